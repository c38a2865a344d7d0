"""Files of a training: checkpoints that are complete after any interruption, its curve, and its
weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from vlmfast.core.files import make_folder, replace_text, replacing

WEIGHTS, CURVE = "trained.safetensors", "curve.jsonl"
_PARTS = ("projector", "adapter")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at ``path`` in one step."""
    with replacing(path) as file:
        torch.save(state, file)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint at ``path``, or None if there is none."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def save_weights(folder: Path, state: dict[str, Any]) -> Path:
    """Write projector and adapter of a checkpoint in bfloat16, with its step and settings."""
    tensors = {
        f"{part}/{name}": value.bfloat16().contiguous()
        for part in _PARTS
        for name, value in state.get(part, {}).items()
    }
    about = {"step": state["step"], "settings": state["settings"]}
    make_folder(folder)
    with replacing(folder / WEIGHTS) as file:
        file.write(save(tensors, {"pocket": json.dumps(about)}))
    return folder / WEIGHTS


def load_weights(path: Path) -> dict[str, Any]:
    """What `save_weights` has written, in float32, with the keys of a checkpoint."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["pocket"])
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    for name, value in tensors.items():
        part, _, own = name.partition("/")
        about.setdefault(part, {})[own] = value
    return about


class Curve:
    """Lines of JSON about a training, one for every few steps.

    Parameters
    ----------
    path : Path
    stage : str
    step : int
        Where the training continues: later lines of the stage are removed.
    """

    def __init__(self, path: Path, stage: str, step: int) -> None:
        self.path, self.stage = path, stage
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _before(line, stage, step)]
        if kept != lines:
            replace_text(path, "".join(f"{line}\n" for line in kept))

    def append(self, step: int, **values: Any) -> None:
        line = {"stage": self.stage, "step": step, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _before(line: str, stage: str, step: int) -> bool:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:  # the process ended while it wrote the line
        return False
    return entry["stage"] != stage or entry["step"] <= step
