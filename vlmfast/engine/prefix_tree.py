"""Finds the prefix that shares the most ids with a prompt: a radix tree of ids.

A look-up follows the ids of one prompt, however many prefixes there are. Every node lists the
prefixes through it that can be cut to any point of the edge into it, so that no others are looked
at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def common(one: Iterable[int], another: Iterable[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for a, b in zip(one, another, strict=False):
        if a != b:
            break
        count += 1
    return count


@dataclass(frozen=True, eq=False)
class Beginning:
    """The identity of an entry within its scope.

    Parameters
    ----------
    ids : tuple of int
    least : int
        To how many ids it can be cut.
    """

    ids: tuple[int, ...]
    least: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Beginning) and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids)

    def shared(self, ids: list[int]) -> int:
        """How many of the first ``ids`` can be taken from it."""
        count = common(self.ids, ids)
        return count if count >= self.least else 0


@dataclass(eq=False)
class _Node(Generic[T]):
    """A point where prefixes part, end, or can first be cut.

    Parameters
    ----------
    start : int
        Ids before the edge into it.
    ids : tuple of int
        Of this edge.
    children : dict of int to _Node
        By the first id of their edges.
    usable : OrderedDict
        Prefixes that can be cut to every point of the edge, the least recently used first.
    ends : set
        Prefixes that end here.
    """

    start: int
    ids: tuple[int, ...]
    children: dict[int, _Node[T]] = field(default_factory=dict)
    usable: OrderedDict[T, None] = field(default_factory=OrderedDict)
    ends: set[T] = field(default_factory=set)

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class PrefixTree(Generic[T]):
    """Names of prefixes by their ids."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(0, ())

    def add(self, name: T, ids: tuple[int, ...], least: int) -> None:
        """Add a prefix that can be cut to ``least`` ids and more; it is the last that was used."""
        node = self._root
        cuts = {max(least - 1, 0), len(ids)}
        while node.stop < len(ids):
            child = node.children.get(ids[node.stop])
            if child is None:
                child = node.children[ids[node.stop]] = _Node(node.stop, ids[node.stop :])
            shared = common(child.ids, ids[child.start : child.stop])
            ends = [cut for cut in cuts if child.start < cut < child.stop]
            if (stop := min([child.start + shared, *ends])) < child.stop:
                child = self._split(node, child, stop)
            node = child
            if node.start >= least - 1:
                node.usable[name] = None
        node.ends.add(name)

    def _split(self, above: _Node[T], node: _Node[T], at: int) -> _Node[T]:
        """A node on the edge from ``above``, after ``at`` ids of the prefixes."""
        count = at - node.start
        new = _Node(node.start, node.ids[:count], usable=node.usable.copy())
        above.children[node.ids[0]] = new
        node.start, node.ids = at, node.ids[count:]
        new.children[node.ids[0]] = node
        return new

    def remove(self, name: T, ids: tuple[int, ...]) -> None:
        """Remove a prefix that was added with these ids."""
        path = [node for node, _ in self._path(ids)]
        for node in path:
            node.usable.pop(name, None)
            node.ends.discard(name)
        for above, node in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.children or node.ends:
                return
            del above.children[node.ids[0]]

    def use(self, name: T, ids: tuple[int, ...]) -> None:
        """Note that a prefix was used."""
        for node, _ in self._path(ids):
            if name in node.usable:
                node.usable.move_to_end(name)

    def find(self, ids: tuple[int, ...], least: int = 1) -> T | None:
        """The prefix that shares the most of the first ``ids``, and can be cut to these.

        Of several ones the last that was used; ``None`` where none shares ``least``.
        """
        found = None
        for node, shared in self._path(ids):
            if shared >= max(least, 1) and node.usable:
                found = next(reversed(node.usable))
        return found

    def within(self, ids: tuple[int, ...]) -> list[T]:
        """The prefixes that ``ids`` begin with."""
        return [
            name for node, shared in self._path(ids) if shared == node.stop for name in node.ends
        ]

    def _path(self, ids: tuple[int, ...]) -> Iterator[tuple[_Node[T], int]]:
        """The nodes from the root to where ``ids`` end or part, and how many ids each shares."""
        node: _Node[T] | None = self._root
        while node is not None:
            part = ids[node.start : node.stop]
            shared = node.stop if part == node.ids else node.start + common(part, node.ids)
            yield node, shared
            goes_on = shared == node.stop < len(ids)
            node = node.children.get(ids[node.stop]) if goes_on else None
