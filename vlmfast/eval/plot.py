"""Plot accuracy against the kept fraction of visual tokens or of the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from vlmfast.core.files import replacing
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError

from .chart import BEFORE, COLORS, STACKS, TRAINED, WITHIN, group_of
from .summary import BASELINES, Row, baseline, reduces, rereads, shrinks

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
        Value of the y axis: ``accuracy``, ``caption`` or ``accuracy_later``.
    session : bool
        Use the results of sessions that prefill an image once.
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
        """Mean and interval in percent."""
        numbers = self.numbers(row)
        mean = None if numbers is None else numbers[f"{self.accuracy}_{self.modality}"]
        if numbers is None or mean is None or numbers[f"kept_{self.modality}"] is None:
            return None  # not measured, or all samples failed
        low, high = numbers[f"{self.accuracy}_{self.modality}_ci"]
        return 100 * mean, 100 * low, 100 * high

    def cost(self, row: Row, axis: str) -> float:
        numbers = self.numbers(row)
        assert numbers is not None  # of rows with a `point`
        return 100 * numbers[f"{axis}_{self.modality}"]


_PANELS = {
    "kept": ((Panel("Images", "image"), Panel("Videos", "video")),),
    "held": (
        (Panel("Images, single questions", "image"), Panel("Videos, single questions", "video")),
        (
            Panel("Captions of images", "image", "caption"),
            Panel("Captions of videos", "video", "caption"),
        ),
        (
            Panel("Images, later questions of a session", "image", "accuracy_later", True),
            Panel("Videos, later questions of a session", "video", "accuracy_later", True),
        ),
    ),
}
_LABELS = {
    "kept": "visual tokens kept, averaged over layers (%)",
    "held": "size of the KV cache (% of the full cache)",
}
_ROUND = {"kept": (1, 2, 3, 5, 10, 20, 30, 50, 100), "held": (1, 2, 5, 10, 20, 30, 50, 80)}
_MANY = 12  # maximum number of distinguishable curves in one panel


def plot(rows: list[Row], file: Path, axis: str = "kept") -> None:
    """One line per method with 95 % intervals, the full model as a band; a PNG.

    Parameters
    ----------
    axis : {"kept", "held"}
        Value of the x axis: visual tokens, or bytes of the cache.

    Raises
    ------
    VLMFastError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, NullLocator
    except ImportError as error:
        raise VLMFastError(
            "the plot needs matplotlib, which is not installed: pip install 'vlmfast[eval]'"
        ) from error

    drawn = [row for row in rows if reduces(row) or shrinks(row)]
    many = len({row.run.meta["method"] for row in drawn}) > _MANY
    groups = _groups(drawn) if axis == "kept" and many else {"": drawn}
    # Panels without results, of a modality or of sessions, are left out.
    panels = [[p for p in line if any(map(p.point, rows))] for line in _PANELS[axis]]
    grid = [
        [(replace(p, title=", ".join(filter(None, (p.title, group)))), own) for p in line]
        for group, own in groups.items()
        for line in panels
        if line
    ]
    shares = [p.cost(row, axis) for line in grid for p, own in line for row in own if p.point(row)]
    # A Figure uses Agg and does not change pyplot's state or back end.
    size = 4.4 * len(grid[0]) + 2.6, 0.4 + 4.2 * len(grid)
    figure = Figure(figsize=size, dpi=160 if len(groups) == 1 else 110, layout="constrained")
    axes = figure.subplots(len(grid), len(grid[0]), sharey=True, squeeze=False)
    named: dict[str, Any] = {}  # a method may be in one panel only
    for (panel, own), place in zip(chain(*grid), axes.flat, strict=True):
        _references(place, rows, panel)
        methods = list(dict.fromkeys(row.run.meta["method"] for row in own))
        for number, method in enumerate(methods):
            points = [
                (panel.cost(row, axis), *accuracy)
                for row in own
                if row.run.meta["method"] == method and (accuracy := panel.point(row))
            ]
            _line(place, method, number, len(methods), points)
        place.set_xscale("log")
        place.set_xlim(min(shares, default=10) / 1.25, max(shares, default=80) * 1.25)
        ticks = _ticks(shares) if axis == "kept" and len(groups) == 1 else _ROUND[axis]
        place.xaxis.set_major_locator(FixedLocator(ticks))
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        place.set_ylim(0, 100)
        place.set_xlabel(_LABELS[axis])
        place.set_title(panel.title)
        place.grid(alpha=0.25, linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
    for line in axes:
        line[0].set_ylabel("accuracy, mean over question types (%)")
        here: dict[str, Any] = {}
        for place in line:
            handles, labels = place.get_legend_handles_labels()
            here |= dict(zip(labels, handles, strict=True))
        if len(groups) > 1:
            right = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
            line[-1].legend(here.values(), here, frameon=False, fontsize=8, **right)
        named |= here
    if len(groups) == 1:
        figure.legend(named.values(), named, loc="outside right center", frameon=False, fontsize=8)
    with replacing(file) as target:
        figure.savefig(target, format=file.suffix.removeprefix("."))


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Group methods by the part of the model that they act on; baselines are in each group."""
    found: dict[str, list[Row]] = {}
    common = [row for row in rows if baseline(row.run) in BASELINES]
    for row in rows:
        if row not in common:
            found.setdefault(group_of(Recipe.parse(row.run.meta["recipe"])), []).append(row)
    order = (BEFORE, WITHIN, TRAINED, STACKS)
    return {title: found[title] + common for title in order if title in found}


def _references(place: Any, rows: list[Row], panel: Panel) -> None:
    """Draw the full model and the controls, which have no budget, across the whole width."""
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
    # Methods have the same budgets: a small shift separates their error bars.
    shift = 1 + 0.05 * (number / max(methods - 1, 1) - 0.5)
    grey = _GREYS.get(method.partition(":")[0]) if "+" not in method else None
    axis.errorbar(
        [value * shift for value in x],
        mean,
        yerr=[
            [m - l for m, l in zip(mean, low, strict=True)],
            [h - m for m, h in zip(mean, high, strict=True)],
        ],
        label=method,
        color=grey or COLORS[number % len(COLORS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markerfacecolor="white" if "+" in method else None,  # hollow for several stages
        linestyle="--" if grey else ("-", (0, (5, 1, 1, 1)))[number // len(COLORS) % 2],
        markersize=5,
        linewidth=1.6,
        capsize=2.5,
        elinewidth=1,
    )


def _ticks(shares: list[float]) -> list[float]:
    """The measured shares, without those close to a smaller one."""
    ticks: list[float] = []
    for share in sorted(shares):
        if not ticks or share > 1.35 * ticks[-1]:
            ticks.append(share)
    return ticks
