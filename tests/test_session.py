"""Sessions: reuse between questions, eviction, and saved sessions."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList

from driven import harmless
from tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, ModelError, RecipeError, VLMFastError
from vlmfast.api.session import Session
from vlmfast.api.session_file import classes, frozen, identity
from vlmfast.core import files, snapshot
from vlmfast.core.protocols import MediaStage
from vlmfast.core.registry import stage_class

EXAMPLE = Path(__file__).parents[1] / "examples" / "picture.png"
ASK = {"max_new_tokens": 6}
QUESTIONS = ("what is here ?", "what colour is it ?", "is there more ?")
# Cache methods that take effect on short prompts; none depends on the question.
SMALL = {
    "h2o": "h2o:0.5",
    "lookm": "lookm:0.7",
    "kivi": "kivi:group=8,residual=16",
    "zipcache": "zipcache:page=4",
    "streamingllm": "streamingllm:0.4",
}


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava())


@pytest.fixture(scope="module", params=["llava", "llava_next", "tiny"])
def family(request) -> VLM:
    """In float32: prefilling in two parts differs from prefilling at once by rounding."""
    if request.param == "tiny":
        return VLM.from_pretrained("tiny", device="cpu", dtype=torch.float32)
    return VLM(*{"llava": build_llava, "llava_next": build_llava_next}[request.param]())


def image_for(vlm: VLM, seed: int = 0):
    return (
        make_image(seed=seed) if vlm.adapter.sizes()["width"] == 64 else make_image(224, 224, seed)
    )


def turns_of(image, pairs: list[tuple[str, str]], question: str) -> list[dict]:
    """A conversation in Hugging Face's schema, with the image in its first turn."""
    texts = [text for pair in pairs for text in pair] + [question]
    roles = itertools.cycle(["user", "assistant"])
    turns = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in zip(roles, texts, strict=False)
    ]
    turns[0]["content"].insert(0, {"type": "image", "image": image})
    return turns


@contextmanager
def counted(vlm: VLM) -> Iterator[dict[str, int]]:
    """Counts rows of the language model and forward passes of the vision tower."""
    count = {"rows": 0, "looks": 0}

    def rows(module, args, kwargs):
        count["rows"] += kwargs["inputs_embeds"].shape[1]

    def looks(module, args):
        count["looks"] += 1

    handles = [
        vlm.adapter.decoder.register_forward_pre_hook(harmless(rows), with_kwargs=True),
        vlm.adapter.projector().register_forward_pre_hook(harmless(looks)),
    ]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def cache_tensors(s: Session) -> dict[str, torch.Tensor]:
    """Every tensor of a session's cache."""
    tensors: dict[str, torch.Tensor] = {}
    prefixes = s._prefixes.copied(*s._known())
    found = [frozen(prefix) for prefix in prefixes]
    snapshot.pack(found, tensors, "cache", classes(s.recipe, ()))
    return {name: tensor.clone() for name, tensor in tensors.items() if ".trace" not in name}


def same(one: dict[str, torch.Tensor], another: dict[str, torch.Tensor]) -> bool:
    return one.keys() == another.keys() and all(
        torch.equal(tensor, another[name]) and tensor.dtype == another[name].dtype
        for name, tensor in one.items()
    )


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest) -> None:
    """Every test begins without what others have asked."""
    for name in ("vlm", "family", "random_vlm", "tiny"):
        if name in request.fixturenames:
            request.getfixturevalue(name).prefix_cache.clear()


# --- context of a question -----------------------------------------------------------------------


@pytest.mark.cases(1)
def test_without_history_answers_equal_ask(family):
    image, other = image_for(family), image_for(family, 1)
    expected = [family.ask(q, image, **ASK).token_ids for q in QUESTIONS]
    with family.session(images=image, history=False) as s:
        assert s.reuses == "kv" and s.messages == []
        assert [s.ask(q, **ASK).token_ids for q in QUESTIONS] == expected
        # Questions leave no state: order and repetition do not matter.
        before = cache_tensors(s)
        assert [s.ask(q, **ASK).token_ids for q in QUESTIONS[::-1]] == expected[::-1]
        assert same(cache_tensors(s), before)
    with family.session(images=other, history=False) as s:
        assert [s.ask(q, **ASK).token_ids for q in QUESTIONS] != expected


