"""Axes of an evaluation: a recipe's budget, its share of the cache, its other parameters."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from math import prod
from typing import Any

from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage, with_values


def method_of(recipe: Recipe) -> tuple[str, float | None]:
    """Split a recipe into its curve (the recipe without budgets and shares) and its budget.

    Budgets multiply; that of several stages is rounded to hundredths.
    """
    plain, budgets = [], []
    for stage in recipe:
        budgets.append(getattr(stage, "budget", None))
        shares = {
            f.name: f.default
            for f in fields(stage)
            if f.name in ("budget", stage.lead) and f.default is not MISSING
        }
        plain.append(str(replace(stage, **shares)))
    given = [b for b in budgets if b is not None]
    budget = round(prod(given), 2) if len(given) > 1 else next(iter(given), None)
    return "+".join(plain) or "none", budget


def takes_budget(recipe: Recipe) -> bool:
    """Whether any stage of a recipe has a budget."""
    return any(_has(stage, "budget") for stage in recipe)


def with_budget(recipe: Recipe, budget: float | None) -> Recipe:
    """Set the budget of all reducers of a recipe."""
    return with_field(recipe, "budget", budget)


def shrinks_cache(stages: Stage | Recipe) -> bool:
    """Whether a stage, or any stage of a recipe, is a cache compression method.

    Reducers are not, even if one of their parts acts on the cache: they are compared by the visual
    tokens that they keep.
    """
    if isinstance(stages, Stage):
        return any(p.protocol == "cache" for p in stages.expand()) and not _has(stages, "budget")
    return any(shrinks_cache(stage) for stage in stages)


def share_of(recipe: Recipe) -> float | None:
    """The ``share`` of a recipe's cache methods; None if they differ or have none."""
    shares = {stage.keep for stage in recipe if shrinks_cache(stage) and _has(stage, "keep")}
    return shares.pop() if len(shares) == 1 else None


def with_share(recipe: Recipe, share: float) -> Recipe:
    """Set the ``share`` of all cache methods of a recipe that have one."""
    return Recipe(
        tuple(
            with_values(stage, keep=share)
            if shrinks_cache(stage) and _has(stage, "keep")
            else stage
            for stage in recipe
        )
    )


def measured(recipe: Recipe) -> list[Recipe]:
    """The variants of a cache method that a group runs at shares of short prompts.

    Windows are a tenth of the kept slots, as in ports to vision-language models: with 35 slots, a
    tenth of a small image's prompt, SnapKV's own window of 32 would leave almost nothing to
    select. A method whose first parameter is ``bits`` has no share; it runs at 4 and 2 bits. All
    other parameters, and methods requested by name, use their defaults.
    """
    (stage,) = recipe
    if stage.lead == "bits":
        return [with_field(recipe, "bits", bits) for bits in (4, 2)]
    return [with_field(recipe, "window", 0.1)]  # if it has a window


def with_field(recipe: Recipe, name: str, value: Any) -> Recipe:
    """Set one parameter in every stage that has it."""
    return Recipe(tuple(replace(s, **{name: value}) if _has(s, name) else s for s in recipe))


def _has(stage: Stage, name: str) -> bool:
    return any(f.name == name for f in fields(stage))
