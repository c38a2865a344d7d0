"""Token Recycling: drafts the tokens that the target ranked high before.

A forward pass of the target ranks the whole vocabulary after each node of the tree that it
verifies, not only the accepted token. Token Recycling (arXiv 2408.08696) keeps the 8 best
successors of each token, as last ranked, and fills a fixed tree of 80 drafts in 6 levels with them:
the child of rank r is the r-th successor of its parent's token. It needs no training and no other
model. Later answers of the same model reuse the successors.

Different from the authors' code, and why:

- A token without known successors has no children. The authors draft token 0 there.
- Where several nodes have the same token, the last one wins, and accepted nodes come last. The
  authors' scatter keeps an arbitrary one of them, which varies between runs on a GPU.
- Pairs of adjacent prompt tokens are a first guess, replaced when the target first ranks the
  successors of a token.
- Placeholders of images are neither remembered nor drafted.
- ``nodes`` may cut the tree; its likeliest nodes are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from vlmfast.core.drafting import Budget, Drafter, Read, Round, Target
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.tree import Tree

from ._static import filled, likeliest_first, shape_of

SUCCESSORS = 8
TEMPLATE = shape_of(
    (
        (8,),
        (8, 4, 3, 2, 1, 1, 1, 1),
        (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1),
        (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1),
        (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1),
        (2, 0, 0, 1),
    )
)
SHAPE = likeliest_first(TEMPLATE)


class Recycled:
    """The drafter of one request.

    Parameters
    ----------
    nodes : int
        Most of a tree.
    banned : sequence of int
        Ids that are never a successor.
    of : dict of int to tuple of int
        The latest best successors of each token, also of earlier requests.
    """

    def __init__(self, nodes: int, banned: tuple[int, ...], of: dict[int, tuple[int, ...]]) -> None:
        self.nodes, self.banned, self.of = nodes, frozenset(banned), of
        self.last: int | None = None  # the last token in the target's cache

    def successors(self, token: int) -> tuple[int, ...]:
        return self.of.get(token, ())

    def prefill(self, read: Read) -> None:
        """Add a text: the token after each token becomes its best successor."""
        ids = read.ids if self.last is None else [self.last, *read.ids]
        for token, follower in pairwise(ids):
            if follower not in self.banned:
                others = (other for other in self.successors(token) if other != follower)
                self.of[token] = (follower, *others)[:SUCCESSORS]
        self.last = ids[-1] if ids else None

    def propose(self, root: int, budget: Budget) -> Tree:
        tree = filled(SHAPE, root, self.successors)
        return tree.first(min(self.nodes, budget.nodes), budget.depth)

    def extend(self, done: Round) -> None:
        """Store the target's best successors of every node of a tree."""
        assert done.logits is not None
        size = done.logits.shape[-1]
        rows = done.logits.topk(min(SUCCESSORS + len(self.banned), size)).indices.tolist()
        for node in (*range(len(rows)), *done.path):
            fitting = [token for token in rows[node] if token not in self.banned]
            self.of[done.tree.tokens[node]] = tuple(fitting[:SUCCESSORS])
        self.last = [done.tree.tokens[0], *done.emitted][-2]


@dataclass(frozen=True)
class Recycle(DrafterStage):
    """Fills a fixed tree with the successors that the model ranked best before."""

    name: ClassVar[str] = "draft-recycle"
    paper: ClassVar[str] = "Token Recycling, arXiv 2408.08696"
    lead: ClassVar[str | None] = "nodes"
    merges: ClassVar[bool] = True
    logits: ClassVar[bool] = True

    nodes: int = param(len(SHAPE), "nodes of the tree, the root included", ge=2, le=len(SHAPE))

    def largest(self) -> tuple[int, int]:
        return self.nodes, SHAPE.first(self.nodes).depth

    def open(self, target: Target) -> Drafter:
        return Recycled(self.nodes, target.banned, target.kept.setdefault("successors", {}))
