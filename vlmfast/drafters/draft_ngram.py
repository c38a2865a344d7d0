"""Prompt lookup: drafts what followed an earlier occurrence of the last tokens.

Prompt lookup decoding (Saxena, 2023) looks for the last n tokens in prompt and answer, n from
``ngram`` down to 1, and drafts a copy of the ``tokens`` that followed. It costs almost nothing, and
pays where an answer repeats: text read off an image, a list, a second question about the same
thing.

Different from the authors' code, and why:

- The latest match comes first: it is the nearest in topic, where the earliest one is often in the
  chat template. ``match=earliest`` is the authors' choice.
- Several different continuations (``paths``) may form one tree; longer matches come first.
- A copy that reaches the end of the text continues with its own tokens, so that a repetition is
  followed to its full length.
- A copy ends before an image's placeholder, which would refer to an image that does not exist.
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
    """Earlier occurrences of the last tokens.

    Returns
    -------
    list of (int, int)
        Length of the match, at most ``ngram``, and the index after it: longest first, and of
        equal lengths the latest or the earliest.
    """
    found, at, end = [], -1, len(ids) - 1
    while True:
        try:
            at = ids.index(ids[end], at + 1, end)
        except (ValueError, IndexError):  # no further match, or no ids at all
            break
        same = 1
        while same < min(ngram, at + 1) and ids[at - same] == ids[end - same]:
            same += 1
        found.append((same, at + 1))
    return sorted(found, key=lambda match: (-match[0], -match[1] if latest else match[1]))


def copied(ids: Sequence[int], start: int, tokens: int, banned: Sequence[int] = ()) -> list[int]:
    """``tokens`` ids from ``start`` on, past the end the copy's own; stops at a ``banned`` one."""
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
    """The distinct continuations of the matches, best match first."""
    seen: set[tuple[int, ...]] = {()}
    for _, start in matches(ids, ngram, latest):
        copy = tuple(copied(ids, start, tokens, banned))
        if copy not in seen:
            seen.add(copy)
            yield copy


class Copies:
    """The drafter of one request."""

    def __init__(self, stage: NGram, banned: tuple[int, ...]) -> None:
        self.stage, self.banned = stage, banned
        self.ids: list[int] = []  # tokens in the target's cache: all but the root

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
    """Copies what followed an earlier occurrence of the last tokens in prompt or answer."""

    name: ClassVar[str] = "draft-ngram"
    paper: ClassVar[str] = "Prompt lookup decoding, 2023"
    tier: ClassVar[str] = "baseline"
    lead: ClassVar[str | None] = "tokens"
    merges: ClassVar[bool] = True

    tokens: int = param(10, "tokens per copy", ge=1)
    ngram: int = param(3, "longest n-gram that is looked up; shorter ones follow", ge=1)
    paths: int = param(1, "most different copies in one tree", ge=1)
    match: str = param(
        "latest", "which of equally long matches comes first", choices=("latest", "earliest")
    )

    def largest(self) -> tuple[int, int]:
        return 1 + self.paths * self.tokens, self.tokens

    def open(self, target: Target) -> Drafter:
        return Copies(self, target.banned)
