"""Chunked prefill: a prompt in chunks gives what it gives in one forward pass."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.closeness import close
from support.engine.prompts import Prompt, chunks, expire, logits_of_prompts, splits
from support.tiny_families import STATES, build_gemma3, builders, first
from support.tiny_models import build_llava, make_image
from support.tower_terms import network
from vlmfast import VLM, DeadlineExceeded, Request, VLMFastError
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.registry import stage_class

pytestmark = pytest.mark.cold

QUESTION = "what is here ?"
IMAGES = [make_image(seed=seed) for seed in range(3)]
RECIPES = ["none", "hired:0.5", "tome", "divprune:0.4,positions=compact", "draft-ngram",
           "visionzip:dominant=6,contextual=4,proportional_attention=true"]  # fmt: skip
SLOW = pytest.mark.slow
# Statistics that may differ.
OTHER = ("prefill_chunks", "peak_memory_bytes", "tokens_per_s")


@pytest.fixture
def first_logits() -> Iterator[list[torch.Tensor]]:
    """The logits after each prompt, or chunk."""
    with logits_of_prompts() as seen:
        yield seen


def asked(vlm: VLM, recipe: str, **more: Any) -> Any:
    generation = {"max_new_tokens": 4, "eos_token_id": None} | more
    return vlm.ask(QUESTION, IMAGES, recipe=recipe, **generation)


def assert_same(got: Any, wanted: Any) -> None:
    assert got.token_ids == wanted.token_ids
    for name, value in wanted.stats.to_dict().items():
        if name not in OTHER and not name.startswith("time_") and not name.endswith("_s"):
            assert getattr(got.stats, name) == value, name


FEW = [RECIPES[0], RECIPES[-1]]
REFUSED = {  # by families without whole cells in the tower, or with a state that drafts change
    ("fast_vlm", "tome"),
    ("lfm2_vl", "tome"),
    ("lfm2_vl", "draft-ngram"),
    ("qwen3_5", "draft-ngram"),
}
CASES = [
    pytest.param(family, recipe, marks=[] if recipe in FEW or family == "llava" else SLOW)
    for family in first(*STATES)
    for recipe in RECIPES
    if (family, recipe) not in REFUSED
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_chunks_give_the_answer_of_one_pass(family: str, recipe: str, first_logits) -> None:
    model, processor = builders()[family]()
    vlm = VLM(model.double(), processor)
    # Linear attention computes in float32 whatever the weights are.
    dtype = torch.float32 if family == "qwen3_5" else torch.float64
    wanted = asked(vlm, recipe)
    (whole,) = first_logits
    for size in (16, 50):
        first_logits.clear()
        got = asked(vlm, recipe, prefill_chunk_size=size)
        assert_same(got, wanted)
        count = got.stats.prefill_chunks
        assert count == len(first_logits) and count >= got.stats.prompt_tokens / max(size, 24)
        close(first_logits[-1], whole, dtype, network(model, got.stats.prompt_tokens))


def test_methods_under_which_prompts_are_not_split() -> None:
    vlm = VLM(*build_llava(layers=4, dtype=torch.float64))
    for recipe in ("pyramiddrop", "snapkv:0.7", "kivi", "hired:0.6+h2o:0.7"):
        wanted, got = (asked(vlm, recipe, prefill_chunk_size=size) for size in (None, 16))
        assert_same(got, wanted)
        assert got.stats.prefill_chunks == 1
    # Without an image they do nothing.
    got = vlm.ask("word " * 40, recipe="snapkv:0.7", max_new_tokens=2, prefill_chunk_size=16)
    assert got.stats.prefill_chunks > 2
    kinds = {name: splits(stage_class(name)()) for name in ("hired", "mustdrop", "atp", "pvc")}
    assert kinds == {"hired": True, "mustdrop": False, "atp": False, "pvc": True}


def test_windows_keep_a_prompt_whole() -> None:
    for window, count in ((256, 8), (64, 1)):
        model, processor = build_gemma3(window=window)
        vlm = VLM(model.double(), processor)
        wanted, got = (asked(vlm, "none", prefill_chunk_size=size) for size in (None, 16))
        assert_same(got, wanted)
        assert got.stats.prefill_chunks == count


def test_the_size_of_the_engine_is_the_default() -> None:
    vlm = VLM(*build_llava(dtype=torch.float64))
    wanted = asked(vlm, "none")
    vlm.engine.prefill_chunk_size = 40
    got = asked(vlm, "none")
    assert_same(got, wanted)
    assert got.stats.prefill_chunks == 3
    assert asked(vlm, "none", prefill_chunk_size=1000).stats.prefill_chunks == 1
    with pytest.raises(VLMFastError, match="prefill_chunk_size=0"):
        asked(vlm, "none", prefill_chunk_size=0)


def test_a_deadline_passes_inside_a_chunk() -> None:
    vlm = VLM(*build_llava(dtype=torch.float64))
    passes: list[int] = []
    submitted = threading.Event()
    generation = {"max_new_tokens": 8, "prefill_chunk_size": 16}

    def late(*_: Any) -> None:
        submitted.wait(60)
        passes.append(1)
        if len(passes) == 3:
            expire(handle)

    hook = vlm.adapter.decoder.layers[0].register_forward_pre_hook(late)
    handle = vlm.submit(Request(QUESTION, IMAGES, generation=generation))
    submitted.set()
    with pytest.raises(DeadlineExceeded, match="after 0 tokens"):
        handle.result()
    hook.remove()
    assert len(passes) == 3
    assert asked(vlm, "none").token_ids


@given(
    kinds=st.lists(st.sampled_from(["text", "image", "other"]), min_size=1, max_size=60),
    size=st.integers(1, 20),
)
def test_chunks_cover_the_prompt_and_never_cut_an_image(kinds: list[str], size: int) -> None:
    """Images of a family in which the tokens of an image see each other."""

    class Sees:
        mask_rule = staticmethod(lambda layout: None)

    n = len(kinds)
    order = torch.arange(n) * 2 + 1  # dropped ids in between
    layout = TokenLayout.text(order, order[None])
    visual = torch.tensor([kind != "text" for kind in kinds])
    item = torch.tensor([{"text": -1, "image": 0, "other": 1}[kind] for kind in kinds])
    kind = torch.where(visual, int(Kind.IMAGE), int(Kind.TEXT)).to(layout.kind.dtype)
    layout = layout.replace(kind=kind, item=item.to(layout.item.dtype))
    level = torch.arange(n)[visual][:, None]
    prompt = Prompt(torch.arange(n)[:, None], layout, 2 * n + 5, 0, extra=(level,))
    for adapter, whole in ((Sees(), True), (type("Plain", (), {"mask_rule": None})(), False)):
        parts = list(chunks(adapter, prompt, size))
        assert torch.cat([part.embeds for part in parts]).flatten().tolist() == list(range(n))
        assert torch.equal(torch.cat([part.layout.order for part in parts]), order)
        assert sum(part.full_length for part in parts) == prompt.full_length
        levels = [part.extra[0] for part in parts if part.extra]
        assert torch.equal(torch.cat([level[:0], *levels]), level)
        if not whole:
            assert all(len(part.layout) <= size for part in parts)
            continue
        for part, following in itertools.pairwise(parts):
            ends, begins = part.layout, following.layout
            cut = bool(ends.visual[-1] & begins.visual[0] & (ends.item[-1] == begins.item[0]))
            assert not cut
            assert len(part.layout) <= size or len(set(part.layout.item.tolist())) == 1
