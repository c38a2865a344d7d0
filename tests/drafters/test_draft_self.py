"""Drafts over a view of the model's own cache: answers are those of plain decoding.

The product of views, families, ways of asking and samplers is tested by pairs, in float64.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from support import tiny_families
from support.covering import covering
from support.engine.cpu_graph import captured_by_stand_in
from support.engine.draws import drafting_passes, slot_lists, verified
from support.models import shared
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.core.drafting import SlotList
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_self import Chain, DraftSelf, KeptSlots
from vlmfast.errors import RecipeError, VLMFastError

BUILD = tiny_families.first()
if importlib.util.find_spec("num2words") is None:
    del BUILD["smolvlm"]  # needed by its processor
BUILD["gemma3 windows"] = lambda: tiny_families.build_gemma3(window=40)
VIEWS = (
    "draft-self:keep=0.3,confidence=0",
    "draft-self:keep=1,confidence=0,refresh=1",
    "draft-self:view=snapkv,keep=0.5,confidence=0,refresh=2",
    "draft-self:view=fastv,keep=0.5,confidence=0",
    "draft-self:view=divprune,keep=0.5,confidence=0",
    "draft-ngram+draft-self:view=h2o,keep=0.5,refresh=3",
)
# Every method of which a view can be made; that of clip-relevance needs a model of its own.
EVICTORS = ("cake", "h2o", "pyramidkv", "snapkv", "streamingllm", "vlcache")
REDUCERS = (
    *("divprune", "downsample", "flashvid", "grid", "hired", "mmtok", "prumerge", "prumerge-plus"),
    *("random", "scope", "visionzip"),
)
DROPPERS = ("dart", "fastv", "pyramiddrop")
FAST = ("llava", "qwen2_5_vl", "gemma3 windows", "llava_next", "internvl")
OTHERS = ["llava_next_video", "llava_onevision", "qwen3_vl", "idefics3", "gemma3"]
PENALIZED = {"do_sample": False, "repetition_penalty": 1.1}
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.8, "top_k": 50, "top_p": 0.98}
SAMPLERS = {
    "greedy": {"do_sample": False},
    "penalized": PENALIZED,
    "sampled": SAMPLED,
    "min-p": {"do_sample": True, "seed": 7, "min_p": 0.02, "repetition_penalty": 1.2},
}
WAYS = {"single": 1, "batch": 3, "session": 2}  # and the generations of a case
QUESTION = "what is here, and where does it stand in the image ?"
QUESTIONS = (
    QUESTION,
    "is there a red thing, and how large is it ?",
    "count all of the things here !",
)


def generations(cases: list[tuple]) -> Counter:
    """How often each way of asking generates an answer with drafts."""
    found = Counter()
    for _, _, way, _ in cases:
        found[way] += WAYS[way]
    return found


def filled(cases: list[tuple], views: tuple, families: list[str], least: int) -> list[tuple]:
    """``cases``, and random others until each way of asking has ``least`` generations."""
    draw, found = random.Random(0), list(cases)
    for way in WAYS:
        while generations(found)[way] < least:
            case = draw.choice(views), draw.choice(families), way, draw.choice(list(SAMPLERS))
            found += [case] if case not in found else []
    return found


PAIRS = covering((list(VIEWS), list(FAST), list(WAYS), list(SAMPLERS)))
QUICK = filled(PAIRS, VIEWS, OTHERS, 30)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models({})


@dataclass
class Models:
    made: dict[str, VLM]

    def __call__(self, family: str) -> VLM:
        if family not in self.made:
            model, processor = BUILD[family]()
            self.made[family] = VLM(model.double(), processor)
        return self.made[family]


@pytest.fixture(scope="module")
def llava() -> VLM:
    return shared(build_llava, dtype=torch.float64)


def given(**more) -> dict:
    return {"images": make_image(seed=1), "max_new_tokens": 24, "eos_token_id": None, **more}


def answers(
    vlm: VLM, recipe: str, way: str, tokens: int, number: int = 1, history: bool = True, **sampler
) -> list:
    """The answers to ``number``, which chooses images and questions."""
    more = {"max_new_tokens": tokens, "eos_token_id": None, **sampler}
    question = QUESTIONS[number % len(QUESTIONS)]
    if way == "single":
        return [vlm.ask(question, images=make_image(seed=number), recipe=recipe, **more)]
    if way == "session":
        given = {"images": make_image(seed=number), "recipe": recipe, "history": history}
        with vlm.session(**given) as session:
            return [session.ask(text, **more) for text in (question, "and there ?")]
    top_logprobs = more.pop("top_logprobs", None)
    requests = [
        Request(
            question + " and there ?" * row,
            [make_image(seed=number + image) for image in range(1 + row // 2)],
            recipe=recipe,
            generation={**more, "max_new_tokens": tokens - 3 * row},
        )
        for row in range(3)
    ]
    return vlm.ask_many(requests, batch_size=3, top_logprobs=top_logprobs)


def without(recipe: str) -> str:
    """A recipe without its drafters."""
    return "+".join(word for word in recipe.split("+") if "draft" not in word) or "none"


def check(models: Models, case: tuple, tokens: int) -> tuple[int, int]:
    """Compare drafted with plain answers. Returns how many drafts were accepted and rejected."""
    recipe, family, way, sampler = case
    number = zlib.crc32("|".join(case).encode())
    vlm, more = models(family), SAMPLERS[sampler]
    wanted = answers(vlm, without(recipe), way, tokens, number, **more)
    got = answers(vlm, recipe, way, tokens, number, **more)
    assert len(got) == WAYS[way]
    assert [a.token_ids for a in got] == [a.token_ids for a in wanted], case
    accepted = rejected = 0
    for answer in got:
        stats = answer.stats
        assert stats.drafted > 0, case
        assert stats.rounds + stats.accepted == len(answer.token_ids) - 1, case
        if "keep=1," in recipe and "repetition_penalty" not in more:  # drafts do not know of it
            assert stats.accepted == stats.drafted, case
        accepted += stats.accepted
        rejected += stats.drafted - stats.accepted
    return accepted, rejected


def check_view(models: Models, cases: list[tuple], tokens: int) -> None:
    """All ``cases`` of one view; it has to be right and wrong in some of them."""
    accepted, rejected = map(
        sum, zip(*(check(models, case, tokens) for case in cases), strict=True)
    )
    assert accepted > 0
    assert rejected > 0


def test_every_method_is_a_view_or_refused() -> None:
    found, refused = set(), {}
    for name in stage_names():
        try:
            DraftSelf(view=name, keep=0.5).selects  # noqa: B018, the property checks the view
        except RecipeError as error:
            refused[name] = str(error)
        else:
            found.add(name)
    assert found == {*EVICTORS, *REDUCERS, *DROPPERS, "clip-relevance"}
    for name, reason in refused.items():
        assert f"view={name}" in reason and "allowed are topk" in reason


@pytest.mark.cases(2)
@pytest.mark.parametrize("view", VIEWS)
def test_pairs(models: Models, view: str) -> None:
    check_view(models, [case for case in QUICK if case[0] == view], tokens=10)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3 windows"])
def test_a_view_of_streamingllm_needs_no_rotation(models: Models, family: str) -> None:
    """Qwen2.5-VL refuses the method itself, which rotates the slots that it keeps."""
    recipe = "draft-self:view=streamingllm,keep=0.5,confidence=0"
    if family == "qwen2_5_vl":
        with pytest.raises(RecipeError, match=r"streamingllm|rotary ids"):
            answers(models(family), "streamingllm:0.5", "single", 4)
    check(models, (recipe, family, "batch", "greedy"), tokens=16)


@pytest.mark.slow
def test_a_view_of_clip_relevance(models: Models, tmp_path, monkeypatch) -> None:
    """Its relevance model has to be named, so that it is a view of a recipe file."""
    pytest.importorskip("open_clip", reason="OpenCLIP (open_clip_torch) is not installed")
    from support import tiny_clip

    model, pretrained = tiny_clip.build(tmp_path)
    monkeypatch.chdir(tmp_path)
    Recipe.parse(f"clip-relevance:0.5,model={model},pretrained={pretrained}").save("clip.yaml")
    recipe = "draft-self:view=clip.yaml,confidence=0"
    families = itertools.cycle(("llava", "qwen2_5_vl", "internvl"))
    cases = [
        (recipe, family, way, sampler)
        for (way, sampler), family in zip(itertools.product(WAYS, SAMPLERS), families, strict=False)
    ]
    check_view(models, cases, tokens=24)


# --- what a draft reads --------------------------------------------------------------------------


@pytest.fixture
def trees(monkeypatch) -> list[Tree]:
    """The trees that are verified."""
    return verified(monkeypatch)


@pytest.fixture
def chains(monkeypatch) -> list[Chain]:
    """The drafters that are opened for a sequence."""
    found = []

    def opened(self, target):
        found.append(Chain(self, target))
        return found[-1]

    monkeypatch.setattr(DraftSelf, "open", opened)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "method", ["snapkv:0.5,window=8", "pyramidkv:0.5", "h2o:0.5,decode=false", "vlcache:0.4"]
)
def test_drafts_are_those_of_the_evicted_cache(llava, trees, tmp_path, method: str) -> None:
    """The first chain is what the model answers where the method has evicted all other slots."""
    wanted = llava.ask(QUESTION, recipe=method, **given()).token_ids
    plain = llava.ask(QUESTION, **given()).token_ids
    assert wanted[:8] != plain[:8]
    Recipe.parse(method).save(tmp_path / "view.yaml")
    trees.clear()
    drafter = f"draft-self:view={tmp_path / 'view.yaml'},steps=7,confidence=0"
    assert llava.ask(QUESTION, recipe=drafter, **given()).token_ids == plain
    assert list(trees[0].tokens) == wanted[:8]


def test_views_of_drops_are_the_rows_that_enter_each_layer(llava, chains) -> None:
    dropped = llava.ask(QUESTION, recipe="fastv:0.4", **given()).trace.depth
    llava.ask(QUESTION, recipe="draft-self:view=fastv,keep=0.4,refresh=1", **given())
    chain = next(chain for chain in chains if chain.view is not None)
    visual = chain.visual[0][0].nonzero().flatten()
    deepest, fewest = int(dropped.max()), int(dropped.min())
    assert fewest < deepest
    for layer, part in enumerate(chain.view):
        wanted = set(visual[(dropped > layer) | (dropped == deepest)].tolist())
        for head, count in enumerate(part.counts.tolist()):
            got = set(part.slots[head, :count].tolist())
            assert got & set(visual.tolist()) == wanted
            assert got - set(visual.tolist()) == set(
                (~chain.visual[0][0]).nonzero().flatten().tolist()
            )


def test_a_draft_ends_with_its_confidence(llava, trees) -> None:
    plain = llava.ask(QUESTION, **given())
    for confidence, most in ((0.0, 4), (1.0, 1)):
        trees.clear()
        recipe = f"draft-self:confidence={confidence}"
        got = llava.ask(QUESTION, recipe=recipe, **given())
        assert got.token_ids == plain.token_ids
        assert max(tree.depth for tree in trees) == most


def test_a_view_follows_the_attention_of_the_verified_tree(
    llava, trees, chains, monkeypatch
) -> None:
    """Against the attention that Hugging Face's own forward returns for prompt and tree."""
    recipe = "draft-self:keep=0.4,confidence=0,refresh=99"  # only the first round is observed
    llava.ask(QUESTION, recipe=recipe, **given())
    chain, tree = next(chain for chain in chains if chain.view is not None), trees[0]
    assert tree.depth == 4
    wanted = most_attended(llava, QUESTION, tree, chain)
    assert slots_of(chain) == wanted
    assert wanted[1:] != wanted[:-1]
    # The control: a view that is never refreshed.
    chains.clear()
    monkeypatch.setattr(Chain, "observer", lambda chain: None)
    llava.ask(QUESTION, recipe=recipe, **given())
    stale = next(chain for chain in chains if chain.view is not None)
    assert slots_of(stale) != wanted


