"""A race between recipes: the cheapest whose loss of accuracy stays within a bound.

The questions have two parts. On the first, successive halving (Jamieson and Talwalkar, AISTATS
2016) compares all candidates on a few questions, keeps the better half, and doubles the questions.
Candidates that surely lose too much are dropped at once. As in Schmucker et al. (arXiv 2106.12639)
the better half is chosen by nondominated sorting, here of cost and loss.

The second part is held out for the verdict. The remaining candidates that look safe are tested on
it in a fixed order, the safest first, until one fails: fixed sequence testing, in the order of
Pareto testing (Laufer-Goldshtein et al., arXiv 2210.07913). The order comes from the first part,
so each test has the full confidence: the probability that any certified recipe exceeds the bound is
at most ``1 - confidence``, however many recipes took part in the race.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bounds import Loss, paired
from .data import Split, split
from .outcomes import FULL, CannotRun, Outcome, Source

OBJECTIVES = ("ttft", "throughput", "memory")
RUNGS, LEAST_RUNG = 4, 12  # rungs at most, and questions of the first
LIKELY = 0.9  # confidence of a choice that is not certified
KEPT, SAFEST = 8, 3  # candidates that stay at least, and those that stay for their small loss


@dataclass(frozen=True)
class Settings:
    """What is searched for.

    Parameters
    ----------
    max_loss : float
        The greatest loss of accuracy, as a fraction.
    objective : {"ttft", "throughput", "memory"}
    confidence : float
        Of the verdict.
    held_out : float
        Fraction of the questions for the verdict.
    strict : bool
        Choose the full model if no recipe can be certified.
    seed : int
        Of the split into parts.
    """

    max_loss: float
    objective: str = "ttft"
    confidence: float = 0.95
    held_out: float = 0.5
    strict: bool = False
    seed: int = 0


@dataclass
class Row:
    """A candidate.

    Parameters
    ----------
    recipe : str
    status : str
        ``running``, ``cannot run``, ``not cheaper``, ``loses too much``, ``dominated``,
        ``frontier``, ``certified`` or ``not certified``.
    cost : float, optional
        Fraction of the full model's cost; see `cost_of`.
    loss : Loss, optional
        On the first part, or on all questions if no recipe is certified.
    verdict : Loss, optional
        On the held-out part.
    estimate : Loss, optional
        On all questions, if no recipe is certified.
    note : str
        Why it cannot run.
    """

    recipe: str
    status: str = "running"
    cost: float | None = None
    tokens: float | None = None
    bytes: float | None = None
    loss: Loss | None = None
    verdict: Loss | None = None
    estimate: Loss | None = None
    note: str = ""


@dataclass
class Result:
    """The outcome of a race.

    Parameters
    ----------
    chosen : str
        A recipe; ``none`` if no recipe is chosen.
    certified : bool
        Whether the held-out questions certify its loss. The full model has none.
    full : Row
        Costs of the full model; its accuracy is ``accuracy``.
    rows : list of Row
        All candidates.
    """

    chosen: str
    certified: bool
    full: Row
    accuracy: float
    split: Split
    rows: list[Row] = field(default_factory=list)

    @property
    def row(self) -> Row:
        return next((row for row in self.rows if row.recipe == self.chosen), self.full)


@dataclass
class _Race:
    source: Source
    groups: Sequence[Hashable]
    settings: Settings
    full: dict[int, Outcome] = field(default_factory=dict)

    def measure(self, row: Row, questions: Sequence[int]) -> Loss:
        """The loss of a candidate on questions; also sets its costs."""
        outcomes = self.source.outcomes(row.recipe, questions)
        full = [self.full[index] for index in questions]
        row.tokens = sum(o.tokens for o in outcomes) / len(outcomes)
        row.bytes = sum(o.bytes for o in outcomes) / len(outcomes)
        row.cost = cost_of(self.settings.objective, outcomes, full)
        return paired(
            [o.score for o in full],
            [o.score for o in outcomes],
            [self.groups[index] for index in questions],
        )

    def ask_full(self, questions: Sequence[int]) -> None:
        found = self.source.outcomes(FULL, questions)
        self.full |= dict(zip(questions, found, strict=True))


def cost_of(objective: str, outcomes: Iterable[Outcome], full: Iterable[Outcome]) -> float:
    """Cost of answers as a fraction of the full model's.

    ``ttft``: equivalent tokens, which the prefill computes. ``memory``: bytes of the KV cache.
    ``throughput``: the mean of both fractions, for the prefill and the decoding of a batch.
    """
    outcomes, full = list(outcomes), list(full)
    tokens = sum(o.tokens for o in outcomes) / sum(o.tokens for o in full)
    memory = sum(o.bytes for o in outcomes) / sum(o.bytes for o in full)
    return {"ttft": tokens, "memory": memory, "throughput": (tokens + memory) / 2}[objective]


def rungs(n: int) -> list[int]:
    """Questions of each rung: twice those of the one before, up to n."""
    count = next(k for k in range(RUNGS, 0, -1) if k == 1 or n >> (k - 1) >= LEAST_RUNG)
    return [n >> (count - 1 - k) for k in range(count)]


def planned(candidates: int, sizes: Sequence[int], done: int, held_out: int) -> int:
    """Answers that are left at most.

    Parameters
    ----------
    candidates : int
    sizes : sequence of int
        Questions of the rungs that are left.
    done : int
        Questions of the last rung.
    held_out : int
        Questions of the verdict.
    """
    total, count = 0, candidates
    for size in sizes:
        total += (size - done) * (count + 1)  # and the full model
        done, count = size, min(count, max(KEPT, count // 2) + SAFEST)
    return total + held_out * (count + 1)


def race(
    source: Source,
    candidates: Sequence[str],
    groups: Sequence[Hashable],
    settings: Settings,
    *,
    stacks: Callable[[list[str]], list[str]] = lambda recipes: [],
    say: Callable[[str], Any] = lambda text: None,
    plan: Callable[[int], Any] = lambda answers: None,
) -> Result:
    """Choose a recipe.

    Parameters
    ----------
    source : Source
    candidates : sequence of str
        Recipes.
    groups : sequence
        The image or video of each question.
    settings : Settings
    stacks : callable
        Further candidates, from the recipes that remain after the first rung, the better ones
        first.
    say : callable
        Called with a line about each step.
    plan : callable
        Called with the greatest number of answers that are left, before each rung.

    Returns
    -------
    Result
        A function of the outcomes: a race that continues from stored answers ends like one that
        was never interrupted.
    """
    parts = split(list(groups), settings.held_out, settings.seed)
    run = _Race(source, groups, settings)
    rows = [Row(recipe) for recipe in dict.fromkeys(candidates)]
    running, sizes = list(rows), rungs(len(parts.race))
    for number, size in enumerate(sizes):
        done = sizes[number - 1] if number else 0
        plan(planned(len(running), sizes[number:], done, len(parts.held_out)))
        questions = parts.race[:size]
        run.ask_full(questions)
        running = _measured(run, running, questions)
        if number == 0:
            known = {row.recipe for row in rows}
            order = [row.recipe for row in _sorted(running)]
            added = [Row(recipe) for recipe in stacks(order) if recipe not in known]
            rows += added
            running += _measured(run, added, questions)
        if number + 1 < len(sizes):
            running = _better_half(running)
        say(f"{size} questions: {len(running)} of {len(rows)} candidates remain")
    safe = _mark(running)
    run.ask_full(parts.held_out)
    chosen, certified = _verdict(run, parts, running, safe, say)
    outcomes = run.full.values()
    full = Row(FULL, "full model", 1.0)
    full.tokens = sum(o.tokens for o in outcomes) / len(outcomes)
    full.bytes = sum(o.bytes for o in outcomes) / len(outcomes)
    accuracy = sum(o.score for o in outcomes) / len(outcomes)
    return Result(chosen, certified, full, accuracy, parts, rows)


def _measured(run: _Race, rows: Sequence[Row], questions: Sequence[int]) -> list[Row]:
    """Measure candidates; those that still can win."""
    settings = run.settings
    for row in rows:
        try:
            row.loss = run.measure(row, questions)
        except CannotRun as error:
            row.status, row.note = "cannot run", str(error)
            continue
        if _cost(row) >= 1:
            row.status = "not cheaper"
        elif row.loss.lower(settings.confidence) > settings.max_loss:
            row.status = "loses too much"
    return [row for row in rows if row.status == "running"]


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """Nondominated sorting of cost and loss: the frontier, the frontier of the rest, and so on."""
    found, left = [], list(rows)
    while left:
        layer = frontier(left)
        found += layer
        left = [row for row in left if row not in layer]
    return found


def _better_half(rows: list[Row]) -> list[Row]:
    """Drop the worse half.

    The candidates of the smallest loss stay, of equal losses those of the highest cost: on few
    questions, recipes that drop too much often look as good.
    """
    safest = sorted(rows, key=lambda row: (_loss(row), -_cost(row), row.recipe))[:SAFEST]
    others = [row for row in _sorted(rows) if row not in safest]
    kept = safest + others[: max(KEPT, len(rows) // 2)]
    for row in rows:
        if row not in kept:
            row.status = "dominated"
    return kept


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Candidates that no other one beats in cost and loss, the cheapest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (_cost(row), _loss(row), row.recipe)):
        if not found or _loss(row) < _loss(found[-1]):
            found.append(row)
    return found


def _mark(rows: Sequence[Row]) -> list[Row]:
    """Set the status of candidates that remain; those of the frontier."""
    found = frontier(rows)
    for row in rows:
        if row.verdict is None:
            row.status = "frontier" if row in found else "dominated"
    return found


def _verdict(
    run: _Race, parts: Split, running: list[Row], safe: list[Row], say: Callable[[str], Any]
) -> tuple[str, bool]:
    settings = run.settings

    def bound(row: Row) -> float:
        assert row.loss is not None
        return row.loss.upper(settings.confidence)

    promising = sorted((row for row in safe if bound(row) <= settings.max_loss), key=bound)
    chosen: Row | None = None
    for row in promising:
        try:
            row.verdict = run.measure(row, parts.held_out)
        except CannotRun as error:
            row.status, row.note = "cannot run", str(error)
            continue
        passed = row.verdict.upper(settings.confidence) <= settings.max_loss
        row.status = "certified" if passed else "not certified"
        say(f"held-out questions: {row.recipe} is {row.status}")
        if not passed:
            break
        if chosen is None or _cost(row) < _cost(chosen):
            chosen = row
    if chosen is not None:
        return chosen.recipe, True
    if settings.strict:
        return FULL, True
    return _likely(run, parts, running), False


def _likely(run: _Race, parts: Split, rows: list[Row]) -> str:
    """The choice without a certificate, from all questions.

    The cheapest candidate whose bound at the confidence `LIKELY` stays within the limit, or else
    the candidate with the lowest bound. The full model if all candidates exceed the limit.
    """
    limit, bounds = run.settings.max_loss, {}
    for row in rows:
        try:
            row.loss = row.estimate = run.measure(row, (*parts.race, *parts.held_out))
        except CannotRun as error:
            row.status, row.note = "cannot run", str(error)
            continue
        if row.estimate.mean <= limit:
            bounds[row.recipe] = (row.estimate.upper(LIKELY), _cost(row))
    _mark([row for row in rows if row.status != "cannot run"])
    likely = [recipe for recipe, (bound, _) in bounds.items() if bound <= limit]
    if likely:
        return min(likely, key=lambda recipe: bounds[recipe][1])
    return min(bounds, key=lambda recipe: bounds[recipe], default=FULL)


def _cost(row: Row) -> float:
    assert row.cost is not None
    return row.cost


def _loss(row: Row) -> float:
    assert row.loss is not None
    return row.loss.mean
