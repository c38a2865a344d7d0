"""Published and measured values side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmfast.core.display import markdown_table

from .papers import Method, Paper, Task
from .rows import Key, Measured

WITHIN, BELOW, ABOVE = "within", "below", "above"
FULL_DIFFERS, NO_RESULT, NOT_RUN = "full model differs", "no result", "not run"


def compare(
    paper: Paper, method: Method, task: Task, found: Mapping[Key, Measured | str]
) -> dict[str, Any]:
    """A row of the table, as JSON values.

    ``full``, ``method`` and ``kept`` are published and measured: the scores, and the recipe's in
    percent of the full model's. ``questions`` are those of the smaller run, ``tolerance`` is of
    ``kept``, in percentage points. ``verdict`` is ``within``, ``below`` or ``above`` the tolerance;
    ``full model differs`` if its score is not within its own; ``no result``, with the ``reason``,
    or ``not run``.

    Parameters
    ----------
    paper : Paper
    method : Method
    task : Task
    found : dict
        Results, or the reasons for which there are none.
    """
    runs = [found.get((recipe, task.name)) for recipe in ("none", method.recipe)]
    reason = next((run for run in runs if isinstance(run, str)), "")
    full, own = (run if isinstance(run, Measured) else None for run in runs)
    counts = [run.questions for run in (full, own) if run and run.questions]
    questions = min(counts, default=task.questions)
    tolerance = paper.of_method(task, questions)
    published = paper.full[task.name], method.values[task.name]
    expected, kept = 100 * published[1] / published[0], None
    verdict = NO_RESULT if reason else NOT_RUN
    if full and own and full.value > 0:
        kept = 100 * own.value / full.value
        allowed = paper.of_full(task, full.questions)
        most = tolerance
        if allowed is None or most is None:
            allowed = most = paper.tolerance
        verdict = WITHIN if abs(kept - expected) <= most else BELOW if kept < expected else ABOVE
        if 100 * abs(full.value / published[0] - 1) > allowed:
            verdict = FULL_DIFFERS
    elif full and own:
        verdict, reason = NO_RESULT, "the full model scores 0"
    return {
        "recipe": method.recipe,
        "task": task.name,
        "full": {"published": published[0], "measured": full and full.value},
        "method": {"published": published[1], "measured": own and own.value},
        "kept": {"published": expected, "measured": kept},
        "questions": questions,
        "tolerance": tolerance,
        "verdict": verdict,
        "reason": reason,
    }


def _both(pair: dict[str, float | None]) -> str:
    return " / ".join(map(_number, pair.values()))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def about_paper(paper: Paper) -> list[str]:
    """Where the values are from, and what to know about them."""
    origin = {"authors": "the authors' values", "quoted": "values as later papers quote them"}
    lines = [
        f"{paper.title} (arXiv {paper.arxiv})",
        f"{paper.table}; {origin[paper.origin]}.",
        f"Tolerance: {paper.tolerance:g} % and sampling errors; {paper.reason}.",
        *paper.notes,
    ]
    lines += [f"Not measured: {name}: {why}." for name, why in paper.left_out.items()]
    return [*lines, "Scores: paper / here. ±: tolerance of kept %, in percentage points."]


_HEAD = ["recipe", "task", "full model", "with recipe", "kept %", "±", "result"]


def markdown(paper: Paper, rows: list[dict[str, Any]], tasks: dict[str, Task]) -> str:
    """The report of a paper; pairs are published / measured."""
    shown = [
        [
            f"`{row['recipe']}`",
            tasks[row["task"]].title,
            *(_both(row[of]) for of in ("full", "method", "kept")),
            _number(row["tolerance"]),
            row["verdict"],
        ]
        for row in rows
    ]
    lists = [
        about_paper(paper),
        [f"{row['recipe']} on {row['task']}: {row['reason']}" for row in rows if row["reason"]],
    ]
    first, last = ("\n".join(f"- {line}" for line in of) for of in lists)
    parts = [f"# {paper.name}", first, markdown_table(_HEAD, shown), last]
    return "\n\n".join(filter(None, parts)) + "\n"
