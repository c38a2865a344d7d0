"""A recipe that keeps everything is the unwrapped model, and drops leave M-RoPE its geometry.

The first part runs every method at its keep-everything setting, on every family: tokens and text
are those of Hugging Face's own ``generate``, and no rotary id has changed. Families, methods,
settings, position policies and media are combined so that every pair of values meets in a request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import vlmfast
from support import tiny_families
from support.closeness import apart, close, network
from support.covering import covering
from support.engine.driven import answer_logits
from support.engine.passes import Ids, rotary_ids
from support.families import built, make_image, start
from support.reference import TOKENS, Dense, closed
from vlmfast import VLM, ModelError, RecipeError, Request
from vlmfast.core.layout import Numbering
from vlmfast.core.protocols import EncodeStage, PrefillStage
from vlmfast.models.base import Adapter

BUILD = tiny_families.first()
MROPE = ["qwen2_5_vl", "qwen3_vl"]
QUESTION = "what is here ?"
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}


MEDIA: dict[str, dict[str, Any]] = {
    "one image": {"images": [make_image(0)]},
    "two images": {"images": [make_image(1, 30, 70), make_image(2, 90, 33)]},
    "a video": {"video": [make_image(i, 40, 40) for i in range(5)], "num_frames": 5},
}


# --- keep-everything settings --------------------------------------------------------------------

# Layers before which every family can drop, and methods that would quantize the kept slots.
MORE = {
    "pyramiddrop": "layers=2/3",
    "sparsevlm": "layers=2/3",
    "mustdrop": "layers=2/3",
    "zipvl": "kv=drop",
}


def keeping() -> dict[str, set[str]]:
    """Methods that drop or merge tokens or evict slots, untrained, and their parameters."""
    found = {}
    for method in vlmfast.methods():
        names = {parameter["name"] for parameter in method["parameters"]}
        if method["trained"] or method["protocol"] not in {
            "in-encoder", "encode", "prefill", "cache"
        }:  # fmt: skip
            continue
        if method["protocol"] == "cache" and "keep" not in names:
            continue  # quantizes, and keeps every slot at any setting
        found[method["name"]] = names
    return found


METHODS = keeping()


def word(method: str, setting: str, positions: str) -> str:
    """The recipe that keeps everything; a method without a parameter goes without it."""
    names = METHODS[method]
    parts = ["budget=1" if setting == "budget=1" and "budget" in names else "1"]
    parts += [f"positions={positions}"] if "positions" in names else []
    parts += [MORE[method]] if method in MORE else []
    return f"{method}:{','.join(parts)}"


FACTORS = (
    sorted(BUILD),
    sorted(METHODS),
    ["1", "budget=1"],
    ["keep", "compact"],
    [*MEDIA, "a batch", "sampled"],
)
ROWS = covering(FACTORS)


def test_rows_are_few() -> None:
    assert len(ROWS) < 1.2 * len(BUILD) * len(METHODS) and covering(FACTORS) == ROWS
    assert {"hired", "tome", "pyramiddrop", "fastv", "divprune", "snapkv", "lookm"} <= set(METHODS)


@pytest.fixture
def read(monkeypatch) -> list[Ids]:
    """The rotary ids of a test's requests."""
    return rotary_ids(monkeypatch)


def generated(vlm: VLM, media: dict[str, Any], **generation: Any) -> list[int]:
    """The tokens of Hugging Face's ``generate``."""
    tensors = start(vlm, **media).inputs.tensors
    torch.manual_seed(7)
    with torch.no_grad():
        out = vlm.model.generate(**tensors, **LENGTH, **generation)
    return out[0, tensors["input_ids"].shape[1] :].tolist()


def answered(vlm: VLM, case: str, recipe: str) -> list[tuple[str, vlmfast.Answer]]:
    """Answers under ``recipe``, and the media of each."""
    if case == "a batch":
        requests = [Request(QUESTION, **media, recipe=recipe) for media in MEDIA.values()]
        return list(zip(MEDIA, vlm.ask_many(requests, batch_size=3, **LENGTH), strict=True))
    sampled = {"do_sample": True, "temperature": 1.5} if case == "sampled" else {}
    media = MEDIA.get(case, MEDIA["one image"])
    torch.manual_seed(7)
    return [(case, vlm.ask(QUESTION, **media, recipe=recipe, **LENGTH, **sampled))]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", sorted(BUILD))
