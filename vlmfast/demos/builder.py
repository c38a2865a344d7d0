"""Edit a recipe with controls: a preset, and the budget of a method.

The text is the recipe. A control changes its own part of the text and preserves the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vlmfast.core.recipe import PRESETS, Recipe
from vlmfast.core.stage import at_budget
from vlmfast.errors import RecipeError

CUSTOM = "custom"
LEAST = 0.05  # of a budget


class Controls(NamedTuple):
    """State of the controls for a recipe.

    Parameters
    ----------
    preset : str
        Name of the equivalent preset, or ``"custom"``.
    method : str
        The first one that has a budget; empty if there is none.
    budget : float or None
        Its value; ``None``: the method's other parameters decide.
    """

    preset: str
    method: str
    budget: float | None


def presets() -> list[tuple[str, str]]:
    """Labels and names of the presets."""
    found = []
    for name in PRESETS:
        parts = [f"{stage.name} {stage.budget:g}" for stage in _budgeted(Recipe.parse(name))]
        found.append((f"{name}: {' + '.join(parts) or 'full model'}", name))
    return found


def read(text: str) -> Controls:
    """Return the state of the controls for a recipe.

    Raises
    ------
    RecipeError
        As `Recipe.parse`.
    """
    recipe = Recipe.parse(text)
    preset = next((name for name in PRESETS if Recipe.parse(name) == recipe), CUSTOM)
    first = next(_budgeted(recipe), None)
    return Controls(preset, *(("", None) if first is None else (first.name, first.budget)))


def set_budget(text: str, budget: float) -> str:
    """Set the budget of the first method that has one."""
    recipe = Recipe.parse(text)
    first = next(_budgeted(recipe), None)
    if first is None:
        raise RecipeError(f"no method of {text} has a budget")
    return str(Recipe(tuple(at_budget(s, budget) if s is first else s for s in recipe)))


def _budgeted(recipe: Recipe) -> Iterator[Any]:
    """The methods that have a budget."""
    return (stage for stage in recipe if hasattr(stage, "budget"))
