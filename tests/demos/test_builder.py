"""The recipe as controls: both ways, without losing words."""

from __future__ import annotations

import pytest

from vlmfast import Recipe, RecipeError
from vlmfast.demos import builder

WITH_MORE = "hired:budget=0.5,alpha=0.3+elastic:budget=0.44+pyramiddrop+kivi:4+draft-ngram"


def test_every_method_has_controls() -> None:
    from vlmfast.core.registry import stage_names

    shown = {m for place in builder.PLACES for m in builder.methods_of(place)} - {builder.NONE}
    assert shown == {n for n in stage_names() if builder.stage_class(n).protocol != "media"}
    for place in builder.PLACES:
        for method in builder.methods_of(place):
            text = builder.choose("none", place, method)
            slots = builder.read(text).slots
            assert slots.pop(place).method == method
            assert {slot.method for slot in slots.values()} == {builder.NONE}


def test_text_sets_the_controls() -> None:
    shown = builder.read(WITH_MORE)
    assert {place: slot.method for place, slot in shown.slots.items()} == {
        "views": "none",
        "in-encoder": "none",
        "encode": "hired",
        "prefill": "pyramiddrop",
        "cache": "kivi",
        "drafter": "draft-ngram",
    }
    dials = {p: (s.dial.name, s.dial.value) for p, s in shown.slots.items() if s.dial}
    assert dials["encode"] == ("budget", 0.5)
    assert dials["prefill"] == ("budget", None)
    assert dials["cache"] == ("bits", 4)
    assert shown.beyond == "elastic:budget=0.44"
    assert not shown.keep
    assert shown.preset == builder.CUSTOM


@pytest.mark.parametrize("name", ["none", "faithful", "balanced", "fast"])
def test_presets_are_recognized_by_their_stages(name: str) -> None:
    assert builder.read(str(Recipe.parse(name))).preset == name


def test_control_changes_only_its_method() -> None:
    assert builder.turn(WITH_MORE, "encode", 0.3) == WITH_MORE.replace("budget=0.5", "budget=0.3")
    assert builder.turn(WITH_MORE, "cache", 8) == WITH_MORE.replace("kivi:4", "kivi:8")
    assert builder.choose(WITH_MORE, "cache", "none") == WITH_MORE.replace("+kivi:4", "")
    assert builder.choose(WITH_MORE, "encode", "none") == WITH_MORE.partition("+")[2]
    text = builder.choose(WITH_MORE, "in-encoder", "tome", keep=False)
    assert text == "tome:budget=0.22+" + WITH_MORE


def test_budget_replaces_the_methods_own_parameter() -> None:
    assert builder.turn("hired:0.5", "encode", 0.3) == "hired:budget=0.3"


def test_positions_are_set_for_all_stages() -> None:
    text = builder.set_positions("hired:0.5+kivi:4", keep=True)
    assert text == "hired:keep=0.5,positions=keep+kivi:4"
    assert builder.read(text).keep
    assert builder.set_positions(text, keep=False) == "hired:0.5+kivi:4"


@pytest.mark.parametrize("place", list(builder.PLACES))
def test_every_slider_position_is_a_valid_recipe(place: str) -> None:
    for method in builder.methods_of(place):
        text = builder.choose("none", place, method)
        dial = builder.read(text).slots[place].dial
        for value in () if dial is None else (dial.low, dial.high):
            turned = builder.turn(text, place, value)
            assert builder.read(turned).slots[place].dial.value == value


def test_invalid_recipes_are_reported() -> None:
    with pytest.raises(RecipeError, match="hired"):
        builder.read("hirred:0.2")
    with pytest.raises(RecipeError, match="choose a method first"):
        builder.turn("none", "cache", 0.5)
    with pytest.raises(RecipeError, match="out of range"):
        builder.turn("hired", "encode", 2)