def test_with_history_answers_equal_chat(family):
    image, turns = image_for(family), []
    with family.session(images=image) as s:
        for question in QUESTIONS:
            expected = family.chat(turns_of(image, turns, question), **ASK)
            answer = s.ask(question, **ASK)
            assert answer.token_ids == expected.token_ids and answer.text == expected.text
            turns.append((question, answer.text))
        assert [turn["content"] for turn in s.messages] == [t for pair in turns for t in pair]
        assert [turn["role"] for turn in s.messages] == ["user", "assistant"] * 3
    # Control: without the conversation, the last question has another answer.
    if family.adapter.sizes()["width"] == 64:
        assert family.ask(QUESTIONS[-1], image, **ASK).token_ids != answer.token_ids


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", ["hired:0.3", "visionzip", "grid:0.5,positions=compact"])
def test_query_independent_reducers_reuse_the_cache(random_vlm, recipe):
    image = make_image()
    full = [random_vlm.ask(q, image, **ASK).token_ids for q in QUESTIONS]
    expected = [random_vlm.ask(q, image, recipe=recipe, **ASK) for q in QUESTIONS]
    with random_vlm.session(images=image, recipe=recipe, history=False) as s:
        assert s.reuses == "kv"
        for question, single in zip(QUESTIONS, expected, strict=True):
            answer = s.ask(question, **ASK)
            assert answer.token_ids == single.token_ids and answer.recipe == single.recipe
            assert answer.stats.kv_bytes == single.stats.kv_bytes < answer.stats.kv_bytes_full
            assert answer.stats.equivalent_tokens == single.stats.equivalent_tokens
            assert answer.stats.visual_tokens_kept == single.stats.visual_tokens_kept
            assert torch.equal(answer.trace.depth, single.trace.depth)
            assert answer.trace.images == [image] or answer.trace.images[0].size == image.size
    assert [single.token_ids for single in expected] != full


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    ["pyramiddrop", "fastv", "mustdrop", "snapkv:keep=0.5,window=8", "hired:0.5+fastv"],
)
def test_query_dependent_methods_select_per_question(random_vlm, recipe):
    """``reuses`` reports it, the tower does not run again, and answers equal ask and chat."""
    image, turns = make_image(), []
    with random_vlm.session(images=image, recipe=recipe) as s:
        assert s.reuses == "features" and s.bytes == 0
        for question in QUESTIONS:
            expected = random_vlm.chat(turns_of(image, turns, question), recipe=recipe, **ASK)
            with counted(random_vlm) as count:
                answer = s.ask(question, **ASK)
            assert count["looks"] == 0
            assert answer.token_ids == expected.token_ids
            assert answer.stats.prompt_reused == 0 < answer.stats.prompt_fed
            assert answer.stats.visual_tokens_per_layer == expected.stats.visual_tokens_per_layer
            assert answer.stats.visual_tokens_kept == expected.stats.visual_tokens_kept
            assert torch.equal(answer.trace.depth, expected.trace.depth)
            turns.append((question, answer.text))
    with random_vlm.session(images=image, recipe=recipe, history=False) as s:
        for question in QUESTIONS:
            expected = random_vlm.ask(question, image, recipe=recipe, **ASK)
            assert s.ask(question, **ASK).token_ids == expected.token_ids


def test_question_prefills_only_new_tokens(random_vlm):
    vlm, image = random_vlm, make_image()
    with counted(vlm) as count:
        s = vlm.session(images=image)
    prefix = s.stats.prompt_fed
    assert count == {"rows": prefix, "looks": 1} and s.stats.prompt_tokens == prefix
    consumed = prefix
    for number, question in enumerate(QUESTIONS):
        with counted(vlm) as count:
            answer = s.ask(question, **ASK)
        stats = answer.stats
        assert count["looks"] == 0
        assert count["rows"] == stats.prompt_fed + stats.generated_tokens - 1
        # The template puts a blank before an answer, so the last answer cannot be reused.
        assert stats.prompt_reused == consumed
        length = stats.prompt_reused + stats.prompt_fed
        assert stats.prompt_fed < 60
        assert stats.prompt_tokens == stats.prompt_fed and stats.flops_prefill == 0
        assert stats.time_vision_s == 0
        consumed = length
        assert number or stats.prompt_reused == prefix
    vlm.prefix_cache.clear()
    alone = vlm.chat(turns_of(image, [], QUESTIONS[0]), **ASK).stats
    assert alone.prompt_reused == 0 and alone.prompt_tokens > prefix


