"""Conversations: what the chat template sees of them, as in Hugging Face, and refused keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from support import tiny_families
from support.tiny_models import make_image
from vlmfast import VLM, Request, VLMFastError

NEW = {"max_new_tokens": 12, "do_sample": False}
PARTS = (
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
)
# Templates of released models read contents as strings only, as lists only, or as either.
TEMPLATES = {
    "strings": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}A:",
    "either": (
        "{% for m in messages %}{{ m['role'] }}: "
        "{% if m['content'] is string %}({{ m['content'] }})"
        "{% elif m['role'] == 'user' %}" + PARTS + "{% endif %} {% endfor %}A:"
    ),
    "lists": "{% for m in messages %}{{ m['role'] }}: " + PARTS + " {% endfor %}A:",
    "lists after a string": (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}"
        "{% else %}{{ m['role'] }}: " + PARTS + " {% endif %}{% endfor %}A:"
    ),
}
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def shared() -> VLM:
    return VLM(*tiny_families.builders()["qwen2_5_vl"](0))


@pytest.fixture
def vlm(shared: VLM) -> Iterator[VLM]:
    """A model whose chat template may be changed."""
    before = shared.processor.chat_template
    yield shared
    shared.processor.chat_template = before


def listed(turn: dict[str, Any]) -> dict[str, Any]:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def expected(vlm: VLM, messages: list[dict], *images: Any) -> list[int]:
    """The answer of Hugging Face, given the messages as they are."""
    text = vlm.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    more = {"images": list(images)} if images else {}
    inputs = vlm.processor(text=[text], return_tensors="pt", **more)
    with torch.no_grad():
        found = vlm.model.generate(**inputs, **NEW)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_reach_the_template_as_in_hugging_face(vlm: VLM, name: str) -> None:
    vlm.processor.chat_template = TEMPLATES[name]
    messages = [SYSTEM, HELLO]
    seen = {"lists": [*map(listed, messages)], "lists after a string": [SYSTEM, listed(HELLO)]}
    own = expected(vlm, seen.get(name, messages))
    (batched,) = vlm.ask_many([Request(messages=messages)], **NEW)
    assert vlm.chat(messages, **NEW).token_ids == batched.token_ids == own
    if name == "lists after a string":
        return
    question = expected(vlm, [listed(HELLO) if name == "lists" else HELLO])
    assert question != own
    with vlm.session() as session:
        found = [vlm.ask("Hello", **NEW), session.ask("Hello", **NEW)]
        assert [answer.token_ids for answer in found] == [question] * 2
        turns = [*session.messages, {"role": "user", "content": "And?"}]
        assert session.ask("And?", **NEW).token_ids == vlm.chat(turns, **NEW).token_ids


def test_lists_stay_lists(vlm: VLM) -> None:
    vlm.processor.chat_template = TEMPLATES["either"]
    messages = [listed(HELLO)]
    assert vlm.chat(messages, **NEW).token_ids == expected(vlm, messages)
    assert expected(vlm, messages) != expected(vlm, [HELLO])


IMAGE_ONLY = {
    "instruction of the system": [listed(SYSTEM)],
    "instruction of an earlier turn": [
        listed(HELLO),
        listed({"role": "assistant", "content": "ok"}),
    ],
    "no instruction": [],
}


@pytest.mark.parametrize("before", IMAGE_ONLY.values(), ids=IMAGE_ONLY)
def test_turns_of_an_image_alone_are_answered(vlm: VLM, before: list[dict]) -> None:
    image = make_image(56, 64, seed=1)
    messages = [*before, {"role": "user", "content": [{"type": "image", "image": image}]}]
    own = expected(vlm, messages, image)
    (batched,) = vlm.ask_many([Request(messages=messages)], **NEW)
    assert vlm.chat(messages, **NEW).token_ids == batched.token_ids == own
    other = [{"role": "user", "content": [{"type": "image", "image": make_image(56, 64, seed=2)}]}]
    assert vlm.chat([*before, *other], **NEW).token_ids != own
    # Methods that read the question.
    for recipe in ("mmtok:0.5", "sparsevlm:0.5", "snapkv:keep=0.9,window=8"):
        assert vlm.chat(messages, recipe=recipe, **NEW).token_ids


def asked(vlm: VLM, entry: dict[str, Any], **turn: Any) -> Callable[[], Any]:
    content = [entry, {"type": "text", "text": "what ?"}]
    return lambda: vlm.chat([{"role": "user", "content": content, **turn}], max_new_tokens=1)


IMAGE, VIDEO = make_image(56, 56), [make_image(56, 56, seed=k) for k in range(4)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"video": VIDEO, "nframes": 2}, "'nframes' (did you mean 'num_frames'?)"),
        ({"video": VIDEO, "num_frame": 2}, "'num_frame' (did you mean 'num_frames'?)"),
        ({"video": VIDEO, "video_start": 1.0}, "unknown key 'video_start'"),
        ({"video": VIDEO, "max_frames": 2}, "'max_frames' (did you mean 'num_frames'?)"),
        ({"video": VIDEO, "path": "a.mp4"}, "video has video and path; give one of them"),
        ({"image": IMAGE, "max_pixels": 1024}, "unknown key 'max_pixels'; known are type, image"),
        ({"image": IMAGE, "resized_height": 28}, "unknown key 'resized_height'"),
        ({"image": IMAGE, "num_frames": 2}, "image has the unknown key 'num_frames'"),
        ({"image": IMAGE, "path": "a.png"}, "image has image and path; give one of them"),
        ({"image": IMAGE, "cache_control": {"type": "ephemeral"}}, "'cache_control'"),
        ({"image": IMAGE, 3: 4}, "unknown key '3'"),
        ({"text": "what ?", "image": IMAGE}, "text has the unknown key 'image'"),
        ({"type": "images", "image": IMAGE}, "'images' is not known (did you mean 'image'?)"),
    ],
)
def test_unknown_keys_of_content_entries_are_refused(
    shared: VLM, entry: dict[str, Any], message: str
) -> None:
    entry = {"type": next(iter(entry)), **entry}
    with pytest.raises(VLMFastError, match=re.escape(message)):
        asked(shared, entry)()
    with pytest.raises(VLMFastError, match=re.escape(message)):
        shared.ask_many([Request(messages=[{"role": "user", "content": [entry]}])])


def test_keys_without_a_value_are_as_absent(shared: VLM) -> None:
    """As in Hugging Face: tables of data give every entry every key."""
    plain = {"type": "image", "image": IMAGE}
    entry = {**plain, "text": None, "path": None, "max_pixels": None}
    both = [asked(shared, of)() for of in (plain, entry)]
    assert both[0].token_ids == both[1].token_ids
    assert asked(shared, plain, tool_calls=None)().token_ids == both[0].token_ids


def test_unknown_keys_of_messages_are_refused(shared: VLM) -> None:
    entry = {"type": "image", "image": np.zeros((56, 56, 3), np.uint8)}
    with pytest.raises(VLMFastError, match=r"a turn has the unknown key 'contents' .*'content'"):
        asked(shared, entry, contents="what ?")()
    with pytest.raises(VLMFastError, match="a turn has the unknown key 'tool_calls'"):
        asked(shared, entry, tool_calls=[{}])()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]
    with (
        shared.session() as session,
        pytest.raises(VLMFastError, match=r"messages\[1\] has the unknown key 'name'"),
    ):
        session.messages = turns
