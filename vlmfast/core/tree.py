"""Trees of drafted tokens.

Node 0 is the token that was emitted last: it is decided, but not yet processed by the target. Every
other node is a draft of what follows its parent. Nodes are numbered so that a parent comes before
its children; children of one node carry different tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Drafted tokens.

    Parameters
    ----------
    tokens : tuple of int
        The root's first.
    parents : tuple of int
        Node that each node follows; -1 for the root.

    Raises
    ------
    ValueError
        When a parent does not come before its child, or two siblings carry the same token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens:
            raise ValueError(
                f"a tree of {len(self.tokens)} tokens and {len(self.parents)} parents; it needs "
                "equal numbers of both, and a root"
            )
        if self.parents[0] != -1 or any(
            not 0 <= parent < node for node, parent in enumerate(self.parents) if node
        ):
            raise ValueError(f"parents={self.parents}: a parent must come before its children")
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError("a tree drafts one token twice after the same node")

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def chain(tokens: Iterable[int]) -> Tree:
        """One path: ``tokens``, the root first."""
        tokens = tuple(tokens)
        return Tree(tokens, tuple(range(-1, len(tokens) - 1)))

    @staticmethod
    def of_paths(root: int, paths: Iterable[Sequence[int]]) -> Tree:
        """The smallest tree that contains all ``paths`` below ``root``, in order of appearance."""
        tokens, parents = [root], [-1]
        children: list[dict[int, int]] = [{}]
        for path in paths:
            node = 0
            for token in path:
                if token not in children[node]:
                    children[node][token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    children.append({})
                node = children[node][token]
        return Tree(tuple(tokens), tuple(parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Drafted tokens on the way to each node, itself included."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """Of each node, token to child, in the order of the nodes."""
        children: tuple[dict[int, int], ...] = tuple({} for _ in self.tokens)
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if node:
                children[parent][token] = node
        return children

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        return [node for node, below in enumerate(self.children) if not below]

    def first(self, nodes: int, depth: int | None = None) -> Tree:
        """The first ``nodes`` nodes, of those at most ``depth`` deep."""
        depth = self.depth if depth is None else depth
        kept = [node for node, d in enumerate(self.depths) if d <= depth][: max(nodes, 1)]
        return self.select(kept)

    def select(self, nodes: Sequence[int]) -> Tree:
        """The tree of some nodes, the root first and each after its parent, in this order."""
        index = {-1: -1} | {node: at for at, node in enumerate(nodes)}
        return Tree(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
        )

    def without(self, banned: Sequence[int]) -> Tree:
        """Without the nodes that carry a ``banned`` token, and what follows them."""
        kept = {0: None}  # ordered
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if token not in banned and parent in kept:
                kept[node] = None
        return self.select([*kept])

    def joined(self, other: Tree) -> Tree:
        """The nodes of both, this one's first.

        Raises
        ------
        ValueError
            When their roots differ.
        """
        if self.tokens[0] != other.tokens[0]:
            raise ValueError(
                f"trees below {self.tokens[0]} and {other.tokens[0]} cannot be joined: they have "
                "different roots"
            )
        tokens, parents = list(self.tokens), list(self.parents)
        children = [dict(below) for below in self.children]
        index = {0: 0}
        for node in range(1, len(other)):
            token, parent = other.tokens[node], index[other.parents[node]]
            if token not in children[parent]:
                children[parent][token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                children.append({})
            index[node] = children[parent][token]
        return Tree(tuple(tokens), tuple(parents))

    def mask(self) -> Tensor:
        """Bool (N, N): whether a node sees another, its ancestor or itself."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if node:
                mask[node] |= mask[parent]
        return mask
