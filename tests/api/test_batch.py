"""`ask_many`: each request of a batch gets the answer that it gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.tiny_models import build_llava, make_image
from vlmfast import VLM, MediaError, RecipeError, Request, VLMFastError

pytestmark = pytest.mark.cold

SLOW = pytest.mark.slow
KV_STATS = (
    "visual_tokens_in",
    "visual_tokens_kept",
    "visual_tokens_per_layer",
    "prompt_tokens",
    "generated_tokens",
    "kv_bytes",
    "kv_bytes_full",
    "kv_tokens_per_layer",
)


def request(recipe, seeds=(0,), question="what is here ?", **generation) -> Request:
    images = [make_image(seed=seed) for seed in seeds] or None
    return Request(question, images, recipe=recipe, generation=generation)


# Pages of kivi and zipcache fill up several times before the answers end.
REQUESTS = [
    request(None, (0,), max_new_tokens=9),
    request("hired:0.4", (1, 2), "and in these two ?", max_new_tokens=20),
    request("kivi:bits=2,group=4,residual=8", (3,), max_new_tokens=25),
    request("pyramiddrop:layers=1/3,positions=compact", (4,), "a", max_new_tokens=4),
    request("snapkv:keep=0.8,window=4", (5, 6, 7), max_new_tokens=14),
    request(None, (), "say something without an image", max_new_tokens=17),
    request("h2o:0.6", (8,), "where is the square ?", max_new_tokens=22),
    request("streamingllm:0.6", (9,), "how many are there , and which ?", max_new_tokens=19),
    request("zipcache:page=8", (10,), "why ?", max_new_tokens=21),
    request("lookm:keep=0.8,merge=avg,proportional_attention=true", (11,), max_new_tokens=1),
    request(
        "visionzip:dominant=6,contextual=4,proportional_attention=true", (12, 13), max_new_tokens=6
    ),
    request("cake:keep=0.8,window=4", (14,), "which colour is it ?", max_new_tokens=16),
    request("hired:0.6+pyramiddrop+snapkv:keep=0.9,window=4", (15, 16), max_new_tokens=18),
    request("snapkv:keep=0.8,window=4+kivi:residual=8,group=4", (17,), max_new_tokens=20),
]


def alone(vlm: VLM, r: Request, **more):
    return vlm.ask(
        r.question, r.images, r.video, num_frames=r.num_frames, fps=r.fps, recipe=r.recipe,
        **more, **r.generation,
    )  # fmt: skip


def assert_same(got, expected) -> None:
    assert got.token_ids == expected.token_ids
    assert got.text == expected.text and got.recipe == expected.recipe
    for name in KV_STATS:
        assert getattr(got.stats, name) == getattr(expected.stats, name), name


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava(layers=4, kv_heads=2))


@pytest.fixture(scope="module")
def singles(vlm) -> list:
    return [alone(vlm, r) for r in REQUESTS]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "batch_size", [1, 8, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)]
)
def test_batched_answers_equal_single_answers(vlm, singles, batch_size):
    answers = vlm.ask_many(REQUESTS, batch_size=batch_size)
    assert len(answers) == len(REQUESTS)
    for got, expected in zip(answers, singles, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW)])
def test_answers_do_not_depend_on_the_batch(vlm, singles, seed):
    order = torch.randperm(len(REQUESTS), generator=torch.Generator().manual_seed(seed)).tolist()
    answers = vlm.ask_many([REQUESTS[i] for i in order], batch_size=4)
    for i, got in zip(order, answers, strict=True):
        assert_same(got, singles[i])


def test_a_ragged_batch_under_a_trained_reducer(tiny):
    """ATP has weights for the shipped model."""
    requests = [
        request("atp", (0,), "what is here ?", max_new_tokens=8),
        request("atp", (1, 2), "how many circles are there ?", max_new_tokens=8),
        request("atp:budget=0.5", (3,), "which colour ?", max_new_tokens=8),
    ]
    answers = tiny.ask_many(requests, batch_size=3)
    for got, r in zip(answers, requests, strict=True):
        assert_same(got, alone(tiny, r))
    assert any(a.stats.equivalent_tokens < a.stats.visual_tokens_in for a in answers)


# --- ends ----------------------------------------------------------------------------------------


def test_row_that_ends_at_once(vlm, singles):
    first = singles[4].token_ids[0]
    ends = replace(REQUESTS[4], generation={"max_new_tokens": 14, "eos_token_id": first})
    one = replace(REQUESTS[6], generation={"max_new_tokens": 1})
    requests = [ends, REQUESTS[0], one, ends, REQUESTS[2], one]
    for batch_size in (1, 2, 6):
        answers = vlm.ask_many(requests, batch_size=batch_size)
        assert [len(a.token_ids) for a in answers] == [1, 9, 1, 1, 25, 1]
        assert answers[0].token_ids == [first] == answers[3].token_ids
        assert answers[2].token_ids == singles[6].token_ids[:1]
        assert_same(answers[1], singles[0])
        assert_same(answers[4], singles[2])
    assert [len(a.token_ids) for a in vlm.ask_many([ends, one], batch_size=2)] == [1, 1]


def test_empty_batch_gives_no_answers(vlm):
    assert vlm.ask_many([]) == []
    assert vlm.ask_many(iter([]), batch_size=2) == []


# --- prefill -------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_requests_are_taken_as_rows_become_free(vlm, batch_size):
    ended, ahead = [], []

    class Ends:
        """A streamer that records when its request has ended."""

        def __init__(self, number: int) -> None:
            self.number = number

        def put(self, tokens: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            ended.append(self.number)

    def requests():
        for number, r in enumerate(REQUESTS[:9]):
            ahead.append(number - len(ended))
            yield replace(r, generation={**r.generation, "streamer": Ends(number)})

    vlm.ask_many(requests(), batch_size=batch_size)
    assert sorted(ended) == list(range(9))
    assert max(ahead) == batch_size - 1
    if batch_size > 1:
        assert ended != sorted(ended)  # a later request ended before an earlier one


BAD = {
    "a recipe that does not exist": (request("snapvk"), RecipeError, "did you mean 'snapkv'"),
    "a layer that does not exist": (
        request("fastv:k=9"),
        RecipeError,
        "fastv: k=9 must be below the model's 4 layers",
    ),
    "an image that is none": (Request("what ?", "nowhere.png"), MediaError, "nowhere.png"),
    "no question": (Request(" "), VLMFastError, "question is empty"),
    "beams": (request(None, num_beams=2), VLMFastError, "num_beams"),
    "frames of nothing": (Request("what ?", num_frames=2), VLMFastError, "no video"),
    "images as a setting": (
        request(None, images=[]),
        VLMFastError,
        "images cannot be given here: it is a field of vlmfast.Request",
    ),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_error_names_its_request(vlm, singles, bad, batch_size):
    """Whether it occurs when the request is prepared or when its prompt is prefilled."""
    wrong, kind, message = BAD[bad]
    with pytest.raises(kind, match=r"^request 2: ") as error:
        vlm.ask_many([*REQUESTS[:2], wrong, REQUESTS[3]], batch_size=batch_size)
    assert message in str(error.value)
    assert vlm.model.config.text_config._attn_implementation == "sdpa"
    assert not any(layer._forward_pre_hooks for layer in vlm.adapter.decoder.layers)
    assert_same(vlm.ask_many(REQUESTS[:2])[1], singles[1])  # still usable


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None])
def test_invalid_batch_size_is_refused(vlm, size):
    with pytest.raises(VLMFastError, match=r"batch_size=.* must be a whole number of at least 1"):
        vlm.ask_many(REQUESTS, batch_size=size)


# --- generation ----------------------------------------------------------------------------------


def test_generation_arguments_apply_per_request(vlm):
    requests = [
        request(None, (0,), max_new_tokens=12, repetition_penalty=1.8),
        request("h2o:0.6", (0,), max_new_tokens=7, no_repeat_ngram_size=1),
        request(None, (0,), min_new_tokens=10),
        request(None, (0,), do_sample=False, max_new_tokens=12, bad_words_ids=[[70], [80], [90]]),
    ]
    answers = vlm.ask_many(requests, batch_size=4, max_new_tokens=10)
    for got, r in zip(answers, requests, strict=True):
        assert_same(got, alone(vlm, replace(r, generation={"max_new_tokens": 10} | r.generation)))
    assert [len(a.token_ids) for a in answers] == [12, 7, 10, 12]
    assert answers[0].token_ids != answers[3].token_ids  # the penalty has an effect
    assert len(set(answers[1].token_ids)) == 7


# --- memory --------------------------------------------------------------------------------------


def test_non_requests_are_refused(vlm):
    with pytest.raises(VLMFastError, match=r"request 1: is a dict; it must be a vlmfast\.Request"):
        vlm.ask_many(["what ?", {"question": "what ?"}], max_new_tokens=1)
    with pytest.raises(VLMFastError, match="batch_size=True"):
        vlm.ask_many(["what ?"], batch_size=True)