def test_keep_1_is_identity(name: str, read: list[Ids]) -> None:
    vlm, ran = built(name), 0
    expected = {case: generated(vlm, media, do_sample=False) for case, media in MEDIA.items()}
    expected["sampled"] = generated(vlm, MEDIA["one image"], do_sample=True, temperature=1.5)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    texts = {}
    for case, tokens in expected.items():
        for _, answer in answered(vlm, case, "none"):
            assert answer.token_ids == tokens
            texts[case] = answer.text
    rows = [row[1:] for row in ROWS if row[0] == name]
    for method, setting, positions, case in rows:
        recipe = word(method, setting, positions)
        read.clear()
        try:
            answers = answered(vlm, case, recipe)
        except (RecipeError, ModelError):  # the family does not serve this method
            continue
        ran += 1
        for seen, answer in answers:
            assert answer.token_ids == expected[seen], (recipe, case)
            assert answer.text == texts[seen]
            entered, stats = answer.stats.visual_tokens_in, answer.stats
            assert {entered, *stats.visual_tokens_kept.values()} == {entered}, (recipe, case)
            assert set(stats.visual_tokens_per_layer) == {entered}
        assert len(read) == len(answers)
        for ids in read:
            assert torch.equal(ids.position, ids.own) and not any(ids.shifts), (recipe, case)
    assert ran >= 0.6 * len(rows)


# --- drops under M-RoPE --------------------------------------------------------------------------


