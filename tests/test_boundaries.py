"""Values at which a rule changes: one token, word, step or bit to either side."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from helpers_layout import REQUEST, make_image, stats_of
from tiny_models import build_llava
from vlmfast import VLM
from vlmfast.compressors.budget import solve
from vlmfast.compressors.tokens.hired import HiRED
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.engine.rounds import Rounds
from vlmfast.eval.scorers import mmmu


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
    sequence: Any = SimpleNamespace(
        sampling=SimpleNamespace(ranked=lambda logits: logits),
        sampler=SimpleNamespace(sampled=False, config=SimpleNamespace(temperature=None)),
    )
    rounds: Any = SimpleNamespace(adapter=SimpleNamespace(dtype=dtype))
    assert Rounds._is_unambiguous(rounds, sequence, logits) is clear


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
