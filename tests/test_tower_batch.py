"""Images of several prompts in one pass of the vision tower."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tiny_families import builders, first
from tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, Request, VLMFastError
from vlmfast.engine import engine, tower_batch

QUESTION = "what is here ?"
SIZES = ((64, 64), (96, 32), (40, 70))
PLENTY = 1 << 30


def request(seed: int, recipe: Any = "none", images: int = 1, **generation: Any) -> Request:
    generation = {"max_new_tokens": 5, "eos_token_id": None} | generation
    made = [make_image(*SIZES[(seed + i) % 3], seed=10 * seed + i) for i in range(images)]
    return Request(QUESTION, made, recipe=recipe, generation=generation)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the images of each pass of a model's tower."""

    def of(vlm: VLM) -> list[int]:
        counts: list[int] = []
        encode = vlm.adapter.encode

        def counting(tensors: Any, context: Any) -> Any:
            counts.append(len(context.items))
            return encode(tensors, context)

        monkeypatch.setattr(vlm.adapter, "encode", counting)
        return counts

    return of


def alone(build: Any, requests: list[Request]) -> tuple[VLM, list[Any]]:
    """A new model, and the answers of one like it that encodes prompt by prompt."""
    vlm, oracle = (VLM(model.double(), processor) for model, processor in (build(), build()))
    return vlm, [
        oracle.ask(r.question, r.images, recipe=r.recipe, **r.generation) for r in requests
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", sorted(first("mistral3", "glm4v", "ovis2", "paligemma")))
def test_answers_are_those_of_one_prompt(family: str, passes: Any) -> None:
    count = 1 if family == "paligemma" else 2
    requests = [request(i, "divprune:0.5", 1 + i % count) for i in range(4)]
    vlm, expected = alone(builders()[family], requests)
    counts = passes(vlm)
    vlm.engine.tower_batch_bytes = PLENTY
    answers = vlm.ask_many(requests, batch_size=4)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert len(counts) == 1
    for answer, other in zip(answers, expected, strict=True):
        for name in (
            "vision_passes",
            "views",
            "views_encoded",
            "visual_tokens_in",
            "cached_tokens",
        ):
            assert getattr(answer.stats, name) == getattr(other.stats, name), name
        assert answer.stats.visual_tokens_kept == other.stats.visual_tokens_kept
        assert answer.stats.time_vision_s > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (build_llava, "hired:0.3"),
        (build_llava_next, "hired:0.3"),
        (build_llava_next, "visionzip:0.4"),
        (build_llava_next, "crops:0.5"),
        (build_llava_next, "crops:0.5+hired:0.5"),
        (build_llava_next, "prumerge"),
    ],
)
def test_statistics_belong_to_their_prompt(build: Any, recipe: str, passes: Any) -> None:
    requests = [request(i, recipe, 1 + i % 2) for i in range(3)]
    vlm, expected = alone(build, requests)
    counts = passes(vlm)
    vlm.engine.tower_batch_bytes = PLENTY
    answers = vlm.ask_many(requests, batch_size=3)
    assert counts == [4]
    for answer, other in zip(answers, expected, strict=True):
        assert answer.token_ids == other.token_ids
        assert answer.stats.visual_tokens_kept == other.stats.visual_tokens_kept
        assert answer.stats.views_encoded == other.stats.views_encoded
        assert answer.trace.to_json() == other.trace.to_json()


def test_no_more_than_the_bytes(passes: Any) -> None:
    vlm = VLM(*build_llava())
    own = 16 * vlm.adapter.width * vlm.adapter.dtype.itemsize  # an image has 4 x 4 tokens
    counts = passes(vlm)
    for bound, expected in ((1, [1] * 5), (2 * own, [2, 2, 1]), (3 * own + 1, [3, 2])):
        vlm.prefix_cache.clear()
        counts.clear()
        vlm.engine.tower_batch_bytes = bound
        answers = vlm.ask_many([request(i) for i in range(5)], batch_size=5)
        assert [a.stats.visual_tokens_in for a in answers] == [16] * 5
        assert counts == expected


def test_off_by_default(passes: Any) -> None:
    vlm = VLM(*build_llava())
    counts = passes(vlm)
    vlm.ask_many([request(i) for i in range(3)], batch_size=3)
    assert counts == [1, 1, 1]


