"""`vlmfast tune`: bounds, the race, and the files of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from vlmfast.core.recipe import Recipe
from vlmfast.tune import space
from vlmfast.tune.bounds import Loss, least_bound, needed, paired
from vlmfast.tune.data import split
from vlmfast.tune.outcomes import FULL, CannotRun, Outcome
from vlmfast.tune.race import Result, Row, Settings, frontier, race, rungs
from vlmfast.tune.report import certifiable, verdict

# --- bounds --------------------------------------------------------------------------------------


def probability(worse: int, better: int, n: int, p: float, q: float) -> float:
    """Of these counts, if each question is one that only one side answers with p and q."""
    counts = ((worse, p), (better, q), (n - worse - better, 1 - p - q))
    if any(k and not x for k, x in counts):
        return 0.0
    ways = math.lgamma(n + 1) - sum(math.lgamma(k + 1) for k, _ in counts)
    return math.exp(ways + sum(k * math.log(x) for k, x in counts if k))


@pytest.mark.parametrize(
    ("p", "q"), [(0.01, 0.0), (0.03, 0.0), (0.03, 0.02), (0.05, 0.01), (0.04, 0.04), (0.02, 0.05)]
)
def test_upper_bound_covers_the_loss(p: float, q: float) -> None:
    """Exact coverage: the sum over all counts that are not negligible."""
    n = 60
    counts = [(w, b) for w in range(14) for b in range(14)]
    assert sum(probability(w, b, n, p, q) for w, b in counts) > 0.999
    found = sum(probability(w, b, n, p, q) for w, b in counts if Loss(w, b, n).upper(0.9) >= p - q)
    assert found >= 0.9


def test_upper_bound_without_gains_is_wilsons() -> None:
    """Wilson's bound on a proportion with its correction: half an answer more."""
    for n, x in ((200, 0), (200, 7), (45, 3)):
        z2, seen = 1.6448536269514722**2, x + 0.5
        half = math.sqrt(z2 * (seen * (n - seen) / n + z2 / 4))
        expected = (seen + z2 / 2 + half) / (n + z2)
        assert Loss(x, 0, n).upper(0.95) == pytest.approx(expected)


def test_bounds_are_ordered() -> None:
    loss = Loss(9, 4, 150)
    assert loss.lower(0.95) < loss.mean < loss.upper(0.95) < loss.upper(0.99)
    assert Loss(4, 9, 150).upper(0.9) == pytest.approx(-loss.lower(0.9))
    assert Loss(90, 40, 1500).upper(0.95) < loss.upper(0.95)


