"""Accuracy against the share of visual tokens kept, as a picture."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from ..errors import VLMFastError
from .summary import BASELINES, MODALITIES, Row, reduces

# Okabe and Ito's colours, apart for colour-blind eyes too; their yellow is too pale for a line.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX*<>"
_GREYS = dict(zip(BASELINES, ("#222222", "#6b6b6b", "#9a9a9a"), strict=True))
_TITLES = {"image": "Pictures", "video": "Clips"}


def plot(rows: list[Row], file: Path) -> None:
    """One line per method with 95 % intervals, the full model as a band; a PNG.

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

    reducing = [row for row in rows if reduces(row)]
    methods = list(dict.fromkeys(row.run.meta["method"] for row in reducing))
    shares = [
        100 * row.numbers[f"kept_{m}"] for row in reducing for m in MODALITIES if _accuracy(row, m)
    ]
    panels = [m for m in MODALITIES if any(_accuracy(row, m) for row in rows)]
    # A figure of its own draws with Agg and leaves pyplot's state, and its back end, alone.
    figure = Figure(figsize=(4.4 * len(panels) + 2.6, 4.6), dpi=160, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, modality in zip(axes, panels, strict=True):
        _references(axis, rows, modality)
        for number, method in enumerate(methods):
            points = [
                (100 * row.numbers[f"kept_{modality}"], *accuracy)
                for row in reducing
                if row.run.meta["method"] == method and (accuracy := _accuracy(row, modality))
            ]
            _line(axis, method, number, len(methods), points)
        axis.set_xscale("log")
        axis.set_xlim(min(shares, default=10) / 1.25, max(shares, default=80) * 1.25)
        axis.xaxis.set_major_locator(FixedLocator(_ticks(shares)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axis.set_ylim(0, 100)
        axis.set_xlabel("visual tokens kept, averaged over layers (%)")
        axis.set_title(_TITLES[modality])
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy, mean over question types (%)")
    named = {}  # a method may be in one panel only
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named, loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(file)


def _accuracy(row: Row, modality: str) -> tuple[float, float, float] | None:
    """Mean and interval in per cent."""
    mean, ci = (row.numbers[f"accuracy_{modality}{end}"] for end in ("", "_ci"))
    return None if mean is None else (100 * mean, 100 * ci[0], 100 * ci[1])


def _references(axis: Any, rows: list[Row], modality: str) -> None:
    """What has no budget: the full model and the controls, across the whole width."""
    styles = cycle((":", "-.", "--"))
    for row in rows:
        accuracy, control = _accuracy(row, modality), row.run.meta["control"]
        if accuracy is None:
            continue
        mean, low, high = accuracy
        if control:
            axis.axhline(mean, color="#444444", linewidth=1, linestyle=next(styles), label=control)
        elif row.run.meta["recipe"] == "none":
            axis.axhspan(low, high, color="#000000", alpha=0.12, linewidth=0)
            axis.axhline(mean, color="#000000", linewidth=1, label="full model (95 % band)")


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
