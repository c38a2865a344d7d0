"""Trees of a fixed shape: a `Tree` that contains ranks instead of tokens.

Rank r is the r-th best successor of the parent, counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vlmfast.core.tree import Tree

ROOT = -1  # instead of a rank
_DEEPER = 1.3


def shape_of(widths: Iterable[Sequence[int]]) -> Tree:
    """A shape by levels: the number of children of each node of a level, in the order of the nodes.

    Nodes at the end of a level that are not listed have no children.
    """
    ranks, parents, level = [ROOT], [-1], [0]
    for counts in widths:
        below = []
        for node, count in zip(level, counts, strict=False):
            for rank in range(count):
                below.append(len(ranks))
                ranks.append(rank)
                parents.append(node)
        level = below
    return Tree(tuple(ranks), tuple(parents))


def likeliest_first(shape: Tree) -> Tree:
    """The same shape, reordered such that every prefix of its nodes is a good small tree.

    A node of rank r counts as 1 / (r + 1) times as likely as one of rank 0, and each level as less
    likely than the one above it. A child thus never comes before its parent.
    """
    cost = [1.0]
    for rank, parent in zip(shape.tokens[1:], shape.parents[1:], strict=True):
        cost.append(cost[parent] * (rank + 1) * _DEEPER)
    return shape.select(sorted(range(len(shape)), key=cost.__getitem__))


def guesses(shape: Tree, root: int, successors: Callable[[int], Sequence[int]]) -> list[int | None]:
    """The token of each node: the one of its rank among ``successors`` of its parent's token.

    ``None`` where there are too few successors, and below such a node.
    """
    tokens: list[int | None] = [root]
    for rank, parent in zip(shape.tokens[1:], shape.parents[1:], strict=True):
        above = tokens[parent]
        known = () if above is None else successors(above)
        tokens.append(known[rank] if rank < len(known) else None)
    return tokens


def filled(shape: Tree, root: int, successors: Callable[[int], Sequence[int]]) -> Tree:
    """A tree of that shape, without the nodes that have no token."""
    tokens: list[int] = []
    parents: list[int] = []
    index = {-1: -1}
    for node, token in enumerate(guesses(shape, root, successors)):
        if token is not None:
            index[node] = len(tokens)
            tokens.append(token)
            parents.append(index[shape.parents[node]])
    return Tree(tuple(tokens), tuple(parents))