def test_correlated_questions_widen_the_bound() -> None:
    full, recipe = [1] * 40, [1] * 36 + [0] * 4
    alone = paired(full, recipe, list(range(40)))
    same = paired(full, recipe, [k // 4 for k in range(40)])
    assert alone.mean == same.mean == 0.1
    assert alone.effect == pytest.approx(1.0)
    assert same.effect == pytest.approx(4.0)
    assert same.upper(0.95) > alone.upper(0.95)


def test_needed_questions_certify_the_bound() -> None:
    n = needed(0.01, 0.95)
    assert least_bound(n, 0.95) <= 0.01 < least_bound(n - 1, 0.95)


# --- data ----------------------------------------------------------------------------------------


def test_split_keeps_images_together_and_depends_on_the_seed() -> None:
    groups = [k // 3 for k in range(90)]
    parts = split(groups, 0.4, 0)
    assert sorted((*parts.race, *parts.held_out)) == list(range(90))
    assert not {groups[i] for i in parts.race} & {groups[i] for i in parts.held_out}
    assert 36 <= len(parts.held_out) <= 38
    assert split(groups, 0.4, 0) == parts != split(groups, 0.4, 1)


# --- candidates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["ttft", "throughput", "memory"])
def test_candidates_are_canonical_and_unique(objective: str) -> None:
    found = space.candidates(objective)
    assert len(set(found)) == len(found) > 100
    assert all(str(Recipe.parse(recipe)) == recipe for recipe in found)
    caches = [recipe for recipe in found if recipe.partition(":")[0] in ("snapkv", "zipcache")]
    assert bool(caches) == (objective != "ttft")
    assert not [recipe for recipe in found if recipe.startswith(("random", "draft-", "frames"))]
    budgets = [r for r in found if r.startswith("divprune")]
    assert len(budgets) == 2 * len(space.BUDGETS)  # under both policies for positions


def test_stacks_join_a_reducer_and_what_follows() -> None:
    best = ["elastic:0.11", "snapkv:keep=0.1", "kivi:4", "hired:0.2", "elastic:0.22+atp:0.5"]
    found = space.stacks(best)
    assert {"elastic:0.11+kivi:4", "hired+kivi:4"} <= set(found)
    assert "elastic:0.11+snapkv:0.5" in found
    assert all(len(Recipe.parse(recipe)) == 2 for recipe in found)
    assert space.stacks(["elastic:0.11"]) == []


# --- the race ------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A source whose recipes are named ``cost/worse/better``, the latter in percent.

    Whether a recipe is right on a question is drawn from its name and the question.
    """

    seed: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)
    drawn: dict[str, list[float]] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)

    def outcomes(self, recipe: str, questions: Sequence[int]) -> list[Outcome]:
        if recipe.startswith("refused"):
            raise CannotRun("it does not fit")
        if recipe in self.fails and self.fails[recipe] in questions:
            raise CannotRun("this question does not fit")
        self.asked += [(recipe, index) for index in questions]
        return [self._outcome(recipe, index) for index in questions]

    def _outcome(self, recipe: str, index: int) -> Outcome:
        full = self._draw("full", index) < 0.9
        if recipe == FULL:
            return Outcome(int(full), 400.0, 1000)
        cost, worse, better = map(float, recipe.split("/"))
        draw = self._draw(recipe, index)
        score = draw >= worse / 90 if full else draw < better / 10
        return Outcome(int(score), 400 * cost, int(1000 * cost))

    def _draw(self, name: str, index: int) -> float:
        if name not in self.drawn:
            rng = random.Random(f"{self.seed} {name}")
            self.drawn[name] = [rng.random() for _ in range(4000)]
        return self.drawn[name][index]


def run(source: Drawn, candidates: list[str], n: int, **settings: object) -> Result:
    chosen = Settings(**{"max_loss": 0.02, **settings})  # type: ignore[arg-type]
    return race(source, candidates, range(n), chosen)


CANDIDATES = ["0.5/0.1/0", "0.2/0.4/0.2", "0.1/20/1", "0.3/15/1", "0.4/5/1", "0.6/0.1/0.1"]


def test_cheapest_recipe_within_the_bound_is_certified() -> None:
    found = run(Drawn(), CANDIDATES, 4000)
    assert found.chosen == "0.2/0.4/0.2"
    assert found.certified
    assert found.row.verdict is not None
    assert found.row.verdict.n == len(found.split.held_out) == 2000
    assert found.row.verdict.upper(0.95) <= 0.02
    assert found.row.cost == pytest.approx(0.2)
    (line,) = verdict(found, Settings(0.02))
    assert line.startswith("0.2/0.4/0.2 loses at most ")


def test_losers_stop_early() -> None:
    source, plans = Drawn(), []
    settings = Settings(0.02)
    found = race(source, CANDIDATES, range(4000), settings, plan=plans.append)
    assert len(set(source.asked)) <= plans[0]
    assert plans == sorted(plans, reverse=True)
    assert len(plans) == len(rungs(2000))
    counts = {recipe: len({i for r, i in source.asked if r == recipe}) for recipe in CANDIDATES}
    status = {row.recipe: row.status for row in found.rows}
    assert status["0.1/20/1"] == status["0.3/15/1"] == "loses too much"
    assert counts["0.1/20/1"] == rungs(2000)[0]
    assert counts[found.chosen] == 4000


def test_held_out_questions_do_not_influence_the_race() -> None:
    source = Drawn()
    found = run(source, CANDIDATES, 4000)
    tested = set(found.split.held_out)
    touched = [recipe for recipe, index in source.asked if index in tested]
    first = touched.index(next(recipe for recipe in touched if recipe != FULL))
    last_race = max(k for k, (_, index) in enumerate(source.asked) if index not in tested)
    first_test = next(k for k, (_, index) in enumerate(source.asked) if index in tested)
    assert last_race < first_test
    assert set(touched[:first]) == {FULL}


def test_too_few_questions_certify_nothing() -> None:
    found = run(Drawn(), CANDIDATES, 60)
    assert not found.certified
    text = " ".join(verdict(found, Settings(0.02)))
    assert "30 held-out questions can certify a loss of at most 11.1 % at best" in text
    assert "2 % needs at least 180 of them" in text
    assert "is chosen without a certificate" in text
    assert found.row.estimate is not None
    assert found.row.estimate.n == 60
    assert "at best." in certifiable(200, Settings(0.02))


def test_strict_chooses_the_full_model() -> None:
    found = run(Drawn(), CANDIDATES, 60, strict=True)
    assert found.chosen == FULL
    assert "The full model (none) is chosen." in verdict(found, Settings(0.02, strict=True))


def test_recipes_that_cannot_run_or_are_not_cheaper_are_rows() -> None:
    found = run(Drawn(), ["refused", "1.2/0/0", *CANDIDATES], 400)
    rows = {row.recipe: row for row in found.rows}
    assert (rows["refused"].status, rows["refused"].note) == ("cannot run", "it does not fit")
    assert rows["1.2/0/0"].status == "not cheaper"


def test_all_candidates_lose_too_much() -> None:
    found = run(Drawn(), ["0.1/30/0", "0.2/25/0"], 400)
    assert found.chosen == FULL
    assert {row.status for row in found.rows} == {"loses too much"}


@pytest.mark.slow
def test_confidence_holds_over_many_candidates() -> None:
    """All recipes lose 3 % where 2 % is allowed; a good one is certified by the same questions."""
    bad = [f"0.{k}/2.6/0.5" for k in range(100, 124)]
    results = [run(Drawn(seed), bad, 800, confidence=0.8) for seed in range(20)]
    # Without a held-out part, most of these races would certify one of the 24.
    lucky = [any(r.loss and r.loss.upper(0.8) <= 0.02 for r in found.rows) for found in results]
    assert sum(lucky) >= 8
    assert sum(found.certified for found in results) <= 7
    good = [run(Drawn(seed), ["0.1/0.3/0.2"], 1600, confidence=0.9).certified for seed in range(9)]
    assert sum(good) >= 8


def test_stacks_join_after_the_first_rung() -> None:
    source, given = Drawn(), []

    def stacks(best: list[str]) -> list[str]:
        given.append(best)
        return ["0.05/0.2/0.2", CANDIDATES[0]]

    found = race(source, CANDIDATES, range(4000), Settings(0.02), stacks=stacks)
    assert found.chosen == "0.05/0.2/0.2"
    assert len(given) == 1
    assert given[0][0] == "0.2/0.4/0.2"
    assert len(found.rows) == len(CANDIDATES) + 1


def test_objective_is_the_cost() -> None:
    def outcomes(recipe: str, questions: Sequence[int]) -> list[Outcome]:
        costs = {FULL: (400.0, 1000), "tokens": (40.0, 900), "cache": (300.0, 100)}
        return [Outcome(1, *costs[recipe]) for _ in questions]

    class Fixed:
        pass

    source = Fixed()
    source.outcomes = outcomes  # type: ignore[attr-defined]
    for objective, chosen in {"ttft": "tokens", "memory": "cache", "throughput": "cache"}.items():
        found = race(source, ["tokens", "cache"], range(400), Settings(0.02, objective))  # type: ignore[arg-type]
        assert (found.chosen, found.certified) == (chosen, True)


def test_frontier_has_no_beaten_recipe() -> None:
    def row(cost: float, worse: int) -> Row:
        return Row(f"{cost}/{worse}", cost=cost, loss=Loss(worse, 0, 100))

    rows = [row(0.5, 3), row(0.1, 9), row(0.3, 3), row(0.2, 9), row(0.8, 0)]
    assert [r.recipe for r in frontier(rows)] == ["0.1/9", "0.3/3", "0.8/0"]


@pytest.mark.parametrize("n", [1, 10, 12, 40, 200, 2000])
def test_rungs_double_up_to_all_questions(n: int) -> None:
    sizes = rungs(n)
    assert sizes[-1] == n
    assert all(a < b <= 2 * a + 1 for a, b in pairwise(sizes))


def test_a_candidate_that_fails_on_a_held_out_question_is_left_out() -> None:
    candidates = ["0.2/0/0", "0.5/0/0", "0.9/0/0"]
    whole = run(Drawn(), candidates, 400)
    assert whole.chosen == "0.2/0/0" and whole.certified
    found = run(Drawn(fails={"0.2/0/0": whole.split.held_out[-1]}), candidates, 400)
    assert found.chosen == "0.5/0/0"  # which the race had left out, and nothing certifies
    assert not found.certified
    (row,) = [row for row in found.rows if row.recipe == "0.2/0/0"]
    assert (row.status, row.note) == ("cannot run", "this question does not fit")