def of_grids(adapter: Adapter, parts: list[int | tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Ids (S,) and rotary ids (3, S) of a prompt: runs of text (a length) and grids (t, h, w).

    A fourth number of a grid makes it a video: the seconds of a step in time.
    """
    config, ids = adapter.config, []
    grids: dict[str, list] = {"image_grid_thw": [], "video_grid_thw": []}
    seconds, steps = [], config.model_type == "qwen3_vl"
    for part in parts:
        if isinstance(part, int):
            ids += [5] * part
            continue
        t, h, w, *step = part
        kind = "video" if step else "image"
        grids[f"{kind}_grid_thw"].append([t, 2 * h, 2 * w])
        seconds += step
        one = [getattr(config, f"{kind}_token_id")] * (h * w)
        ids += ([*one, 5] * t)[:-1] if steps else one * t
    tensors = {key: torch.tensor(of) for key, of in grids.items() if of}
    if seconds:
        tensors["second_per_grid_ts"] = torch.tensor(seconds)
    tensors["input_ids"] = torch.tensor([ids])
    return tensors["input_ids"][0], adapter.positions(tensors)


def compacted(adapter: Adapter, ids: Tensor, position: Tensor, rows: Tensor) -> Tensor:
    marks = ids.where(adapter.visual(ids), -1)
    return adapter.compact(Numbering.of(position, marks), rows.nonzero()[:, 0])


@pytest.mark.parametrize("name", MROPE)
def test_compacting_equals_a_loop_over_segments(name: str) -> None:
    adapter, rng = built(name).adapter, random.Random(1)
    for _ in range(40):
        parts: list = [rng.randint(1, 4)]
        for _ in range(rng.randint(0, 4)):
            grid = (rng.randint(1, 5), rng.randint(1, 5))
            video = (rng.randint(1, 5), *grid, rng.choice([0.1, 0.3, 0.6, 1.0, 2.0]))
            parts += [rng.choice([(1, *grid), video]), rng.randint(1, 3)]
        ids, position = of_grids(adapter, parts)
        visual = adapter.visual(ids)
        share = rng.choice([0.0, 0.1, 0.4, 0.8, 1.0])
        rows = ~visual | (torch.tensor([rng.random() for _ in ids]) < share)
        got = compacted(adapter, ids, position + 3, rows)
        marks = ids.where(visual, -1)
        assert torch.equal(got, closed(position + 3, marks, rows)[:, rows])
        if bool(rows.all()):
            assert torch.equal(got, position + 3)
    everything = torch.ones_like(visual)
    assert torch.equal(compacted(adapter, ids, position, everything), position)


@dataclass(frozen=True)
class Before(EncodeStage):
    """Drops the rows of the full prompt given by ``gone``."""

    name: ClassVar[str] = "test-before"
    gone: tuple[int, ...] = ()
    positions: str = "compact"

    def reduce(self, tokens, stats, request):
        return tokens.select(~torch.isin(tokens.layout.order, torch.tensor(self.gone)))


@dataclass(frozen=True)
class Between(PrefillStage):
    """The same before layers."""

    name: ClassVar[str] = "test-between"
    gone: tuple[tuple[int, tuple[int, ...]], ...] = ()
    positions: str = "compact"

    def layers(self, depth):
        return tuple(layer for layer, _ in self.gone)

    def select_tokens(self, step, layer):
        gone = torch.tensor(dict(self.gone)[layer])
        return (~torch.isin(step.layout.order, gone)).nonzero()[:, 0]


@dataclass(frozen=True)
class Later(Between):
    """Another one in the same recipe."""

    name: ClassVar[str] = "test-later"


def checked(vlm: VLM, recipe: Any, case: str, number: Sequence[bool]) -> None:
    """Logits under ``recipe`` are those of the dense reference.

    ``number`` marks the layers where rows have been renumbered.
    """
    run = start(vlm, recipe, **MEDIA[case])
    got = answer_logits(vlm, run, TOKENS)
    dense, alive = Dense(vlm, run.inputs.tensors), []
    visual = vlm.adapter.visual(run.inputs.tensors["input_ids"][0])
    for layer in range(vlm.adapter.depth):
        rows = ~visual
        rows[run.trace.layout.order[run.trace.depth > layer]] = True
        alive.append(rows)
    numbered = [rows if new else None for rows, new in zip(alive, number, strict=True)]
    terms = network(vlm.model, dense.size)
    close(got, dense(alive, numbered=numbered), terms=terms)
    # Controls: other ids, and nothing dropped.
    apart(got, dense(alive, numbered=[None] * len(alive)), terms=terms)
    apart(got, dense(dense.everything()), terms=terms)


@pytest.mark.parametrize("case", ["two images", "a video"])
@pytest.mark.parametrize("name", [*MROPE, "internvl"])
def test_several_drops_number_as_one(name: str, case: str) -> None:
    """Before the language model and twice in it, each time renumbered from the full prompt."""
    vlm = built(name)
    ids = start(vlm, **MEDIA[case]).inputs.tensors["input_ids"][0]
    visual = tuple(vlm.adapter.visual(ids).nonzero()[:, 0].tolist())
    third = len(visual) // 3  # whole rows, or a step in time, are dropped in two parts
    first, second = visual[: third // 2], visual[third // 2 : third]
    stages = Before(first), Between(((2, visual[-2:]), (3, second)))
    checked(vlm, stages, case, [True] * 4)
    # A stage that drops nothing renumbers nothing, whatever other stages drop and keep.
    stages = Before(first, "keep"), Between(((2, ()), (3, second)))
    checked(vlm, stages, case, [False, False, False, True])


@pytest.mark.parametrize("name", sorted(BUILD))
def test_a_stage_that_keeps_all_does_not_renumber_for_others(name: str, read: list[Ids]) -> None:
    vlm = built(name)
    recipe = "random:0.5+divprune:1,positions=compact"
    run = start(vlm, recipe, **MEDIA["one image"])
    answer_logits(vlm, run, [])
    kept = run.prompt.layout.order
    assert len(kept) < read[-1].own.shape[1]
    assert torch.equal(read[-1].position, read[-1].own[:, kept])


def test_answer_ids_follow_when_the_last_time_is_dropped() -> None:
    """The largest id of the prompt is dropped where ids stay, then rows are renumbered."""
    vlm = built("qwen2_5_vl")
    vlm.model.config.vision_config.tokens_per_second = 40  # times are far ahead of the text
    run = start(vlm, **MEDIA["a video"])
    position = vlm.adapter.positions(run.inputs.tensors)
    visual = vlm.adapter.visual(run.inputs.tensors["input_ids"][0]).nonzero()[:, 0]
    assert position[0, visual].max() == position.max() > position[1].max()
    last = visual[position[0, visual] == position[0, visual].max()].tolist()
    first = visual[: len(visual) // 3].tolist()
    stages = Between(((2, tuple(last)),), "keep"), Later(((3, tuple(first)),))
    checked(vlm, stages, "a video", [False, False, False, True])


@pytest.mark.cases(1)
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("name", MROPE)
def test_a_session_numbers_as_ask_does(name: str, between: bool) -> None:
    """Also where text follows a video that drops rows and columns and whose times stay apart."""
    vlm = built(name)
    if name == "qwen2_5_vl":  # times 0 and 2 of 3 x 4 tokens: text follows the columns
        vlm.model.config.vision_config.tokens_per_second = 1
    video = {"video": [make_image(i) for i in range(4)], "num_frames": 4}
    for media, policy in product((MEDIA["one image"], video), ("keep", "compact")):
        ids = start(vlm, **media).inputs.tensors["input_ids"][0]
        visual = vlm.adapter.visual(ids).nonzero()[:, 0].tolist()
        gone = tuple(at for i, at in enumerate(visual) if i % 12 not in {5, 9})  # a column is left
        recipe = Between(((2, gone),), policy) if between else Before(gone, policy)
        with vlm.session(**media, recipe=recipe, history=False) as session:
            assert session.reuses == "kv"
            for question in (QUESTION, "and the rest ?"):
                expected = vlm.ask(question, **media, recipe=recipe, **LENGTH)
                assert session.ask(question, **LENGTH).token_ids == expected.token_ids