def test_a_view_follows_the_question_of_the_session(llava, trees, chains) -> None:
    """The images were read without a question, and the first one must not count for the second."""
    recipe = "draft-self:keep=0.4,confidence=0,refresh=99"
    more = {name: value for name, value in given().items() if name != "images"}
    opened = {"images": make_image(seed=1), "recipe": recipe, "history": False}
    found, wanted = [], []
    with llava.session(**opened) as session:
        for question in (QUESTION, QUESTIONS[1]):
            trees.clear()
            chains.clear()
            session.ask(question, **more)
            assert session.reuses == "kv"
            chain = next(chain for chain in chains if chain.view is not None)
            found.append(slots_of(chain))
            wanted.append(most_attended(llava, question, trees[0], chain))
    assert found == wanted
    assert wanted[0] != wanted[1]
    chains.clear()
    with llava.session(**opened) as session:
        session.ask(QUESTIONS[1], **more)
    alone = next(chain for chain in chains if chain.view is not None)
    assert slots_of(alone) == found[1]


def slots_of(chain: Chain) -> list[list[set[int]]]:
    """The slots of a view, by layer and KV head."""
    return [
        [set(own[:count].tolist()) for own, count in zip(part.slots, part.counts, strict=True)]
        for part in chain.view
    ]


def most_attended(vlm: VLM, question: str, tree: Tree, chain: Chain) -> list[list[set[int]]]:
    """What `topk` keeps: all text, and the visual slots with most attention, `chain.stage.keep`."""
    visual, found = chain.visual[0][0], []
    count = int(chain.stage.keep * int(visual.sum()))
    text = set((~visual).nonzero().flatten().tolist())
    for attention, part in zip(
        attention_of(vlm, question, list(tree.tokens)), chain.view, strict=True
    ):
        received = attention[:, -len(tree) :, : len(visual)].sum(1)
        scores = received.unflatten(0, (len(part.slots), -1)).sum(1).masked_fill(~visual, -1)
        found.append([set(best.tolist()) | text for best in scores.topk(count).indices])
    return found


