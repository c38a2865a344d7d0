"""Recipes of a task without a result, and why: ``DIR/<task>/failed.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from vlmfast.core.files import make_folder, read_bytes
from vlmfast.core.journal import folder_lock
from vlmfast.errors import VLMFastError

from .results import write_json

FAILED = "failed.json"


def read_failures(folder: Path) -> dict[str, str]:
    """The reasons by name of the run; empty if there is no file.

    Parameters
    ----------
    folder : Path
        The folder of a task.

    Raises
    ------
    VLMFastError
        If the file cannot be read or is damaged.
    """
    path = folder / FAILED
    try:
        found = json.loads(read_bytes(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise VLMFastError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise VLMFastError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(r, str) for r in found.values()):
        raise VLMFastError(f"{path} is damaged: it must contain a reason for each recipe")
    return found


def note_failures(folder: Path, reasons: Mapping[str, str | None]) -> None:
    """Add reasons to those of earlier runs and of other shards; None removes one.

    Raises
    ------
    VLMFastError
        If the file cannot be written.
    """
    if not (folder / FAILED).exists() and not any(reasons.values()):
        return
    make_folder(folder)
    with folder_lock(folder):
        found = {**read_failures(folder), **reasons}
        write_json(folder / FAILED, {name: r for name, r in found.items() if r is not None})
