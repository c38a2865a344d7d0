"""Trees whose shape is known before any token is: a `Tree` that carries ranks instead of tokens.

Rank r stands for the r-th best guess behind the parent, counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vlmfast.core.tree import Tree

ROOT = -1  # in place of a rank
_DEEPER = 1.3


def shape_of(widths: Iterable[Sequence[int]]) -> Tree:
    """A shape by levels: how many children each node of one level has, in the order of the nodes.

    Nodes at the end of a level that are not listed have none.
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
    """The same shape, its nodes in an order of which every beginning is a good small tree.

    A guess of rank r counts as 1 / (r + 1) times as likely as the first, and each level as less
    likely than the one above it. A child thus never comes before its parent.
    """
    cost = [1.0]
    for rank, parent in zip(shape.tokens[1:], shape.parents[1:], strict=True):
        cost.append(cost[parent] * (rank + 1) * _DEEPER)
    order = sorted(range(len(shape)), key=cost.__getitem__)
    place = {node: at for at, node in enumerate(order)} | {-1: -1}
    return Tree(
        tuple(shape.tokens[node] for node in order),
        tuple(place[shape.parents[node]] for node in order),
    )


def guesses(shape: Tree, root: int, successors: Callable[[int], Sequence[int]]) -> list[int | None]:
    """The token of each node: the one of its rank among ``successors`` of its parent's token.

    ``None`` where there are not so many, and behind such a node.
    """
    tokens: list[int | None] = [root]
    for rank, parent in zip(shape.tokens[1:], shape.parents[1:], strict=True):
        above = tokens[parent]
        known = () if above is None else successors(above)
        tokens.append(known[rank] if rank < len(known) else None)
    return tokens


def filled(shape: Tree, root: int, successors: Callable[[int], Sequence[int]]) -> Tree:
    """A tree of that shape, without the nodes for which there is no guess."""
    place, tokens, parents = {-1: -1}, [], []
    for node, token in enumerate(guesses(shape, root, successors)):
        if token is not None:
            place[node] = len(tokens)
            tokens.append(token)
            parents.append(place[shape.parents[node]])
    return Tree(tuple(tokens), tuple(parents))
