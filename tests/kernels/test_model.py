"""A whole model gives the same tokens with the kernels and with their references."""

from __future__ import annotations

import pytest
import torch

from support.engine.kernels import launches
from support.fake_drafters import Knows
from support.tiny_models import build_llava, make_image
from vlmfast import VLM
from vlmfast.core.recipe import Recipe
from vlmfast.kernels import (
    biased_attention,
    col_stats,
    decode_mixed,
    few_rows,
    gather_rows,
    merge,
    norm_rope_append,
    quantize_kv,
    select,
    tree_verify,
)

STEP = (decode_mixed, norm_rope_append, few_rows)  # what every decode step launches
MODULES = (*STEP, biased_attention, col_stats, gather_rows, merge, quantize_kv, select)
# What a recipe must launch in addition to the kernels of the decode step.
RECIPES = {
    "none": (),
    "snapkv:keep=0.7,window=4": (col_stats, select),
    "lookm:keep=0.8,recent=0.2": (col_stats, merge),
    "h2o:0.7": (col_stats, select),
    "kivi:bits=4,group=4,residual=4": (quantize_kv,),
    "downsample:0.3,proportional_attention=true": (biased_attention,),
    "pyramiddrop+zipcache:page=4": (col_stats, gather_rows, quantize_kv),
    "pyramiddrop:positions=compact": (gather_rows,),
}
FAST = ("lookm:keep=0.8,recent=0.2", "pyramiddrop:positions=compact")


@pytest.fixture(scope="module")
def vlm(request: pytest.FixtureRequest, device: torch.device) -> VLM:
    """Of two layers, or of as many as the test names."""
    model, processor = build_llava(layers=getattr(request, "param", 2))
    # Eager on a GPU too, since launches are counted.
    return VLM(model.to(device), processor, decoding="eager")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("vlm", "recipe"),
    # Only dropping between layers needs more than two of them.
    [
        pytest.param(
            4 if "pyramiddrop" in recipe else 2,
            recipe,
            marks=[] if recipe in FAST else [pytest.mark.slow],
        )
        for recipe in RECIPES
    ],
    indirect=["vlm"],
)
@pytest.mark.usefixtures("triton")
def test_tokens_match_reference(vlm: VLM, recipe: str, monkeypatch) -> None:
    given = {"images": make_image(seed=3), "recipe": recipe, "max_new_tokens": 4}
    launched = {module: launches(monkeypatch, module) for module in MODULES}
    got = vlm.ask("what is here ?", **given, eos_token_id=None)
    for module in (*STEP, *RECIPES[recipe]):
        assert launched[module], f"{module.__name__} was not launched"
        launched[module].clear()
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    expected = vlm.ask("what is here ?", **given, eos_token_id=None)
    assert not any(launched.values())
    assert got.token_ids == expected.token_ids
    assert got.stats.kv_bytes == expected.stats.kv_bytes


@pytest.mark.parametrize(
    ("vlm", "recipe"),
    [
        pytest.param(2, "none", marks=pytest.mark.slow),
        pytest.param(4, "pyramiddrop", marks=pytest.mark.slow),
        pytest.param(4, "kivi:bits=4,group=4,residual=8", marks=pytest.mark.slow),
    ],
    indirect=["vlm"],
)
@pytest.mark.usefixtures("triton")
def test_drafting_gives_same_tokens(vlm: VLM, recipe: str, monkeypatch) -> None:
    given = {"images": make_image(seed=3), "max_new_tokens": 9, "eos_token_id": None}
    wanted = vlm.ask("what is here ?", recipe=recipe, **given).token_ids
    seen = []
    attend = tree_verify.attend
    monkeypatch.setattr(tree_verify, "attend", lambda *a: seen.append(a[0]) or attend(*a))
    drafts = Recipe.of(recipe) + Knows(answer=tuple(wanted), cycle=True)
    got = vlm.ask("what is here ?", recipe=drafts, **given)
    assert got.token_ids == wanted and got.stats.accepted > 2 and seen


@pytest.mark.parametrize("positions", ["keep", "compact"])
@pytest.mark.usefixtures("triton")
def test_drops_rows_of_per_layer_rotary_tables(positions: str, device) -> None:
    """If some layers get other rotary tables, rows are dropped from those too."""
    model, processor = build_llava(layers=6)
    vlm, seen = VLM(model.to(device), processor, decoding="eager"), {}

    def halve(module, args, kwargs):
        own = tuple(table / 2 for table in kwargs["position_embeddings"])
        return args, kwargs | {"position_embeddings": own}

    layers = vlm.adapter.decoder.layers
    for index in (3, 4):
        layers[index].register_forward_pre_hook(halve, with_kwargs=True)
    for index, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: seen.__setitem__(
                index, kwargs["position_embeddings"]
            ),
            with_kwargs=True,
        )
    recipe = f"pyramiddrop:layers=1/3,ratios=0.7/0.4,positions={positions}"
    vlm.ask("what ?", images=make_image(seed=1), recipe=recipe, max_new_tokens=1)
    lengths = [seen[index][0].shape[1] for index in range(1, 6)]
    assert lengths[0] == lengths[1] > lengths[2] == lengths[3] == lengths[4]
    for at in (3, 4):
        for own, other in zip(seen[at], seen[5], strict=True):
            assert torch.equal(own if positions == "compact" else 2 * own, other)
