"""Keys and values in the prefix cache: what prompts and sessions continue from."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from support import tiny_families
from support.engine.kept import (
    KIND,
    Entry,
    Key,
    PrefixCache,
    beginning,
    beginnings,
    free_for_copies,
    overlook,
    recent,
    released_prefixes,
    tensors_of,
)
from support.engine.turns import free_memory
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Answer, ModelError, RecipeError, Request

FAMILIES = sorted(tiny_families.FIRST)
IMAGE = make_image(60, 44)
QUESTIONS = ("what is here ?", "what colour is it ?", "is there more of it ?")
# A prompt may continue from another one's keys and values under the first, not under the second.
SHARED = ("none", "hired:0.3", "divprune:0.3", "grid:0.5,positions=compact", "tome:budget=0.5")
ALONE = ("lookm:0.8", "kivi:group=8,residual=16", "h2o:0.5", "pyramiddrop:0.5", "sparsevlm:0.5")
# Cache methods of sessions; none depends on the question.
METHODS = {
    "none": "none",
    "lookm": "lookm:0.8",
    "kivi": "kivi:group=8,residual=16",
    "zipcache": "zipcache:page=4",
    "h2o": "h2o:0.5",
    "streamingllm": "streamingllm:0.4",
}


def pairs(others: Iterable[str]) -> list[Any]:
    """Families with something else; in the fast run each of both is there, not every pair."""
    return [
        pytest.param(family, other, marks=[pytest.mark.slow] if (i + j) % 3 else [])
        for i, family in enumerate(FAMILIES)
        for j, other in enumerate(others)
    ]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> VLM:
    """Every family in float64, so that rounding changes no token."""
    if request.param == "smolvlm":
        pytest.importorskip("num2words")
    model, processor = tiny_families.builders()[request.param]()
    return VLM(model.double(), processor)


@pytest.fixture
def vlm() -> VLM:
    return VLM(*build_llava(dtype=torch.float64))


def asked(vlm: VLM, question: str = QUESTIONS[0], recipe: str = "none", **more: Any) -> Answer:
    more = {"max_new_tokens": 6, "recipe": recipe} | more
    return vlm.ask(question, more.pop("images", IMAGE), **more)


def cold(vlm: VLM, *given: Any, **more: Any) -> Answer:
    with vlm.prefix_cache.bypassed():
        return asked(vlm, *given, **more)


def shown(answer: Answer) -> dict[str, Any]:
    """What does not depend on where the beginning of a prompt came from."""
    stats = answer.stats
    return {
        "tokens": answer.token_ids,
        "trace": answer.trace.to_dict(),
        "kept": stats.visual_tokens_kept,
        "layers": stats.visual_tokens_per_layer,
        "bytes": (stats.kv_bytes, stats.kv_bytes_full, stats.kv_tokens_per_layer),
    }


def rows(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward pass of the language model, as they come."""
    found: list[int] = []
    embed = vlm.adapter.embed

    def counted(ids: torch.Tensor) -> torch.Tensor:
        found.append(ids.shape[-1])
        return embed(ids)

    monkeypatch.setattr(vlm.adapter, "embed", counted)
    return found


def stored(vlm: VLM, tenant: str = "") -> list[Entry]:
    """All stored prefixes, the most recently used first."""
    return [of for of in recent(vlm.prefix_cache) if of.key[:2] == (KIND, tenant)]


def entries(vlm: VLM, tenant: str = "") -> list[tuple[int, ...]]:
    """Their ids."""
    return [of.key.ids for of in stored(vlm, tenant)]


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize(("family", "recipe"), pairs(SHARED), indirect=["family"])
def test_a_second_question_is_prefilled_after_the_image(family: VLM, recipe: str) -> None:
    family.prefix_cache.clear()
    try:
        wanted = [shown(cold(family, question, recipe)) for question in QUESTIONS]
    except RecipeError:
        pytest.skip("the recipe does not run on this family")
    answers = [asked(family, question, recipe) for question in QUESTIONS]
    assert [shown(answer) for answer in answers] == wanted
    reused = [answer.stats.prompt_reused for answer in answers]
    assert reused[0] == 0
    if answers[0].stats.visual_tokens_in and _fits(family):
        visual = int(family.adapter.visual(torch.tensor(entries(family)[0])).sum())
        assert min(reused[1:]) > visual  # all of the image