@torch.no_grad()
def attention_of(vlm: VLM, question: str, answer: list[int]) -> list[torch.Tensor]:
    """By layer, Hugging Face's attention (Hq, S, S) over prompt and answer, all tokens a chain."""
    from vlmfast.api.request import messages_of, render, tensors_of

    prompt = render(vlm.adapter, messages_of(question, images=make_image(seed=1)), Recipe())
    tensors = tensors_of(vlm.adapter, prompt)
    tensors["input_ids"] = torch.cat([tensors["input_ids"], torch.tensor([answer])], 1)
    tensors.pop("attention_mask", None)
    before = vlm.model.config._attn_implementation
    vlm.model.set_attn_implementation("eager")
    try:
        found = vlm.model(**tensors, output_attentions=True).attentions
    finally:
        vlm.model.set_attn_implementation(before)
    return [layer[0] for layer in found]


def test_views_that_read_the_question_share_no_prefill(llava) -> None:
    """A session then prefills the images for each question; refreshed views share theirs."""
    more = {"max_new_tokens": 3, "eos_token_id": None}
    for view in ("topk", "snapkv", "divprune", "mmtok", *DROPPERS):
        recipe = f"draft-self:view={view},keep=0.5"
        with llava.session(images=make_image(seed=1), recipe=recipe) as session:
            reuses = session.reuses
            stats = [session.ask(question, **more).stats for question in ("what ?", "why ?")]
        shares = view not in ("mmtok", *DROPPERS)
        assert reuses == ("kv" if shares else "features")
        assert [own.prompt_reused > own.visual_tokens_in for own in stats] == [shares] * 2


