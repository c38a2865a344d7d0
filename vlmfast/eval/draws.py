"""Draws of a control: runs that differ only in the seed of a random selection.

One draw says little: on a hundred questions, two draws can differ by several points. A control is
therefore the mean of several, and intervals resample images and draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import with_values

from .results import COSTS, Results

DRAWS = 5


def with_draws(recipes: Iterable[Recipe], draws: int) -> list[Recipe]:
    """Repeat each recipe that selects at random, with the seeds 0 to ``draws - 1``.

    A recipe with another seed stays as it is.
    """
    found: list[Recipe] = []
    for recipe in recipes:
        repeated = recipe != with_seed(recipe, 1) and recipe == with_seed(recipe, 0)
        found += [with_seed(recipe, n) for n in range(draws)] if repeated else [recipe]
    return list(dict.fromkeys(found))


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Set the seed of random selection; other recipes stay as they are."""
    return Recipe(tuple(with_values(s, seed=seed) if s.name == "random" else s for s in recipe))


def joined(runs: list[Results]) -> list[Results]:
    """Join the draws of each control to one run, with the name of the draw of seed 0.

    Scores and costs of its samples are means, and ``draws`` of a sample has the draws' own. It has
    the questions that all draws have, and the times of the first.
    """
    groups: dict[tuple[Recipe, str | None], list[Results]] = {}
    for run in runs:
        key = with_seed(Recipe.parse(run.meta["recipe"]), 0), run.variant
        groups.setdefault(key, []).append(run)
    return [_join(recipe, own) for (recipe, _), own in groups.items()]


def scores(sample: dict[str, Any]) -> list[float]:
    """The score of each draw; one score for other samples."""
    return [draw["score"] for draw in sample.get("draws", (sample,))]


def _join(recipe: Recipe, draws: list[Results]) -> Results:
    first = draws[0]
    if len(draws) == 1:
        return first
    common = set.intersection(*(set(draw.samples) for draw in draws))
    samples = {
        doc: _mean([draw.samples[doc] for draw in draws]) for doc in first.samples if doc in common
    }
    meta = {**first.meta, "recipe": str(recipe), "draws": len(draws)}
    timings = {doc: line for doc, line in first.timings.items() if doc in common}
    return Results(first.path, meta, samples, timings)


def _mean(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample of all draws; it has failed if any of them has."""
    errors = [draw["error"] for draw in draws if "error" in draw]
    means = {key: _mean_of([draw.get(key) for draw in draws]) for key in ("score", *COSTS)}
    return {**draws[0], **means, "draws": draws, **({"error": errors[0]} if errors else {})}


def _mean_of(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
