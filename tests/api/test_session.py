"""Sessions: reuse between questions, eviction, and saved sessions."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList

from support.engine.driven import harmless
from support.engine.kept import open_sessions
from support.paths import ROOT
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, ModelError, RecipeError, VLMFastError
from vlmfast.api.identity import identity
from vlmfast.api.session_file import read_content, write_content
from vlmfast.core.protocols import DecodeStage, MediaStage
from vlmfast.core.registry import stage_class

EXAMPLE = ROOT / "examples" / "picture.png"
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
        assert [s.ask(q, **ASK).token_ids for q in QUESTIONS[::-1]] == expected[::-1]
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
    assert open_sessions(vlm) == []


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


SAVED = {
    "none": None,
    "hired": "hired:0.4",
    "pyramiddrop": "pyramiddrop",
    "mustdrop": "mustdrop",
    "crops": "crops:0.5",
    "snapkv": "snapkv:keep=0.5,window=8",
    "draft": "draft-ngram",
    **SMALL,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("recipe", SAVED.values(), ids=SAVED)
def test_loaded_session_continues(tmp_path, recipe, history):
    """With equal ids, except for methods that change the cache in decode: answers are prefilled."""
    path, options = tmp_path / "a.session", {"max_new_tokens": 10}
    vlm, other = VLM(*build_llava_next()), VLM(*build_llava_next())
    with vlm.session(images=make_image(), recipe=recipe, history=history) as s:
        for question in QUESTIONS[:2]:
            s.ask(question, **options)
        s.save(path)
        loaded = other.load_session(path)
        assert str(loaded.recipe) == str(s.recipe) and loaded.reuses == s.reuses
        assert loaded.messages == s.messages and loaded.history == history
        assert bool(loaded.bytes) == (s.reuses == "kv") and loaded.stats.time_vision_s > 0
        mine, its = (of.ask(QUESTIONS[2], **options) for of in (s, loaded))
        assert len(loaded.messages) == len(s.messages) and its.trace.images == []
        lengths = [of.stats.prompt_fed + of.stats.prompt_reused for of in (mine, its)]
        assert lengths[0] == lengths[1]
        if history and s.recipe.acting(DecodeStage):
            return
        assert mine.token_ids == its.token_ids and torch.equal(mine.trace.depth, its.trace.depth)
        full = [of.ask(QUESTIONS[0], restore=True, **options).token_ids for of in (s, loaded)]
        assert full[0] == full[1]
    metadata, tensors = read_content(path)  # the control: other pixels
    write_content(path, metadata, {key: -of for key, of in tensors.items()})
    assert other.load_session(path).ask(QUESTIONS[2], **options).token_ids != its.token_ids


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


@pytest.mark.parametrize("asked", [0, 2])
def test_session_without_images_is_saved(vlm, tmp_path, asked):
    with vlm.session() as s:
        for question in QUESTIONS[:asked]:
            s.ask(question, **ASK)
        s.save(tmp_path / "a")
        expected = s.ask(QUESTIONS[2], **ASK)
    answer = vlm.load_session(tmp_path / "a").ask(QUESTIONS[2], **ASK)
    assert answer.token_ids == expected.token_ids
    assert answer.stats.prompt_fed == expected.stats.prompt_fed + expected.stats.prompt_reused


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
        assert list(file.keys()) == ["pixel_values"]
    assert list(saved.parent.iterdir()) == [saved]


def test_damaged_files_are_rejected(vlm, saved, tmp_path):
    data, path, rng = saved.read_bytes(), tmp_path / "a.session", random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    # Half of the flipped bits are in the header, which is smaller.
    offsets = [rng.randrange(header) for _ in range(500)]
    offsets += [rng.randrange(header, len(data)) for _ in range(500)]
    cuts = [0, 1, 8, 9, 40, 90, len(data) - 1, *rng.sample(range(len(data)), 20)]
    broken = [*(data[:cut] for cut in cuts), data + b"\0", data + data, b"\0" + data]
    for offset in [*range(100), *offsets, len(data) - 1]:
        bit = data[offset] ^ 1 << rng.randrange(8)
        broken.append(data[:offset] + bytes([bit]) + data[offset + 1 :])
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(VLMFastError, match=r"is damaged|is not a saved session|in format"):
            vlm.load_session(path)


def test_incompatible_sessions_are_rejected(vlm, saved, tmp_path):
    from safetensors.torch import save_file

    target = tmp_path / "a.session"
    metadata, tensors = read_content(saved)
    for changes, message in (
        ({"version": "3"}, "in format 3; this vlmfast reads format 2"),
        ({"kind": "something"}, "is not a saved session"),
        ({"recipe": "newest:0.2"}, "unknown method 'newest'"),
    ):
        write_content(target, metadata | changes, tensors)
        with pytest.raises(VLMFastError, match=message):
            vlm.load_session(target)
    save_file({"x": torch.zeros(3)}, target, metadata={"format": "pt"})
    with pytest.raises(VLMFastError, match="is not a saved session"):
        vlm.load_session(target)
    with pytest.raises(VLMFastError, match=r"nowhere.*cannot be read: No such file"):
        vlm.load_session(tmp_path / "nowhere")

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
    assert s not in open_sessions(vlm)


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