# --- stale views ---------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch) -> Iterator:
    """Change the notes of all layers after the prompt."""

    def plant(change) -> None:
        finish = KeptSlots.finish

        def changed(self, context, cache):
            cache = finish(self, context, cache)
            layers = context.notes[self.name]["layers"]
            layers.update({layer: change(*note) for layer, note in layers.items()})
            return cache

        monkeypatch.setattr(KeptSlots, "finish", changed)

    return plant


def test_a_view_of_another_cache_is_refused(llava, planted) -> None:
    planted(lambda slots, counts, start, visual: (slots, counts, start + 1, visual))
    with pytest.raises(VLMFastError, match="draft-self: the stored view of layer 0 is damaged"):
        llava.ask(QUESTION, recipe="draft-self", **given())


@pytest.mark.parametrize("far", [-1, 1000])
def test_slots_outside_the_cache_are_refused(llava, planted, far: int) -> None:
    planted(lambda slots, counts, start, visual: (slots * 0 + far, counts, start, visual))
    with pytest.raises(VLMFastError, match="the view of layer 0 is of another cache"):
        llava.ask(QUESTION, recipe="draft-self", **given())


# --- requests ------------------------------------------------------------------------------------


def test_rows_share_the_passes_of_drafts(llava, monkeypatch) -> None:
    """A batch drafts with as many forward passes as one row; a row that fails ends alone."""
    passes = drafting_passes(monkeypatch)
    recipe = "draft-self:keep=1,confidence=0,steps=3"
    more = given(max_new_tokens=21)
    requests = [Request(QUESTION, more["images"], recipe=recipe) for _ in range(3)]
    generation = {name: value for name, value in more.items() if name != "images"}
    wanted = llava.ask(QUESTION, **more).token_ids
    assert [a.token_ids for a in llava.ask_many(requests, **generation)] == [wanted] * 3
    assert [rows for rows, _ in passes].count(3) == 15
    propose = Chain.propose

    def fails(self, root, budget):
        tree = yield from propose(self, root, replace(budget, depth=1))
        if self.stage.steps == 2:
            raise ArithmeticError("planted")
        return tree

    monkeypatch.setattr(Chain, "propose", fails)
    requests[1] = replace(requests[1], recipe=recipe.replace("steps=3", "steps=2"))
    got = llava.ask_many(requests, errors="keep", **generation)
    assert isinstance(got[1], ArithmeticError)
    assert [got[0].token_ids, got[2].token_ids] == [wanted] * 2