@pytest.mark.cases(1)
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("recipe", SMALL.values(), ids=SMALL)
def test_questions_use_the_compressed_images(recipe, history):
    vlm, image = VLM(*build_llava_next()), make_image()
    with vlm.session(images=image, history=history) as s:
        full = [s.ask(q, **ASK) for q in QUESTIONS[:2]]
    with vlm.session(images=image, recipe=recipe, history=history) as s:
        assert s.reuses == "kv"
        assert s.stats.kv_bytes < 0.8 * s.stats.kv_bytes_full
        with counted(vlm) as count:
            answers = [s.ask(q, **ASK) for q in QUESTIONS[:2]]
        assert count["looks"] == 0
        for answer, single in zip(answers, full, strict=True):
            assert answer.stats.kv_bytes < 0.9 * single.stats.kv_bytes
            assert answer.recipe == recipe
        # The cache does not depend on the first question.
        if not history:
            assert answers[0].stats.prompt_reused == answers[1].stats.prompt_reused > 0
            again = [s.ask(q, **ASK).token_ids for q in QUESTIONS[1::-1]]
            assert again == [a.token_ids for a in answers[::-1]]
    assert [a.token_ids for a in answers] != [a.token_ids for a in full]


def test_conversation_can_be_replaced(vlm):
    with vlm.session(images=make_image()) as s:
        answers = [s.ask(question, **ASK) for question in QUESTIONS[:3]]
        messages = s.messages
        s.messages = messages[:4]  # remove the last question
        again = s.ask(QUESTIONS[2], **ASK)
        assert again.token_ids == answers[2].token_ids and s.messages == messages
        assert again.stats.prompt_reused > answers[1].stats.prompt_reused
        with vlm.session(images=make_image()) as other:
            other.messages = messages[:4]
            assert other.ask(QUESTIONS[2], **ASK).token_ids == again.token_ids
        s.messages = []
        assert s.ask(QUESTIONS[2], **ASK).token_ids != again.token_ids
        messages = s.messages
        for wrong, message in (
            ([messages[1], messages[0]], r"messages\[0\] must have the role user"),
            (
                [{"role": "user", "content": [{"type": "image"}]}, messages[1]],
                r"messages\[0\] .* a text",
            ),
            (messages[:1], "must end with an answer"),
        ):
            with pytest.raises(VLMFastError, match=message):
                s.messages = wrong
            assert s.messages == messages
    with vlm.session(images=make_image(), history=False) as s:
        s.messages = []
        with pytest.raises(VLMFastError, match="history=False"):
            s.messages = messages


def test_logits_processors_see_the_whole_prompt(vlm):
    image, seen = make_image(), []

    def spy(ids, scores):
        seen.append(ids.clone())
        return scores.roll(7, dims=1)

    options = {**ASK, "logits_processor": LogitsProcessorList([spy])}
    with vlm.session(images=image, history=False) as s:
        for question in QUESTIONS:
            expected, of_ask = vlm.ask(question, image, **options).token_ids, seen.copy()
            seen.clear()
            assert s.ask(question, **options).token_ids == expected
            assert len(seen) == ASK["max_new_tokens"]
            assert all(torch.equal(a, b) for a, b in zip(seen, of_ask, strict=True))
            assert s.ask(question, **ASK).token_ids != expected
            seen.clear()
        torch.manual_seed(3)
        expected = vlm.ask(QUESTIONS[0], image, do_sample=True, **ASK).token_ids
        torch.manual_seed(3)
        assert s.ask(QUESTIONS[0], do_sample=True, **ASK).token_ids == expected
        assert s.ask(QUESTIONS[0], do_sample=True, **ASK).token_ids != expected