def test_the_text_after_a_reused_image_is_prefilled_in_chunks(vlm: VLM) -> None:
    given = {"question": "word " * 40, "prefill_chunk_size": 16}
    wanted = cold(vlm, **given)
    asked(vlm)
    got = asked(vlm, **given)
    stats = got.stats
    assert got.token_ids == wanted.token_ids and stats.prompt_reused > 0
    assert stats.prefill_chunks == math.ceil(stats.prompt_tokens / 16) > 2


def _fits(vlm: VLM) -> bool:
    """Whether short prompts of the family are stored: its layers attend without a window."""
    return all(window is None for window in vlm.adapter.windows)


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", ALONE)
def test_compressed_prompts_are_not_shared(vlm: VLM, recipe: str) -> None:
    """The question takes part in the compression."""
    for question in QUESTIONS[:2]:
        answer = asked(vlm, question, recipe)
        assert shown(answer) == shown(cold(vlm, question, recipe))
        assert answer.stats.prompt_reused == 0
    assert entries(vlm) == []


def test_only_new_rows_are_prefilled(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked(vlm)
    count = rows(vlm, monkeypatch)
    second = asked(vlm, QUESTIONS[1])
    stats = second.stats
    assert stats.prompt_reused + stats.prompt_fed == stats.kv_tokens_per_layer[0]
    assert sum(count) == stats.prompt_fed + stats.generated_tokens - 1
    assert first.stats.prompt_reused == 0 and stats.prompt_reused == stats.cached_tokens


def test_a_growing_conversation_is_one_entry(vlm: VLM) -> None:
    """Each turn replaces the prompt of the one before; the first is not prefilled again."""
    turns: list[dict[str, Any]] = []
    for question in QUESTIONS:
        text = {"type": "text", "text": question}
        media = [] if turns else [{"type": "image", "image": IMAGE}]
        turns.append({"role": "user", "content": [*media, text]})
        with vlm.prefix_cache.bypassed():
            wanted = vlm.chat(turns, max_new_tokens=6)
        answer = vlm.chat(turns, max_new_tokens=6)
        assert answer.token_ids == wanted.token_ids
        assert (answer.stats.prompt_reused > 0) == (len(turns) > 1)
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answer.text}]})
    assert len(entries(vlm)) == 1


def test_ten_questions_about_each_image_prefill_it_once(vlm: VLM) -> None:
    images = [make_image(seed=seed) for seed in range(4)]
    requests = [
        Request(f"what is number {n} ?", image, generation={"max_new_tokens": 4})
        for image in images
        for n in range(10)
    ]
    with vlm.prefix_cache.bypassed():
        wanted = [answer.token_ids for answer in vlm.ask_many(requests, batch_size=4)]
    answers = vlm.ask_many(requests, batch_size=4)
    assert [answer.token_ids for answer in answers] == wanted
    assert sum(answer.stats.prompt_reused == 0 for answer in answers) == len(images)
    assert len(entries(vlm)) == len(images)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "hired:0.5+draft-ngram", "draft-layerskip"])
def test_rows_do_not_write_what_is_stored(vlm: VLM, recipe: str) -> None:
    asked(vlm, QUESTIONS[0], recipe)
    (entry,) = stored(vlm)
    before = tensors_of(entry)
    assert asked(vlm, QUESTIONS[1], recipe, max_new_tokens=20).stats.prompt_reused > 0
    requests = [Request(question, IMAGE, recipe=recipe) for question in QUESTIONS]
    vlm.ask_many(requests, max_new_tokens=20)
    assert entry in stored(vlm)
    after = tensors_of(entry)
    assert len(before) == len(after) > 4
    assert all(map(torch.equal, before, after))


