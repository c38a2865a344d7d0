"""Edit a recipe with controls: a preset, the budget of a method, and the policy of positions.

The text is the recipe. A control changes its own part of the text and preserves the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vlmfast.core.recipe import PRESETS, Recipe
from vlmfast.core.stage import Stage, at_budget
from vlmfast.errors import RecipeError
from vlmfast.eval.axes import with_field

CUSTOM = "custom"
LEAST = 0.05  # of a budget


@dataclass(frozen=True)
class Controls:
    """State of the controls for a recipe.

    Parameters
    ----------
    preset : str
        Name of the equivalent preset, or ``"custom"``.
    method : str
        The first one that has a budget; empty if there is none.
    budget : float or None
        Its value; ``None``: the method's other parameters decide.
    keep : bool
        Whether no stage renumbers the tokens that it keeps.
    """

    preset: str
    method: str
    budget: float | None
    keep: bool


def presets() -> list[tuple[str, str]]:
    """Labels and names of the presets."""
    found = []
    for name in PRESETS:
        parts = [f"{stage.name} {budget:g}" for stage, budget in _budgets(Recipe.parse(name))]
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
    method, budget = next(((stage.name, budget) for stage, budget in _budgets(recipe)), ("", None))
    compact = any(getattr(stage, "positions", "") == "compact" for stage in recipe)
    return Controls(preset, method, budget, not compact)


def set_budget(text: str, budget: float) -> str:
    """Set the budget of the first method that has one."""
    recipe = Recipe.parse(text)
    first = next((stage for stage, _ in _budgets(recipe)), None)
    if first is None:
        raise RecipeError(f"no method of {text} has a budget")
    return str(Recipe(tuple(at_budget(s, budget) if s is first else s for s in recipe)))


def set_positions(text: str, keep: bool) -> str:
    """Preserve the rotary ids of all kept tokens, or renumber them."""
    return str(with_field(Recipe.parse(text), "positions", "keep" if keep else "compact"))


def _budgets(recipe: Recipe) -> Iterator[tuple[Stage, float | None]]:
    """The methods that have a budget, and its value."""
    for stage in recipe:
        if hasattr(stage, "budget"):
            yield stage, stage.budget
