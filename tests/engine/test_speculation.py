"""Speculative decoding: drafts never change an answer, and its statistics are correct."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from support.closeness import apart, close, network
from support.engine.draws import (
    answered,
    drifting,
    left_by,
    near_ties,
    quantized,
    values_kept,
    verified,
    without_prefill,
)
from support.fake_drafters import Drafting, Knows
from support.models import shared
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, Answer, Request
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.errors import RecipeError

FLOAT = torch.float32  # norms and rotary tables are float32 in float64 models too
FAMILIES = {"llava": build_llava, "llava-next": build_llava_next}
RECIPES = [
    "none",
    "hired:0.5",
    "pyramiddrop",
    "lookm:0.8",
    "zipvl:page=8",
    "kivi:bits=4,group=4,residual=8",
    "h2o:0.7",
    "streamingllm:0.7",
]
PAGED = ("zipvl:page=8", "kivi:bits=4,group=4,residual=8")
# Decode stages of these run before every token, so a round has one token.
SINGLE = ("h2o:0.7", "streamingllm:0.7")
SAMPLED = {
    "do_sample": True,
    "seed": 5,
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.98,
    "repetition_penalty": 1.3,
}
WAYS = {"greedy": {"do_sample": False, "repetition_penalty": 1.1}, "sampled": SAMPLED}
QUESTION = "what is here ?"


def halves(axis: list) -> list[tuple]:
    """Family, value, way: every two of different axes meet; the other half is slow."""
    return [
        pytest.param(family, value, way, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
        for i, family in enumerate(FAMILIES)
        for j, value in enumerate(axis)
        for k, way in enumerate(WAYS)
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request) -> VLM:
    return shared(FAMILIES[request.param], dtype=torch.float64)


@pytest.fixture(scope="module")
def llava() -> VLM:
    return shared(build_llava, dtype=torch.float64)


@pytest.fixture(scope="module")
def half() -> VLM:
    return shared(build_llava, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def wanted(llava: VLM) -> Answer:
    """The greedy answer without drafts."""
    return llava.ask(QUESTION, **given())


def given(**more) -> dict:
    return {"images": make_image(seed=1), "max_new_tokens": 40, "eos_token_id": None, **more}


def drafted(vlm: VLM, wanted, recipe: str = "none", knows: Knows | None = None, **more):
    """The answer with drafts that follow ``wanted``, an answer without drafts."""
    knows = replace(knows or Knows(), answer=tuple(wanted.token_ids))
    return vlm.ask(QUESTION, recipe=Recipe.of(recipe) + knows, **more)


# --- equality ------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize(("vlm", "recipe", "way"), halves(RECIPES), indirect=["vlm"])
def test_drafts_do_not_change_the_answer(vlm: VLM, recipe: str, way: str) -> None:
    more = given(**WAYS[way])
    wanted = vlm.ask(QUESTION, recipe=recipe, **more)
    assert len(set(wanted.token_ids)) > 10
    accepted, rejected = set(), set()
    for wrong in (0.0, 0.5, 1.0):
        knows = Knows(cycle=True) if wrong == 0.5 else Knows(wrong=wrong)
        got = drafted(vlm, wanted, recipe, knows, **more)
        assert got.token_ids == wanted.token_ids, wrong
        stats = got.stats
        pairs = enumerate(
            zip(stats.accepted_at_depth, stats.drafted_at_depth, strict=True), start=1
        )
        for depth, (right, tried) in pairs:
            accepted |= {depth} if right else set()
            rejected |= {depth} if right < tried else set()
        assert stats.rounds + stats.accepted == 39
        assert stats.mean_emitted == 39 / stats.rounds
        assert stats.mean_accepted == stats.accepted / stats.rounds
        if recipe in SINGLE:
            assert stats.drafted == 0 and stats.rounds == 39
        elif wrong == 0.0:
            assert stats.rounds <= 13
        elif wrong == 1.0:
            assert stats.accepted == 0 < stats.drafted
    if recipe not in SINGLE:
        assert accepted >= {1, 2, 3, 4}
        assert rejected >= ({1, 2, 3} if recipe in PAGED else {1, 2, 3, 4})  # pages shorten rounds


def test_time_of_verification_is_within_that_of_the_answer(llava: VLM, wanted) -> None:
    start = time.perf_counter()
    stats = drafted(llava, wanted, **given()).stats
    assert 0 < stats.time_verify_s < time.perf_counter() - start


def test_seed_determines_the_sample(llava: VLM) -> None:
    """With a seed, sampling does not use torch's generator; without one it does."""
    more = given(**SAMPLED, max_new_tokens=16)
    one = llava.ask(QUESTION, **more)
    assert llava.ask(QUESTION, **more).token_ids == one.token_ids
    assert llava.ask(QUESTION, **more | {"seed": 6}).token_ids != one.token_ids
    free = {key: value for key, value in more.items() if key != "seed"}
    answers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        answers.append(llava.ask(QUESTION, recipe=Recipe((Nothing(),)), **free))
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids


