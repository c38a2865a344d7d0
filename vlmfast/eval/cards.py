"""Tables of an evaluation for the model cards of trained stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmfast.core.files import read_text, readable
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import with_values
from vlmfast.errors import VLMFastError

_COLUMNS = ("recipe", "kept %", "images % [95 %]", "videos % [95 %]", "same answers %")


def accuracy_tables(report: str | Path, stage: str, note: str = "") -> list[dict[str, Any]]:
    """Accuracy against kept tokens of a trained stage, one table per task of a report.

    Parameters
    ----------
    report : str or Path
        ``report.json``, which ``vlmfast report`` writes.
    stage : str
        Method name. Rows are the runs of this method alone, and that of the full model.
    note : str
        Printed after each table: where and how it was measured.

    Returns
    -------
    list of dict
        For `StageWeights.with_measured`.

    Raises
    ------
    VLMFastError
        When the report cannot be read, contains no run of the stage, or runs with several weights.
    """
    with readable(f"report={report}", damaged=(KeyError, TypeError, AttributeError)):
        tasks = json.loads(read_text(report))["tasks"]
        runs = {task: _runs(found["recipes"], stage) for task, found in tasks.items()}
    weights = {recipe[0].weights for found in runs.values() for recipe, _ in found if recipe}
    if not weights:
        raise VLMFastError(f"report={report} contains no run of {stage} alone")
    if len(weights) > 1:
        raise VLMFastError(f"report={report} contains runs of {stage} with several weights")
    return [
        {
            "title": f"Accuracy on {task} against kept tokens",
            "columns": list(_COLUMNS),
            "rows": [_row(recipe, run) for recipe, run in found],
            "note": note,
        }
        for task, found in runs.items()
        if any(recipe for recipe, _ in found)
    ]


def _runs(runs: dict[str, Any], stage: str) -> list[tuple[Recipe, dict[str, Any]]]:
    """The full model and the runs of the stage alone, most tokens first."""
    parsed = [(Recipe.parse(run["recipe"]), run) for run in runs.values() if not run["control"]]
    chosen = [(r, run) for r, run in parsed if not r or (len(r) == 1 and r[0].name == stage)]
    return sorted(chosen, key=lambda pair: (bool(pair[0]), -_kept(pair[1])))


def _kept(run: dict[str, Any]) -> float:
    return 1.0 if run.get("kept") is None else run["kept"]


def _row(recipe: Recipe, run: dict[str, Any]) -> list[Any]:
    shown = Recipe(tuple(with_values(stage, weights="auto") for stage in recipe))  # no local path
    accuracies = [_interval(run, kind) for kind in ("accuracy_image", "accuracy_video")]
    loyalty = 1.0 if not recipe else run.get("loyalty")
    same = None if loyalty is None else f"{100 * loyalty:.1f}"
    return [f"`{shown}`", f"{100 * _kept(run):.1f}", *accuracies, same]


def _interval(run: dict[str, Any], key: str) -> str | None:
    if run.get(key) is None:
        return None
    low, high = run[f"{key}_ci"]
    return f"{100 * run[key]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