def test_chunks_and_drafters_continue_from_a_prefix(vlm: VLM) -> None:
    for recipe in ("none", "draft-ngram", "draft-layerskip"):
        vlm.prefix_cache.clear()
        for question, size in ((QUESTIONS[0], 16), (QUESTIONS[1], None), (QUESTIONS[2], 3)):
            wanted = cold(vlm, question, recipe)
            answer = asked(vlm, question, recipe, prefill_chunk_size=size)
            assert answer.token_ids == wanted.token_ids
            assert (answer.stats.prompt_reused > 0) == (question != QUESTIONS[0])
            assert answer.stats.drafted == wanted.stats.drafted


def test_autocast(vlm: VLM) -> None:
    """Keys are then wider than values; nothing is shared with other precisions."""
    vlm.model.float()
    asked(vlm)
    with torch.autocast("cpu", torch.bfloat16):
        for question, reused in zip(QUESTIONS, (False, True, True), strict=True):
            answer = asked(vlm, question)
            assert len(answer.token_ids) == 6 and (answer.stats.prompt_reused > 0) == reused
        with vlm.session(images=IMAGE) as session:
            assert len(session.ask(QUESTIONS[0], max_new_tokens=6).token_ids) == 6


# --- what must not be shared ---------------------------------------------------------------------


def halved(vlm: VLM) -> None:
    for layer in vlm.adapter.decoder.layers:
        layer.self_attn.v_proj.weight.data.mul_(0.5)  # leaves the version counter as it was


def inference_weights(vlm: VLM) -> None:
    with torch.inference_mode():
        vlm.model.load_state_dict(
            {name: value * 0.75 for name, value in vlm.model.state_dict().items()}, assign=True
        )


