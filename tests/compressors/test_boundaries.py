"""Values at which a rule changes: one token, word, step or bit to either side."""

from __future__ import annotations

import math
import operator
import random
from typing import Any, ClassVar

import pytest
import torch

from support.engine.driven import unambiguous
from support.engine.storage import KVLayer, bucket
from support.helpers_layout import REQUEST, make_image, stats_of
from support.tiny_models import build_llava
from vlmfast import VLM
from vlmfast.compressors.budget import solve
from vlmfast.compressors.encoder.mustdrop import dual_attention
from vlmfast.compressors.tokens.hired import HiRED
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.tree import Tree
from vlmfast.errors import RecipeError
from vlmfast.eval.scorers import mmmu, share, video_mme

# Allowed values of every parameter with a range: those of the papers, and where code would fail.
RANGES = {
    "> 0": "atp.layers_ cake.window cake.tau1 cake.tau2 catp.k fastkv.window fastkv.layer "
    "mmtok.tau_t mmtok.tau_v mustdrop.layers pyramiddrop.layers_ pyramidkv.window snapkv.window "
    "sparsevlm.layers",
    ">= 0": "static-frames.threshold "
    "cake.gamma catp.text catp.sample dart.text_pivots draft-eagle.seed "
    "draft-self.refresh elastic.seed lookm.sinks mmtok.alpha mustdrop.window random.seed "
    "scope.alpha streamingllm.sinks tome.r visionzip.dominant visionzip.contextual zipcache.seed "
    "zipvl.random zipvl.seed",
    ">= 1": "static-frames.refresh static-frames.patch "
    "dart.k dart.visual_pivots draft-auto.after draft-auto.margin draft-auto.hold "
    "draft-eagle.queries draft-eagle.top_k draft-eagle.depth draft-layerskip.depth "
    "draft-ngram.tokens draft-ngram.ngram draft-ngram.paths draft-self.steps draft-vispec.top_k "
    "draft-vispec.depth elastic.queries fastv.k flashvid.least frames-clip.n "
    "frames-clip.candidates kivi.group kivi.residual pvc.image_repeat pvc.video_repeat "
    "pyramidkv.beta quickprefill.top_k zipcache.page zipvl.page zipvl.recent zipvl.force_recent",
    ">= 2": "draft-eagle.nodes draft-vispec.nodes pvc.side",
    ">= -1": "flashvid.similarity mustdrop.similarity",
    "<= 1": "flashvid.segment",
    "> 0 and <= 1": "atp.budget cake.keep catp.keep catp.budget clip-relevance.keep "
    "clip-relevance.budget dart.keep dart.budget divprune.keep divprune.budget downsample.keep "
    "downsample.budget draft-eagle.keep draft-self.keep elastic.keep elastic.budget elastic.prune "
    "elastic.pool elastic.conv fastkv.keep fastkv.tsp fastv.keep fastv.budget flashvid.keep "
    "flashvid.budget flashvid.alpha grid.keep grid.budget h2o.keep hired.keep hired.budget "
    "lookm.keep mmtok.keep mmtok.budget mustdrop.key mustdrop.budget prumerge.keep "
    "prumerge.budget prumerge-plus.keep prumerge-plus.budget pvc.budget pyramiddrop.keep "
    "pyramiddrop.ratios pyramiddrop.budget pyramidkv.keep quickprefill.keep random.keep "
    "random.budget scope.keep scope.budget snapkv.keep sparsevlm.keep sparsevlm.budget "
    "streamingllm.keep tome.keep tome.budget visionzip.keep visionzip.budget vlcache.keep "
    "vlcache.p zipvl.tau",
    "> 0 and < 1": "zipcache.recent",
    ">= 0 and <= 1": "draft-layerskip.confidence draft-self.confidence hired.alpha "
    "mustdrop.global_thr mustdrop.individual_thr zipcache.important zipvl.dense_above crops.keep "
    "crops.cover",
    ">= 0 and < 1": "draft-layerskip.skip h2o.recent hired.reserve lookm.recent prumerge.reserve "
    "prumerge-plus.reserve visionzip.reserve vlcache.recent zipcache.random",
    ">= 0 and <= 8": "atp.grids",
    ">= 0 and <= 16": "flashvid.guard hired.guard prumerge.guard prumerge-plus.guard scope.guard "
    "visionzip.guard",
    ">= 2 and <= 8": "kivi.bits zipcache.bits_high zipcache.bits_low zipvl.bits_high "
    "zipvl.bits_low",
    ">= 2 and <= 81": "draft-recycle.nodes",
    ">= 1 and <= 65535": "cake.kernel fastkv.kernel pyramidkv.kernel snapkv.kernel",
    "> 0 and <= 1000": "atp.temperature",
}
SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@pytest.mark.parametrize("allowed", RANGES)
def test_ranges_of_parameters(allowed: str) -> None:
    """The last allowed value on each side, and the first that is refused."""
    limits = [part.split() for part in allowed.split(" and ")]
    for of in RANGES[allowed].split():
        method, _, name = of.partition(".")
        stage = stage_class(method)
        field = stage.__dataclass_fields__[name]
        whole, several = type(field.default) is int, "tuple" in str(field.type)
        for sign, number in limits:
            limit = float(number)
            for far in (-math.inf, math.inf):
                near = limit + math.copysign(1, far) if whole else math.nextafter(limit, far)
                for value in (int(limit) if whole else limit, int(near) if whole else near):
                    if all(SIGNS[s](value, float(n)) for s, n in limits):
                        assert refused(stage, name, (value,) if several else value) != allowed
                    elif not SIGNS[sign](value, limit):
                        assert refused(stage, name, (value,) if several else value) == allowed
        if "float" in str(field.type) and not whole:
            nan = (math.nan,) if several else math.nan
            assert refused(stage, name, nan) == allowed