@pytest.mark.parametrize("recipe", [None, "h2o:0.5", "snapkv:keep=0.5,window=8"])
def test_text_only_session(vlm, recipe):
    with vlm.session(recipe=recipe, history=False) as s:
        for question in QUESTIONS:
            expected = vlm.ask(question, recipe=recipe, **ASK).token_ids
            assert s.ask(question, **ASK).token_ids == expected
        assert s.bytes == 0
        with pytest.raises(VLMFastError, match="this session has none"):
            s.ask(QUESTIONS[0], restore=True)
    vlm.prefix_cache.clear()
    with vlm.session() as s:
        pairs = []
        for question in QUESTIONS:
            texts = [text for pair in pairs for text in pair] + [question]
            roles = itertools.cycle(["user", "assistant"])
            turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
            answer = s.ask(question, **ASK)
            assert answer.token_ids == vlm.chat(turns, **ASK).token_ids
            assert bool(answer.stats.prompt_reused) == bool(pairs)
            pairs.append((question, answer.text))


def test_streaming(vlm):
    image = make_image()
    with vlm.session(images=image) as s, vlm.session(images=image) as t:
        for question in QUESTIONS:
            *pieces, answer = s.stream(question, **ASK)
            assert answer.token_ids == t.ask(question, **ASK).token_ids
            assert "".join(pieces).strip() == answer.text
        # If the reader stops, the conversation continues with the text generated so far.
        reader = s.stream(QUESTIONS[0], max_new_tokens=400)
        next(reader)
        reader.close()
        assert len(s.messages) == 8 and s.messages[-2]["content"] == QUESTIONS[0]
        assert len(s.messages[-1]["content"]) < 400
        expected = vlm.chat(
            turns_of(
                image,
                list(
                    zip(
                        [m["content"] for m in s.messages[::2]],
                        [m["content"] for m in s.messages[1::2]],
                        strict=True,
                    )
                ),
                QUESTIONS[1],
            ),
            **ASK,
        )
        assert s.ask(QUESTIONS[1], **ASK).token_ids == expected.token_ids


# --- full images ---------------------------------------------------------------------------------


RESTORED = [None, "hired:0.3", "h2o:0.5", "pyramiddrop", "mustdrop", "downsample:0.25+kivi"]


# Every two of family, recipe and history meet; the other half is slow.
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("random_vlm", "recipe", "history"),
    [
        pytest.param(family, recipe, history, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
        for i, family in enumerate(["llava", "llava_next"])
        for j, recipe in enumerate(RESTORED)
        for k, history in enumerate([True, False])
    ],
    indirect=["random_vlm"],
)
def test_restore_gives_the_full_model_answer(random_vlm, recipe, history):
    vlm, image = random_vlm, make_image()
    with vlm.prefix_cache.bypassed():
        full = vlm.ask(QUESTIONS[0], image, **ASK)
    with vlm.session(images=image, recipe=recipe, history=history) as s:
        with counted(vlm) as count:
            restored = s.ask(QUESTIONS[0], restore=True, **ASK)
        assert restored.token_ids == full.token_ids and restored.recipe == "none"
        assert restored.stats.visual_tokens_per_layer == full.stats.visual_tokens_per_layer
        # In-encoder stages leave no full features, so the tower runs again.
        assert count["looks"] == (recipe == "mustdrop")
        if history:  # the restored answer is part of the conversation
            turns = turns_of(image, [(QUESTIONS[0], restored.text)], QUESTIONS[1])
            expected = vlm.chat(turns, **ASK).token_ids
            assert s.ask(QUESTIONS[1], restore=True, **ASK).token_ids == expected
        else:  # the compressed images are still available
            with vlm.session(images=image, recipe=recipe, history=False) as other:
                expected = other.ask(QUESTIONS[1], **ASK)
            answer = s.ask(QUESTIONS[1], **ASK)
            assert answer.token_ids == expected.token_ids
            assert answer.stats.prompt_reused == expected.stats.prompt_reused
    if recipe not in (None, "mustdrop"):
        compressed = vlm.session(images=image, recipe=recipe, history=False)
        assert compressed.ask(QUESTIONS[0], **ASK).token_ids != full.token_ids
        compressed.close()


# --- memory --------------------------------------------------------------------------------------


