"""Validation of generation arguments, texts and lengths before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import vlmfast
from support import tiny_families
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, ModelError, Request, VLMFastError
from vlmfast.api.generation import REFUSED, gate
from vlmfast.api.request import placeholder_texts

QUESTION = "what is here ?"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava())


@pytest.fixture
def passes(vlm: VLM) -> Iterator[list[int]]:
    """Records forward passes of the language model."""
    seen: list[int] = []
    hook = vlm.model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    hook.remove()


@pytest.fixture
def positions(vlm: VLM) -> Iterator[Any]:
    """Sets the number of positions of the model."""
    text = vlm.model.config.get_text_config()
    before = text.max_position_embeddings

    def put(most: int) -> None:
        text.max_position_embeddings = most

    yield put
    text.max_position_embeddings = before


def refused(vlm: VLM, **generation: Any) -> str:
    """The error of generation arguments, equal for every entry point."""
    ways = (
        lambda: vlm.ask(QUESTION, "no such file.png", **generation),
        lambda: vlm.chat([{"role": "user", "content": QUESTION}], **generation),
        lambda: vlm.stream(QUESTION, **generation),
        lambda: vlm.compare(QUESTION, recipes=["random"], **generation),
        lambda: vlm.ask_many([QUESTION], **generation),
        lambda: vlm.session().ask(QUESTION, **generation),
    )
    found = set()
    for way in ways:
        with pytest.raises(VLMFastError) as error:
            way()
        found.add(str(error.value).removeprefix("request 0: "))
    assert len(found) == 1, found
    (text,) = found
    assert "\n" not in text and len(text) < 400
    return text


# --- generation arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0.5}, "max_new_tokens=0.5 must be a whole number of at least 1"),
        ({"max_new_tokens": "3"}, "max_new_tokens='3' must be"),
        ({"max_new_tokens": NAN}, "max_new_tokens=nan must be"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 must be"),
        ({"generation_config": "x"}, "generation_config='x' must be a transformers"),
        ({"num_beams": 10**9}, "num_beams=1000000000 must be 1"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 must be 1"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0 must be 1"),
        ({"do_sample": "yes"}, "do_sample='yes' must be True or False"),
        ({"temperature": NAN}, "temperature=nan must be a finite number"),
        ({"do_sample": True, "temperature": 0.0}, "above 0; use do_sample=False for greedy"),
        ({"do_sample": True, "temperature": INF}, "temperature=inf must be a finite"),
        ({"do_sample": True, "temperature": 1e300}, "above 1e-30 and at most 1e+30"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5 must be at least 0 and at most 1"),
        ({"do_sample": True, "top_k": -1}, "top_k=-1 must be"),
        ({"top_k": 1.5}, "top_k=1.5 must be"),
        ({"do_sample": True, "min_p": -0.1}, "min_p=-0.1 must be"),
        ({"do_sample": True, "typical_p": 0.0}, "typical_p=0.0 must be"),
        ({"epsilon_cutoff": "x"}, "epsilon_cutoff='x' must be a number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be"),
        ({"encoder_no_repeat_ngram_size": 10**9}, "encoder_no_repeat_ngram_size=1000000000"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight cannot be given"),
        ({"decoder_start_token_id": "a"}, "decoder_start_token_id='a'"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"strict": "x"}, "strict='x' must be"),
        ({"stop_strings": 3}, "stop_strings=3 must be a text"),
        ({"bad_words_ids": [3]}, "must be a list of at least one id"),
        ({"bad_words_ids": [[3], []]}, "must be a list of at least one id"),
        ({"sequence_bias": [[[3], 1.0, 2]]}, "must be ids and a number"),
        ({"bad_words_ids": [[10**6]]}, "from 0 to 260"),
        ({"suppress_tokens": 3}, "suppress_tokens=3 must be"),
        ({"do_sample": True, "suppress_tokens": list(range(261))}, "contains every token"),
        ({"eos_token_id": "2"}, "eos_token_id='2' must be"),
        ({"eos_token_id": []}, "use None for no end token"),
        ({"pad_token_id": 1.5}, "pad_token_id=1.5 must be"),
        ({"forced_eos_token_id": 999}, "forced_eos_token_id=999 must be"),
        ({"streamer": object()}, "streamer=a object must be a streamer"),
        ({"logits_processor": 3}, "logits_processor=3 must be a list"),
        ({"stopping_criteria": [3]}, "stopping_criteria"),
        ({"watermarking_config": 5}, "watermarking_config=5 cannot be used"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' cannot be given"),
        ({"cache_implementation": "x"}, "cache_implementation='x' cannot be used"),
        ({"use_cache": False}, "use_cache=False cannot be given"),
        ({"vlmfast_run": 3}, "vlmfast_run cannot be given: names that begin with vlmfast_"),
        ({"input_ids": torch.zeros(1, 3)}, "input_ids cannot be given"),
        ({"temprature": 0.5}, "unknown argument temprature (did you mean 'temperature'?)"),
        ({"max_tokens": 3}, "unknown argument max_tokens (did you mean 'max_new_tokens'?)"),
        ({"qqq": 1}, "unknown argument qqq"),
    ],
)
def test_invalid_generation_arguments_raise(vlm, passes, arguments, message):
    assert message in refused(vlm, **arguments)
    assert not passes


def test_misspelled_arguments_get_suggestions(vlm):
    with pytest.raises(VLMFastError, match=r"unknown argument image \(did you mean 'images'\?\)"):
        vlm.ask(QUESTION, image=make_image())
    with pytest.raises(
        VLMFastError, match=r"unknown argument message \(did you mean 'messages'\?\)"
    ):
        vlm.chat([{"role": "user", "content": QUESTION}], message=3)


def test_errors_do_not_print_the_model(vlm):
    for name in ("vlmfast_run", "generation_config", "streamer", "temperature", "assistant_model"):
        with pytest.raises(VLMFastError) as error:
            vlm.ask(QUESTION, **{name: vlm.model})
        assert len(str(error.value)) < 200 and "\n" not in str(error.value)


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_ask_and_attach_reject_the_same_arguments(vlm, name):
    assert f"{name} cannot be given" in refused(vlm, **{name: 0.6})
    inputs = vlm.inputs(QUESTION, make_image())
    with (
        vlmfast.attach(vlm.model, vlm.processor),
        pytest.raises(VLMFastError, match=f"{name} cannot be given"),
    ):
        vlm.model.generate(**inputs, **{name: 0.6})
    assert gate(vlm.adapter, {name: None}) and gate(vlm.adapter, {name: False})


def test_valid_arguments_match_hugging_face(vlm):
    """Unusual but valid arguments give the same tokens; a control shows that they take effect."""
    inputs = vlm.inputs(QUESTION, make_image())
    length = inputs["input_ids"].shape[1]
    seen = set()
    for given in (
        {"temperature": 0.0},
        {"top_k": -1},
        {"eos_token_id": -1},
        {"pad_token_id": -100},
        {"max_new_tokens": np.int64(4)},
        {"cache_implementation": "static"},
        {"suppress_tokens": [], "synced_gpus": False},
        {"bad_words_ids": [[token] for token in range(5, 200)]},
    ):
        given = {"max_new_tokens": 3, **given}
        full = vlm.model.generate(**inputs, do_sample=False, **given)[0, length:].tolist()
        assert vlm.ask(QUESTION, make_image(), do_sample=False, **given).token_ids == full, given
        seen.add(tuple(full[:3]))
    assert len(seen) > 1


def test_integers_are_accepted_as_floats(vlm):
    """Hugging Face requires floats for some arguments."""
    same = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "top_k": 0}
    for name in ("temperature", "repetition_penalty"):
        whole = vlm.ask(QUESTION, **same, **{name: 2}).token_ids
        assert whole == vlm.ask(QUESTION, **same, **{name: 2.0}).token_ids
        assert whole != vlm.ask(QUESTION, **same, **{name: 0.1}).token_ids


def test_generation_configs_merge_like_hugging_face(vlm):
    own = vlm.model.generation_config
    before = own.max_new_tokens
    try:
        own.max_new_tokens = 3
        assert len(vlm.ask(QUESTION).token_ids) == 3
        config = GenerationConfig(do_sample=False)
        assert len(vlm.ask(QUESTION, generation_config=config).token_ids) == 3
        config = GenerationConfig(max_new_tokens=2)
        assert len(vlm.ask(QUESTION, generation_config=config).token_ids) == 2
        assert len(vlm.ask(QUESTION, generation_config=config, max_new_tokens=4).token_ids) == 4
        with pytest.raises(VLMFastError, match="penalty_alpha cannot be given"):
            vlm.ask(QUESTION, generation_config=GenerationConfig(penalty_alpha=0.6))
    finally:
        own.max_new_tokens = before


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "internvl", "idefics3"])
def test_placeholder_in_text_raises(family):
    vlm = VLM(*tiny_families.builders()[family]())
    marks = placeholder_texts(vlm.adapter)
    assert set(vlm.adapter.marks()) <= set(marks)
    for mark in marks:
        text = f"what is {mark} ?"
        for way in (
            lambda text=text: vlm.ask(text, make_image()),
            lambda text=text: vlm.ask(text),
            lambda text=text: vlm.chat([{"role": "user", "content": text}]),
            lambda text=text: vlm.ask_many([text]),
            lambda text=text: vlm.session(make_image()).ask(text),
        ):
            with pytest.raises(VLMFastError, match=r"contains .*, the placeholder of an") as error:
                way()
            assert mark in str(error.value)
    assert vlm.ask("what is <photo> ?", max_new_tokens=1).token_ids  # other tags are text


def test_lone_surrogate_raises(vlm):
    with pytest.raises(VLMFastError, match="lone surrogate"):
        vlm.ask("what \ud800 ?")


def test_requests_accept_messages(vlm):
    content = [{"type": "image", "image": make_image()}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    asked = vlm.ask(QUESTION, make_image(), max_new_tokens=3)
    other = vlm.ask(QUESTION, make_image(seed=5), max_new_tokens=3)
    (got,) = vlm.ask_many([Request(messages=messages)], max_new_tokens=3)
    assert got.token_ids == asked.token_ids != other.token_ids
    for wrong in (Request(QUESTION, messages=messages), Request(images=[], messages=messages)):
        with pytest.raises(VLMFastError, match="request 0: messages replace question"):
            vlm.ask_many([wrong])
    with pytest.raises(VLMFastError, match="request 0: question=None must be a text"):
        vlm.ask_many([Request()])


@pytest.mark.parametrize(
    "requests", [3, None, "what ?", Request("what ?"), {"a": 1}, torch.tensor(1.0)]
)
def test_requests_must_be_a_list(vlm, requests):
    with pytest.raises(VLMFastError, match=r"must be a list of vlmfast\.Request"):
        vlm.ask_many(requests)


@pytest.mark.parametrize("found", [None, [], 3, [0.5], [-1], [10**9], "x", [[1]]])
def test_prefix_allowed_tokens_are_validated(vlm, found):
    given = {"max_new_tokens": 3, "eos_token_id": None}
    with pytest.raises(VLMFastError, match=r"^prefix_allowed_tokens_fn returned .* from 0 to \d+$"):
        vlm.ask("what ?", prefix_allowed_tokens_fn=lambda row, ids: found, **given)
    answer = vlm.ask("what ?", prefix_allowed_tokens_fn=lambda row, ids: [40, 41], **given)
    assert set(answer.token_ids) <= {40, 41}
    assert not set(vlm.ask("what ?", **given).token_ids) <= {40, 41}


def test_exceptions_of_user_functions_propagate(vlm):
    def allowed(row, ids):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vlm.ask("what ?", max_new_tokens=3, prefix_allowed_tokens_fn=allowed)


# --- lengths -------------------------------------------------------------------------------------


def test_too_long_text_raises_before_prefill(vlm, passes):
    for text in ("a" * 100_000, "a b " * 3_000_000):
        for way in (
            lambda text=text: vlm.ask(text, "no such file.png"),
            lambda text=text: vlm.chat([{"role": "user", "content": text}]),
            lambda text=text: vlm.session().ask(text),
        ):
            with pytest.raises(ModelError, match=r"takes at least \d+ positions .* has 4096"):
                way()
    assert not passes


def test_prompt_and_answer_must_fit_max_positions(vlm, passes, positions):
    size = vlm.inputs(QUESTION, make_image())["input_ids"].shape[1]
    positions(size + 5)
    answer = vlm.ask(QUESTION, make_image(), max_new_tokens=5, eos_token_id=None)
    assert len(answer.token_ids) == 5
    passes.clear()
    inputs = vlm.inputs(QUESTION, make_image())
    with pytest.raises(ModelError, match=rf"{size} positions .* up to 6, .* has {size + 5}; use "):
        vlm.ask(QUESTION, make_image(), max_new_tokens=6)
    with pytest.raises(ModelError, match="max_new_tokens=5"):
        vlm.ask(QUESTION, make_image(), max_length=size + 6)
    with vlmfast.attach(vlm.model, vlm.processor), pytest.raises(ModelError, match="up to 6"):
        vlm.model.generate(**inputs, max_new_tokens=6)
    with pytest.raises(VLMFastError, match="max_length=3 leaves no token for the answer"):
        vlm.ask(QUESTION, make_image(), max_length=3)
    assert not passes
    # The default length is cut to what fits and gives the same tokens up to there.
    cut = vlm.ask(QUESTION, make_image(), eos_token_id=None)
    assert cut.token_ids == answer.token_ids
    (many,) = vlm.ask_many([Request(QUESTION, make_image(), generation={"eos_token_id": None})])
    *_, streamed = vlm.stream(QUESTION, make_image(), eos_token_id=None)
    with vlm.session(make_image()) as session:
        asked = session.ask(QUESTION, eos_token_id=None)
    assert many.token_ids == streamed.token_ids == asked.token_ids == answer.token_ids
    with vlmfast.attach(vlm.model, vlm.processor):
        made = vlm.model.generate(**inputs, eos_token_id=None)
    assert made[0, size:].tolist() == answer.token_ids
    positions(size)
    passes.clear()
    with pytest.raises(ModelError, match=f"{size} positions"):
        vlm.ask(QUESTION, make_image())
    assert not passes


def test_dropped_tokens_count_unless_compacted(vlm, passes, positions):
    size = vlm.inputs(QUESTION, make_image())["input_ids"].shape[1]
    positions(size - 4)
    for recipe in ("random:0.5", "pyramiddrop:positions=compact"):
        with pytest.raises(ModelError, match=f"{size} positions"):
            vlm.ask(QUESTION, make_image(), recipe=recipe, max_new_tokens=2)
    assert not passes
    got = vlm.ask(QUESTION, make_image(), recipe="random:0.5,positions=compact", max_new_tokens=4)
    assert len(got.token_ids) == 4
    with pytest.raises(ModelError, match=f"{size - 8} positions and its answer up to 5"):
        vlm.ask(QUESTION, make_image(), recipe="random:0.5,positions=compact", max_new_tokens=5)
    given = {"recipe": "random:0.5,positions=compact", "eos_token_id": None}
    assert len(vlm.ask(QUESTION, make_image(), **given).token_ids) == 4


def test_model_without_position_limit(vlm, monkeypatch):
    with pytest.raises(ModelError, match="has 4096"):
        vlm.ask("a" * 5000, max_new_tokens=1)
    monkeypatch.setattr(type(vlm.adapter), "max_positions", None)
    assert vlm.ask("a" * 5000, max_new_tokens=1).token_ids


def test_conversation_beyond_max_positions_raises(vlm, positions):
    with vlm.session(make_image()) as session:
        first = session.ask(QUESTION, max_new_tokens=4)
        positions(vlm.inputs(QUESTION, make_image())["input_ids"].shape[1] + 10)
        with pytest.raises(ModelError, match="positions and its answer"):
            session.ask(QUESTION, max_new_tokens=4)
        session.messages = []
        assert session.ask(QUESTION, max_new_tokens=4).token_ids == first.token_ids
