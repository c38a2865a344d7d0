"""Model cards of trained stages: Markdown with the metadata of the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from .params import show
from .stage import Stage

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
FOLDER = "FOLDER"  # in the recipe of a card


def recipe_of(stage: type[Stage], about: dict[str, Any]) -> str:
    """The recipe that uses the weights, with ``weights=FOLDER``."""
    kind = about["config"].get("kind")
    default = next((f.default for f in fields(stage) if f.name == "kind"), kind)
    return f"{stage.name}:{'' if kind == default else f'kind={kind},'}weights={FOLDER}"


def model_card(stage: type[Stage], about: dict[str, Any], recipe: str | None = None) -> str:
    """The card of trained weights.

    Parameters
    ----------
    stage : type
        Class of the method.
    about : dict
        The content of ``stage.json``, see `StageWeights`.
    recipe : str, optional
        The recipe of the example; by default with ``weights=FOLDER``.

    Returns
    -------
    str
        Markdown after a YAML front matter.
    """
    from huggingface_hub import ModelCard, ModelCardData

    training, config = about.get("training") or {}, about["config"]
    model, license = training.get("model"), about.get("license")
    kind = "drafter" if stage.protocol == "drafter" else "compressor"
    data = ModelCardData(
        base_model=model if model and "/" in model else None,
        library_name="vlmfast",
        license=license,
        pipeline_tag="image-text-to-text",
        tags=["vlmfast", stage.name, "vision-language", _TAGS[kind]],
    )
    base = {"model": f"`{model}`"} if model else {}
    base |= {text: config[key] for key, text in _SIZES.items() if key in config}
    base["fingerprint"] = f"`{' '.join(f'{value:.4g}' for value in about['signature'])}`"
    apart = ("model", "command", "note")
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        stage=stage,
        kind=kind,
        summary=(stage.__doc__ or stage.name).strip().partition("\n")[0],
        model=model,
        config=config,
        recipe=recipe or recipe_of(stage, about),
        folder=FOLDER,
        base=base,
        training=training,
        facts={k.replace("_", " "): v for k, v in training.items() if k not in apart},
        measured=about.get("measured"),
        license=license,
        text=_text,
    )
    return str(card)


_TAGS = {"drafter": "speculative-decoding", "compressor": "token-reduction"}
_SIZES = {
    "family": "family",
    "width": "width",
    "depth": "layers",
    "heads": "attention heads",
    "vision_width": "width of the vision tower",
    "vision_depth": "layers of the vision tower",
    "patches": "patches of a view",
}


def _text(value: Any) -> str:
    """A value as one cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        value = tuple(value)
    return re.sub(r"[\n|]+", " ", show(value))