def test_lists_of_a_batch_follow_its_rows() -> None:
    """Views are replaced, removed and longer than before; rows join and leave."""
    draw = random.Random(0)

    def view() -> tuple[SlotList, ...]:
        parts = []
        for _ in range(2):
            start = draw.randint(1, 9)
            counts = torch.tensor([draw.randint(0, start) for _ in range(3)])
            slots = torch.arange(int(counts.max())).repeat(3, 1)
            parts.append(SlotList(slots, counts, torch.full((3,), start), (start,)))
        return tuple(parts)

    listed, views = slot_lists(2), [view(), None]
    for _ in range(60):
        kind = draw.choice(["none", "replace", "remove", "join", "leave"])
        row = draw.randrange(len(views))
        if kind in ("replace", "remove"):
            views[row] = view() if kind == "replace" else None
        elif kind == "join" and len(views) < 5:
            views.append(view())
        elif kind == "leave" and len(views) > 1:
            views[row] = views[-1]
            views.pop()
        if not any(views):
            views[0] = view()
        found = listed(list(views))
        assert len(found) == 2
        for layer, got in enumerate(found):
            fresh = SlotList.stacked([own and own[layer] for own in views])
            assert got.least == fresh.least
            assert torch.equal(got.counts, fresh.counts) and torch.equal(got.start, fresh.start)
            used = torch.arange(fresh.slots.shape[2]) < fresh.counts[..., None]
            width = got.slots[..., : fresh.slots.shape[2]]
            assert torch.equal(width * used, fresh.slots * used)


