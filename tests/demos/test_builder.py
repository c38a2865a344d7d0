"""The recipe as controls: both ways, without losing words."""

from __future__ import annotations

import pytest

from vlmfast import Recipe, RecipeError
from vlmfast.core.recipe import PRESETS
from vlmfast.demos import builder

WITH_MORE = (
    "hired:budget=0.5,alpha=0.3+elastic:budget=0.44+scope:0.9+pyramiddrop+kivi:4+draft-ngram"
)

FIRST = {"encode-2": "encode"}  # where a method is shown that has none before it


def test_every_method_has_controls() -> None:
    from vlmfast.core.registry import stage_names

    assert [place for row in builder.ROWS for place in row] == list(builder.PLACES)
    shown = {m for place in builder.PLACES for m in builder.methods_of(place)} - {builder.NONE}
    assert shown == {n for n in stage_names() if builder.stage_class(n).protocol != "media"}
    for place in builder.PLACES:
        for method in builder.methods_of(place):
            text = builder.choose("none", place, method)
            slots = builder.read(text).slots
            # A method alone is the first one.
            assert slots.pop(FIRST.get(place, place)).method == method
            assert {slot.method for slot in slots.values()} == {builder.NONE}


def test_text_sets_the_controls() -> None:
    shown = builder.read(WITH_MORE)
    assert {place: slot.method for place, slot in shown.slots.items()} == {
        "views": "none",
        "in-encoder": "none",
        "encode": "hired",
        "encode-2": "elastic",
        "prefill": "pyramiddrop",
        "cache": "kivi",
        "drafter": "draft-ngram",
    }
    dials = {p: (s.dial.name, s.dial.value) for p, s in shown.slots.items() if s.dial}
    assert dials["encode"] == ("budget", 0.5)
    assert dials["encode-2"] == ("budget", 0.44)
    assert dials["prefill"] == ("budget", None)
    assert dials["cache"] == ("bits", 4)
    assert shown.beyond == "scope:0.9"
    assert shown.keep
    assert shown.preset == builder.CUSTOM


@pytest.mark.parametrize("name", ["none", "faithful", "balanced", "fast"])
def test_presets_are_recognized_by_their_stages(name: str) -> None:
    assert builder.read(str(Recipe.parse(name))).preset == name


def test_control_changes_only_its_method() -> None:
    assert builder.turn(WITH_MORE, "encode", 0.3) == WITH_MORE.replace("budget=0.5", "budget=0.3")
    turned = builder.turn(WITH_MORE, "encode-2", 0.6)
    assert turned == WITH_MORE.replace("budget=0.44", "budget=0.6")
    assert builder.turn(WITH_MORE, "cache", 8) == WITH_MORE.replace("kivi:4", "kivi:8")
    assert builder.choose(WITH_MORE, "cache", "none") == WITH_MORE.replace("+kivi:4", "")
    assert builder.choose(WITH_MORE, "encode", "none") == WITH_MORE.partition("+")[2]
    text = builder.choose(WITH_MORE, "in-encoder", "tome")
    assert text == "tome:budget=0.22+" + WITH_MORE


def test_second_reducer_follows_the_first() -> None:
    text = builder.choose("hired:0.5+kivi:4", "encode-2", "divprune")
    assert text == "hired:0.5+divprune:budget=0.22+kivi:4"
    assert builder.read(text).slots["encode-2"].method == "divprune"
    assert builder.choose(text, "encode-2", "none") == "hired:0.5+kivi:4"
    left = builder.choose(text, "encode", "none")  # the second is the first now
    assert left == "divprune:budget=0.22+kivi:4"
    slots = builder.read(left).slots
    assert (slots["encode"].method, slots["encode-2"].method) == ("divprune", builder.NONE)
    with pytest.raises(RecipeError, match="Visual tokens, second method: no method"):
        builder.turn(left, "encode-2", 0.5)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
def test_every_stage_of_a_preset_has_a_control(name: str) -> None:
    shown = builder.read(name)
    assert not shown.beyond
    methods = [slot.method for slot in shown.slots.values() if slot.method != builder.NONE]
    assert methods == [stage.name for stage in Recipe.parse(name)]


def test_budget_replaces_the_methods_own_parameter() -> None:
    assert builder.turn("hired:0.5", "encode", 0.3) == "hired:budget=0.3"


def test_positions_are_set_for_all_stages() -> None:
    text = builder.set_positions("hired:0.5+kivi:4", keep=False)
    assert text == "hired:keep=0.5,positions=compact+kivi:4"
    assert not builder.read(text).keep
    assert builder.set_positions(text, keep=True) == "hired:0.5+kivi:4"


@pytest.mark.parametrize("place", list(builder.PLACES))
def test_every_slider_position_is_a_valid_recipe(place: str) -> None:
    for method in builder.methods_of(place):
        text = builder.choose("none", place, method)
        shown_at = FIRST.get(place, place)
        dial = builder.read(text).slots[shown_at].dial
        for value in () if dial is None else (dial.low, dial.high):
            turned = builder.turn(text, shown_at, value)
            assert builder.read(turned).slots[shown_at].dial.value == value


def test_invalid_recipes_are_reported() -> None:
    with pytest.raises(RecipeError, match="hired"):
        builder.read("hirred:0.2")
    with pytest.raises(RecipeError, match="choose a method first"):
        builder.turn("none", "cache", 0.5)
    with pytest.raises(RecipeError, match="out of range"):
        builder.turn("hired", "encode", 2)