CHANGES = {
    "data": halved,
    "in place": lambda vlm: vlm.adapter.decoder.norm.weight.requires_grad_(False).mul_(1.5),
    "replaced": inference_weights,
    "dtype": lambda vlm: vlm.model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(vlm: VLM, change: str) -> None:
    asked(vlm)
    CHANGES[change](vlm)
    answer = asked(vlm, QUESTIONS[1])
    assert answer.stats.prompt_reused == 0
    assert answer.token_ids == cold(vlm, QUESTIONS[1]).token_ids


@pytest.mark.cases(1)
@pytest.mark.parametrize("history", [True, False])
def test_an_open_session_notices_changed_weights(
    vlm: VLM, monkeypatch: pytest.MonkeyPatch, history: bool
) -> None:
    """The control: with a constant fingerprint it answers from keys of the weights before."""

    def answers(constant: bool) -> tuple[Answer, Answer]:
        vlm = VLM(*build_llava(dtype=torch.float64))
        with monkeypatch.context() as patch, vlm.session(images=IMAGE, history=history) as session:
            if constant:
                overlook(patch, "weights")
            session.ask(QUESTIONS[0], max_new_tokens=6)
            halved(vlm)
            messages = session.messages if history else []
            answer = session.ask(QUESTIONS[1], max_new_tokens=12)
        fresh = VLM(*build_llava(dtype=torch.float64))
        halved(fresh)
        with fresh.session(images=IMAGE, history=history) as session:
            session.messages = messages
            return answer, session.ask(QUESTIONS[1], max_new_tokens=12)

    answer, wanted = answers(False)
    assert answer.token_ids == wanted.token_ids and answer.stats.prompt_reused == 0
    answer, wanted = answers(True)
    assert answer.stats.prompt_reused > 0
    assert answer.token_ids != wanted.token_ids


def test_another_setting_of_the_processor() -> None:
    """Of the same size, so that the ids of the prompt are the same."""
    model, processor = tiny_families.builders()["qwen2_5_vl"]()
    vlm = VLM(model.double(), processor)
    asked(vlm)
    vlm.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    answer = asked(vlm, QUESTIONS[1])
    assert answer.stats.prompt_reused == 0
    assert shown(answer) == shown(cold(vlm, QUESTIONS[1]))
    assert asked(vlm, QUESTIONS[2]).stats.prompt_reused > 0


def test_tenants_share_nothing(vlm: VLM) -> None:
    short = {"generation": {"max_new_tokens": 3}}
    names = ("alice", "bob", "alice")
    requests = [Request(QUESTIONS[0], IMAGE, tenant=name, **short) for name in names]
    reused = [vlm.submit(one).result().stats.prompt_reused for one in requests]
    assert reused[:2] == [0, 0] and reused[2] > 0
    assert len(entries(vlm, "alice")) == len(entries(vlm, "bob")) == 1


def test_training_mode_bypasses_it(vlm: VLM) -> None:
    asked(vlm)
    vlm.model.train()
    try:
        assert asked(vlm).stats.prompt_reused == 0
    finally:
        vlm.model.eval()
    assert asked(vlm).stats.prompt_reused > 0


# --- memory --------------------------------------------------------------------------------------


def test_an_entry_is_not_dropped_while_it_is_copied(
    vlm: VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All entries are dropped between the look-up and the copy; its buffers are still its own."""

    def dropped() -> None:
        vlm.prefix_cache.clear()
        assert not released

    released = released_prefixes(monkeypatch, before_copy=dropped)
    asked(vlm)
    wanted = cold(vlm, QUESTIONS[1])
    assert asked(vlm, QUESTIONS[1]).token_ids == wanted.token_ids
    vlm.prefix_cache.clear()
    assert len(released) == 1


def test_a_bound_below_one_entry_stores_nothing(vlm: VLM) -> None:
    vlm.prefix_cache.limit = 1000
    with vlm.session(images=IMAGE, recipe=METHODS["lookm"]) as session:
        assert session.reuses == "features"
        few = [session.ask(question, max_new_tokens=6) for question in QUESTIONS]
        assert session.reuses == "features" and session.bytes == 0
    assert asked(vlm).stats.prompt_reused == asked(vlm).stats.prompt_reused == 0
    assert entries(vlm) == []
    vlm.prefix_cache.limit = 1 << 28
    with vlm.session(images=IMAGE, recipe=METHODS["lookm"]) as session:
        many = [session.ask(question, max_new_tokens=6) for question in QUESTIONS]
        assert session.reuses == "kv" and session.bytes > 1000
    assert [a.token_ids for a in few] == [a.token_ids for a in many]


def test_buffers_return_to_the_pool(vlm: VLM) -> None:
    from support.engine.batched import CountingPool

    pool = vlm.adapter.pool = CountingPool()
    for question in QUESTIONS:
        asked(vlm, question)
    with vlm.session(images=IMAGE, recipe=METHODS["h2o"]) as session:
        for question in QUESTIONS:
            session.ask(question, max_new_tokens=6)
    assert pool.out > 0
    vlm.prefix_cache.clear()
    assert pool.out == 0


def test_nothing_is_copied_where_memory_is_short(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free_for_copies(monkeypatch, 100_000)
    asked(vlm)
    assert entries(vlm) == []
    monkeypatch.undo()
    asked(vlm)
    assert len(entries(vlm)) == 1


def test_entries_make_room_for_requests(vlm: VLM) -> None:
    """Where the memory that is free is not enough for one more row."""
    asked(vlm)
    assert len(entries(vlm)) == 1
    requests = [Request(question, make_image(seed=3)) for question in QUESTIONS]
    with free_memory(lambda device: 0 if vlm.prefix_cache.stats().bytes else 1 << 30):
        vlm.ask_many(requests, batch_size=3, max_new_tokens=4)
    assert vlm.prefix_cache.stats().evictions > 0


def test_two_threads_ask_about_one_image(vlm: VLM) -> None:
    wanted = [cold(vlm, question).token_ids for question in QUESTIONS[:2]]
    barrier = threading.Barrier(2)

    def run(question: str) -> Answer:
        barrier.wait()
        return asked(vlm, question)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, QUESTIONS[:2]))
    assert [answer.token_ids for answer in found] == wanted
    assert sorted(answer.stats.prompt_reused > 0 for answer in found) == [False, True]


# --- sessions ------------------------------------------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize(("family", "method"), pairs(METHODS), indirect=["family"])
def test_no_turn_prefills_the_images_again(family: VLM, method: str) -> None:
    """With every template, also where it writes an answer differently than it was generated."""
    try:
        session = family.session(images=make_image(120, 90), recipe=METHODS[method])
    except RecipeError:
        pytest.skip("the recipe does not run on this family")
    with session:
        assert session.reuses == "kv"
        prefix = len(beginning(session))
        for turn in range(4):
            answer = session.ask(QUESTIONS[turn % 3], max_new_tokens=6)
            assert answer.stats.prompt_reused >= prefix and session.reuses == "kv"


class Says(LogitsProcessor):
    """Makes the model generate these ids."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = list(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids.pop(0)] = 0.0
        return forced


def says(ids: list[int]) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Says(ids)]), "max_new_tokens": len(ids)}


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu", dtype=torch.float32)