@dataclass(frozen=True)
class Nothing(Knows):
    """Drafts nothing."""

    name: ClassVar[str] = "nothing"

    def open(self, target):
        return _Nothing(self, target)


class _Nothing(Drafting):
    def propose(self, root, budget):
        return Tree.chain([root])


def test_empty_drafts_build_no_tree(llava: VLM, wanted) -> None:
    got = llava.ask(QUESTION, recipe=Recipe((Nothing(),)), **given())
    assert got.token_ids == wanted.token_ids
    assert (got.stats.drafted, got.stats.rounds) == (0, 39)


# --- the cache -----------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "pyramiddrop", "lookm:0.8", "zipvl:page=8"])
def test_cache_equals_single_token_decoding(vlm: VLM, recipe: str) -> None:
    more = given(max_new_tokens=24)
    plain = answered(vlm, QUESTION, recipe=Recipe.of(recipe), **more)
    knows = Knows(answer=tuple(plain.sampler.tokens), wrong=0.3)
    drafts = answered(vlm, QUESTION, recipe=Recipe.of(recipe) + knows, **more)
    counts, wanted, tokens = left_by(plain)
    found, stored, _ = left_by(drafts)
    assert found == counts
    for one, other in zip(wanted, stored, strict=True):
        close(one, other, FLOAT, network(vlm.model, tokens))


# --- end of an answer ----------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_max_new_tokens_is_exact(llava: VLM, wanted, tokens: int) -> None:
    got = drafted(llava, wanted, **given(max_new_tokens=tokens))
    assert got.token_ids == wanted.token_ids[:tokens]


@pytest.mark.cases(3)
@pytest.mark.parametrize("at", range(8))
def test_eos_inside_an_accepted_path(llava: VLM, wanted, at: int) -> None:
    end = wanted.token_ids[at]
    at = wanted.token_ids.index(end)
    more = given(eos_token_id=end)
    assert llava.ask(QUESTION, **more).token_ids == wanted.token_ids[: at + 1]
    got = drafted(llava, wanted, **more)
    assert got.token_ids == wanted.token_ids[: at + 1]


def test_stop_strings(llava: VLM, wanted) -> None:
    letters = [llava.processor.tokenizer.decode([token]) for token in wanted.token_ids]
    stops = [letter for letter in letters[2:30] if letter.isascii() and letter.isprintable()]
    assert len(stops) > 2
    for stop in stops[:4]:
        plain = llava.ask(QUESTION, **given(stop_strings=[stop]))
        assert 0 < len(plain.token_ids) < 40
        got = drafted(llava, wanted, **given(stop_strings=[stop]))
        assert got.token_ids == plain.token_ids


class Fifth(StoppingCriteria):
    """Stops at a length and records the lengths it was called with."""

    def __init__(self, end: int) -> None:
        self.end, self.seen = end, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.end)


def test_stopping_criteria_run_for_every_token(llava: VLM, wanted) -> None:
    length = llava.inputs(QUESTION, images=make_image(seed=1))["input_ids"].shape[1]
    criteria = Fifth(length + 7)
    got = drafted(llava, wanted, **given(stopping_criteria=[criteria]))
    assert got.token_ids == wanted.token_ids[:7]
    assert criteria.seen == list(range(length + 1, length + 8))