@pytest.mark.parametrize(("method", "keep"), [("dart", 0.222), ("divprune", 0.098)])
def test_default_fractions_are_those_of_the_papers(method: str, keep: float) -> None:
    assert stage_class(method)().keep == keep


def test_defaults_are_values_and_docs_are_texts() -> None:
    for method in stage_names():
        for name, field in stage_class(method).__dataclass_fields__.items():
            if doc := field.metadata.get("doc"):
                assert " " in doc, (method, name)
                default = field.default if isinstance(field.default, str) else ""
                assert " " not in default, (method, name)


def refused(stage: type, name: str, value: Any) -> str:
    """The range that a value is out of; another text if another rule of the method forbids it."""
    try:
        stage(**{name: value})
    except RecipeError as error:
        return str(error).partition(f"{name.rstrip('_')}=")[2].partition("allowed is ")[2]
    return ""


def test_every_range_is_listed() -> None:
    named = [of for names in RANGES.values() for of in names.split()]
    assert len(named) == len(set(named))
    assert set(named) == {
        f"{method}.{name}"
        for method in stage_names()
        for name, field in stage_class(method).__dataclass_fields__.items()
        if field.metadata.keys() & {"gt", "ge", "lt", "le"}
    }


@pytest.mark.parametrize("tokens", [1, 100, 255, 256, 257, 600])
def test_a_full_layer_gains_256_slots_or_what_it_needs(tokens: int) -> None:
    layer = KVLayer.__new__(KVLayer)
    layer.max_lengths = [1000]
    layer.keys = torch.zeros(1, 1, 1000, 1)
    assert layer.enlarged(tokens) == bucket(1000 + max(tokens, 256))
    # As many as the layer has.
    layer.max_lengths = [1000 - tokens]
    assert layer.enlarged(tokens) == 1000


def test_slots_that_are_needed_are_not_one_more() -> None:
    """Where the slots end at the edge of a bucket, one more would double the step."""
    layer = KVLayer.__new__(KVLayer)
    edge = bucket(5000)
    assert bucket(edge) == edge < bucket(edge + 1)
    layer.max_lengths, layer.keys = [edge - 300], torch.zeros(1, 1, edge - 300, 1)
    assert layer.enlarged(300) == edge


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_hired_budget_gives_the_whole_view_its_fraction(alpha: float) -> None:
    count = 30
    tokens, geometry = make_image((2, 2), (6, 6))
    attention = torch.rand(5, 4, 36, generator=torch.Generator().manual_seed(1)).softmax(-1)
    stats = stats_of((geometry,), {0: attention, 22: attention})
    kept = HiRED(budget=count / len(tokens), alpha=alpha).reduce(tokens, stats, REQUEST).layout
    assert len(kept) == count
    assert int((kept.tile == 0).sum()) == int(alpha * count)


