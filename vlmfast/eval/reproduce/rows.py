"""Measure one recipe on one task with lmms-eval, in a process of its own.

Results are lines of a journal, so a run that was killed repeats only the row that it was in.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmfast.core.files import make_folder, open_to_append, read_bytes
from vlmfast.core.signals import exit_on_sigterm
from vlmfast.errors import VLMFastError

from .papers import Task

ROWS, LOG, RESULTS = "rows.jsonl", "log.txt", "lmms-eval"
Key = tuple[str, str]  # a recipe, and the name of a task


class NoResult(VLMFastError):
    """A row that ended without a result; other rows may have one."""


@dataclass(frozen=True)
class Settings:
    """What all rows of a run share.

    Parameters
    ----------
    model : str
        ``tiny``, a folder or a hub id.
    limit : int, optional
        Questions of each task; all by default.
    device : str, optional
    dtype : str
    include : Path, optional
        Folder of further tasks.
    """

    model: str
    limit: int | None = None
    device: str | None = None
    dtype: str = "auto"
    include: Path | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What must be equal for rows to be comparable."""
        return {"model": self.model, "limit": self.limit, "dtype": self.dtype}


@dataclass(frozen=True)
class Row:
    """A recipe on a task; ``folder`` is its own."""

    recipe: str
    task: Task
    folder: Path

    @property
    def key(self) -> Key:
        return self.recipe, self.task.name


@dataclass(frozen=True)
class Measured:
    """The result of a row, on the scale of the published values.

    Parameters
    ----------
    value : float
    questions : int or None
    """

    value: float
    questions: int | None


def results_of(lines: list[dict[str, Any]]) -> dict[Key, Measured]:
    """The results in a journal by recipe and task."""
    return {
        (line["recipe"], line["task"]): Measured(line["value"], line["questions"])
        for line in lines
        if "recipe" in line
    }


def command(row: Row, settings: Settings) -> list[str]:
    """The command of a row, to follow ``python``.

    lmms-eval separates arguments by commas, so recipes use semicolons.
    """
    model = {"pretrained": settings.model, "recipe": row.recipe.replace(",", ";")}
    model |= {"device": settings.device} if settings.device else {}
    model |= {"dtype": settings.dtype} if settings.dtype != "auto" else {}
    words = ["-m", "lmms_eval", "--model", "vlmfast"]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    words += ["--tasks", row.task.lmms_name, "--batch_size", "1"]
    words += ["--output_path", str(row.folder / RESULTS)]
    if settings.limit is not None:
        words += ["--limit", str(settings.limit)]
    if settings.include is not None:
        words += ["--include_path", str(settings.include)]
    return words


def shown(words: list[str]) -> str:
    """A command as a user types it."""
    return shlex.join(["python", *words])


def _measured(task: Task, found: Any, path: Path) -> Measured:
    results = found.get("results", {}) if isinstance(found, dict) else {}
    own = results.get(task.lmms_name, {})
    values = []
    for metric in task.metrics:
        # lmms-eval adds the name of the filter: "exact_match,none".
        value = next((v for k, v in own.items() if k.partition(",")[0] == metric), None)
        if not isinstance(value, int | float) or not math.isfinite(value):
            have = ", ".join(key for key in own if "stderr" not in key and key != "alias") or "none"
            raise NoResult(f"{path} has no number {metric} of {task.lmms_name}; it has {have}")
        values.append(value)
    samples = found.get("n-samples", {}).get(task.lmms_name, {}).get("effective")
    return Measured(task.scale * sum(values), samples or task.questions)


def measure(row: Row, settings: Settings) -> Measured:
    """Run lmms-eval for a row.

    Raises
    ------
    NoResult
        If lmms-eval ends without a result.
    """
    make_folder(row.folder)
    shutil.rmtree(row.folder / RESULTS, ignore_errors=True)  # of a row that was cut short
    with open_to_append(row.folder / LOG) as log, exit_on_sigterm():
        log.truncate(0)
        words = [sys.executable, *command(row, settings)]
        # Ends the process with this one.
        code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
    for path in (row.folder / RESULTS).rglob("*_results.json"):
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):  # cut short
            return _measured(row.task, json.loads(read_bytes(path)), path)
    raise _error(row, code)


def _error(row: Row, code: int) -> NoResult:
    """The reason why there is no result, from the log. lmms-eval ends with 0 after an error."""
    path = row.folder / LOG
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    reason = (errors or lines or ["it printed nothing"])[-1]
    if code < 0:
        reason = f"ended by {signal.Signals(-code).name}: {reason}"
    return NoResult(f"{reason}; see {path}")
