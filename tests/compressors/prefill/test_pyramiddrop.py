"""PyramidDrop: counts and budgets. test_golden and test_engine test its exactness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tiny_models import build_llava, build_llava_next
from vlmfast import VLM, RecipeError
from vlmfast.compressors.budget import equivalent, solve
from vlmfast.compressors.prefill.pyramiddrop import PyramidDrop


@pytest.fixture(scope="module", params=[build_llava, build_llava_next])
def vlm(request) -> VLM:
    return VLM(*request.param(layers=4))


def make_image(seed: int, width: int = 60, height: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_published_setting_on_32_layers():
    stage = PyramidDrop()
    assert stage.layers(32) == (8, 16, 24)
    counts = stage.counts(576, 32)
    assert counts == (288, 144, 72)
    assert equivalent(576, (8, 16, 24), counts, 32) == 270
    assert stage.counts(577, 32) == (288, 144, 72)


@pytest.mark.parametrize(
    ("layers", "target", "ratio"),
    [
        ((8, 16, 24), 192, 0.253),
        ((2, 8, 16), 192, 0.560),
        ((2, 8, 16), 128, 0.420),
        ((2, 8, 16), 64, 0.192),
    ],
)
def test_budgets_give_the_known_ratios(layers, target, ratio):
    stage = PyramidDrop(budget=target / 576, layers_=layers)
    counts = stage.counts(576, 32)
    assert counts[0] / 576 == pytest.approx(ratio, abs=3e-3)
    assert equivalent(576, layers, counts, 32) == pytest.approx(target, abs=1)


@given(n=st.integers(1, 3000), depth=st.integers(4, 80), budget=st.floats(0.01, 1))
def test_budget_or_floor_is_met(n, depth, budget):
    stage = PyramidDrop(budget=budget)
    layers = stage.layers(depth)
    counts = stage.counts(n, depth)
    got = equivalent(n, layers, counts, depth)
    assert list(counts) == sorted(counts, reverse=True)
    floor = equivalent(n, layers, [1] * 3, depth)
    # Counts are integers: one more token in every stage is the distance of two attainable costs.
    assert abs(got - max(budget * n, floor)) <= 1.5
    assert got >= stage.floor(depth) * n * 0.999


def test_solve_finds_the_nearest_step():
    def cost(x: float) -> int:
        return int(x * 10)

    assert cost(solve(cost, 7)) == 7
    assert cost(solve(cost, -5)) == 0
    assert cost(solve(cost, 99)) == 10


def test_budget_is_met_and_reported(vlm):
    answer = vlm.ask(
        "what ?", [make_image(0), make_image(1)], recipe="pyramiddrop:budget=0.6", max_new_tokens=3
    )
    n = answer.stats.visual_tokens_in
    assert answer.stats.equivalent_tokens == pytest.approx(0.6 * n, abs=1)
    assert answer.stats.visual_tokens_per_layer[0] == n
    low = vlm.ask("what ?", make_image(0), recipe="pyramiddrop:budget=0.01", max_new_tokens=3).stats
    assert low.visual_tokens_per_layer == [low.visual_tokens_in, 1, 1, 1]  # the floor, not 1 %


@pytest.mark.parametrize("rule", ["next", "last"])
def test_images_are_ranked_jointly_or_separately(vlm, rule):
    together = vlm.ask(
        "what ?",
        [make_image(0), make_image(1)],
        recipe=f"pyramiddrop:rule={rule}",
        max_new_tokens=2,
    )
    apart = vlm.ask(
        "what ?",
        [make_image(0), make_image(1)],
        recipe=f"pyramiddrop:rule={rule},per_item=true",
        max_new_tokens=2,
    )
    n = apart.trace.layout.item.bincount()
    for layer, share in ((1, 0.5), (2, 0.25), (3, 0.125)):
        kept = apart.trace.layout.item[apart.trace.depth > layer].bincount(minlength=2)
        assert kept.tolist() == [int(k * share) for k in n.tolist()]
        assert int((together.trace.depth > layer).sum()) == int(int(n.sum()) * share)


def test_layers_outside_of_the_model_are_refused():
    with pytest.raises(RecipeError, match="stay below 24"):
        PyramidDrop(layers_=(8, 16, 24)).layers(24)
    with pytest.raises(RecipeError, match="must ascend"):
        PyramidDrop().layers(1)
