"""The reports of accuracy in the package, as charts; needs no Gradio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmfast.core.recipe import Recipe
from vlmfast.eval.chart import Measured, figure, rows

# Reports of the same questions, and what their recipes reduce.
AXES = {
    "Visual tokens": (("report.json", "presets/report.json"), "kept"),
    "KV cache": (("cache/report.json",), "held"),
}


def chart(axis: str, recipe: Recipe, asked: Recipe | None, kept: float | None) -> Any:
    """The chart of a report.

    Parameters
    ----------
    axis : str
        One of `AXES`.
    recipe : Recipe
        The recipe to mark.
    asked : Recipe, optional
        The recipe of the last answer, which kept the fraction ``kept`` of the visual tokens.
    kept : float, optional
    """
    files, reduced = AXES[axis]
    found: list[Measured] = []
    for file in files:  # each contains the full model
        present = {row.recipe for row in found}
        found += [r for r in rows(results() / file, axis=reduced) if r.recipe not in present]
    same = reduced == "kept" and asked == recipe
    return figure(found, current=str(recipe), kept=kept if same else None)


def results() -> Path:
    """The folder of the reports: in the package, or in a clone."""
    folder = Path(__file__).parent / "results"
    return folder if folder.is_dir() else Path(__file__).parents[2] / "docs" / "results"
