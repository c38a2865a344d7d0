"""Model cards of trained stages: Markdown with the metadata of the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from .params import show
from .stage import Stage

# In the recipe of a card, until the hub id of the repository is known.
FOLDER = "FOLDER"
_REPLACE = f"Replace `{FOLDER}` with the path of this folder or with its hub id."


def recipe_of(stage: type[Stage], about: dict[str, Any]) -> str:
    """The recipe that uses the weights, with ``weights=FOLDER``."""
    kind = about["config"].get("kind")
    default = next((f.default for f in fields(stage) if f.name == "kind"), kind)
    return f"{stage.name}:{'' if kind == default else f'kind={kind},'}weights={FOLDER}"


def with_hub_id(card: str, repo_id: str) -> str:
    """The card of a repository of this id."""
    card = card.replace(f"weights={FOLDER}", f"weights={repo_id}")
    return card.replace(f"{_REPLACE}\n\n", "")


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
    from huggingface_hub import ModelCardData

    training, license = about.get("training") or {}, about.get("license")
    name, model = stage.name, training.get("model")
    recipe = recipe or recipe_of(stage, about)
    kind = "drafter" if stage.protocol == "drafter" else "compressor"
    data = ModelCardData(
        base_model=model if model and "/" in model else None,
        library_name="vlmfast",
        license=license,
        pipeline_tag="image-text-to-text",
        tags=["vlmfast", name, "vision-language", _TAGS[kind]],
    )
    summary = (stage.__doc__ or name).strip().partition("\n")[0]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name} for {model or _text(about['config'].get('family', 'a model'))}",
        f"Trained weights of the {kind} `{name}` ({stage.paper}). {summary}",
        "They fit only the model that they were trained for, which is not included.",
        "## Use",
        _usage(model, recipe),
    ]
    if FOLDER in recipe:
        parts.append(_REPLACE)
    parts += ["## Base model", _facts(_base(about, model))]
    parts += ["## Training", *_training(training)]
    if measured := about.get("measured"):
        parts.append("## Measured")
        for table in measured:
            parts += [f"**{table['title']}**", _table(table["columns"], table["rows"])]
            parts += [table["note"]] if table.get("note") else []
    if license:
        parts += ["## License", f"{license}."]
    return "\n\n".join(parts) + "\n"


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


def _usage(model: str | None, recipe: str) -> str:
    return (
        "```python\nfrom vlmfast import VLM\n\n"
        f'vlm = VLM.from_pretrained("{model or "MODEL"}")\n'
        'answer = vlm.ask("What is in the image?", images="image.png",\n'
        f'                 recipe="{recipe}")\n'
        "print(answer)\n```"
    )


def _base(about: dict[str, Any], model: str | None) -> dict[str, Any]:
    config, found = about["config"], {"model": f"`{model}`"} if model else {}
    found |= {text: config[key] for key, text in _SIZES.items() if key in config}
    numbers = " ".join(f"{value:.4g}" for value in about["signature"])
    found["fingerprint"] = f"`{numbers}`"
    return found


def _training(training: dict[str, Any]) -> list[str]:
    values = {k: v for k, v in training.items() if k not in ("model", "command", "note")}
    command = training.get("command")
    parts = ["The model was frozen; only these weights were trained."]
    if command:
        parts.append(f"```\n{command}\n```")
    if note := training.get("note"):
        parts.append(note)
    return [*parts, _facts(values)]


def _facts(values: dict[str, Any]) -> str:
    return _table(["", ""], [[key.replace("_", " "), value] for key, value in values.items()])


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)


def _text(value: Any) -> str:
    """A value as one cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        value = tuple(value)
    return re.sub(r"[\n|]+", " ", show(value))
