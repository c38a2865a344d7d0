"""Draw accuracy against the measured time to the first token: ``python tools/ttft_png.py``.

Accuracies are those of ``tiny`` on images, of docs/results/views-stacks. Ratios of the time to the
first token are those of benchmarks/results/ask-views-cpu-float32.json, under the same recipes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmfast.core.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
ACCURACY = ROOT / "docs" / "results" / "views-stacks" / "report.json"
TIMES = ROOT / "benchmarks" / "results" / "ask-views-cpu-float32.json"
OUT = ROOT / "docs" / "images" / "views-ttft.png"
_HIRED = tuple(f"hired:budget={budget}" for budget in (0.33, 0.22, 0.11, 0.05))
_STACKED = (0.66, 0.44, 0.22, 0.1)
# Label -> the recipes of one curve.
CURVES = {
    "hired": _HIRED,
    "hired + divprune": tuple(f"hired:budget=0.5+divprune:budget={b}" for b in _STACKED),
    "tome:0.5 + divprune": tuple(f"tome:budget=0.5+divprune:budget={b}" for b in (0.44, 0.22)),
    "tome:0.33 + divprune": ("tome:budget=0.33+divprune:budget=0.33",),
    "tome + hired + divprune": ("tome:budget=0.5+hired:budget=0.5+divprune:budget=0.44",),
    "crops:0.5 + hired": tuple(f"crops:0.5+hired:budget={b}" for b in (0.6, 0.4, 0.2, 0.1)),
    "crops:0.25 + hired": tuple(f"crops:0.25+hired:budget={b}" for b in (0.4, 0.2)),
}
_MARKERS = "osPXvD^"
_COLORS = ("#2166ac", "#1b7837", "#762a83", "#9970ab", "#35978f", "#b2182b", "#e08214")


@dataclass(frozen=True)
class Point:
    """One recipe.

    Parameters
    ----------
    recipe : str
    kept : float
        Fraction of the visual tokens of an image.
    accuracy, low, high : float
        Of images, with the 95 % interval, in percent.
    faster : float
        Time to the first token of Hugging Face over that of the recipe.
    """

    recipe: str
    kept: float
    accuracy: float
    low: float
    high: float
    faster: float


def points(recipes: list[str]) -> list[Point]:
    """The measured recipes among ``recipes``, in this order."""
    runs = json.loads(ACCURACY.read_text(encoding="utf-8"))["tasks"]["shapes"]["recipes"]
    accuracy = {run["recipe"]: run for run in runs.values() if run["control"] is None}
    ((_, times),) = json.loads(TIMES.read_text(encoding="utf-8"))["models"].items()
    timed = {str(Recipe.parse(name)): row for name, row in times.items() if name != "huggingface"}
    found = []
    for recipe in recipes:
        canonical = str(Recipe.parse(recipe))
        if canonical in accuracy and canonical in timed:
            run: dict[str, Any] = accuracy[canonical]
            low, high = run["accuracy_image_ci"]
            values = (100 * value for value in (run["accuracy_image"], low, high))
            faster = timed[canonical]["ratio"]["ttft"]
            found.append(Point(recipe, run["kept_image"], *values, faster))
    return found


def curves() -> dict[str, list[Point]]:
    """The points of each curve."""
    return {name: points(list(recipes)) for name, recipes in CURVES.items()}


def draw(out: Path = OUT) -> None:
    """Write the plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    (full,) = points(["none"])
    axes.axhspan(full.low, full.high, color="#000000", alpha=0.08, linewidth=0)
    axes.plot([full.faster], [full.accuracy], "k*", markersize=10, label="none")
    styles = zip(_MARKERS, _COLORS, strict=True)
    for (name, found), (marker, color) in zip(curves().items(), styles, strict=True):
        x, y = [p.faster for p in found], [p.accuracy for p in found]
        low = [p.accuracy - p.low for p in found]
        high = [p.high - p.accuracy for p in found]
        axes.errorbar(
            x, y, (low, high), color=color, marker=marker, capsize=2, linewidth=1.2, label=name
        )
        below = name == "hired"  # beside a curve that lies close
        for p in found:
            axes.annotate(
                f"{100 * p.kept:.0f} %",
                (p.faster, p.accuracy),
                (-4, -10) if below else (4, 4),
                ha="right" if below else "left",
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
    axes.set_xlabel(
        "time to the first token: Hugging Face / recipe (CLIP ViT-L/14-336, 2 CPU cores)"
    )
    axes.set_ylabel("accuracy of tiny on images (%)")
    axes.xaxis.label.set_size(9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(out)


if __name__ == "__main__":
    draw()
