"""Recipes of a task without a result, and why: ``DIR/<task>/failed.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vlmfast.core.files import make_folder
from vlmfast.core.journal import Journal, folder_lock, read_lines
from vlmfast.errors import VLMFastError

FAILED = "failed.jsonl"


def read_failures(folder: Path) -> dict[str, str]:
    """The reasons by name of the run, of which the last one counts; empty if there is no file.

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
        found = {line["name"]: line["reason"] for line in read_lines(path)[0]}
    except KeyError as error:
        raise VLMFastError(f"{path} is damaged: a line has no {error}") from error
    return {name: str(reason) for name, reason in found.items() if reason is not None}


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
    with folder_lock(folder), Journal(folder / FAILED) as journal:
        journal.append(*({"name": name, "reason": reason} for name, reason in reasons.items()))
