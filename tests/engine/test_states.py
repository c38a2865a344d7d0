"""Layers that hold a state instead of slots: in batches, sessions and captured steps.

That answers equal Hugging Face's, and logits those of a reference without the dropped tokens, is
tested with all families.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from support import tiny_families
from support.engine.batched import twin
from support.engine.cpu_graph import captured_by_stand_in
from support.engine.driven import Driven
from support.engine.prompts import switched
from support.engine.turns import renewed
from vlmfast import VLM, ModelError, RecipeError, Request

QUESTION = "what is here ?"
# Before the language model, between its layers, in the cache, and during decoding.
RECIPES = ("none", "random:0.3", "fastv:0.5,k=2", "kivi:group=8,residual=16", "h2o:0.5")


def image(seed: int, width: int = 60, height: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


IMAGES = [image(0), image(1, 30, 70), image(2, 90, 33)]


@functools.cache
def model(family: str) -> VLM:
    """In float64, so that rounding changes no token."""
    model, processor = tiny_families.builders()[family]()
    return VLM(model.double(), processor)


@pytest.fixture(params=tiny_families.STATES)
def vlm(request: pytest.FixtureRequest) -> VLM:
    return renewed(model(request.param))


def requests() -> list[Request]:
    """Of different lengths: rows join and leave while others are decoded."""
    return [
        Request(
            QUESTION,
            IMAGES[: 1 + i % 3],
            recipe=recipe,
            generation={"max_new_tokens": 4 + 5 * (i % 4), "eos_token_id": None},
        )
        for i, recipe in enumerate((*RECIPES, "none", "snapkv:0.5,window=4"))
    ]


def alone(vlm: VLM, request: Request) -> list[int]:
    answer = vlm.ask(request.question, request.images, recipe=request.recipe, **request.generation)
    return answer.token_ids


@pytest.mark.cases(1)
def test_rows_of_a_batch_have_their_own_states(vlm: VLM) -> None:
    asked = requests()
    wanted = [alone(vlm, request) for request in asked]
    assert len({tuple(tokens[:4]) for tokens in wanted}) > 2
    for size in (2, 3):
        answers = vlm.ask_many(asked, batch_size=size)
        assert [answer.token_ids for answer in answers] == wanted


@pytest.mark.cases(1)
def test_captured_steps_change_the_states_once(vlm: VLM, monkeypatch) -> None:
    asked = requests()[::2]
    wanted = [alone(vlm, request) for request in asked]
    captured_by_stand_in(vlm, monkeypatch)
    for _ in range(2):  # the second time in buffers of the first
        assert [alone(vlm, request) for request in asked] == wanted
        assert [a.token_ids for a in vlm.ask_many(asked, batch_size=3)] == wanted
    assert vlm.adapter.kept["graphs"].reused > 1


def test_nothing_is_reused_after_the_tower(vlm: VLM) -> None:
    """A state cannot be cut back to the beginning of a prompt."""
    given = {"max_new_tokens": 6, "eos_token_id": None}
    wanted = [vlm.ask(q, IMAGES, **given).token_ids for q in (QUESTION, "and the rest ?")]
    again = vlm.ask(QUESTION, IMAGES, **given)
    assert again.token_ids == wanted[0]
    # The features of the tower only.
    assert again.stats.prompt_reused == 0
    assert again.stats.cached_tokens == again.stats.visual_tokens_in > 0
    with vlm.session(images=IMAGES) as session:
        assert session.reuses == "features"
        first = session.ask(QUESTION, **given)
        second = session.ask("and the rest ?", **given)
    assert first.token_ids == wanted[0]
    assert second.stats.prompt_reused == 0


def test_states_are_copied_and_not_cut(vlm: VLM) -> None:
    run = Driven.of(vlm, images=IMAGES[:1], question=QUESTION)
    with torch.no_grad(), switched(vlm.model):
        run.start(4)
        copy = run.cache.clone()
        first = run.next(torch.tensor([[60]]))
        with pytest.raises(ValueError, match="with the states of layers cannot be cropped"):
            run.cache.crop(1)
        assert bool((twin(run, copy).next(torch.tensor([[60]])) == first).all())


@pytest.mark.cases(1)
def test_bytes_are_those_of_the_slots(vlm: VLM) -> None:
    answer = vlm.ask(QUESTION, IMAGES, max_new_tokens=2)
    stats, layers = answer.stats, vlm.adapter.state_layers
    assert len(layers) == 2 and all(stats.kv_tokens_per_layer[layer] == 0 for layer in layers)
    assert stats.kv_bytes == stats.kv_bytes_full > 0
    assert vlm.ask(QUESTION, IMAGES, recipe="snapkv:0.5,window=4").stats.kv_bytes < stats.kv_bytes


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("draft-ngram", r"cannot be rolled back after rejected drafts"),
        ("cake:0.8", r"divides its budget among all layers, .* hold a state .* 'divprune:0.2'"),
        ("fastv:0.5,k=1", r"uses the attention of layer 0, .* with attention are 1, 2"),
        ("zipvl", r"uses the attention of layer 0, .* with attention are 1, 2"),
    ],
)
def test_what_needs_slots_is_refused(vlm: VLM, recipe: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        vlm.ask(QUESTION, IMAGES, recipe=recipe)


def test_videos_are_not_read_block_by_block(vlm: VLM) -> None:
    with pytest.raises((ModelError, RecipeError), match=r"which prompts of .* do not allow"):
        vlm.ask(
            QUESTION, video=[image(i, 40, 40) for i in range(12)], num_frames=12,
            max_kv_tokens=200, progress=False,
        )  # fmt: skip
