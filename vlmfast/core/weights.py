"""Weights of trained stages: a folder or a hub repository with ``stage.json`` and
``model.safetensors``.

``stage.json`` holds the stage's name, what its module is built from (the sizes of the model among
it), a signature of the model and how the weights were trained. Weights fit only the model that they
were trained for. ``README.md`` is their model card.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.errors import RecipeError, check_memory

from . import hub
from .cards import model_card
from .files import make_folder, read_text, readable, replace_bytes, replace_text
from .registry import stage_class
from .stage import Stage

SHIPPED = Path(__file__).parents[1] / "weights"
CONFIG, WEIGHTS, CARD = "stage.json", "model.safetensors", "README.md"
# `config.json` is that of published drafters.
_ON_HUB = (CONFIG, WEIGHTS, "config.json")


@dataclass(frozen=True, eq=False)
class StageWeights:
    """Weights of a trained stage or drafter, with how they were trained and measured.

    Parameters
    ----------
    stage : str
        Method name.
    config : dict
        What `Stage.build` takes: sizes of the model and the training's own values.
    signature : list of float
        Of the model, see `Adapter.signature`.
    training : dict
        How the weights were trained: ``model``, ``command``, ``steps`` and further values.
    state : dict of str to Tensor
        The state of the module, on the host.
    measured : tuple of dict
        Tables for the card: ``title``, ``columns``, ``rows`` (a list of values for each) and
        optionally ``note``.
    license : str, optional
        SPDX identifier in lower case, as on the hub.

    Examples
    --------
    >>> weights = StageWeights.from_pretrained("runs/elastic/weights")  # doctest: +SKIP
    >>> weights.save_pretrained("copy")  # doctest: +SKIP
    """

    stage: str
    config: dict[str, Any]
    signature: list[float]
    training: dict[str, Any]
    state: dict[str, Tensor] = field(repr=False)
    measured: tuple[dict[str, Any], ...] = ()
    license: str | None = None

    @classmethod
    def from_pretrained(cls, source: str | Path) -> StageWeights:
        """Read a folder that `save_pretrained` or ``vlmfast train`` wrote, or a hub repository.

        Parameters
        ----------
        source : str or Path
            A folder, ``owner/name`` or ``owner/name@revision``.

        Raises
        ------
        RecipeError
            When it cannot be read or downloaded.
        """
        text, name = str(source), "StageWeights"
        folder = _located(name, text)
        about = _described(folder / CONFIG, f"{name}: weights={text}")
        state = _state(folder, f"{name}: weights={text}")
        weights = cls(
            about["stage"],
            about["config"],
            about["signature"],
            about.get("training") or {},
            state,
            tuple(about.get("measured") or ()),
            about.get("license"),
        )
        weights._check(f"{name}: {folder / CONFIG}")
        return weights

    def _check(self, where: str) -> None:
        if not isinstance(self.training, dict):
            raise RecipeError(f"{where}: training must be an object")
        for table in self.measured:
            rows = table.get("rows") if isinstance(table, dict) else None
            if not (
                isinstance(rows, list)
                and isinstance(table.get("title"), str)
                and isinstance(table.get("columns"), list)
                and all(isinstance(row, list) for row in rows)
            ):
                raise RecipeError(f"{where}: measured must contain title, columns and rows")

    def module(self) -> nn.Module:
        """The module, on the host, float32, for inference.

        Raises
        ------
        RecipeError
            When the weights do not fit the module that ``config`` describes.
        """
        try:
            module = stage_class(self.stage).build(self.config).float()
            module.load_state_dict(self.state)
        except RecipeError:
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            check_memory(error)
            raise RecipeError(
                f"{self.stage}: the weights cannot be used: {type(error).__name__}: {error}"
            ) from error
        return module.eval().requires_grad_(False)

    def with_measured(self, *tables: dict[str, Any]) -> StageWeights:
        """The same weights with tables of measurements, for the card.

        ``vlmfast.eval.cards.accuracy_tables`` returns those of a report.
        """
        weights = replace(self, measured=(*self.measured, *tables))
        weights._check("with_measured")
        return weights

    def model_card(self, recipe: str | None = None) -> str:
        """Text of the model card; ``recipe`` is that of its example."""
        return model_card(stage_class(self.stage), self._about(), recipe)

    def save_pretrained(self, folder: str | Path, recipe: str | None = None) -> None:
        """Write weights in bfloat16, ``stage.json`` and model card, each file atomically.

        Parameters
        ----------
        folder : str or Path
            Created if it does not exist.
        recipe : str, optional
            As in `model_card`.

        Raises
        ------
        VLMFastError
            With the path and the reason, when a file cannot be written.
        """
        from safetensors.torch import save

        folder = Path(folder)
        make_folder(folder)
        state = {
            key: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else None)
            for key, value in self.state.items()
        }
        replace_bytes(
            folder / WEIGHTS, [save({key: value.contiguous() for key, value in state.items()})]
        )
        replace_text(folder / CONFIG, json.dumps(self._about(), indent=2) + "\n")
        replace_text(folder / CARD, self.model_card(recipe))

    def _about(self) -> dict[str, Any]:
        """The content of ``stage.json``."""
        about = {name: getattr(self, name) for name in ("stage", "config", "signature", "training")}
        more = {"measured": list(self.measured), "license": self.license}
        return about | {name: value for name, value in more.items() if value}


def training(name: str) -> str:
    """The command that makes the weights of a trained stage."""
    drafter = name.removeprefix("draft-")
    return f"vlmfast train {name if drafter == name else f'drafter --kind {drafter}'}"


def load_weights(
    stage: Stage, sizes: dict[str, Any], signature: list[float], slack: float = 0.0
) -> nn.Module:
    """The module of a trained stage for the model of these ``sizes`` and this ``signature``.

    Parameters
    ----------
    slack : float
        By how much quantization may have changed a number of the signature, as a fraction of the
        largest of them.

    Returns
    -------
    Module
        On the host, float32, for inference.

    Raises
    ------
    RecipeError
        When no weights exist for this model, or the folder contains something else.
    """
    model = f"this {sizes['family']} model of width {sizes['width']} and {sizes['depth']} layers"
    train = f"train them with `{training(stage.name)} --model ...` and pass weights=DIR"
    if stage.weights != "auto":
        folder = _located(stage.name, stage.weights)
        if (module := stage.published(folder, sizes)) is not None:
            return module.requires_grad_(False).eval()
        about = _read(folder, stage.name, stage.weights)
        if not _belongs(about, sizes, signature, slack):
            raise RecipeError(
                f"{stage.name}: the weights in {stage.weights} were trained for another model than "
                f"{model}; {train}"
            )
        return _module(folder, about, stage.weights)
    for folder in sorted(SHIPPED.glob(f"*-{stage.name}")):
        about = _read(folder, stage.name, str(folder))
        if _belongs(about, sizes, signature, slack):
            return _module(folder, about, str(folder))
    raise RecipeError(f"{stage.name}: there are no weights for {model}; {train}")


def _located(name: str, weights: str) -> Path:
    """The folder of weights, downloaded if ``weights`` is a hub id."""
    folder = Path(weights)
    if not hub.is_hub_id(weights):
        # `os.path.exists` is False for every name that the system refuses.
        if not os.path.exists(folder / CONFIG) and os.path.exists(folder / "weights" / CONFIG):
            return folder / "weights"  # the folder of the whole training
        return folder
    folder = hub.download(name, weights, _ON_HUB)
    if not any((folder / file).exists() for file in (CONFIG, "config.json")):
        raise RecipeError(
            f"{name}: the repository {weights} lacks {CONFIG}; it must contain the files that "
            "training wrote, or a published drafter"
        )
    if not (folder / WEIGHTS).exists():
        raise RecipeError(
            f"{name}: the repository {weights} lacks {WEIGHTS}; no other format is downloaded"
        )
    return folder


def _read(folder: Path, name: str, weights: str) -> dict[str, Any]:
    """The content of `CONFIG`, which must be of the stage ``name``."""
    try:
        about = _described(folder / CONFIG, f"{name}: weights={weights}")
    except RecipeError as error:
        raise RecipeError(f"{error}; it must be a folder that `{training(name)}` wrote") from error
    if about["stage"] != name:
        raise RecipeError(f"{name}: weights={weights} contains no weights of {name}")
    return about


def _described(file: Path, where: str) -> dict[str, Any]:
    with readable(where, RecipeError):
        about = json.loads(read_text(file))
    if not isinstance(about, dict) or not isinstance(about.get("stage"), str):
        raise RecipeError(f"{where} contains no weights of a stage")
    signature = about.get("signature")
    numbers = isinstance(signature, list) and all(isinstance(x, int | float) for x in signature)
    if not numbers or not isinstance(about.get("config"), dict):
        raise RecipeError(f"{where}: {file.name} lacks the config or the signature")
    return about


def _belongs(
    about: dict[str, Any], sizes: dict[str, Any], signature: list[float], slack: float
) -> bool:
    config, stored = about["config"], about["signature"]
    if any(config.get(key) != value for key, value in sizes.items()):
        return False
    # Half precision keeps three digits of a number, and little of very small ones.
    least = max(1e-5, slack * max(map(abs, stored), default=0.0))
    return len(stored) == len(signature) and all(
        abs(a - b) <= 0.01 * max(abs(a), abs(b)) + least
        for a, b in zip(stored, signature, strict=True)
    )


def _state(folder: Path, where: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise RecipeError(
            f"{where}: {WEIGHTS} cannot be used: {type(error).__name__}: {error}"
        ) from error


def _module(folder: Path, about: dict[str, Any], weights: str) -> nn.Module:
    name, state = about["stage"], _state(folder, f"{about['stage']}: weights={weights}")
    try:
        return StageWeights(name, about["config"], about["signature"], {}, state).module()
    except RecipeError as error:
        raise RecipeError(f"{error} (weights={weights})") from error
