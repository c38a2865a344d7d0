"""Gemma 3 beyond the window of its local layers, against Hugging Face and dense references.

The references run Hugging Face's layers with an explicit mask. A window counts rotary ids: a token
that was dropped leaves a gap if the others keep theirs (``positions=keep``) and none if they are
renumbered; a token that was evicted from the cache leaves one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from support import tiny_families
from support.closeness import apart, close, network
from support.engine.driven import Driven, answer_logits, entered
from support.engine.prompts import (
    Inputs,
    attention_rows,
    statistics_within,
    switched,
    token_by_token,
)
from support.engine.storage import (
    aged,
    ages,
    captured_masks,
    compressed,
    kept_with_ages,
    trackers_of,
    windowed,
)
from support.reference import TOKENS, Dense
from vlmfast import VLM
from vlmfast.api.request import render, tensors_of
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage, EncodeStage, PrefillStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ColumnRequest, StatRequest
from vlmfast.core.tree import Tree
from vlmfast.train.stages import run as train

WINDOW = 64
IMAGE = "<start_of_image>"


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (44, 60, 3), dtype=np.uint8)


def random_words(count: int, seed: int = 0) -> str:
    """Text of ``count`` tokens."""
    letters = np.random.default_rng(seed).integers(97, 123, count)
    return "".join(map(chr, letters))


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*tiny_families.build_gemma3(window=WINDOW))


def start(vlm: VLM, text: str, recipe: Any = ()) -> Driven:
    """A run of a prompt with images at the placeholders in ``text``."""
    from PIL import Image

    images = [Image.fromarray(image(i)) for i in range(text.count(IMAGE))]
    tensors = vlm.adapter.inputs(text, images)
    sizes = [(img.height, img.width) for img in images]
    return Driven(vlm.adapter, Inputs(tensors, sizes, "q"), Recipe.of(recipe))


# Images at the start, in the middle, and across the boundary of the last row's window.
LONG = IMAGE + random_words(70) + IMAGE + random_words(30, 1) + IMAGE + random_words(40, 2)


def equal(vlm: VLM, got: Tensor, want: Tensor, rows: int) -> None:
    # Norms and rotary tables are float32 in models of any dtype.
    close(got, want, torch.float32, terms=network(vlm.model, rows))


def differs(vlm: VLM, got: Tensor, control: Tensor, rows: int) -> None:
    apart(got, control, terms=network(vlm.model, rows))


# --- nothing dropped -----------------------------------------------------------------------------


def against_hugging_face(vlm: VLM, text: str, count: int) -> None:
    run = start(vlm, text)
    tensors = run.inputs.tensors
    size = tensors["input_ids"].shape[1]
    expected = vlm.model.generate(
        **tensors,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = expected.sequences[0, size:].tolist()
    got = answer_logits(vlm, run, tokens[:-1])
    assert got.argmax(-1).tolist() == tokens
    equal(vlm, got, torch.cat(expected.logits), size)
    control = Dense(vlm, tensors, windows=False)(tokens=tokens[:-1])
    differs(vlm, got, control, size)
    # The reference of the tests below agrees.
    equal(vlm, Dense(vlm, tensors)(tokens=tokens[:-1]), got, size)
    # Local layers store and count only the slots within their windows.
    config = vlm.model.config.get_text_config()
    window, kinds = config.sliding_window, config.layer_types
    lengths = [size if kind == "full_attention" else min(size, window - 1) for kind in kinds]
    assert run.stats.kv_tokens_per_layer == lengths
    assert run.stats.kv_bytes == run.stats.kv_bytes_full
    assert run.stats.kv_bytes == sum(lengths) * vlm.adapter.bytes_per_token() // len(kinds)


PLACES = {
    "no image": random_words(200),
    "at the start": IMAGE + random_words(150),
    "in the middle": random_words(100) + IMAGE + random_words(100, 1),
    "at the end": random_words(150) + IMAGE,
    "several": LONG,
}


@pytest.mark.parametrize("case", PLACES)
def test_logits_beyond_the_window_equal_hugging_face(vlm, case):
    against_hugging_face(vlm, PLACES[case], 6)


@pytest.mark.parametrize("text_after", range(40, 62, 3))
def test_window_boundary_inside_an_image(vlm, text_after):
    """The rows after an image attend to fewer and fewer of its tokens."""
    against_hugging_face(vlm, random_words(50) + IMAGE + random_words(text_after, 1), 4)


def test_images_longer_than_the_window():
    narrow = VLM(*tiny_families.build_gemma3(window=7))
    against_hugging_face(
        narrow, random_words(9) + IMAGE + random_words(3, 1) + IMAGE + random_words(5, 2), 5
    )


@pytest.mark.parametrize("margin", [0, 1, 12])
def test_answers_that_cross_the_window(vlm, margin):
    """The prompt fits into the window, but its answer does not."""
    text = random_words(WINDOW - 1 - margin - 20) + IMAGE
    run = start(vlm, text)
    size = run.inputs.tensors["input_ids"].shape[1]
    tokens = (TOKENS * 5)[: WINDOW + 10 - size]
    got = answer_logits(vlm, run, tokens)
    equal(vlm, got, Dense(vlm, run.inputs.tensors)(tokens=tokens), size)
    differs(vlm, got, Dense(vlm, run.inputs.tensors, windows=False)(tokens=tokens), size)


def test_prompt_within_the_window_is_unchanged(vlm, monkeypatch):
    """A window that covers prompt and answer adds no work and changes no bit."""
    text = IMAGE + random_words(20)
    run = start(vlm, text, "snapkv:keep=0.6,window=4")
    got = answer_logits(vlm, run, TOKENS)
    assert not any(windowed(run)) and not any(aged(run))
    monkeypatch.setattr(vlm.adapter, "windows", (None,) * vlm.adapter.depth)
    assert torch.equal(answer_logits(vlm, start(vlm, text, run.recipe), TOKENS), got)


# --- tokens dropped before and between layers ----------------------------------------------------


@dataclass(frozen=True)
class Rank(PrefillStage):
    """Keeps, twice, the half of the visual tokens with the most attention of the last row."""

    name: ClassVar[str] = "test-rank"
    positions: str = "keep"

    def layers(self, depth):
        return (1, 3)

    def text_stats(self, depth):
        return {0: StatRequest("columns"), 2: StatRequest("columns")}

    def select_tokens(self, step, layer):
        visual = step.layout.visual.nonzero().flatten()
        score = step.stats[layer - 1].mean(dim=(0, 1))[visual]
        best = visual[score.argsort(descending=True)[: len(visual) // 2]]
        text = (~step.layout.visual).nonzero().flatten()
        return torch.cat([text, best]).sort().values


DENSE = (
    IMAGE
    + random_words(8)
    + IMAGE
    + random_words(8, 1)
    + (IMAGE + random_words(6, 2)) * 4
    + random_words(20, 3)
)


@pytest.mark.parametrize("policy", ["keep", "compact"])
@pytest.mark.parametrize("method", ["random:keep=0.4", "grid:keep=0.4"])
def test_token_reducers(vlm, method, policy):
    run = start(vlm, DENSE, f"{method},positions={policy}")
    got = answer_logits(vlm, run, TOKENS)
    alive, dense = entered(run), Dense(vlm, run.inputs.tensors)
    assert WINDOW < int(alive[0].sum()) < dense.size - 40
    numbered = alive if policy == "compact" else None
    equal(vlm, got, dense(alive, numbered=numbered), dense.size)
    differs(vlm, got, dense(), dense.size)
    wide = Dense(vlm, run.inputs.tensors, windows=False)
    differs(vlm, got, wide(alive, numbered=numbered), dense.size)


def counting_rows(dense: Dense, alive: list[Tensor]) -> Tensor:
    """A control: windows that count the rows that are left and not their rotary ids."""
    rows = (torch.cat([alive[0], torch.ones(len(TOKENS), dtype=torch.bool)]).cumsum(0) - 1)[None]
    near = Dense.near

    class Rows(Dense):
        def near(self, layer: int, *_: Tensor) -> Tensor:
            return near(self, layer, rows[0], rows[0])

    return Rows(dense.vlm, dense.tensors)(alive)


@pytest.mark.parametrize(("text", "keep"), [(DENSE, 0.4), (IMAGE * 6 + random_words(4), 0.1)])
def test_dropped_tokens_leave_gaps_in_the_window(vlm, text, keep):
    """Also where all rows that are left would fit into the window."""
    run = start(vlm, text, f"random:keep={keep}")
    got = answer_logits(vlm, run, TOKENS)
    alive, dense = entered(run), Dense(vlm, run.inputs.tensors)
    assert (int(alive[0].sum()) > WINDOW) == (text == DENSE)
    equal(vlm, got, dense(alive), dense.size)
    differs(vlm, got, counting_rows(dense, alive), dense.size)
    assert any(windowed(run)) and aged(run) == windowed(run)


@pytest.mark.parametrize("policy", ["keep", "compact"])
@pytest.mark.parametrize(
    "method", ["rank", "fastv:0.4,k=1", "pyramiddrop", "sparsevlm:keep=0.4,layers=2,recycle=false"]
)
def test_prefill_drops(vlm, method, policy):
    recipe = (
        Rank(policy) if method == "rank" else method + ":,"[":" in method] + f"positions={policy}"
    )
    run = start(vlm, DENSE, recipe)
    got = answer_logits(vlm, run, TOKENS)
    alive, dense = entered(run), Dense(vlm, run.inputs.tensors)
    counts = [int(rows.sum()) for rows in alive]
    assert counts[0] > counts[-1] > WINDOW
    numbered = None
    if policy == "compact":
        first = next(i for i, count in enumerate(counts) if count < counts[0])
        numbered = [None if layer < first else rows for layer, rows in enumerate(alive)]
    equal(vlm, got, dense(alive, numbered=numbered), dense.size)
    differs(vlm, got, dense(), dense.size)
    wide = Dense(vlm, run.inputs.tensors, windows=False)
    differs(vlm, got, wide(alive, numbered=numbered), dense.size)


@dataclass(frozen=True)
class Weighs(EncodeStage):
    """Keeps every second visual token with weight 3."""

    name: ClassVar[str] = "test-weighs"
    positions: str = "keep"
    proportional_attention = True

    def reduce(self, tokens, stats, request):
        index = torch.arange(0, len(tokens), 2)
        tokens = tokens.select(index)
        return replace(tokens, layout=tokens.layout.replace(weight=torch.full((len(index),), 3.0)))


def test_merged_token_weights(vlm):
    """Key biases leave the window with their keys."""
    run = start(vlm, DENSE, Weighs())
    got = answer_logits(vlm, run, TOKENS)
    alive, dense = entered(run), Dense(vlm, run.inputs.tensors)
    bias = vlm.adapter.visual(run.inputs.tensors["input_ids"][0]) * math.log(3)
    equal(vlm, got, dense(alive, bias=bias), dense.size)
    differs(vlm, got, dense(alive), dense.size)
    wide = Dense(vlm, run.inputs.tensors, windows=False)
    differs(vlm, got, wide(alive, bias=bias), dense.size)


def test_training_prompts_with_answer(vlm):
    """As in training."""
    run = start(vlm, LONG)
    ids = run.inputs.tensors["input_ids"]
    dense = Dense(vlm, dict(run.inputs.tensors))
    # There is one row before each token of the answer.
    run.inputs.tensors["input_ids"] = torch.cat([ids, torch.tensor([[*TOKENS, 5]])], 1)
    run.inputs.answer = len(TOKENS) + 1
    got, _, _ = train(vlm, run.inputs, None)
    equal(vlm, got.detach(), dense(), dense.size)


# --- cache ---------------------------------------------------------------------------------------


@pytest.fixture
def kept() -> Iterator[dict[int, KV]]:
    """Compressed cache of each layer."""
    with compressed() as seen:
        yield seen


CACHE = {
    "snapkv": "snapkv:keep=0.5,window=4",
    "pyramidkv": "pyramidkv:keep=0.5,window=4",
    "vlcache": "vlcache:0.4",
    "fastkv": "fastkv:keep=0.4,tsp=0.9,window=3",
    "lookm": "lookm:keep=0.9,merge=avg",
    "lookm, weighted": "lookm:keep=0.9,merge=avg,proportional_attention=true",
    "lookm, weighted, and kivi": (
        "lookm:keep=0.9,merge=avg,proportional_attention=true+kivi:4,group=4,residual=16"
    ),
    "lookm, merged at one position": "lookm:keep=0.9,rope_aware=true",
    "streamingllm": "streamingllm:0.5",
    "h2o": "h2o:0.5",
    "cake": "cake:keep=0.5,window=4",
    "kivi": "kivi:bits=4,group=4,residual=16",
    "zipcache": "zipcache",
    "snapkv and kivi": "snapkv:keep=0.7,window=4+kivi:bits=4,group=4,residual=8",
    "random and zipcache": "random:0.7+zipcache",
    # Pages of tokens after dropped ones.
    "random and kivi": "random:0.7+kivi:bits=4,group=4,residual=64",
    "rank and snapkv": (Rank(), "snapkv:keep=0.5,window=4"),
}
EVICTING = ("h2o", "cake", "streamingllm")  # in each step


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", CACHE)
def test_cache_methods(vlm, kept, method):
    """Every answer token attends to the slots of a layer within the window."""
    recipe = CACHE[method]
    if isinstance(recipe, tuple):
        recipe = Recipe.of(recipe[0]) + Recipe.of(recipe[1])
    run = start(vlm, DENSE, recipe)
    dense, free = (Dense(vlm, run.inputs.tensors, windows=windows) for windows in (True, False))
    tokens = (TOKENS * 5)[:40]
    with torch.no_grad(), switched(vlm.model):
        first = run.start(len(tokens))
        alive = entered(run)
        if method != "fastkv" and not method.startswith(("random", "rank")):
            assert all(bool(rows.all()) for rows in alive)
        equal(vlm, first, dense(alive, []), dense.size)
        bytes_of = run.stats.kv_bytes
        trackers = trackers_of(run, kept)
        for number, token in enumerate(tokens):
            run.decoder.run_decode_stages()
            past = [tracker.slots(method in EVICTING) for tracker in trackers]
            # Copies, so that they do not contain what the step writes.
            past = [tuple(tensor.clone() for tensor in layer) for layer in past]
            got = run.decoder.feed(torch.tensor([[token]])).logits[:, -1]
            equal(vlm, got, dense.feed([token], past, dense.size + number), dense.size)
            for tracker in trackers:
                tracker.fed(number)
        if method not in EVICTING:  # these evict slots outside the window first
            differs(vlm, got, free.feed([token], past, free.size + number), dense.size)
    assert 0 < bytes_of < run.stats.kv_bytes_full
    config = vlm.model.config.get_text_config()
    assert aged(run) == [kind == "sliding_attention" for kind in config.layer_types]


def test_quantized_pages_leave_the_window(vlm, kept):
    """Slots that were quantized in decoding leave the window like others."""
    run = start(vlm, DENSE, "kivi:bits=8,group=4,residual=8")
    tokens = (TOKENS * 12)[:90]  # all of the prompt has left the window by then
    got, want = answer_logits(vlm, run, tokens), Dense(vlm, run.inputs.tensors)(tokens=tokens)
    segments = [layer.segments for layer in run.cache.layers]
    assert all(int(pages[-1].lengths.max()) > 80 for pages in segments)
    difference = (got - want).abs().amax(-1)
    assert float(difference[1:].max()) < 0.1  # 8 bits
    wide = Dense(vlm, run.inputs.tensors, windows=False)(tokens=tokens)
    assert float((wide - want).abs().amax(-1)[1:].max()) > 0.5


def test_h2o_evicts_slots_outside_the_window_first(vlm):
    """A slot that no later token can attend to is evicted before all others."""
    run = start(vlm, DENSE, "h2o:0.9")
    answer_logits(vlm, run, (TOKENS * 8)[:60])
    assert len(ages(run)) > 1 and max(ages(run)) <= WINDOW + 1


@pytest.mark.parametrize("rows", ["all", "important"])
@pytest.mark.parametrize("before", ["", "random:0.5+"])
def test_zipvl(vlm, rows, before):
    run = start(vlm, DENSE, f"{before}zipvl:tau=0.9,kv=none,rows={rows},recent=8,random=8")
    got = answer_logits(vlm, run, TOKENS)
    dense, chosen = Dense(vlm, run.inputs.tensors), []
    alive = entered(run)
    for layer in range(vlm.adapter.depth):
        mask = torch.zeros(dense.size, dtype=torch.bool)
        mask[run.prompt.notes["zipvl"][layer]] = True
        assert 8 < int(mask.sum()) < dense.size
        chosen.append(mask if rows == "all" else mask & mask[:, None])
    equal(vlm, got, dense(alive, chosen=chosen), dense.size)
    wide = Dense(vlm, run.inputs.tensors, windows=False)
    differs(vlm, got, wide(alive, chosen=chosen), dense.size)


@pytest.mark.parametrize("step", [1, 2])
def test_zipvl_ranks_within_the_window(vlm, step):
    from vlmfast.compressors.prefill.zipvl import within

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(h, 50, 16, generator=generator) for h in (4, 2))
    rows = torch.tensor([3, 20, 30, 48, 49])
    position = torch.arange(50) * step
    mass, nnz = within(query, key, rows, None, None, 9, None if step == 1 else position)
    seen = (position <= position[:, None]) & (position > position[:, None] - 9)
    logits = query @ key.repeat_interleave(2, 0).transpose(1, 2) / 4
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1)[:, rows]
    close(mass, p.sum(1).mean(0), terms=50 * 16)
    assert nnz.tolist() == seen[rows].sum(0).clamp(min=1).tolist()


# --- drafts, batches, sessions -------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [
        "none",
        "random:0.4",
        "snapkv:keep=0.8,window=1",
        "rank",
        "kivi:bits=8,group=4,residual=16",
    ],
)
@pytest.mark.parametrize("window", [WINDOW, 6])
def test_draft_trees(recipe, window, kept):
    """Tree logits equal decoding each path alone; part of one path is accepted."""
    vlm = VLM(*tiny_families.build_gemma3(window=window))
    if recipe.startswith("kivi"):  # so that rounding changes no code
        vlm.model.double()
    wrong = [token + 1 for token in TOKENS]
    tree = Tree.of_paths(TOKENS[0], [TOKENS[1:], [TOKENS[1], *wrong[2:4]], wrong[1:3]])
    paths = [tree.path(node) for node in range(len(tree)) if not tree.children[node]]
    assert len(paths) == 3
    recipe, after = Rank() if recipe == "rank" else recipe, (wrong * 2)[4:]
    with torch.no_grad(), switched(vlm.model):
        for path in (paths[0][:6], paths[1][:3], paths[2][:2]):
            run, alone = start(vlm, DENSE, recipe), start(vlm, DENSE, recipe)
            run.start(30), alone.start(30)
            run.decoder.run_decode_stages(), alone.decoder.run_decode_stages()
            logits = run.decoder.verify([tree]).logits[0]
            run.decoder.accept([path])
            want = [
                alone.decoder.feed(torch.tensor([[tree.tokens[node]]])).logits[0] for node in path
            ]
            rows = run.inputs.tensors["input_ids"].shape[1]
            equal(vlm, logits[path], torch.cat(want), rows)
            both = [
                [run.next(torch.tensor([[t]])) for t in after],
                [alone.next(torch.tensor([[t]])) for t in after],
            ]
            equal(vlm, torch.cat(both[0]), torch.cat(both[1]), rows)
    if recipe == "none":
        dense = Dense(vlm, run.inputs.tensors)
        for path in paths:
            expected = dense(tokens=[tree.tokens[node] for node in path])
            equal(vlm, logits[path], expected[1:], rows)
            wide = Dense(vlm, run.inputs.tensors, windows=False)
            differs(vlm, logits[path], wide(tokens=[tree.tokens[node] for node in path])[1:], rows)


@pytest.mark.cases(1)
@pytest.mark.parametrize("window", [WINDOW, 200])
def test_multi_turn_session(window, tmp_path):
    """The images alone are longer than the window, or the conversation outgrows it."""
    vlm = VLM(*tiny_families.build_gemma3(window=window))
    given = {"images": [image(0), image(1)]}
    questions = (
        "what is here ?",
        "and the rest of it, all that there is ?" + random_words(90),
        "why ?",
    )
    kwargs = {"max_new_tokens": 12, "eos_token_id": None}

    def fresh(messages: list[dict]) -> list[int]:
        tensors = tensors_of(vlm.adapter, render(vlm.adapter, messages, Recipe()))
        size = tensors["input_ids"].shape[1]
        return vlm.model.generate(**tensors, do_sample=False, **kwargs)[0, size:].tolist()

    def whole(session: Any, question: str) -> list[dict]:
        content = [{"type": "image", "image": img} for img in given["images"]]
        first, *rest = [*session.messages, {"role": "user", "content": question}]
        text = {"type": "text", "text": first["content"]}
        return [{"role": "user", "content": [*content, text]}, *rest]

    with vlm.session(**given) as session:
        assert session.reuses == "kv"
        for question in questions:
            expected = fresh(whole(session, question))
            answer = session.ask(question, **kwargs)
            assert answer.token_ids == expected
        stats = answer.stats
        assert stats.prompt_reused + stats.prompt_fed > window and session.bytes > 0
        session.messages = session.messages[:2]  # back to the first answer
        expected = fresh(whole(session, "what else is there ?"))
        got = session.ask("what else is there ?", **kwargs)
        assert got.token_ids == expected and got.stats.prompt_reused > WINDOW
        session.save(tmp_path / "session")
        expected = fresh(whole(session, "and now ?"))
    with vlm.load_session(tmp_path / "session") as session:
        assert session.ask("and now ?", **kwargs).token_ids == expected


def test_session_returns_to_evicted_tokens(vlm):
    """The prompt is prefilled again if local layers have evicted the needed slots."""
    question, other = random_words(90), random_words(40) + random_words(50, 1)
    kwargs = {"max_new_tokens": 8, "eos_token_id": None}
    with vlm.session() as session:
        assert session.ask(question, **kwargs).token_ids == vlm.ask(question, **kwargs).token_ids
        session.messages = []
        got = session.ask(other, **kwargs)
        assert got.token_ids == vlm.ask(other, **kwargs).token_ids
        assert got.stats.prompt_reused == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [
        "lookm:keep=0.9,merge=none",
        "kivi:bits=8,group=4,residual=16",
        "random:0.4",
        "random:0.4+lookm:keep=0.9,merge=none",
    ],
)
def test_session_with_compressed_cache(vlm, recipe, tmp_path):
    """A long question over a compressed cache equals the question fed token by token."""
    with vlm.session(images=[image(i) for i in range(6)], recipe=recipe) as session:
        first = session.ask("what is here ?" * 4, max_new_tokens=10, eos_token_id=None)
        session.save(tmp_path / "session")
        second = session.ask("why is it so ?" * 4, max_new_tokens=10, eos_token_id=None)
    with vlm.load_session(tmp_path / "session") as session:
        assert kept_with_ages(vlm)
        again = session.ask("why is it so ?" * 4, max_new_tokens=10, eos_token_id=None)
        assert again.token_ids == second.token_ids
    vlm.prefix_cache.clear()
    with (
        token_by_token(),
        vlm.session(images=[image(i) for i in range(6)], recipe=recipe) as session,
    ):
        got = session.ask("what is here ?" * 4, max_new_tokens=10, eos_token_id=None)
        assert got.token_ids == first.token_ids


# --- statistics ----------------------------------------------------------------------------------


def test_statistics_equal_eager_attention(vlm):
    seen = {}

    @dataclass(frozen=True)
    class Look(PrefillStage):
        name: ClassVar[str] = "test-look"

        def layers(self, depth):
            return (3,)

        def text_stats(self, depth):
            return {
                0: StatRequest("window", 80),
                1: StatRequest("columns"),
                2: StatRequest("columns"),
                3: StatRequest("last", ahead=True),
            }

        def select_tokens(self, step, layer):
            seen.update(step.stats)

    @dataclass(frozen=True)
    class Sums(CacheStage):
        name: ClassVar[str] = "test-sums"

        def text_stats(self, depth):
            want = ("sum", "max", "entropy", "sumsq")
            return dict.fromkeys(range(depth), ColumnRequest("window", 90, want=want))

        def compress(self, step, layer, kv, stats):
            seen["cache", layer] = stats, kv
            return kv

    run = start(vlm, LONG, (Look(), Sums()))
    answer_logits(vlm, run, [])
    tensors = run.inputs.tensors
    with torch.no_grad():
        vlm.model.set_attn_implementation("eager")
        maps = vlm.model(**tensors, output_attentions=True, use_cache=False).attentions
        vlm.model.set_attn_implementation("sdpa")
    size = maps[0].shape[-1]
    terms = network(vlm.model, size)
    expected = [
        maps[0][0, :, -80:],
        *(layer_map[0].sum(1, keepdim=True) for layer_map in maps[1:3]),
    ]
    for layer, rows in enumerate([*expected, maps[3][0, :, -1:]]):
        close(seen[layer], rows, terms=terms)
    for layer, kind in enumerate(vlm.model.config.get_text_config().layer_types):
        stats, kv = seen["cache", layer]
        local = kind == "sliding_attention"
        assert len(kv) == (WINDOW - 1 if local else size)
        assert kv.order[0].tolist() == list(range(size - len(kv), size))
        rows = maps[layer][0, :, -90:].unflatten(0, (2, -1))[..., -len(kv) :]
        close(stats.sum, rows.sum(2), terms=terms)
        close(stats.max, rows.amax(2), terms=terms)
        close(stats.sumsq, rows.square().sum(2), terms=terms)
        close(stats.entropy, -torch.xlogy(rows, rows + 1e-10).sum(2), terms=terms)
        assert torch.equal(stats.nnz[0], (rows[0, 0] > 0).sum(0))
        assert bool((maps[layer][0, 0].tril(-WINDOW) > 0).any()) != local


def test_entropy_of_weights_below_its_offset() -> None:
    """Peaked attention has weights far below 1e-10, whose share is zero and not NaN."""
    n = 12
    generator = torch.Generator().manual_seed(0)
    query, key = (40 * torch.randn(2, n, 8, generator=generator) for _ in range(2))
    rows = torch.arange(n)
    request = ColumnRequest("all", want=("sum", "entropy"))
    stats = statistics_within(request, query, key, torch.zeros(n, dtype=torch.int64), rows)
    p = attention_rows(query, key, rows, None, last=rows)
    assert ((p > 0) & (p < 1e-11)).any()
    assert torch.equal(stats.entropy[:, 0], -torch.xlogy(p, p + 1e-10).sum(1))
    assert torch.isfinite(stats.entropy).all()


# --- captured steps and kernels ------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [
        "none",
        "random:0.4",
        "snapkv:keep=0.5,window=4",
        "kivi:bits=8,group=4,residual=8",
        "h2o:0.6",
    ],
)
def test_captured_steps(vlm, recipe, monkeypatch):
    """Captured steps give the same tokens within and beyond the window."""
    from support.engine.cpu_graph import captured_by_stand_in

    given = {"images": [image(0), image(1)], "recipe": recipe, "eos_token_id": None}
    wanted = vlm.ask("what ?", **given, max_new_tokens=50).token_ids
    captured = VLM(*tiny_families.build_gemma3(window=WINDOW))
    captured_by_stand_in(captured, monkeypatch)
    for _ in range(2):
        assert captured.ask("what ?", **given, max_new_tokens=50).token_ids == wanted
    # A step captured with everything visible is not used if something is masked.
    local = tuple(window is not None for window in vlm.adapter.windows)
    wanted = {(False,) * 4, local} if recipe == "none" else {local}
    assert captured_masks(captured) == wanted


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    "recipe",
    [
        "none",
        "random:0.4",
        *(CACHE[method] for method in ("snapkv", "h2o", "zipcache")),
    ],
)
def test_no_device_synchronization(recipe, width, monkeypatch):
    """Also beyond the window."""
    from support.fake_cuda import shapes, steps

    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    vlm = VLM(*tiny_families.build_gemma3(window=WINDOW))
    run = start(vlm, DENSE, recipe)
    with torch.no_grad(), switched(vlm.model):
        run.start(20)
        for token in TOKENS[:4]:
            run.next(torch.tensor([[token]]))
    watch = steps(vlm, run.decoder, 3, width=width)
    assert watch.complaints == []
    done = shapes(watch)
    assert done[0] == done[1] == done[2] and len(done[0]) > 100