@pytest.mark.parametrize(("words", "found"), [(4, False), (5, False), (6, True), (7, True)])
def test_mmmu_reads_an_options_text_from_six_words_on(words: int, found: bool) -> None:
    """Shorter answers must name a letter; the official parser counts the same way."""
    answer = " ".join(["perhaps", "it", "could", "well", "just"][: words - 2] + ["a"] * (words - 7))
    answer = f"{answer} red car"
    assert len(answer.split()) == words
    parsed = mmmu.parse_choice(answer, ["a blue bus", "red car"], guess=random.Random(0))
    assert parsed.found is found
    assert not found or parsed.answer == "B"


def test_the_mean_of_no_samples_is_zero() -> None:
    assert share([]) == 0.0
    assert share([1, 0, 0, 1]) == 0.5


def test_lmms_eval_knows_four_letters() -> None:
    for letter in "ABCD":
        assert video_mme.parse_choice(f"({letter})", mode="lmms-eval").answer == letter
    assert video_mme.parse_choice("(E)", mode="lmms-eval") == ("", False)


@pytest.mark.parametrize(("unit", "kept"), [(1.0, False), (2.0, True), (3.0, True)])
def test_mustdrop_keeps_a_token_that_meets_its_global_threshold(unit: float, kept: bool) -> None:
    """Of a sum of 16, an eighth is 2."""
    g = torch.tensor([unit, 16 - unit])
    assert dual_attention(g, torch.zeros(2), 0.125, 0.5).tolist() == [kept, True]


@pytest.mark.parametrize(("target", "nearest"), [(12, 10), (14.9, 10), (15.1, 20), (18, 20)])
def test_solve_takes_the_step_below_where_it_is_nearer(target: float, nearest: int) -> None:
    def cost(parameter: float) -> float:
        return 10 if parameter < 0.37 else 20

    assert cost(solve(cost, target)) == nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("units", "clear"), [(0, False), (4, False), (8, False), (9, True)])
def test_strict_needs_more_than_eight_units_in_the_last_place(
    dtype: torch.dtype, units: int, clear: bool
) -> None:
    eps = torch.finfo(dtype).eps
    logits = torch.tensor([1.0, 1.0 - units * eps, -1.0], dtype=torch.float64)
    assert unambiguous(logits, dtype) is clear


class Listening(DrafterStage):
    """Drafts one wrong token, and records the tokens of the largest noise at each depth."""

    name: ClassVar[str] = "listening"

    def __init__(self) -> None:
        self.heard: list[tuple[int, list[int]]] = []
        self.at = 1

    def largest(self) -> tuple[int, int]:
        return 2, 1

    def open(self, target: Target) -> Listening:
        self.at = 1
        return self

    def prefill(self, read: Read) -> None:
        pass

    def propose(self, root: int, budget: Budget) -> Tree:
        assert budget.noise is not None
        self.heard.append((self.at, [int(budget.noise(d).argmax()) for d in (1, 2, 3)]))
        return Tree.chain([root, 7])

    def extend(self, done: Round) -> None:
        self.at += len(done.emitted)


def test_drafters_hear_the_noise_of_the_position_that_they_draft() -> None:
    """At an extreme temperature a token is that of the largest noise at its position."""
    vlm, stage = VLM(*build_llava(dtype=torch.float64)), Listening()
    answer = vlm.ask(
        "What is this?",
        recipe=Recipe((stage,)),
        max_new_tokens=12,
        eos_token_id=None,
        do_sample=True,
        temperature=1e9,
        top_k=0,
        seed=5,
    )
    tokens = list(answer.token_ids)
    assert len(stage.heard) > 3
    for at, heard in stage.heard:
        following = tokens[at : at + 3]
        assert heard[: len(following)] == following
