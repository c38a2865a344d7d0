"""The result of a race as text, JSON and a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    """Write a page with loss against cost of all candidates that ran."""
    from plotly.graph_objects import Figure

    from vlmfast.eval.chart import COLORS, write_page

    groups: dict[str, list[tuple[Row, Loss]]] = {
        name: [] for name in ("other candidates", "frontier", "chosen")
    }
    for row in result.rows:
        if row.loss is not None and row.cost and row.status != "not cheaper":
            name = "frontier" if row in _best(result) else "other candidates"
            name = "chosen" if row is result.row else name
            groups[name].append((row, row.verdict or row.estimate or row.loss))
    shown = Figure()
    for (name, points), color in zip(groups.items(), ("#9a9a9a", *COLORS), strict=False):
        shown.add_scatter(
            x=[100 * (row.cost or 0) for row, _ in points],
            y=[100 * loss.mean for _, loss in points],
            error_y={
                "array": [100 * (loss.upper(_INTERVAL) - loss.mean) for _, loss in points],
                "arrayminus": [100 * (loss.mean - loss.lower(_INTERVAL)) for _, loss in points],
            },
            text=[row.recipe for row, _ in points],
            name=name,
            mode="markers",
            marker={"color": color},
        )
    most = 100 * settings.max_loss
    shown.add_hline(most, line_dash="dash", annotation_text=f"largest loss: {most:.3g} points")
    shown.update_xaxes(type="log", title=f"{_COSTS[settings.objective]}, % of the full model's")
    shown.update_yaxes(title="loss of accuracy (points)")
    shown.update_layout(template="none")
    write_page(shown, path, "vlmfast tune")