class Prefixes(LogitsProcessor):
    """Forbids a token that depends on the whole prefix, and records the prefixes."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(tuple(input_ids[0].tolist()))
        scores[:, int(input_ids.sum()) % scores.shape[1] :: 7] = -torch.inf
        return scores


def test_processors_receive_each_node_prefix(llava: VLM) -> None:
    prefixes, others = Prefixes(), Prefixes()
    wanted = llava.ask(QUESTION, **given(logits_processor=LogitsProcessorList([prefixes])))
    more = given(logits_processor=LogitsProcessorList([others]))
    got = drafted(llava, wanted, **more)
    assert got.token_ids == wanted.token_ids and others.seen == prefixes.seen
    assert got.stats.accepted > 10


def test_scores_of_emitted_tokens(llava: VLM) -> None:
    more = given(return_dict_in_generate=True, output_scores=True, output_logits=True)
    plain = answered(llava, QUESTION, recipe=Recipe(), **more).sampler
    knows = Recipe((Knows(answer=tuple(plain.tokens), wrong=0.3),))
    got = answered(llava, QUESTION, recipe=knows, **more).sampler
    terms = network(llava.model, plain.length)
    assert torch.equal(plain.ids, got.ids)
    for name in ("scores", "raw"):
        left, right = getattr(plain, name), getattr(got, name)
        assert len(left) == len(right) == 40
        for one, other in zip(left, right, strict=True):
            close(one, other, FLOAT, terms)


# --- batches and sessions ------------------------------------------------------------------------


def requests(way: str) -> Iterator[Request]:
    for number, recipe in enumerate(["none", "pyramiddrop", "h2o:0.7", "zipvl:page=8", "none"]):
        generation = {
            **WAYS[way],
            "max_new_tokens": 16 + 6 * number,
            "eos_token_id": None,
        }
        if way == "sampled":
            generation["seed"] = number
        images = [make_image(seed=s) for s in range(1 + number % 2)]
        yield Request(QUESTION, images, recipe=recipe, generation=generation)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("vlm", "size", "way"), halves([2, 5]), indirect=["vlm"])
def test_batched_trees(vlm: VLM, way: str, size: int) -> None:
    """Each row has its own tree or none, and its own end."""
    asked, wanted = list(requests(way)), []
    for number, r in enumerate(asked):
        answer = vlm.ask(r.question, images=r.images, recipe=r.recipe, **r.generation)
        wanted.append(answer.token_ids)
        if number != 4:
            knows = Knows(answer=tuple(answer.token_ids), wrong=0.2, depth=2 + number)
            r.recipe = Recipe.of(r.recipe) + knows
    got = vlm.ask_many(asked, batch_size=size)
    assert [a.token_ids for a in got] == wanted
    assert sum(a.stats.accepted for a in got) > 10


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "lookm:0.8", "kivi:bits=4,group=4,residual=8"])
def test_sessions_with_drafts(llava: VLM, recipe: str) -> None:
    questions = [QUESTION, "and now ?", "what else ?"]
    more = {"max_new_tokens": 14, "eos_token_id": None}
    with llava.session(images=make_image(seed=1), recipe=recipe) as session:
        wanted = [session.ask(q, **more).token_ids for q in questions]

    class Follows(Knows):
        """Drafts the answers to all questions."""

        name: ClassVar[str] = "follows"

        def open(self, target):
            return Answering(Knows(wrong=0.2), target)

    class Answering(Drafting):
        def prefill(self, read):
            if not self.reads:
                self.stage = replace(self.stage, answer=tuple(answers.pop(0)))
            super().prefill(read)

    answers = [list(ids) for ids in wanted]
    with llava.session(images=make_image(seed=1), recipe=Recipe.of(recipe) + Follows()) as session:
        got = [session.ask(q, **more) for q in questions]
    assert [a.token_ids for a in got] == wanted
    assert all(a.stats.accepted > 2 for a in got)
    if recipe != "kivi:bits=4,group=4,residual=8":  # pages cannot be removed
        assert got[1].stats.prompt_reused > 0


# --- inputs of drafters --------------------------------------------------------------------------


@dataclass(frozen=True)
class Listens(Knows):
    """Records its inputs."""

    name: ClassVar[str] = "listens"
    features: ClassVar[bool] = True
    logits: ClassVar[bool] = True
    heard: ClassVar[list] = []

    def aux_hidden_state_layers(self, depth):
        return (1, depth - 1)

    def open(self, target):
        self.heard.append((target, drafting := Drafting(self, target)))
        return drafting


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", ["none", "hired:0.5", "pyramiddrop"])
def test_drafters_receive_the_pruned_prompt(vlm: VLM, recipe: str) -> None:
    """Features and aux_hidden_states belong to rows of the pruned prompt, then to tree nodes."""
    Listens.heard.clear()
    wanted = vlm.ask(QUESTION, recipe=recipe, **given())
    got = drafted(vlm, wanted, recipe, Listens(wrong=0.2), **given())
    assert got.token_ids == wanted.token_ids
    _, (target, drafting) = Listens.heard  # the first one is opened to check that it fits
    (read,) = drafting.reads
    rows = len(read.layout)
    assert rows == len(drafting.reads[0].embeds) == len(read.features)
    assert (rows < len(read.ids)) == (recipe != "none")
    assert read.aux_hidden_states.shape == (rows, 2, target.width)
    # The last row gives the first token, and the nodes give the next ones.
    assert int(target.logits(read.features[-1]).argmax()) == wanted.token_ids[0]
    emitted = []
    for done in drafting.rounds:
        close(target.logits(done.features), done.logits, FLOAT, target.width)
        assert done.aux_hidden_states.shape == (len(done.tree), 2, target.width)
        assert done.logits[done.path].argmax(-1).tolist() == done.emitted
        emitted += done.emitted
    assert wanted.token_ids[1 : 1 + len(emitted)] == emitted
    # Text rows have the model's embeddings.
    text = ~read.layout.visual
    ids = torch.tensor(read.ids)[read.layout.order[text]]
    assert torch.equal(read.embeds[text], target.embed(ids))  # looked up
    assert target.banned == (vlm.adapter.image_token_id,)


def test_taps_are_layer_inputs(llava: VLM, wanted) -> None:
    Listens.heard.clear()
    drafted(llava, wanted, "none", Listens(), **given())
    _, (_, drafting) = Listens.heard
    inputs = llava.inputs(QUESTION, images=make_image(seed=1))
    with torch.no_grad():
        states = llava.model(**inputs, output_hidden_states=True).hidden_states
    terms = network(llava.model, len(states[0][0]))
    close(drafting.reads[0].aux_hidden_states[:, 0], states[1][0], FLOAT, terms)
    close(drafting.reads[0].aux_hidden_states[:, 1], states[3][0], FLOAT, terms)
    close(drafting.reads[0].features, states[-1][0], FLOAT, terms)
    apart(
        drafting.reads[0].aux_hidden_states[:, 0], states[0][0], FLOAT, terms
    )  # control: another layer


def test_placeholders_are_never_drafted(llava: VLM, monkeypatch) -> None:
    @dataclass(frozen=True)
    class Wild(Knows):
        name: ClassVar[str] = "wild"

        def open(self, target):
            return _Wild(self, target)

    class _Wild(Drafting):
        def propose(self, root, budget):
            return Tree.of_paths(root, [[self.target.banned[0], 7], [9]])

    seen = verified(monkeypatch)
    llava.ask(QUESTION, recipe=Recipe((Wild(),)), **given())
    assert seen and all(tree.tokens[1:] == (9,) for tree in seen)


# --- two drafters --------------------------------------------------------------------------------


def test_drafters_that_cannot_share_a_tree(llava: VLM) -> None:
    @dataclass(frozen=True)
    class Alone(Knows):
        name: ClassVar[str] = "alone"
        merges: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Apart(Alone):
        name: ClassVar[str] = "apart"

    with pytest.raises(RecipeError, match="alone and apart cannot draft together"):
        llava.ask(QUESTION, recipe=Recipe((Alone(), Apart())), **given())


def test_linear_attention_raises(monkeypatch) -> None:
    llava = VLM(*build_llava())
    kinds = ["full_attention", "linear_attention"]
    config = llava.model.config.get_text_config()
    monkeypatch.setattr(config, "layer_types", kinds, raising=False)
    with pytest.raises(RecipeError, match="linear_attention layers"):
        llava.ask(QUESTION, recipe=Recipe((Knows(),)), **given())


def test_drafter_of_another_model_raises_before_prefill(llava: VLM) -> None:
    from vlmfast.drafters.draft_eagle.module import EagleModule

    key = ("draft-eagle", "auto", "eagle")
    for config, match in (({"width": 32, "heads": 2}, "width"),):
        llava.adapter.modules[key] = EagleModule(config)
        try:
            with pytest.MonkeyPatch.context() as patch:
                without_prefill(patch)
                with pytest.raises(RecipeError, match=match):
                    llava.ask(QUESTION, recipe="draft-eagle", **given())
        finally:
            del llava.adapter.modules[key]
    with pytest.raises(RecipeError, match="layers=0/9 must be ascending, each from 0 to 3"):
        llava.ask(QUESTION, recipe="draft-layerskip:layers=0/9", **given())
    assert llava.ask(QUESTION, **given()).token_ids


# --- half precision ------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "pyramiddrop", "lookm:0.8"])
def test_strict_redecodes_near_ties(half: VLM, recipe: str, monkeypatch) -> None:
    """Near ties are decoded with the cache of plain decoding, even if tree keys have drifted."""
    more = given(max_new_tokens=22)
    wanted = half.ask(QUESTION, recipe=recipe, **more)
    got = drafted(half, wanted, recipe, Knows(cycle=True), **more, strict=True)
    assert got.token_ids == wanted.token_ids
    # If every margin is below the tolerance, every token is decoded alone ...
    near_ties(monkeypatch, 1e9)
    got = drafted(half, wanted, recipe, Knows(cycle=True), **more, strict=True)
    assert got.token_ids == wanted.token_ids
    assert got.stats.accepted == 0 and got.stats.redecoded == 20  # the last one is not drafted
    # ... and if half of them are, the drafted tokens in between are rewritten.
    drifting(monkeypatch, 0.3)
    for ulps, same in ((40.0, True), (0.0, False)):  # the second is the control
        near_ties(monkeypatch, ulps)
        got = drafted(half, wanted, recipe, Patient(), **more, strict=True)
        assert (got.token_ids == wanted.token_ids) == same
    assert got.stats.accepted > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [*PAGED, "zipcache:page=8"])
def test_strict_answers_quantize_what_single_tokens_write(half, recipe, monkeypatch) -> None:
    """A tree's last bits never enter a page."""
    drifting(monkeypatch, 0.02)
    pages = quantized(monkeypatch)
    more = given(max_new_tokens=36)
    wanted = half.ask(QUESTION, recipe=recipe, **more)
    plain = pages.copy()
    assert len(plain) > 2 * 2 * len(half.adapter.decoder.layers)
    for strict in (True, False):  # the second is the control
        pages.clear()
        got = drafted(half, wanted, recipe, Patient(), **more, strict=strict)
        same = len(pages) == len(plain) and all(map(torch.equal, pages, plain))
        assert same == strict and got.stats.accepted > 0
        if strict:
            assert got.token_ids == wanted.token_ids


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [*PAGED, "zipcache:page=8"])
def test_strict_answers_are_drafted_up_to_the_first_page(llava, recipe: str) -> None:
    """Without near ties; the tokens before the page are decoded again, all others once."""
    name, more = recipe.partition(":")[0], given(max_new_tokens=36)
    wanted = llava.ask(QUESTION, recipe=recipe, **more)
    got = drafted(llava, wanted, recipe, strict=True, **more)
    assert got.token_ids == wanted.token_ids and got.stats.redecoded == 0
    assert 0 < got.stats.accepted < 8
    assert got.stats.speculation == f"off: strict, {name} modifies the cache"
    short = drafted(llava, wanted, recipe, strict=True, **given(max_new_tokens=4))
    assert short.stats.accepted == 2 and short.stats.speculation == "knows"


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "kivi:bits=4,group=4,residual=64"])
def test_strict_answers_of_a_session_leave_what_single_tokens_write(recipe, monkeypatch) -> None:
    drifting(monkeypatch, 0.02)
    vlm = VLM(*build_llava(dtype=torch.bfloat16))
    given = {"max_new_tokens": 24, "eos_token_id": None}

    def answered(stages: Recipe, **more):
        """An answer, and the values in the cache after it."""
        with vlm.session(images=make_image(seed=1), recipe=stages) as session:
            return session.ask(QUESTION, **given, **more), values_kept(session)

    wanted, values = answered(Recipe.of(recipe))
    knows = Recipe.of(recipe) + Patient(answer=tuple(wanted.token_ids))
    for strict in (True, False):  # the second is the control
        got, found = answered(knows, strict=strict)
        assert got.stats.accepted > 0
        assert torch.equal(found, values) == strict
    assert answered(knows, strict=True)[0].token_ids == wanted.token_ids


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["h2o:0.7", "cake:0.7", "streamingllm:0.7"])
def test_evictions_at_every_token_disable_drafts(llava, recipe: str) -> None:
    wanted = llava.ask(QUESTION, recipe=recipe, **given())
    for strict in (True, False):
        got = drafted(llava, wanted, recipe, strict=strict, **given())
        assert got.token_ids == wanted.token_ids and got.stats.drafted == 0
        name = recipe.partition(":")[0]
        assert got.stats.speculation == f"off: {name} modifies the cache at every token"
    with llava.session(images=make_image(seed=1), recipe=f"{recipe}+draft-ngram") as session:
        got = session.ask(QUESTION, strict=True, max_new_tokens=8, eos_token_id=None)
    assert len(got.token_ids) == 8 and got.stats.drafted == 0