def test_least_recently_used_session_is_evicted():
    vlm = VLM(*build_llava())
    images = [make_image(seed=seed) for seed in range(3)]
    expected = [vlm.ask(QUESTIONS[0], image, **ASK).token_ids for image in images]
    sessions = [vlm.session(images=image) for image in images]
    vlm.prefix_cache.clear()
    for s, ids in zip(sessions, expected, strict=True):
        assert s.ask(QUESTIONS[0], **ASK).token_ids == ids
    one = sessions[0].bytes
    assert one > 0 and all(s.bytes == one for s in sessions)
    vlm.prefix_cache.limit = 2 * one
    assert [bool(s.bytes) for s in sessions] == [False, True, True]
    for s in sessions:
        s.messages = []
    answer = sessions[0].ask(QUESTIONS[0], **ASK)
    assert answer.token_ids == expected[0] and answer.stats.prompt_reused == 0
    assert [bool(s.bytes) for s in sessions] == [True, False, True]
    sessions[0].messages = []
    assert sessions[0].ask(QUESTIONS[0], **ASK).stats.prompt_reused > 0
    with counted(vlm) as count:
        assert sessions[1].ask(QUESTIONS[0], **ASK).token_ids == expected[1]
    assert count["looks"] == 0
    # A session larger than the limit still answers.
    vlm.prefix_cache.limit = one - 1
    for s, ids in zip(sessions, expected, strict=True):
        s.messages = []
        answer = s.ask(QUESTIONS[0], **ASK)
        assert answer.token_ids == ids and answer.stats.prompt_reused == s.bytes == 0
        assert s.reuses == "features"
    # Closed and deleted sessions do not count.
    vlm.prefix_cache.limit = 4 * one
    sessions[2].close()
    del sessions, s
    gc.collect()
    assert len(vlm._sessions.open) == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [None, *SMALL.values()], ids=["none", *SMALL])
def test_eviction_does_not_change_answers(vlm, recipe):
    image = make_image()
    for history in (False, True) if recipe is None else (False,):
        with vlm.session(images=image, recipe=recipe, history=history) as s:
            expected = [s.ask(q, **ASK).token_ids for q in QUESTIONS]
        with vlm.session(images=image, recipe=recipe, history=history) as s:
            for question, ids in zip(QUESTIONS, expected, strict=True):
                vlm.prefix_cache.clear()
                answer = s.ask(question, **ASK)
                assert answer.token_ids == ids and answer.stats.prompt_reused == 0


# --- saved sessions ------------------------------------------------------------------------------


SAVED = {"none": None, "hired": "hired:0.4", "pyramiddrop": "pyramiddrop", "mustdrop": "mustdrop"}
SAVED |= SMALL


@pytest.mark.cases(1)
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("recipe", SAVED.values(), ids=SAVED)
def test_loaded_session_continues_bit_for_bit(vlm, tmp_path, recipe, history):
    path = tmp_path / "a.session"
    options = {"max_new_tokens": 10}
    with vlm.session(images=make_image(), recipe=recipe, history=history) as s:
        s.ask(QUESTIONS[0], **options)
        s.save(path)
        other = VLM(*build_llava())
        loaded = other.load_session(path)
        assert str(loaded.recipe) == str(s.recipe) and loaded.reuses == s.reuses
        assert loaded.messages == s.messages and loaded.history == history
        # Copies have no free space in their quantized segments.
        assert 0 < loaded.bytes <= s.bytes if s.reuses == "kv" else loaded.bytes == s.bytes == 0
        for question in QUESTIONS[1:]:
            mine, its = s.ask(question, **options), loaded.ask(question, **options)
            assert mine.token_ids == its.token_ids
            assert mine.stats.prompt_reused == its.stats.prompt_reused
            assert mine.stats.prompt_fed == its.stats.prompt_fed
            assert torch.equal(mine.trace.depth, its.trace.depth) and its.trace.images == []
            assert s.reuses == "features" or same(cache_tensors(s), cache_tensors(loaded))
        mine = s.ask(QUESTIONS[0], restore=True, **options)
        assert loaded.ask(QUESTIONS[0], restore=True, **options).token_ids == mine.token_ids
        if s.reuses == "kv":  # control of the cache comparison
            entry = s._prefixes.find(*s._known())
            entry.value.group.position.add_(1)
            assert not same(cache_tensors(s), cache_tensors(loaded))


@pytest.mark.parametrize("recipe", ["pvc:0.5", "atp:0.6"])
def test_loaded_session_reloads_trained_weights(tiny, tmp_path, recipe):
    question, path = "What is in the bottom left?", tmp_path / "a.session"
    with tiny.session(images=EXAMPLE, recipe=recipe, history=False) as s:
        s.save(path)
        expected = s.ask(question, **ASK)
    loaded = tiny.load_session(path)
    answer = loaded.ask(question, **ASK)
    assert answer.token_ids == expected.token_ids
    assert answer.stats.equivalent_tokens == expected.stats.equivalent_tokens < 336
    assert loaded.ask(question, restore=True, **ASK).stats.equivalent_tokens == 336


