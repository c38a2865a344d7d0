"""A whole model on the kernels: the same tokens as on their references."""

from __future__ import annotations

import functools

import pytest
import torch

from tiny_models import build_llava, picture
from vlmfast import VLM, Request
from vlmfast.kernels import (
    biased_attention,
    col_stats,
    decode_mixed,
    merge,
    select,
)

# What a recipe must launch beside the decode step's own attention.
RECIPES = {
    "none": (),
    "snapkv:share=0.7,window=4": (col_stats, select),
    "lookm:share=0.8,recent=0.2": (col_stats, merge),
    "h2o:0.7": (col_stats, select),
    "kivi:bits=4,group=4,residual=4": (),
    "downsample:0.3,repair=true": (biased_attention,),
    "pyramiddrop+zipcache:page=4": (col_stats,),
}


@pytest.fixture(scope="module")
def vlm(device: torch.device) -> VLM:
    model, processor = build_llava(layers=4)
    # On a GPU too step by step: what launches is counted.
    return VLM(model.to(device), processor, decoding="eager")


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each of the kernels' files was launched."""
    counts: dict[str, int] = {}
    for module in (biased_attention, col_stats, decode_mixed, merge, select):
        for name in [name for name in vars(module) if name.startswith("_launch")]:
            launch = getattr(module, name)

            @functools.wraps(launch)
            def noted(*args, _launch=launch, _name=module.__name__, **kwargs):
                counts[_name] = counts.get(_name, 0) + 1
                return _launch(*args, **kwargs)

            monkeypatch.setattr(module, name, noted)
    return counts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("triton")
def test_a_model_gives_the_same_tokens(vlm: VLM, recipe: str, monkeypatch) -> None:
    given = {"images": picture(seed=3), "recipe": recipe, "max_new_tokens": 6}
    counts = counted(monkeypatch)
    got = vlm.ask("what is here ?", **given, eos_token_id=None)
    for module in (decode_mixed, *RECIPES[recipe]):
        assert counts.get(module.__name__), f"{module.__name__} was not launched"
    counts.clear()
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    expected = vlm.ask("what is here ?", **given, eos_token_id=None)
    assert not counts
    assert got.token_ids == expected.token_ids
    assert got.stats.kv_bytes == expected.stats.kv_bytes


@pytest.mark.usefixtures("triton")
def test_a_ragged_batch_gives_the_same_tokens(vlm: VLM, monkeypatch) -> None:
    requests = [
        Request("what ?", picture(seed=i), recipe=r, generation={"max_new_tokens": 3 + i})
        for i, r in enumerate(["none", "kivi:bits=2,group=4,residual=4", "h2o:0.7"])
    ]
    got = [answer.token_ids for answer in vlm.ask_many(requests, eos_token_id=None)]
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    assert got == [answer.token_ids for answer in vlm.ask_many(requests, eos_token_id=None)]
    assert [len(ids) for ids in got] == [3, 4, 5]
