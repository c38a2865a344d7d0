"""Weights of trained stages: a folder with ``stage.json`` and ``model.safetensors``.

``stage.json`` holds the stage's name, what its module is built from (the sizes of the model among
it), a signature of the model and how the weights were trained. Weights fit only the model that they
were trained for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmfast.errors import RecipeError

from .files import make_folder, replace_bytes, replace_text
from .registry import stage_class
from .stage import Stage

SHIPPED = Path(__file__).parents[1] / "weights"
CONFIG, WEIGHTS = "stage.json", "model.safetensors"


def save_weights(
    folder: str | Path,
    name: str,
    module: nn.Module,
    config: dict[str, Any],
    signature: list[float],
    training: dict[str, Any],
) -> None:
    """Write the weights of a trained stage, in bfloat16, each file atomically.

    Parameters
    ----------
    folder : str or Path
        Created if it does not exist.
    name : str
        Method name of the stage.
    module : Module
    config : dict
        What `Stage.build` takes: sizes of the model and the training's own values.
    signature : list of float
        Of the model, see `Adapter.signature`.
    training : dict
        How the weights were trained, for the reader.
    """
    from safetensors.torch import save

    folder = Path(folder)
    make_folder(folder)
    state = {
        key: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else None)
        for key, value in module.state_dict().items()
    }
    text = json.dumps(
        {"stage": name, "config": config, "signature": signature, "training": training}, indent=2
    )
    replace_bytes(
        folder / WEIGHTS, [save({key: value.contiguous() for key, value in state.items()})]
    )
    replace_text(folder / CONFIG, text + "\n")


def training(name: str) -> str:
    """The command that makes the weights of a trained stage."""
    drafter = name.removeprefix("draft-")
    return f"vlmfast train {name if drafter == name else f'drafter --kind {drafter}'}"


def load_weights(stage: Stage, sizes: dict[str, Any], signature: list[float]) -> nn.Module:
    """The module of a trained stage for the model of these ``sizes`` and this ``signature``.

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
        folder = Path(stage.weights)
        if not (folder / CONFIG).exists() and (folder / "weights" / CONFIG).exists():
            folder = folder / "weights"  # the folder of the whole training
        if (module := stage.published(folder, sizes)) is not None:
            return module.requires_grad_(False).eval()
        about = _read(folder, stage.name)
        if not _belongs(about, sizes, signature):
            raise RecipeError(
                f"{stage.name}: the weights in {folder} were trained for another model than "
                f"{model}; {train}"
            )
        return _module(folder, about)
    for folder in sorted(SHIPPED.glob(f"*-{stage.name}")):
        about = _read(folder, stage.name)
        if _belongs(about, sizes, signature):
            return _module(folder, about)
    raise RecipeError(f"{stage.name}: there are no weights for {model}; {train}")


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{name}: weights={folder} cannot be read: {error}; it must be a folder that "
            f"`{training(name)}` wrote"
        ) from error
    if not isinstance(about, dict) or about.get("stage") != name:
        raise RecipeError(f"{name}: weights={folder} contains no weights of {name}")
    signature = about.get("signature")
    numbers = isinstance(signature, list) and all(isinstance(x, int | float) for x in signature)
    if not numbers or not isinstance(about.get("config"), dict):
        raise RecipeError(f"{name}: {folder / CONFIG} lacks the config or the signature")
    return about


def _belongs(about: dict[str, Any], sizes: dict[str, Any], signature: list[float]) -> bool:
    config, stored = about["config"], about["signature"]
    if any(config.get(key) != value for key, value in sizes.items()):
        return False
    # Half precision keeps three digits of a number, and little of very small ones.
    return len(stored) == len(signature) and all(
        abs(a - b) <= 0.01 * max(abs(a), abs(b)) + 1e-5
        for a, b in zip(stored, signature, strict=True)
    )


def _module(folder: Path, about: dict[str, Any]) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        module = stage_class(about["stage"]).build(about["config"]).float()
        module.load_state_dict(load_file(folder / WEIGHTS))
    except RecipeError:
        raise
    except (OSError, RuntimeError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{about['stage']}: the weights in {folder} cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error
    return module.eval().requires_grad_(False)