def test_evicted_or_unused_session_is_saved_without_cache(vlm, tmp_path):
    with vlm.session(images=make_image()) as s:
        expected = s.ask(QUESTIONS[0], **ASK).token_ids
        s._drop()
        s._messages = []
        s.save(tmp_path / "a")
    loaded = vlm.load_session(tmp_path / "a")
    assert loaded.bytes == 0 and loaded.ask(QUESTIONS[0], **ASK).token_ids == expected
    with vlm.session() as s:
        s.save(tmp_path / "b")
        expected = s.ask(QUESTIONS[0], **ASK).token_ids
    assert vlm.load_session(tmp_path / "b").ask(QUESTIONS[0], **ASK).token_ids == expected


@pytest.fixture(scope="module")
def saved(vlm, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.session"
    with vlm.session(images=make_image(), recipe=SMALL["kivi"]) as s:
        s.ask(QUESTIONS[0], **ASK)
        s.save(path)
    return path


def test_saved_session_is_a_safetensors_file(saved):
    from safetensors import safe_open

    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
        assert metadata["recipe"] == SMALL["kivi"] and len(metadata["digest"]) == 64
        assert any(name.startswith("session.caches.0.layers.0") for name in file.keys())  # noqa: SIM118
        for name in file.keys():  # noqa: SIM118
            file.get_tensor(name)
    assert list(saved.parent.iterdir()) == [saved]


def test_flipped_bytes_are_rejected(vlm, saved, tmp_path):
    data, path, rng = saved.read_bytes(), tmp_path / "a.session", random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data)
    vlm.load_session(path).close()
    # Half of the positions are in the header, which is smaller.
    offsets = [rng.randrange(header) for _ in range(500)]
    offsets += [rng.randrange(header, len(data)) for _ in range(500)]
    offsets += [*range(100), len(data) - 1]
    for offset in offsets:
        flipped = bytearray(data)
        flipped[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(VLMFastError, match=r"is damaged|is not a saved session"):
            vlm.load_session(path)


def test_truncated_and_extended_files_are_rejected(vlm, saved, tmp_path):
    data, path, rng = saved.read_bytes(), tmp_path / "a.session", random.Random(0)
    cuts = [0, 1, 8, 9, 40, 90, 98, 99, len(data) - 1, *rng.sample(range(len(data)), 20)]
    for broken in [*(data[:cut] for cut in cuts), data + b"\0", data + data, b"\0" + data]:
        path.write_bytes(broken)
        with pytest.raises(VLMFastError, match=r"is damaged|is not a saved session"):
            vlm.load_session(path)


def rewritten(path: Path, into: Path, **changes: str) -> Path:
    """A valid file with other metadata."""
    metadata, tensors = snapshot.read(path, "a file")
    metadata.pop("digest")
    snapshot.write(into, {**metadata, **changes}, tensors)
    return into


def test_incompatible_sessions_are_rejected(vlm, saved, tmp_path):
    from safetensors.torch import save_file

    target = tmp_path / "a.session"
    vlm.load_session(rewritten(saved, target)).close()
    with pytest.raises(VLMFastError, match="in format 3; this vlmfast reads format 1"):
        vlm.load_session(rewritten(saved, target, version="3"))
    with pytest.raises(VLMFastError, match="is not a saved session"):
        vlm.load_session(rewritten(saved, target, kind="something"))
    with pytest.raises(VLMFastError, match="cannot be used: its parts are others"):
        vlm.load_session(rewritten(saved, target, session='{"dict": []}'))
    with pytest.raises(RecipeError, match="unknown method 'newest'"):
        vlm.load_session(rewritten(saved, target, recipe="newest:0.2"))
    save_file({"x": torch.zeros(3)}, target, metadata={"format": "pt"})
    with pytest.raises(VLMFastError, match="is not a saved session"):
        vlm.load_session(target)
    with pytest.raises(VLMFastError, match=r"nowhere.*cannot be read: No such file"):
        vlm.load_session(tmp_path / "nowhere")
    with pytest.raises(VLMFastError, match="cannot be read"):
        vlm.load_session(tmp_path)

    for build, message in {
        lambda: build_llava(seed=1): "its weights are different",
        lambda: build_llava(
            dtype=torch.bfloat16
        ): "a model in float32, and this one is in bfloat16",
        lambda: build_llava(layers=3): "another model: depth 4 and not 3",
        build_llava_next: "another model: family llava and not llava_next",
    }.items():
        with pytest.raises(ModelError, match=message):
            VLM(*build()).load_session(saved)
    with pytest.raises(RecipeError, match="not kivi"):
        vlm.load_session(saved, recipe="kivi")
    assert str(vlm.load_session(saved, recipe=SMALL["kivi"]).recipe) == SMALL["kivi"]


def test_identity_depends_on_every_weight():
    vlm = VLM(*build_llava())
    before = identity(vlm.adapter)
    assert identity(VLM(*build_llava()).adapter) == before
    with torch.no_grad():
        vlm.adapter.decoder.layers[2].self_attn.v_proj.weight.add_(1e-3)
    assert identity(vlm.adapter) != before


@pytest.mark.cases(1)
@pytest.mark.parametrize("part", ["tower", "language model", "processor", "training"])
def test_a_file_of_another_state_is_refused(tmp_path, part: str):
    """Of equal weights; in the state of the file it is loaded, also by another object."""

    def changed(vlm: VLM) -> None:
        if part == "tower":
            vlm.adapter.vision_blocks()[0].layer_norm1.eps = 0.5
        elif part == "language model":
            vlm.adapter.decoder.norm.variance_epsilon = 0.5
        elif part == "processor":
            vlm.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
        else:
            vlm.model.train()

    path, vlm = tmp_path / "session", VLM(*build_llava())
    changed(vlm)
    with vlm.session(images=make_image(60, 44)) as session:
        session.save(path)
    other = VLM(*build_llava())
    with pytest.raises(ModelError, match="other settings of the model, its adapters or its proc"):
        other.load_session(path)
    changed(other)
    other.load_session(path).close()


# --- saves that fail -----------------------------------------------------------------------------


def test_failed_folder_sync_keeps_the_new_file(vlm, tmp_path, monkeypatch):
    path = tmp_path / "a.session"
    with vlm.session(images=make_image()) as s:
        s.save(path)
        s.ask(QUESTIONS[0], **ASK)

        def full(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(files, "_sync_folder", full)
            with pytest.raises(VLMFastError, match="No space left"):
                s.save(path)
        assert vlm.load_session(path).messages == s.messages


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no device without an end")
def test_device_is_no_session(vlm):
    with pytest.raises(VLMFastError, match=r"/dev/zero cannot be read: Is not a regular file"):
        vlm.load_session("/dev/zero")


def test_unwritable_paths_raise(vlm, tmp_path):
    with vlm.session(images=make_image()) as s:
        with pytest.raises(VLMFastError, match=r"nowhere.a cannot be written: No such file"):
            s.save(tmp_path / "nowhere" / "a")
        (tmp_path / "folder").mkdir()
        with pytest.raises(VLMFastError, match=r"folder cannot be written"):
            s.save(tmp_path / "folder")
        assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from vlmfast.core import files, snapshot

    path, whole, lines = Path(sys.argv[1]), {}, 0
    tensors = {str(i): torch.full((1 << 14,), float(i), dtype=torch.float16) for i in range(4)}

    def counted(last):
        def trace(frame, event, argument):
            global lines
            if frame.f_code.co_filename not in (files.__file__, snapshot.__file__):
                return None
            lines += event == "line"
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        return trace

    for name in "ba":
        lines = 0
        sys.settrace(counted(None))
        snapshot.write(path, {"name": name}, tensors)
        sys.settrace(None)
        whole[name] = path.read_bytes()
    seen, torn = [], 0
    for last in range(1, lines + 1):
        if (child := os.fork()) == 0:
            lines = 0
            sys.settrace(counted(last))
            snapshot.write(path, {"name": "b"}, tensors)
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        metadata, _ = snapshot.read(path, "a file")
        seen.append(metadata["name"])
        assert path.read_bytes() == whole[metadata["name"]]
        for draft in path.parent.glob(".*.tmp"):
            torn += draft.read_bytes() not in whole.values()
            draft.unlink()
        if seen[-1] == "b":
            snapshot.write(path, {"name": "a"}, tensors)
    print("".join(seen), torn)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_killed_save_leaves_old_or_new_file(tmp_path):
    """The process is killed before every line that it runs."""
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "a.session")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(code, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    seen, torn = done.stdout.split()
    # The old file, then the new one from some line on; some runs left a partial temporary file.
    assert set(seen) == {"a", "b"} and seen == "".join(sorted(seen)) and int(torn) > 0


# --- errors --------------------------------------------------------------------------------------


def test_errors_leave_the_session_unchanged(vlm):
    image = make_image()
    with vlm.session(images=image, history=False) as s:
        expected = s.ask(QUESTIONS[0], **ASK).token_ids
        for call, error, message in (
            (lambda: s.ask("  "), VLMFastError, "question is empty"),
            (lambda: s.stream(""), VLMFastError, "question is empty"),
            (lambda: s.ask("what is <image> ?"), VLMFastError, "contains <image>"),
            (lambda: s.ask("what ?", recipe="hired"), RecipeError, "a session has one recipe"),
            (lambda: s.ask("what ?", num_beams=2), VLMFastError, "num_beams"),
        ):
            with pytest.raises(error, match=message):
                call()
            answer = s.ask(QUESTIONS[0], **ASK)
            assert answer.token_ids == expected and answer.stats.prompt_reused > 0
    for call in (lambda: s.ask("what ?"), lambda: s.stream("what ?"), lambda: s.save("nowhere")):
        with pytest.raises(VLMFastError, match="the session is closed"):
            call()
    s.close()  # closing twice is allowed
    assert s.bytes == 0
    with pytest.raises(VLMFastError, match="num_frames and fps are for video"):
        vlm.session(images=image, num_frames=3)
    with pytest.raises(VLMFastError, match=r"nowhere\.png"):
        vlm.session(images="nowhere.png")
    with pytest.raises(RecipeError, match="elastic: there are no weights"):
        vlm.session(images=image, recipe="elastic")
    assert s not in vlm._sessions.open


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", [None, SMALL["h2o"], "snapkv:keep=0.5,window=8"])
@pytest.mark.parametrize("history", [True, False])
def test_interrupted_answer_leaves_the_session_usable(vlm, recipe, history):
    def breaks(ids, scores, **kwargs):
        raise RuntimeError("broken")

    with (
        vlm.session(images=make_image(), recipe=recipe, history=history) as s,
        vlm.session(images=make_image(), recipe=recipe, history=history) as other,
    ):
        for question in QUESTIONS[:2]:
            with pytest.raises(RuntimeError, match="broken"):
                s.ask(question, stopping_criteria=[breaks], **ASK)
            assert s.ask(question, **ASK).token_ids == other.ask(question, **ASK).token_ids
        assert s.messages == other.messages


def test_query_dependent_media_stage_raises(vlm):
    from dataclasses import dataclass
    from typing import ClassVar

    @dataclass(frozen=True)
    class Asking(MediaStage):
        """Selects frames by the question."""

        name: ClassVar[str] = "test-asking"
        query_dependent: ClassVar[bool] = True

    with pytest.raises(RecipeError, match="test-asking chooses frames by the question"):
        vlm.session(video=[make_image()] * 3, recipe=Asking())


def test_changed_template_prefix_raises():
    vlm = VLM(*build_llava())
    with vlm.session(images=make_image()) as s:
        s.ask(QUESTIONS[0], **ASK)
        vlm.adapter.processor.chat_template = "Look: " + vlm.processor.chat_template
        vlm.processor.chat_template = vlm.adapter.processor.chat_template
        with pytest.raises(ModelError, match="before the images"):
            s.ask(QUESTIONS[1], **ASK)


def test_query_dependent_methods_declare_it():
    """Otherwise the first question of a session would select the tokens for all others."""
    for name in ("fastv", "pyramiddrop", "mustdrop", "atp", "elastic", "snapkv", "pyramidkv"):
        assert any(p.query_dependent for p in (stage_class(name)(), *stage_class(name)().expand()))
    for name in ("hired", "random", "grid", "h2o", "lookm", "kivi", "zipcache", "streamingllm"):
        stage = stage_class(name)()
        assert not any(part.query_dependent for part in (stage, *stage.expand())), name
