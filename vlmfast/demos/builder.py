"""Edit a recipe with controls: one method and one parameter for each step of the pipeline.

The step between encoder and language model has two, since the presets combine two methods there.

The text is the recipe. A control changes its own part of the text and preserves the rest, including
settings without a control.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, replace
from typing import Any

from vlmfast.core.params import recipe_name
from vlmfast.core.protocols import PROTOCOLS
from vlmfast.core.recipe import PRESETS, Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.stage import Stage, at_budget
from vlmfast.errors import RecipeError
from vlmfast.eval.axes import with_field

NONE = "none"
CUSTOM = "custom"
_BUDGET = 0.22


@dataclass(frozen=True)
class Place:
    """A control: the method at one place in the pipeline.

    Parameters
    ----------
    label : str
    protocol : str
        Kind of the methods.
    nth : int
        Which of a recipe's methods of this kind, from 0.
    """

    label: str
    protocol: str
    nth: int = 0


PLACES = {
    "views": Place("Crops and frames", "views"),
    "in-encoder": Place("Vision tower", "in-encoder"),
    "encode": Place("Visual tokens", "encode"),
    "encode-2": Place("Visual tokens, second method", "encode", 1),
    "prefill": Place("Language model", "prefill"),
    "cache": Place("KV cache", "cache"),
    "drafter": Place("Drafts", "drafter"),
}
# On the page: before the language model, and in it.
ROWS = (("views", "in-encoder", "encode", "encode-2"), ("prefill", "cache", "drafter"))


@dataclass(frozen=True)
class Dial:
    """The parameter of a method that a slider sets.

    Parameters
    ----------
    name : str
        Its name in recipes.
    value : float or None
        ``None``: the method's other parameters decide.
    low, high, step : float
    """

    name: str
    value: float | None
    low: float
    high: float
    step: float


@dataclass(frozen=True)
class Slot:
    """State of the controls of one place."""

    method: str = NONE
    dial: Dial | None = None


@dataclass(frozen=True)
class Controls:
    """State of all controls for a recipe.

    Parameters
    ----------
    slots : dict of str to Slot
        By place.
    keep : bool
        Whether no stage renumbers the tokens that it keeps.
    preset : str
        Name of the equivalent preset, or ``"custom"``.
    beyond : str
        Stages without a control, such as the third one of a kind; empty if there are none.
    """

    slots: dict[str, Slot]
    keep: bool
    preset: str
    beyond: str


def methods_of(place: str, offered: Container[str] | None = None) -> list[str]:
    """``"none"`` and the methods of a place, all or those that are ``offered``."""
    protocol = PLACES[place].protocol
    names = (n for n in sorted(stage_names()) if stage_class(n).protocol == protocol)
    return [NONE, *(n for n in names if offered is None or n in offered)]


def presets() -> list[tuple[str, str]]:
    """Labels and names of the presets."""
    found = []
    for name in PRESETS:
        recipe = Recipe.parse(name)
        dials = [(stage.name, dial_of(stage)) for stage in recipe]
        parts = [f"{n} {d.value:g}" if d and d.value else n for n, d in dials]
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
    slots, beyond = {place: Slot() for place in PLACES}, []
    for stage in recipe:
        same = (name for name, place in PLACES.items() if place.protocol == stage.protocol)
        free = next((name for name in same if slots[name].method == NONE), None)
        if free is None:
            beyond.append(str(stage))
        else:
            slots[free] = Slot(stage.name, dial_of(stage))
    preset = next((name for name in PRESETS if Recipe.parse(name) == recipe), CUSTOM)
    placed = [stage.positions for stage in recipe if hasattr(stage, "positions")]
    return Controls(slots, "compact" not in placed, preset, ", ".join(beyond))


def choose(text: str, place: str, method: str, keep: bool = True) -> str:
    """Replace the method of a place, with its defaults and a budget if it has one.

    The second of two methods takes the place of the first one when that is removed.
    """
    stages = list(Recipe.parse(text))
    at = _find(stages, place)
    if at is not None:
        stages.pop(at)
    if method != NONE:
        rank = PROTOCOLS.index(PLACES[place].protocol)
        later = (i for i, s in enumerate(stages) if PROTOCOLS.index(s.protocol) > rank)
        stages.insert(next(later, len(stages)) if at is None else at, _new(method, keep))
    return str(Recipe(tuple(stages)))


def turn(text: str, place: str, value: float) -> str:
    """Set the parameter of the method at a place."""
    stages = list(Recipe.parse(text))
    at = _find(stages, place)
    dial = None if at is None else dial_of(stages[at])
    if at is None or dial is None:
        raise RecipeError(
            f"{PLACES[place].label}: no method with a parameter; choose a method first"
        )
    stages[at] = _set(stages[at], dial, value)
    return str(Recipe(tuple(stages)))


def set_positions(text: str, keep: bool) -> str:
    """Preserve the rotary ids of all kept tokens, or renumber them."""
    return str(with_field(Recipe.parse(text), "positions", "keep" if keep else "compact"))


def dial_of(stage: Stage) -> Dial | None:
    """The parameter that sets how much a method keeps: its budget, else its bare value."""
    by_name = {f.name: f for f in fields(stage)}
    f = by_name.get("budget") or by_name.get(stage.lead or "")
    if f is None:
        return None
    value = getattr(stage, f.name)
    default: Any = f.default
    kind = type(default)
    if kind is int:
        low, high = f.metadata.get("ge", 1), f.metadata.get("le", max(8, 2 * default))
        return Dial(recipe_name(f), value, low, high, 1)
    if kind is float or f.name == "budget":
        return Dial(recipe_name(f), value, 0.05, 0.95 if "lt" in f.metadata else 1.0, 0.005)
    return None


def _set(stage: Stage, dial: Dial, value: float) -> Stage:
    names = {recipe_name(f): f for f in fields(stage)}
    f = names[dial.name]
    if f.name == "budget":
        return at_budget(stage, float(value))
    return replace(stage, **{f.name: int(value) if type(f.default) is int else float(value)})


def _new(method: str, keep: bool) -> Stage:
    cls = stage_class(method)
    names = {f.name for f in fields(cls)}
    values: dict[str, Any] = {}
    if "budget" in names:
        values["budget"] = max(_BUDGET, cls().floor(32))
    if "positions" in names and not keep:
        values["positions"] = "compact"
    return cls(**values)


def _find(stages: list[Stage], place: str) -> int | None:
    of = PLACES[place]
    same = [i for i, stage in enumerate(stages) if stage.protocol == of.protocol]
    return same[of.nth] if of.nth < len(same) else None
