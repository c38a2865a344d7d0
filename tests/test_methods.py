"""What holds for every method, trained or not, on the shipped model."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from PIL import Image

import vlmfast
from tiny_models import picture
from vlmfast.compressors.random import Random
from vlmfast.errors import RecipeError
from vlmfast.recipe import Recipe
from vlmfast.stages import stage_class, stage_names

METHODS = sorted(stage_names())
MEDIA = {
    "one pixel": {"images": Image.new("RGB", (1, 1), "red")},
    "below a patch": {"images": picture(5, 3)},
    "a clip of one frame": {"video": [picture(64, 64)], "num_frames": 1},
    "a strip": {"images": picture(120, 20)},
    "two pictures": {"images": [picture(seed=1), picture(128, 128, seed=2)]},
    "a clip": {"video": [picture(seed=i) for i in range(3)], "num_frames": 3},
}


def budgeted(name: str, budget: float):
    return replace(stage_class(name)(), budget=budget)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_every_medium(tiny, name) -> None:
    """Its own default and a budget: fewer tokens come out, and an answer."""
    for case, media in MEDIA.items():
        for stage in (stage_class(name)(), budgeted(name, 0.4)):
            answer = tiny.ask("what ?", **media, recipe=stage, max_new_tokens=2)
            stats = answer.stats
            assert answer.token_ids, (case, str(stage))
            assert 0 < stats.equivalent_tokens <= stats.visual_tokens_in, (case, str(stage))
            assert len(answer.trace.entered) >= stats.visual_tokens_per_layer[0], case


@pytest.mark.parametrize("name", METHODS)
def test_budget_one_is_the_full_model(tiny, name) -> None:
    media = MEDIA["two pictures"]
    full = tiny.ask("what ?", **media, max_new_tokens=6)
    same = tiny.ask("what ?", **media, recipe=budgeted(name, 1.0), max_new_tokens=6)
    assert same.token_ids == full.token_ids
    assert same.stats.equivalent_tokens == full.stats.equivalent_tokens


@pytest.mark.parametrize("name", [n for n in METHODS if stage_class(n)().floor(6) == 0])
def test_a_budget_is_met_by_methods_without_a_floor(tiny, name) -> None:
    """As near as equal cells and whole numbers allow."""
    for budget in (0.5, 0.22, 0.11):
        stats = tiny.ask(
            "what ?", picture(128, 128), recipe=budgeted(name, budget), max_new_tokens=1
        ).stats
        assert stats.equivalent_tokens / stats.visual_tokens_in == pytest.approx(budget, rel=0.12)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_deterministic(tiny, name) -> None:
    runs = [
        tiny.ask("what ?", picture(128, 128), recipe=budgeted(name, 0.3), max_new_tokens=4)
        for _ in range(2)
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert torch.equal(runs[0].trace.depth, runs[1].trace.depth)


@pytest.mark.parametrize("name", [n for n in METHODS if stage_class(n).trained])
def test_trained_methods_say_when_they_have_no_weights(name) -> None:
    from tiny_models import build_llava

    other = vlmfast.VLM(*build_llava())
    with pytest.raises(RecipeError, match=f"{name}: there are no weights for this llava model"):
        other.ask("what ?", picture(), recipe=name)
    with pytest.raises(RecipeError, match=rf"vlmfast train {name}"):
        other.ask("what ?", picture(), recipe=f"{name}:weights=nowhere")
    # Text alone needs none.
    assert other.ask("what ?", recipe=name, max_new_tokens=1).token_ids


@pytest.mark.parametrize("name", [n for n in METHODS if stage_class(n).trained])
def test_shipped_weights_are_small(name) -> None:
    from vlmfast.checkpoints import SHIPPED

    (folder,) = SHIPPED.glob(f"*-{name}")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000


STACKS = (
    "hired:budget=0.5+pyramiddrop:budget=0.6",
    "elastic:budget=0.3+atp:budget=0.5",
    "pvc:budget=0.22+hired:budget=0.5",
    "mustdrop:budget=0.5+visionzip:budget=0.5",
    "hired:budget=0.5+elastic:budget=0.5+fastv:budget=0.6",
    "downsample:0.4,repair=true+fastv",
    "mustdrop:0.4,repair=true+hired:0.5+pyramiddrop",
)


@pytest.mark.parametrize("recipe", STACKS)
def test_stacks_cost_less_than_their_parts(tiny, recipe) -> None:
    """Several stages in one recipe, on a picture and on a clip, in both position policies."""
    for case in ("two pictures", "a clip"):
        for positions in ("keep", "compact"):
            stages = tuple(
                replace(s, positions=positions)
                if any(f.name == "positions" for f in fields(s))
                else s
                for s in Recipe.parse(recipe)
            )
            first = tiny.ask("what ?", **MEDIA[case], recipe=stages[:1], max_new_tokens=2).stats
            whole = tiny.ask("what ?", **MEDIA[case], recipe=stages, max_new_tokens=2)
            assert whole.stats.equivalent_tokens < first.equivalent_tokens
            assert whole.token_ids


def test_another_seed_is_another_selection(tiny) -> None:
    """The control of determinism."""
    depths = [
        tiny.ask("what ?", picture(128, 128), recipe=Random(seed=s), max_new_tokens=1).trace.depth
        for s in (0, 1)
    ]
    assert not torch.equal(*depths)