@pytest.mark.cases(2)
@pytest.mark.parametrize("method", METHODS)
def test_an_answer_is_not_tokenized_again(tiny: VLM, method: str) -> None:
    """Its ids are kept, although its text has others."""
    tokenizer = tiny.processor.tokenizer
    text = " a red square"  # the template writes a blank before an answer
    usual = tokenizer(text, add_special_tokens=False).input_ids
    letters = [i for c in text for i in tokenizer(c, add_special_tokens=False).input_ids]
    assert letters != usual and tokenizer.decode(letters) == text == tokenizer.decode(usual)
    end = [tokenizer.eos_token_id]
    with tiny.session(images=make_image(128, 128), recipe=METHODS[method]) as session:
        first = session.ask("What is here?", **says(letters + end))
        assert first.text == text.strip()
        second = session.ask("And there?", max_new_tokens=4)
    consumed = first.stats.prompt_reused + first.stats.prompt_fed + len(letters)
    assert second.stats.prompt_reused == consumed


@pytest.mark.cases(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_rewritten_history_is_read_from_there_on(tiny: VLM, method: str) -> None:
    """The template drops what the answer begins with: a model's thoughts, for example."""
    tokenizer, processor = tiny.processor.tokenizer, tiny.processor
    template = processor.chat_template
    end = [tokenizer.eos_token_id]
    said = tokenizer("so a red square", add_special_tokens=False).input_ids + end
    with tiny.session(images=make_image(128, 128), recipe=METHODS[method]) as session:
        first = session.ask("What is here?", **says(said))
        turns = session.messages
        session.messages = [turns[0], {**turns[1], "content": "red square"}]
        second = session.ask("And there?", max_new_tokens=4)
    prompt = first.stats.prompt_reused + first.stats.prompt_fed
    assert second.stats.prompt_reused == prompt  # the state before the answer
    assert processor.chat_template == template


def test_sessions_and_prompts_share_the_image(vlm: VLM) -> None:
    asked(vlm)
    with vlm.session(images=IMAGE) as session:
        assert session.stats.prompt_fed == 0 < session.stats.prompt_reused
        assert session.ask(QUESTIONS[1], max_new_tokens=6).stats.prompt_reused > 0
    with vlm.session(images=IMAGE, recipe=METHODS["lookm"]) as session:
        assert session.stats.prompt_reused == 0
        with vlm.session(images=IMAGE, recipe=METHODS["lookm"]) as other:
            assert other.stats.prompt_fed == 0
            own = [session.ask(question, max_new_tokens=6) for question in QUESTIONS]
            others = [other.ask(question, max_new_tokens=6) for question in QUESTIONS]
    assert [a.token_ids for a in own] == [a.token_ids for a in others]


# --- the model of an open session ----------------------------------------------------------------

EPS = "variance_epsilon", 5.0
OF_LANGUAGE = {
    "data": halved,
    "eps": lambda vlm: setattr(vlm.adapter.decoder.layers[0].input_layernorm, *EPS),
    "scaling": lambda vlm: setattr(vlm.adapter.decoder.layers[0].self_attn, "scaling", 2.0),
}
OF_TOWER = {
    "data": lambda vlm: vlm.adapter.projector().linear_2.weight.data.mul_(-0.5),
    "eps": lambda vlm: setattr(vlm.adapter.vision_blocks()[0].layer_norm1, "eps", 0.5),
    "scale": lambda vlm: setattr(vlm.adapter.vision_blocks()[0].self_attn, "scale", 2.0),
    "activation": lambda vlm: setattr(vlm.adapter.projector(), "act", torch.nn.Tanh()),
    "adapter": lambda vlm: vlm.adapter.projector().linear_1.set_adapter("two"),
    "adapter off": lambda vlm: vlm.adapter.projector().linear_1.enable_adapters(False),
    "adapter scaled": lambda vlm: vlm.adapter.projector().linear_1.scaling.update(one=8.0),
    "hook": lambda vlm: vlm.adapter.projector().register_forward_hook(lambda *given: -given[2]),
}


def with_adapters(vlm: VLM) -> None:
    """Two adapters of PEFT on a projection of the image features; the first one is active."""
    from peft.tuners.lora import Linear, LoraConfig

    projector = vlm.adapter.projector()
    torch.manual_seed(0)
    own = {"r": 4, "lora_alpha": 16, "config": LoraConfig(init_lora_weights=False)}
    layer = projector.linear_1 = Linear(projector.linear_1, "one", **own)
    layer.update_layer("two", **own)
    projector.double().requires_grad_(False)


@pytest.mark.cases(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", OF_TOWER)
def test_a_changed_vision_tower_is_refused(vlm: VLM, change: str, training: bool) -> None:
    """By an open session, with keys and values and without; all others compute again."""
    with_adapters(vlm)
    vlm.model.train(training)
    recipes = ("none", "pyramiddrop:0.5")
    before = [asked(vlm, recipe=recipe).token_ids for recipe in recipes]
    sessions = [vlm.session(images=IMAGE, recipe=recipe, history=False) for recipe in recipes]
    given = {"max_new_tokens": 6}
    assert [s.ask(QUESTIONS[0], **given).token_ids for s in sessions] == before
    OF_TOWER[change](vlm)
    after = [asked(vlm, recipe=recipe) for recipe in recipes]
    assert after[0].stats.cached_tokens == 0
    assert [a.token_ids for a in after] == [cold(vlm, recipe=r).token_ids for r in recipes]
    assert [a.token_ids for a in after] != before, "the change does not matter"
    for session in sessions:
        with pytest.raises(ModelError, match="vision tower has changed"):
            session.ask(QUESTIONS[0], **given)
        with pytest.raises(ModelError, match="vision tower has changed"):
            session.ask(QUESTIONS[0], restore=True, **given)


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", OF_LANGUAGE)
def test_a_changed_language_model_is_noticed(vlm: VLM, change: str) -> None:
    """The images are prefilled again, in a session as well."""
    with vlm.session(images=IMAGE, history=False) as session:
        before = session.ask(QUESTIONS[0], max_new_tokens=6)
        assert before.stats.prompt_reused > 0
        OF_LANGUAGE[change](vlm)
        answer = session.ask(QUESTIONS[0], max_new_tokens=6)
        assert answer.stats.prompt_reused == 0
        assert answer.token_ids == cold(vlm).token_ids != before.token_ids
        again = asked(vlm)
        assert again.stats.prompt_reused > 0 and again.token_ids == answer.token_ids


def test_settings_that_are_back_find_their_entries(vlm: VLM) -> None:
    norm, found = vlm.adapter.decoder.layers[0].input_layernorm, []
    for eps in (1e-5, 5.0, 1e-5, 5.0):
        norm.variance_epsilon = eps
        found.append((asked(vlm).token_ids, asked(vlm).stats.prompt_reused > 0, len(entries(vlm))))
    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]
    assert [count for *_, count in found] == [1, 2, 2, 2]


def test_a_session_that_cannot_go_on_is_not_saved(vlm: VLM, tmp_path: Path) -> None:
    """The file would hold features of one tower beside the name of another one."""
    with vlm.session(images=IMAGE) as session:
        session.ask(QUESTIONS[0], max_new_tokens=2)
        session.save(tmp_path / "session")
        OF_TOWER["eps"](vlm)
        with pytest.raises(ModelError, match="vision tower has changed"):
            session.save(tmp_path / "session")


def test_other_settings_of_the_processor_are_refused(vlm: VLM) -> None:
    with vlm.session(images=IMAGE) as session:
        session.ask(QUESTIONS[0], max_new_tokens=2)
        vlm.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
        with pytest.raises(ModelError, match="image processor"):
            session.ask(QUESTIONS[0], max_new_tokens=2)


def test_another_device_or_address_is_no_change(vlm: VLM) -> None:
    with vlm.session(images=IMAGE) as session:
        session.ask(QUESTIONS[0], max_new_tokens=2)
        vlm.model.load_state_dict(copy.deepcopy(vlm.model.state_dict()), assign=True)
        session.ask(QUESTIONS[1], max_new_tokens=2)
    assert session.reuses == "features"


def test_what_began_with_another_model_is_not_stored(vlm: VLM) -> None:
    """The control: without the change the conversation is stored."""
    lengths = []
    for change in (lambda vlm: None, OF_LANGUAGE["eps"]):
        vlm.prefix_cache.clear()
        with vlm.session(images=IMAGE) as session:
            stream = session.stream(QUESTIONS[0], max_new_tokens=8, eos_token_id=None)
            next(stream)
            change(vlm)
            list(stream)
            lengths.append(max(map(len, entries(vlm))) - len(beginning(session)))
    assert lengths[0] > lengths[1] == 0


# --- look-ups ------------------------------------------------------------------------------------


TAILS = ((), (1,), (1, 1), (1, 2), (2,))


@st.composite
def searched(draw: st.DrawFn) -> Key:
    """Of few prefixes, most of which share a beginning that ends before or after a block."""
    ids = (0,) * draw(st.sampled_from([0, 1, 14, 16, 17])) + draw(st.sampled_from(TAILS))
    tenant, content = draw(st.sampled_from([("", ""), ("", ""), ("other", ""), ("", "more")]))
    return Key("x", tenant, content, ids)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "find", "find", "remove"]),
            searched(),
            st.sampled_from([0, 1, 2, 15, 16, 17, 19]),
        ),
        min_size=5,
    )
)
def test_a_search_finds_what_a_look_at_each_entry_finds(steps: list[Any]) -> None:
    """The longest common beginning of the same tenant, of several the last that was used."""
    cache, known = PrefixCache(1000), dict[Key, tuple[int, Entry]]()
    for step, key, least in steps:  # the last used one is the last that is known
        if step == "put":
            least = max(min(least, len(key.ids)), 1)  # no prefix is cut to nothing
            for old, (other, _) in list(known.items()):
                inside = old.ids and old.begins(key, len(old.ids)) and other >= least
                if old == key or inside:
                    del known[old]
            entry = cache.put(key, None, 1, least=least)
            assert entry is not None
            known[key] = least, entry
        elif step == "remove" and key in known:
            cache.remove(known.pop(key)[1])
        elif step == "find":
            shared = {own: _shared(own, key, of) for own, (of, _) in reversed(known.items())}
            best = max(shared, key=shared.__getitem__, default=key)
            count = shared.get(best, 0)
            wanted = (known[best][1], count) if count >= max(least, 1) else (None, 0)
            assert cache.search(key, least) == wanted
            if wanted[1]:
                known[best] = known.pop(best)
        assert [of.key for of in recent(cache)] == [*reversed(known)]
    cache.clear()
    assert beginnings(cache) == 0


def _shared(one: Key, other: Key, least: int) -> int:
    """How many of its first ids a prefix that can be cut to ``least`` shares."""
    pairs = enumerate(zip(one.ids, other.ids, strict=False))
    most = min(len(one.ids), len(other.ids)) if one[:3] == other[:3] else 0
    count = min(next((n for n, (a, b) in pairs if a != b), most), most)
    return count if count >= least else 0


def test_a_search_costs_ids_and_not_entries() -> None:
    """Counted in lines of Python, with entries that share all but the end of a prompt."""
    ids, cache, costs = tuple(range(400)), PrefixCache(1000), list[int]()

    def lines(frame: Any, event: str, argument: Any) -> Any:
        costs[-1] += event == "line"
        return lines

    for number in range(200):
        cache.put(Key("x", "", "", (*ids, 1000 + number, *range(40))), number, 1, least=300)
        if number in (9, 199):
            costs.append(0)
            before = sys.gettrace()
            sys.settrace(lines)
            try:
                entry, count = cache.search(Key("x", "", "", (*ids, 1005, *range(30))), 350)
            finally:
                sys.settrace(before)
            assert entry is not None and (entry.value, count) == (5, 431)
    assert costs[0] > 10 and costs[1] <= costs[0] + 10
