"""The recipe as controls: both ways, without losing words."""

from __future__ import annotations

from dataclasses import fields

import pytest

from vlmfast import Recipe, RecipeError
from vlmfast.core.recipe import PRESETS
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.demos import builder
from vlmfast.demos.builder import Controls


def _has_budget(name: str) -> bool:
    return any(f.name == "budget" for f in fields(stage_class(name)))


REDUCERS = list(filter(_has_budget, sorted(stage_names())))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("none", ("none", "", None)),
        ("balanced", ("balanced", "downsample", 0.5)),
        ("downsample:budget=0.33+scope:budget=0.33", ("fast", "downsample", 0.33)),
        ("hired:0.5+scope:budget=0.4", ("custom", "hired", None)),
        ("snapkv:0.5", ("custom", "", None)),
        ("hired:positions=compact,budget=0.2", ("custom", "hired", 0.2)),
    ],
)
def test_text_sets_the_controls(text: str, shown: tuple) -> None:
    assert builder.read(text) == Controls(*shown)
    assert builder.read(str(Recipe.parse(text))) == Controls(*shown)


def test_presets_are_labeled_with_their_methods() -> None:
    labels = {name: label for label, name in builder.presets()}
    assert list(labels) == list(PRESETS)
    assert labels["none"] == "none: full model"
    assert labels["fast"] == "fast: downsample 0.33 + scope 0.33"


def test_control_changes_only_its_part() -> None:
    text = "hired:budget=0.5,alpha=0.3+scope:0.9+kivi:4+draft-ngram"
    assert builder.set_budget(text, 0.3) == text.replace("budget=0.5", "budget=0.3")
    # The budget replaces the method's own parameter.
    assert builder.set_budget("hired:0.5+kivi:4", 0.3) == "hired:budget=0.3+kivi:4"


@pytest.mark.parametrize("method", REDUCERS)
@pytest.mark.parametrize("budget", [builder.LEAST, 1])
def test_every_slider_position_is_a_valid_recipe(method: str, budget: float) -> None:
    shown = builder.read(builder.set_budget(method, budget))
    assert (shown.method, shown.budget) == (method, budget)


def test_invalid_edits_are_reported() -> None:
    with pytest.raises(RecipeError, match="hired"):
        builder.read("hirred:0.2")
    with pytest.raises(RecipeError, match="no method of none has a budget"):
        builder.set_budget("none", 0.5)
    with pytest.raises(RecipeError, match="out of range"):
        builder.set_budget("hired", 2)
