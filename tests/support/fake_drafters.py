"""Drafters that know the answer and make a given fraction of mistakes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.tree import Tree


@dataclass(frozen=True)
class Knows(DrafterStage):
    """Drafts a given answer, with mistakes."""

    name: ClassVar[str] = "knows"
    merges: ClassVar[bool] = True

    answer: tuple[int, ...] = param((), "the tokens of the answer")
    wrong: float = param(0.0, "probability that a token of the path is wrong", ge=0, le=1)
    cycle: bool = param(
        False, "the first round is wrong at depth 1, the next at depth 2, and so on"
    )
    beside: int = param(2, "wrong siblings before each token of the path", ge=0)
    depth: int = param(4, "drafted tokens on a path", ge=1)

    def largest(self) -> tuple[int, int]:
        return 1 + self.depth * (self.beside + 1), self.depth

    def open(self, target: Target) -> Drafting:
        return Drafting(self, target)


class Drafting:
    def __init__(self, stage: Knows, target: Target) -> None:
        self.stage, self.target, self.at = stage, target, 1
        self.proposals = 0
        self.random = random.Random(str(stage))
        self.reads: list[Read] = []
        self.rounds: list[Round] = []

    def prefill(self, read: Read) -> None:
        self.reads.append(read)

    def propose(self, root: int, budget: Budget) -> Tree:
        stage, size = self.stage, self.target.vocabulary
        assert stage.answer[self.at - 1] == root
        paths, before, bad = [], [], self.proposals % (stage.depth + 1) if stage.cycle else None
        self.proposals += 1
        for number, token in enumerate(stage.answer[self.at : self.at + budget.depth]):
            others = [t for t in range(5, size) if t != token]
            paths += [[*before, other] for other in self.random.sample(others, stage.beside)]
            missed = self.random.random() < stage.wrong or number == bad
            before = [*before, self.random.choice(others) if missed else token]
            paths.append(before)
        return Tree.of_paths(root, paths)

    def extend(self, done: Round) -> None:
        self.rounds.append(done)
        self.at += len(done.emitted)
