"""Published and measured values side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vlmfast.core.display import markdown_table

from .papers import Method, Paper, Task
from .rows import Key, Measured

WITHIN, BELOW, ABOVE = "within", "below", "above"
FULL_DIFFERS, NO_RESULT, NOT_RUN = "full model differs", "no result", "not run"
_NONE = "–"


@dataclass(frozen=True)
class Pair:
    """A published and a measured value."""

    published: float
    measured: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One recipe on one task.

    Parameters
    ----------
    recipe, task : str
    full, method : Pair
        Scores.
    kept : Pair
        Score of the recipe in percent of the full model's.
    questions : int or None
        Of the smaller run.
    tolerance : float or None
        Of ``kept``, in percentage points.
    verdict : str
        ``within``, ``below`` or ``above`` the tolerance of ``kept``; ``full model differs`` if its
        score is not within its own; ``no result`` or ``not run``.
    reason : str
        Why there is no result.
    """

    recipe: str
    task: str
    full: Pair
    method: Pair
    kept: Pair
    questions: int | None
    tolerance: float | None
    verdict: str
    reason: str = ""


def compare(
    paper: Paper, method: Method, task: Task, found: Mapping[Key, Measured | str]
) -> Comparison:
    """A row of the table, from results and the reasons for which there are none."""
    runs = [found.get((recipe, task.name)) for recipe in ("none", method.recipe)]
    reason = next((run for run in runs if isinstance(run, str)), "")
    known = [run if isinstance(run, Measured) else None for run in runs]
    full, own = known
    questions = min((r.questions for r in known if r and r.questions), default=task.questions)
    tolerance = paper.of_method(task, questions)
    published = paper.full[task.name], method.values[task.name]
    pairs = [Pair(value, run and run.value) for value, run in zip(published, known, strict=True)]
    kept = Pair(100 * published[1] / published[0])
    verdict = NO_RESULT if reason else NOT_RUN
    if full and own and full.value > 0:
        kept = Pair(kept.published, 100 * own.value / full.value)
        verdict, reason = _verdict(paper, task, full, kept, tolerance), ""
    elif full and own:
        verdict, reason = NO_RESULT, "the full model scores 0"
    return Comparison(method.recipe, task.name, *pairs, kept, questions, tolerance, verdict, reason)


def _verdict(paper: Paper, task: Task, full: Measured, kept: Pair, tolerance: float | None) -> str:
    assert kept.measured is not None
    published = paper.full[task.name]
    allowed = paper.of_full(task, full.questions)
    if allowed is None or tolerance is None:
        allowed = tolerance = paper.tolerance
    if 100 * abs(full.value / published - 1) > allowed:
        return FULL_DIFFERS
    gap = kept.measured - kept.published
    return WITHIN if abs(gap) <= tolerance else BELOW if gap < 0 else ABOVE


def cells(rows: list[Comparison], tasks: dict[str, Task]) -> list[dict[str, str]]:
    """The columns of the table as text; pairs are published / measured."""
    return [
        {
            "recipe": row.recipe,
            "task": tasks[row.task].title,
            "full model": _both(row.full),
            "with recipe": _both(row.method),
            "kept %": _both(row.kept),
            "±": _NONE if row.tolerance is None else f"{row.tolerance:.1f}",
            "result": row.verdict,
        }
        for row in rows
    ]


def _both(pair: Pair) -> str:
    here = _NONE if pair.measured is None else f"{pair.measured:.1f}"
    return f"{pair.published:.1f} / {here}"


def about(paper: Paper) -> list[str]:
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


def markdown(paper: Paper, rows: list[Comparison], tasks: dict[str, Task]) -> str:
    """The report of a paper."""
    table = cells(rows, tasks)
    shown = markdown_table(
        list(table[0]),
        [[f"`{row['recipe']}`", *list(row.values())[1:]] for row in table],
    )
    parts = [f"# {paper.name}", "\n".join(f"- {line}" for line in about(paper)), shown]
    reasons = reasons_of(rows)
    if reasons:
        parts.append("\n".join(f"- {line}" for line in reasons))
    return "\n\n".join(parts) + "\n"


def reasons_of(rows: list[Comparison]) -> list[str]:
    """A line for each row without a result."""
    return [f"{row.recipe} on {row.task}: {row.reason}" for row in rows if row.reason]


def to_json(paper: Paper, rows: list[Comparison], shared: dict[str, Any]) -> dict[str, Any]:
    """The report of a paper as JSON values."""
    facts = {key: getattr(paper, key) for key in ("title", "arxiv", "origin", "table", "tolerance")}
    return {"paper": paper.name, **facts, **shared, "rows": [asdict(row) for row in rows]}
