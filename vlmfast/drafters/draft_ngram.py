"""Prompt lookup: what followed the last tokens when they stood in the text before.

Prompt lookup decoding (Saxena, 2023) looks for the last n tokens in prompt and answer, n from
``ngram`` down to 1, and drafts a copy of the ``tokens`` that followed. It costs nothing, and pays
where an answer repeats: text read off a picture, a list, a second question about the same thing.

Different from the authors' code, and why:

- The latest match comes first: it is the nearest in topic, where the earliest one is often in the
  chat template. ``match=earliest`` is the authors' choice.
- Several different continuations (``paths``) may make one tree; longer matches come first.
- A copy that reaches the end of the text goes on with what it has copied, so that a repetition is
  followed to its full length.
- A copy ends in front of a picture's placeholder, which would ask for a picture that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from vlmfast.core.drafting import Budget, Drafter, Read, Round, Target
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.tree import Tree


def matches(ids: Sequence[int], ngram: int, latest: bool = True) -> list[tuple[int, int]]:
    """Where the last tokens stood before.

    Returns
    -------
    list of (int, int)
        Tokens that agree, at most ``ngram``, and the place behind them: longest first, and of
        equally long ones the latest or the earliest.
    """
    found, at, end = [], -1, len(ids) - 1
    while True:
        try:
            at = ids.index(ids[end], at + 1, end)
        except (ValueError, IndexError):  # no further place, or no ids at all
            break
        same = 1
        while same < min(ngram, at + 1) and ids[at - same] == ids[end - same]:
            same += 1
        found.append((same, at + 1))
    return sorted(found, key=lambda match: (-match[0], -match[1] if latest else match[1]))


def copied(ids: Sequence[int], start: int, tokens: int, banned: Sequence[int] = ()) -> list[int]:
    """``tokens`` ids from ``start`` on, which may be the copy's own; up to a ``banned`` one."""
    copy: list[int] = []
    for at in range(start, start + tokens):
        token = ids[at] if at < len(ids) else copy[at - len(ids)]
        if token in banned:
            break
        copy.append(token)
    return copy


def continuations(
    ids: Sequence[int], ngram: int, tokens: int, latest: bool, banned: Sequence[int] = ()
) -> Iterator[tuple[int, ...]]:
    """What followed at each match, best match first, each once."""
    seen = {()}
    for _, start in matches(ids, ngram, latest):
        copy = tuple(copied(ids, start, tokens, banned))
        if copy not in seen:
            seen.add(copy)
            yield copy


class Copies:
    """The drafter of one request."""

    def __init__(self, stage: NGram, banned: tuple[int, ...]) -> None:
        self.stage, self.banned = stage, banned
        self.ids: list[int] = []  # what the target has read: all but the root

    def prefill(self, read: Read) -> None:
        self.ids += read.ids

    def propose(self, root: int, budget: Budget) -> Tree:
        stage = self.stage
        length = min(stage.tokens, budget.depth)
        found = continuations(
            [*self.ids, root], stage.ngram, length, stage.match == "latest", self.banned
        )
        return Tree.of_paths(root, islice(found, stage.paths)).first(budget.nodes)

    def extend(self, done: Round) -> None:
        self.ids += [done.tree.tokens[0], *done.emitted[:-1]]


@dataclass(frozen=True)
class NGram(DrafterStage):
    """Copies what followed the last tokens when they stood in the prompt or the answer before."""

    name: ClassVar[str] = "draft-ngram"
    paper: ClassVar[str] = "Prompt lookup decoding, 2023"
    lead: ClassVar[str | None] = "tokens"
    merges: ClassVar[bool] = True

    tokens: int = param(10, "tokens of a copy", ge=1)
    ngram: int = param(3, "tokens that are looked for, at most; shorter ones follow", ge=1)
    paths: int = param(1, "different copies in one tree, at most", ge=1)
    match: str = param(
        "latest", "which of equally long matches comes first", choices=("latest", "earliest")
    )

    def largest(self) -> tuple[int, int]:
        return 1 + self.paths * self.tokens, self.tokens

    def open(self, target: Target) -> Drafter:
        return Copies(self, target.banned)
