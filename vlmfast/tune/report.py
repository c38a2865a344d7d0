"""The result of a race as text, JSON and a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlmfast.core.files import replacing

from .bounds import Loss, least_bound, needed
from .race import Result, Row, Settings

_COSTS = {
    "ttft": "equivalent tokens",
    "memory": "KV cache",
    "throughput": "mean of equivalent tokens and KV cache",
}
_INTERVAL = 0.975  # one-sided, so that both bounds are a 95 % interval


def table(result: Result) -> list[dict[str, str]]:
    """Rows of the full model, of the frontier, and of the choice."""
    rows = sorted(_best(result), key=lambda row: -(row.cost or 0))
    return [_line(row, result) for row in (result.full, *rows)]


def _best(result: Result) -> list[Row]:
    """Candidates that no other one beats in cost and loss, and the choice."""
    shown = ("frontier", "certified", "not certified")
    return [row for row in result.rows if row.status in shown or row is result.row]


def _line(row: Row, result: Result) -> dict[str, str]:
    assert row.cost is not None and row.tokens is not None and row.bytes is not None
    return {
        "recipe": ("* " if row.recipe == result.chosen else "  ") + row.recipe,
        "cost": f"{row.cost:.1%}",
        "tokens": f"{row.tokens:.1f}",
        "KV cache": f"{row.bytes / 1e6:.2f} MB",
        "loss (95 %)": "-" if row.loss is None else interval(row.loss),
        "held out": "-" if row.verdict is None else interval(row.verdict),
        "status": row.status,
    }


def interval(loss: Loss) -> str:
    """Loss and its 95 % interval in points."""
    low, high = loss.lower(_INTERVAL), loss.upper(_INTERVAL)
    return f"{100 * loss.mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def verdict(result: Result, settings: Settings) -> list[str]:
    """What the data show about the chosen recipe, in sentences."""
    n, row = len(result.split.held_out), result.row
    bound, level = f"{100 * settings.max_loss:.3g} %", f"{100 * settings.confidence:.3g} %"
    if row.status == "certified" and row.verdict is not None:
        upper = 100 * row.verdict.upper(settings.confidence)
        return [
            f"{row.recipe} loses at most {upper:.1f} points with {level} confidence ({n} held-out "
            f"questions), at {row.cost:.1%} of the full model's {_COSTS[settings.objective]}."
        ]
    lines = [certifiable(n, settings)] if _too_few(n, settings) else []
    lines.append(f"No recipe is certified to lose at most {bound} ({level} confidence).")
    if row.estimate is None:
        lines.append("The full model (none) is chosen.")
    else:
        lines.append(
            f"{row.recipe} is chosen without a certificate: on all {row.estimate.n} questions it "
            f"loses {interval(row.estimate)} points. --strict chooses the full model instead."
        )
    return lines


def certifiable(n: int, settings: Settings) -> str:
    """What n held-out questions can certify, in a sentence."""
    best = f"{n} held-out questions can certify a loss of at most "
    best += f"{100 * least_bound(n, settings.confidence):.1f} % at best"
    if not _too_few(n, settings):
        return f"{best}."
    more = needed(settings.max_loss, settings.confidence)
    return f"{best}; {100 * settings.max_loss:.3g} % needs at least {more} of them."


def _too_few(n: int, settings: Settings) -> bool:
    return least_bound(n, settings.confidence) > settings.max_loss


def failures(result: Result) -> dict[str, list[str]]:
    """Recipes that cannot run, by reason."""
    found: dict[str, list[str]] = {}
    for row in result.rows:
        if row.status == "cannot run":
            found.setdefault(row.note, []).append(row.recipe)
    return found


def to_dict(result: Result, settings: Settings) -> dict[str, Any]:
    """Everything, for ``tune.json``."""
    return {
        "chosen": result.chosen,
        "certified": result.certified,
        "verdict": " ".join(verdict(result, settings)),
        "settings": asdict(settings),
        "cost": _COSTS[settings.objective],
        "questions": {
            "race": len(result.split.race),
            "held_out": len(result.split.held_out),
            "certifiable": least_bound(len(result.split.held_out), settings.confidence),
        },
        "full": {**_json(result.full, settings), "accuracy": result.accuracy},
        "candidates": [_json(row, settings) for row in result.rows],
    }


def _json(row: Row, settings: Settings) -> dict[str, Any]:
    def of(loss: Loss | None) -> dict[str, Any] | None:
        if loss is None:
            return None
        ends = [loss.lower(_INTERVAL), loss.upper(_INTERVAL)]
        upper = loss.upper(settings.confidence)
        return {**asdict(loss), "mean": loss.mean, "interval": ends, "upper": upper}

    return {
        "recipe": row.recipe,
        "status": row.status,
        "cost": row.cost,
        "equivalent_tokens": row.tokens,
        "kv_bytes": row.bytes,
        "loss": of(row.loss),
        "verdict": of(row.verdict),
        "estimate": of(row.estimate),
        "note": row.note or None,
    }


def plot(result: Result, settings: Settings, path: Path) -> None:
    """Draw loss against cost of all candidates that ran."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    ran = [row for row in result.rows if row.loss is not None and row.status != "not cheaper"]
    near = _best(result)
    others = [row for row in ran if row not in near]
    axes.scatter(*_points(others), s=12, color="#9a9a9a", label="other candidates")
    labels = {"chosen": False, "frontier": False}  # whether each is in the legend
    for row in near:
        assert row.cost is not None and row.loss is not None
        shown = row.verdict or row.estimate or row.loss
        low, high = shown.mean - shown.lower(_INTERVAL), shown.upper(_INTERVAL) - shown.mean
        own = row.recipe == result.chosen
        name = "chosen" if own else "frontier"
        label, labels[name] = None if labels[name] else name, True
        axes.errorbar(
            [100 * row.cost],
            [100 * shown.mean],
            yerr=[[100 * low], [100 * high]],
            fmt="D" if own else "o",
            color="#D55E00" if own else "#0072B2",
            capsize=3,
            zorder=3,
            label=label,
        )
    axes.axhline(100 * settings.max_loss, color="#222222", linestyle="--", linewidth=1)
    axes.annotate(
        f"largest loss: {100 * settings.max_loss:.3g} points",
        (1, 100 * settings.max_loss),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    # Without limits, a logarithmic axis needs a point.
    least = min((row.cost for row in ran if row.cost), default=0.1)
    axes.set_xscale("log")
    axes.set_xlim(100 * least / 1.3, 130)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} %"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    top = max((row.loss.mean for row in near if row.loss), default=0.0)
    span = max(4 * settings.max_loss, 2 * top, 0.02)
    axes.set_ylim(-100 * span / 2, 100 * span)
    axes.set_xlabel(f"{_COSTS[settings.objective]}, of the full model's")
    axes.set_ylabel("loss of accuracy (points)")
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    if ran:
        axes.legend(frameon=False, fontsize=8)
    canvas = FigureCanvasAgg(figure)
    with replacing(path) as file:
        canvas.print_png(file)


def _points(rows: list[Row]) -> tuple[list[float], list[float]]:
    found = [(100 * row.cost, 100 * row.loss.mean) for row in rows if row.cost and row.loss]
    return [x for x, _ in found], [y for _, y in found]
