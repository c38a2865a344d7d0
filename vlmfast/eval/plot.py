"""Accuracy against what was kept, of the visual tokens or of the cache, as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from ..errors import VLMFastError
from .summary import BASELINES, Row, reduces, rereads, shrinks

# Okabe and Ito's colours, apart for colour-blind eyes too; their yellow is too pale for a line.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX*<>"
_GREYS = dict(zip(BASELINES, ("#222222", "#6b6b6b", "#9a9a9a"), strict=True))
_GREYS["streamingllm"] = "#8a8a8a"


@dataclass(frozen=True)
class Panel:
    """One of a figure's axes.

    Parameters
    ----------
    title, modality : str
    accuracy : str
        What stands above what was paid: ``accuracy``, ``caption`` or ``accuracy_later``.
    session : bool
        Whether both are of the recipes' sessions, where these read a picture once.
    """

    title: str
    modality: str
    accuracy: str = "accuracy"
    session: bool = False

    def numbers(self, row: Row) -> dict[str, Any] | None:
        if not self.session:
            return row.numbers
        return None if row.session is None or rereads(row.run) else row.session.numbers

    def point(self, row: Row) -> tuple[float, float, float] | None:
        """Mean and interval in per cent."""
        numbers = self.numbers(row)
        mean = numbers and numbers[f"{self.accuracy}_{self.modality}"]
        if mean is None:
            return None
        low, high = numbers[f"{self.accuracy}_{self.modality}_ci"]
        return 100 * mean, 100 * low, 100 * high

    def cost(self, row: Row, axis: str) -> float:
        return 100 * self.numbers(row)[f"{axis}_{self.modality}"]


_PANELS = {
    "kept": ((Panel("Pictures", "image"), Panel("Clips", "video")),),
    "held": (
        (Panel("Pictures, asked alone", "image"), Panel("Clips, asked alone", "video")),
        (
            Panel("Captions of pictures", "image", "caption"),
            Panel("Captions of clips", "video", "caption"),
        ),
        (
            Panel("Pictures, later questions (read once)", "image", "accuracy_later", True),
            Panel("Clips, later questions (read once)", "video", "accuracy_later", True),
        ),
    ),
}
_LABELS = {
    "kept": "visual tokens kept, averaged over layers (%)",
    "held": "bytes of the KV cache held (% of the full one)",
}
_ROUND = (1, 2, 5, 10, 20, 30, 50, 80)  # shares held differ by a little from method to method


def plot(rows: list[Row], file: Path, axis: str = "kept") -> None:
    """One line per method with 95 % intervals, the full model as a band; a PNG.

    Parameters
    ----------
    axis : {"kept", "held"}
        What accuracies stand against: visual tokens, or bytes of the cache.

    Raises
    ------
    VLMFastError
        Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, NullLocator
    except ImportError as error:
        raise VLMFastError(
            "the plot needs matplotlib, which is not installed: pip install 'vlmfast[eval]'"
        ) from error

    drawn = [row for row in rows if reduces(row) or shrinks(row)]
    methods = list(dict.fromkeys(row.run.meta["method"] for row in drawn))
    # What nobody was asked, a modality or sessions, has no panel.
    grid = [[p for p in line if any(map(p.point, rows))] for line in _PANELS[axis]]
    grid = [line for line in grid if line]
    shares = [p.cost(row, axis) for line in grid for p in line for row in drawn if p.point(row)]
    # A figure of its own draws with Agg and leaves pyplot's state, and its back end, alone.
    size = 4.4 * len(grid[0]) + 2.6, 0.4 + 4.2 * len(grid)
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    axes = figure.subplots(len(grid), len(grid[0]), sharey=True, squeeze=False)
    named = {}  # a method may be in one panel only
    for panel, place in zip(chain(*grid), axes.flat, strict=True):
        _references(place, rows, panel)
        for number, method in enumerate(methods):
            points = [
                (panel.cost(row, axis), *accuracy)
                for row in drawn
                if row.run.meta["method"] == method and (accuracy := panel.point(row))
            ]
            _line(place, method, number, len(methods), points)
        place.set_xscale("log")
        place.set_xlim(min(shares, default=10) / 1.25, max(shares, default=80) * 1.25)
        place.xaxis.set_major_locator(FixedLocator(_ticks(shares) if axis == "kept" else _ROUND))
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        place.set_ylim(0, 100)
        place.set_xlabel(_LABELS[axis])
        place.set_title(panel.title)
        place.grid(alpha=0.25, linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
        handles, labels = place.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    for line in axes:
        line[0].set_ylabel("accuracy, mean over question types (%)")
    figure.legend(named.values(), named, loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(file)


def _references(place: Any, rows: list[Row], panel: Panel) -> None:
    """What has no budget: the full model and the controls, across the whole width."""
    styles = cycle((":", "-.", "--"))
    for row in rows:
        accuracy, control = panel.point(row), row.run.meta["control"]
        if accuracy is None:
            continue
        mean, low, high = accuracy
        if control:
            place.axhline(mean, color="#444444", linewidth=1, linestyle=next(styles), label=control)
        elif row.run.meta["recipe"] == "none":
            place.axhspan(low, high, color="#000000", alpha=0.12, linewidth=0)
            place.axhline(mean, color="#000000", linewidth=1, label="full model (95 % band)")


def _line(
    axis: Any,
    method: str,
    number: int,
    methods: int,
    points: list[tuple[float, float, float, float]],
) -> None:
    if not points:
        return
    x, mean, low, high = zip(*sorted(points), strict=True)
    # Methods stand at the same budgets: a small shift keeps their error bars apart.
    shift = 1 + 0.05 * (number / max(methods - 1, 1) - 0.5)
    word = method.partition(":")[0]
    grey = _GREYS.get(word) if "+" not in method else None
    axis.errorbar(
        [value * shift for value in x],
        mean,
        yerr=[
            [m - l for m, l in zip(mean, low, strict=True)],
            [h - m for m, h in zip(mean, high, strict=True)],
        ],
        label=method,
        color=grey or _COLORS[number % len(_COLORS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markerfacecolor="white" if "+" in method else None,  # stacks are hollow
        linestyle="--" if grey else ("-", (0, (5, 1, 1, 1)))[number // len(_COLORS) % 2],
        markersize=5,
        linewidth=1.6,
        capsize=2.5,
        elinewidth=1,
    )


def _ticks(shares: list[float]) -> list[float]:
    """The shares that were measured, those that lie close together as one."""
    ticks: list[float] = []
    for share in sorted(shares):
        if not ticks or share > 1.35 * ticks[-1]:
            ticks.append(share)
    return ticks