@pytest.mark.parametrize("decoding", ["eager", "captured"])
def test_rows_of_several_groups(monkeypatch, decoding: str) -> None:
    """Of different capacities, beside rows without this drafter; steps are captured, drafts not."""
    vlm = VLM(*build_llava(layers=2, dtype=torch.float64))
    if decoding == "captured":
        captured_by_stand_in(vlm, monkeypatch)
    recipe = "draft-self:keep=1,confidence=0,refresh=2"
    requests = [
        Request(QUESTION, [make_image(seed=n)] * images, recipe=own)
        for n, (images, own) in enumerate([(1, recipe), (24, recipe), (1, "draft-ngram")])
    ]
    more = {"max_new_tokens": 21, "eos_token_id": None, "do_sample": True, "seed": 3}
    wanted = vlm.ask_many([replace(r, recipe="none") for r in requests], **more)
    passes = drafting_passes(monkeypatch)
    got = vlm.ask_many(requests, **more)
    assert [a.token_ids for a in got] == [a.token_ids for a in wanted]
    assert [a.stats.accepted == a.stats.drafted > 0 for a in got[:2]] == [True, True]
    assert max(groups for _, groups in passes) == 2
    if decoding == "captured":
        assert vlm.adapter.kept["graphs"].reused > 0


def test_a_prompt_without_images_is_not_drafted(llava) -> None:
    more = {"max_new_tokens": 12, "eos_token_id": None}
    got = llava.ask("what ?", recipe="draft-self", **more)
    assert got.token_ids == llava.ask("what ?", **more).token_ids
    assert got.stats.drafted == 0


def test_a_saved_session_keeps_its_view(llava, tmp_path: Path) -> None:
    more = {name: value for name, value in given().items() if name != "images"}
    recipe = "draft-self:keep=0.5,confidence=0"
    with llava.session(images=make_image(seed=1), recipe=recipe) as session:
        session.ask(QUESTION, **more)
        session.save(tmp_path / "a")
        wanted = session.ask("and there ?", **more)
    with llava.load_session(tmp_path / "a") as session:
        got = session.ask("and there ?", **more)
    assert got.token_ids == wanted.token_ids
    assert got.stats.drafted == wanted.stats.drafted > 0
    assert got.stats.accepted == wanted.stats.accepted


def test_strict_answers_and_bytes(llava) -> None:
    plain = llava.ask(QUESTION, **given())
    got = llava.ask(QUESTION, recipe="draft-self", strict=True, **given())
    assert got.token_ids == plain.token_ids
    assert got.stats.kv_bytes == plain.stats.kv_bytes  # a view is no copy


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("draft-self:view=nothing", "view=nothing: there is no such method; allowed are topk"),
        ("draft-self:view=elastic", "view=elastic needs weights of its own"),
        ("draft-self:view=draft-eagle", "view=draft-eagle selects no slots of a whole cache"),
        ("draft-self:view=absent.yaml", "recipe file absent.yaml cannot be read"),
        ("kivi+draft-self", "kivi quantizes the cache, so draft-self cannot follow it"),
        ("zipvl+draft-self", "zipvl quantizes the cache, so draft-self cannot follow it"),
        ("zipvl:page=8+draft-self", "zipvl quantizes the cache, so draft-self cannot follow it"),
        (
            "streamingllm+draft-self",
            "slots of the prompt's cache, which streamingllm evicts or moves during the answer; "
            "use one of them alone",
        ),
        ("h2o+draft-self", "which h2o evicts or moves during the answer; use h2o:decode=false"),
        ("cake+draft-self", "which cake evicts or moves during the answer"),
    ],
)
def test_bad_input(llava, recipe: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason.replace("(", r"\(")):
        llava.ask(QUESTION, recipe=recipe, **given())


def test_bad_recipe_files(llava, tmp_path: Path) -> None:
    for text, reason in (("hired:0.5+divprune:0.5", "exactly one method"), ("none", "exactly one")):
        Recipe.parse(text).save(tmp_path / "view.yaml")
        with pytest.raises(RecipeError, match=reason):
            llava.ask(QUESTION, recipe=f"draft-self:view={tmp_path / 'view.yaml'}", **given())