def test_other_recipes_and_modes_are_not_joined(passes: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.engine.tower_batch_bytes = PLENTY
    counts = passes(vlm)
    recipes = ["none", "hired:0.5", "none", "hired:0.5", "hired:0.2"]
    vlm.ask_many([request(i, recipe) for i, recipe in enumerate(recipes)], batch_size=5)
    assert sorted(counts) == [1, 2, 2]
    counts.clear()
    vlm.prefix_cache.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handles = [vlm.submit(request(0))]
    handles.append(vlm.submit(request(1)))
    for handle in handles:
        handle.result()
    assert counts == [1, 1]


def test_an_image_is_encoded_once_and_found_afterwards(passes: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.engine.tower_batch_bytes = PLENTY
    counts = passes(vlm)
    same = [request(0), request(0, max_new_tokens=3), request(1)]
    answers = vlm.ask_many(same, batch_size=3)
    assert counts == [2]
    assert [a.stats.vision_passes for a in answers] == [1, 0, 1]
    counts.clear()  # and the pass of several prompts leaves them in the cache
    vlm.ask_many([request(i) for i in range(3)], batch_size=3)
    assert counts == [1]


def test_without_the_prefix_cache(passes: Any) -> None:
    requests = [request(i) for i in range(3)]
    vlm, expected = alone(build_llava, requests)
    vlm.session_bytes = 0
    vlm.engine.tower_batch_bytes = PLENTY
    counts = passes(vlm)
    answers = vlm.ask_many(requests, batch_size=3)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert counts == [3]


def test_stages_inside_the_tower_keep_prompts_apart(passes: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.engine.tower_batch_bytes = PLENTY
    counts = passes(vlm)
    vlm.ask_many([request(i, "tome:0.5") for i in range(3)], batch_size=3)
    assert counts == [1, 1, 1]


def test_an_error_belongs_to_its_own_request(monkeypatch: Any, caplog: Any, passes: Any) -> None:
    requests = [request(i) for i in range(3)]
    vlm, expected = alone(build_llava, requests)
    vlm.engine.tower_batch_bytes = PLENTY
    counts = passes(vlm)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory for all of them")

    monkeypatch.setattr(tower_batch, "encode", broken)
    with caplog.at_level(logging.WARNING, "vlmfast"):
        answers = vlm.ask_many(requests, batch_size=3)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert counts == [1, 1, 1]
    assert "no memory for all of them" in caplog.text


def submitted(vlm: VLM, requests: list[Request], monkeypatch: Any) -> list[Any]:
    """Handles of requests that all wait when the engine takes the first of them."""
    inside, ready = threading.Event(), threading.Event()
    encode = vlm.adapter.encode

    def waiting(*args: Any) -> Any:
        inside.set()
        assert ready.wait(60)
        return encode(*args)

    monkeypatch.setattr(vlm.adapter, "encode", waiting)
    before = vlm.submit(request(7, max_new_tokens=1))
    assert inside.wait(60)
    handles = [vlm.submit(r) for r in requests]
    ready.set()
    before.result()
    return handles


def test_a_cancelled_request_does_not_take_the_others_along(monkeypatch: Any) -> None:
    requests = [request(i) for i in range(3)]
    vlm, expected = alone(build_llava, requests)
    vlm.engine.tower_batch_bytes = PLENTY
    joined = []

    def cancelling(adapter: Any, sequences: Any) -> None:
        joined.append(len(sequences))
        if len(joined) == 1:
            sequences[0].cancelled = True
        tower_batch.encode_ahead(adapter, sequences)

    monkeypatch.setattr(engine, "encode_ahead", cancelling)
    handles = submitted(vlm, requests, monkeypatch)
    others = [handle.result() for handle in handles[1:]]
    assert joined == [3, 2]
    assert [a.token_ids for a in others] == [a.token_ids for a in expected[1:]]
    assert handles[0].done
    assert all(handle.sequence.inputs.ahead is None for handle in handles)


def test_features_of_a_request_that_is_cancelled_are_freed(monkeypatch: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.engine.tower_batch_bytes = PLENTY
    encoded = []

    def cancelling(adapter: Any, sequences: Any) -> None:
        tower_batch.encode_ahead(adapter, sequences)
        encoded.extend(sequence.inputs.ahead for sequence in sequences)
        sequences[1].cancelled = True

    monkeypatch.setattr(engine, "encode_ahead", cancelling)
    first, second = submitted(vlm, [request(0), request(1)], monkeypatch)
    first.result()
    with pytest.raises(VLMFastError, match="cancelled"):
        second.result()
    assert len(encoded) == 2 and None not in encoded
    assert second.sequence.inputs.ahead is None


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "1"])
def test_the_limit_is_checked(bad: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.engine.tower_batch_bytes = bad
    with pytest.raises(VLMFastError, match="tower_batch_bytes must be a positive integer"):
        vlm.ask(QUESTION, make_image())