def test_strict_answers_are_not_drafted_in_a_batch_without_drafts(half: VLM) -> None:
    generation = {"max_new_tokens": 8, "eos_token_id": None, "strict": True}
    requests = [
        Request(QUESTION, make_image(seed=1), recipe=Recipe((Patient(),))) for _ in range(2)
    ]
    answers = half.ask_many(requests, **generation)
    assert all(a.stats.drafted == 0 for a in answers)


@pytest.mark.parametrize("sampled", [False, True])
def test_strict_and_drafted_rows_in_one_batch(llava: VLM, sampled: bool) -> None:
    """The strict row has no drafts, and no seed if sampled; the other row's trees do not matter."""
    wanted = llava.ask(QUESTION, **given(max_new_tokens=8))
    drafting_recipe = Recipe((Knows(answer=tuple(wanted.token_ids)),))
    strict = {"max_new_tokens": 8, "eos_token_id": None, "strict": True, "do_sample": sampled}
    requests = [
        Request(QUESTION, make_image(seed=1), generation=strict),
        Request(
            QUESTION,
            make_image(seed=1),
            recipe=drafting_recipe,
            generation={**strict, "strict": False},
        ),
    ]
    requests[1].generation["do_sample"] = False
    first, second = llava.ask_many(requests, batch_size=2)
    assert second.token_ids == wanted.token_ids and second.stats.accepted > 0
    assert len(first.token_ids) == 8
    assert sampled or first.token_ids == wanted.token_ids


@dataclass(frozen=True)
class Patient(Knows):
    """Drafts nothing after a mismatch."""

    name: ClassVar[str] = "patient"

    def open(self, target):
        return _Patient(self, target)


class _Patient(Drafting):
    def propose(self, root, budget):
        answer = self.stage.answer
        if self.at > len(answer) or answer[self.at - 1] != root:
            return Tree.chain([root])
        return super().propose(root, budget)
