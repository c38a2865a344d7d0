"""Rotary embeddings whose tables depend on the length of a sequence: the tokens of ``generate``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from support import tiny_families
from support.engine.cpu_graph import captured_by_stand_in
from support.engine.prompts import Inputs, prepared, splittable, switched
from support.fake_drafters import Knows
from support.rope_types import ORIGINAL, TYPES, build
from support.tiny_models import make_image
from vlmfast import VLM, Request, VLMFastError
from vlmfast.core.recipe import Recipe
from vlmfast.models.rope import LengthRotary, longest

pytestmark = pytest.mark.cold

BY_LENGTH = ("dynamic", "longrope")
SHORT, LONG = "what is here ?", "what is in this image and in the one before it, and why ? " * 2
COUNT = 24


def generated(kind: str, question: str, count: int = COUNT) -> list[int]:
    """By Hugging Face's ``generate`` on a model that has seen no other sequence."""
    vlm = VLM(*build(kind))
    tensors = vlm.inputs(question, images=[make_image()])
    ids = vlm.model.generate(**tensors, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return ids[0, tensors["input_ids"].shape[1] :].tolist()


def given(count: int = COUNT) -> dict[str, Any]:
    return {"images": make_image(), "max_new_tokens": count, "eos_token_id": None}


@pytest.fixture(scope="module", params=BY_LENGTH)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def vlm(kind: str) -> VLM:
    return VLM(*build(kind))


@pytest.fixture(scope="module")
def wanted(kind: str) -> dict[str, list[int]]:
    """Of an answer that crosses the original length, and of one that begins beyond it."""
    return {question: generated(kind, question) for question in (SHORT, LONG)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("of", TYPES)
def test_every_type_gives_the_tokens_of_generate(of: str) -> None:
    vlm = VLM(*build(of))
    prompt = vlm.inputs(SHORT, images=[make_image()])["input_ids"].shape[1]
    assert prompt < ORIGINAL < prompt + COUNT
    assert vlm.ask(SHORT, **given()).token_ids == generated(of, SHORT)


@pytest.mark.cases(1)
def test_earlier_and_concurrent_sequences_change_nothing(vlm: VLM, wanted) -> None:
    """A long prompt, a short one, and both in one batch."""
    for question in (LONG, SHORT, LONG):
        assert vlm.ask(question, **given()).token_ids == wanted[question]
    more = {"max_new_tokens": COUNT, "eos_token_id": None}
    requests = [Request(q, make_image(), generation=more) for q in (SHORT, LONG, SHORT)]
    answers = [answer.token_ids for answer in vlm.ask_many(requests, batch_size=3)]
    assert answers == [wanted[SHORT], wanted[LONG], wanted[SHORT]]


def test_captured_steps_cross_the_original_length(kind: str, wanted, monkeypatch) -> None:
    vlm = captured_by_stand_in(VLM(*build(kind)), monkeypatch)
    for question in (SHORT, LONG):
        assert vlm.ask(question, **given()).token_ids == wanted[question]
    assert vlm.adapter.kept["graphs"].captured >= 1


def test_drafted_tokens_have_the_tables_of_single_ones(vlm: VLM, wanted) -> None:
    for question in (SHORT, LONG):
        knows = Recipe.of("none") + Knows(answer=tuple(wanted[question]), cycle=True)
        got = vlm.ask(question, recipe=knows, **given())
        assert got.token_ids == wanted[question] and got.stats.accepted > 10


@pytest.mark.slow
def test_kernels_give_the_same_tokens(kind: str, wanted, monkeypatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    count, question = 4, SHORT + " " * 13
    model, processor = build(kind, layers=2)
    got = VLM(model, processor).ask(question, **given(count))
    assert ORIGINAL - count < got.stats.prompt_tokens < ORIGINAL and len(set(got.token_ids)) > 1
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    assert VLM(model, processor).ask(question, **given(count)).token_ids == got.token_ids


def test_long_prompts_are_prefilled_at_once(vlm: VLM, wanted) -> None:
    """A part of one would have other tables."""
    for question, expected in ((SHORT, True), (LONG, False)):
        tensors = vlm.inputs(question, images=[make_image()])
        with torch.no_grad():
            prompt, _ = prepared(vlm, Inputs(tensors, [(64, 64)], question))
        assert splittable(vlm.adapter, Recipe(), prompt, 200) is expected


def test_dynamic_positions_end_at_the_stretched_length() -> None:
    vlm = VLM(*build("dynamic"))
    assert vlm.adapter.max_positions == 4 * ORIGINAL == longest(vlm.model.config.text_config)
    with pytest.raises(VLMFastError, match=f"the model has {4 * ORIGINAL}"):
        vlm.ask(SHORT, **given(4 * ORIGINAL))
    assert VLM(*build("linear")).adapter.max_positions == 4 * ORIGINAL


def test_the_model_has_its_own_module_outside(kind: str) -> None:
    vlm = VLM(*build(kind))
    decoder: Any = vlm.adapter.decoder
    own, keys = decoder.rotary_emb, set(vlm.model.state_dict())
    with switched(vlm.model):
        inside = decoder.rotary_emb
        assert isinstance(inside, LengthRotary) and inside.rotary is own
        with switched(vlm.model):  # nested
            assert decoder.rotary_emb is inside
        assert decoder.rotary_emb is inside
        assert set(vlm.model.state_dict()) == keys
    assert decoder.rotary_emb is own
    with pytest.raises(KeyError), switched(vlm.model):
        raise KeyError
    assert decoder.rotary_emb is own and set(vlm.model.state_dict()) == keys


@pytest.mark.parametrize("of", ["linear", "yarn", "default"])
def test_other_types_keep_their_module(of: str) -> None:
    vlm = VLM(*build(of))
    own = vlm.adapter.decoder.rotary_emb
    with switched(vlm.model):
        assert vlm.adapter.decoder.rotary_emb is own


# --- families with tables of their own -----------------------------------------------------------


def tables(rotary: Any, position: Tensor, *named: str) -> tuple[Tensor, ...]:
    return rotary(torch.zeros(1, 1, 4), position, *named)


def test_three_rotary_ids(kind: str) -> None:
    """M-RoPE: the largest of the three counts."""
    model, _ = tiny_families.build_qwen2_5_vl()
    config = model.get_decoder().config
    config.max_position_embeddings = ORIGINAL
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, **TYPES[kind]}
    own = type(model.get_decoder().rotary_emb)(config)
    ours = LengthRotary(copy.deepcopy(own))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, ORIGINAL + 20, (3, 1, 90), generator=generator)
    prompt[:, :, 0] = 0
    later = torch.tensor([[9, 70, 63], [71, 64, 5], [3, 5, 62]])[..., None]
    for position, rows in ((prompt, [slice(None)]), (later, [slice(i, i + 1) for i in range(3)])):
        got = tables(ours, position)
        for row in rows:
            expected = tables(copy.deepcopy(own), position[:, row])
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x[..., row, :, :], y)


def test_layers_of_two_kinds(kind: str) -> None:
    """Gemma 3: layers with a window keep their tables."""
    model, _ = tiny_families.build_gemma3()
    config = model.get_decoder().config
    config.max_position_embeddings = ORIGINAL
    full = {**config.rope_parameters["full_attention"], "rope_type": kind, **TYPES[kind]}
    config.rope_parameters = {**config.rope_parameters, "full_attention": full}
    own = type(model.get_decoder().rotary_emb)(config)
    ours = LengthRotary(copy.deepcopy(own))
    assert longest(config) == ORIGINAL  # layers with a window are not stretched
    for last in (ORIGINAL - 1, ORIGINAL + 9):
        for layer_type in ("full_attention", "sliding_attention"):
            for position in (torch.arange(last + 1)[None], torch.tensor([[last]])):
                got = tables(ours, position, layer_type)
                expected = tables(copy.deepcopy(own), position, layer_type)
                for x, y in zip(got, expected, strict=True):
                    assert torch.equal(x, y)
