"""Files of a training: checkpoints that are complete after any interruption, and its curve."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from parts import PocketError

from vlmfast.core.files import replace_text, replacing

VERSION = 1


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at ``path`` in one step."""
    with replacing(path) as file:
        torch.save({"version": VERSION, **state}, file)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint at ``path``, or None if there is none.

    Raises
    ------
    PocketError
        If it cannot be read, or was written by another version.
    """
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise PocketError(f"{path} cannot be read: {error}".splitlines()[0]) from error
    if not isinstance(state, dict) or (found := state.get("version")) != VERSION:
        found = state.get("version") if isinstance(state, dict) else None
        raise PocketError(f"{path} is of version {found}, expected is {VERSION}; use a new folder")
    return state


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
