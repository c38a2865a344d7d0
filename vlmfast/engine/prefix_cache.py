"""The prefix cache: what several requests to one model share, bounded in bytes.

An entry is anything that was computed once and is read again: the features of an image, for
example. Entries are never modified. The least recently used ones are dropped first, and an entry
that is in use is not dropped before its last user has let go of it.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vlmfast.models.base import Adapter

from .memory import total_bytes
from .prefix_tree import Beginning, PrefixTree

_LIMIT = 1 << 30  # bytes, where the memory of the device is unknown
_PART = 10  # of the memory of the device that entries may take by default


class Key(NamedTuple):
    """What an entry is found by.

    Parameters
    ----------
    kind : str
        What is stored, ``"images"`` for example; statistics are counted by kind.
    tenant : str
        Who may use it. Entries of one tenant are never found for another one.
    content : Hashable
        Everything that determines the value, together with ``scope``.
    scope : Hashable
        Entries of the same kind, tenant and scope are searched together, see `PrefixCache.search`.
    """

    kind: str
    tenant: str
    content: Any
    scope: Any = None

    @property
    def group(self) -> tuple[str, str, Any]:
        return self.kind, self.tenant, self.scope


@dataclass(frozen=True)
class KindStats:
    """The entries of one kind.

    Parameters
    ----------
    hits, misses : int
        Look-ups since the cache was created or cleared.
    entries, bytes : int
        That are stored now.
    evictions : int
        Entries that were dropped to make room.
    """

    hits: int = 0
    misses: int = 0
    entries: int = 0
    bytes: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups; 0 without any."""
        return self.hits / max(self.hits + self.misses, 1)


@dataclass(frozen=True)
class CacheStats(KindStats):
    """The contents and the use of a prefix cache: all entries together.

    Parameters
    ----------
    limit : int
        Upper bound on ``bytes``.
    kinds : dict of str to KindStats
        The same for each kind of entry: ``"images"`` and ``"prefixes"``.
    """

    limit: int = 0
    kinds: dict[str, KindStats] = field(default_factory=dict)


@dataclass(eq=False)
class Entry:
    """A stored value, obtained from `PrefixCache.find` or `PrefixCache.put`.

    Parameters
    ----------
    key : Key
    value : object
        Not to be modified.
    bytes : int
    release : callable, optional
        Called once, when the entry is neither stored nor in use any longer.
    pins : int
        How many users it has.
    stored : bool
        Whether it can still be found.
    """

    key: Key
    value: Any
    bytes: int
    release: Callable[[], None] | None = None
    pins: int = 0
    stored: bool = True


class PrefixCache:
    """Values that several requests share; any thread may use it.

    Parameters
    ----------
    limit : int
        Upper bound on the bytes of all entries; 0 turns it off.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._bypassed = ContextVar("bypassed", default=False)
        self._reset()

    def _reset(self) -> None:
        """Forget everything."""
        self._process, self._lock = os.getpid(), threading.RLock()
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        # The same, by group; those of prefixes also by their ids. An interrupt may leave a key here
        # that has no entry any more, or none yet, and no tree.
        self._groups: dict[tuple[str, str, Any], OrderedDict[Key, None]] = {}
        self._trees: dict[tuple[str, str, Any], PrefixTree[Entry]] = {}
        self._bytes = 0  # of all entries that are stored or in use
        self._counts: dict[str, dict[str, int]] = {}

    @contextmanager
    def _locked(self) -> Iterator[list[Entry]]:
        """Hold the lock; entries that are put into the list are released after it."""
        if self._process != os.getpid():
            self._reset()  # after a fork, threads that used entries or the lock do not exist
        ended: list[Entry] = []
        try:
            with self._lock:
                yield ended
        finally:
            for entry in ended:
                if entry.release is not None:
                    entry.release()

    # --- entries ---------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether anything is stored and found: the limit is above 0, and it is not `bypassed`."""
        return self._limit > 0 and not self.is_bypassed

    @property
    def is_bypassed(self) -> bool:
        """Whether this thread is inside a block of `bypassed`."""
        return self._bypassed.get()

    def find(self, key: Key) -> Entry | None:
        """The entry of a key, pinned: `unpin` it after use. Counts a hit or a miss."""
        with self._locked():
            if not self.enabled:
                return None
            entry = self._entries.get(key)
            self._count(key.kind, "misses" if entry is None else "hits")
            if entry is not None:
                self._used(entry)
                entry.pins += 1
            return entry

    def has(self, key: Key) -> bool:
        """Whether a key has an entry; this is no use of it, and not counted."""
        with self._locked():
            return self.enabled and key in self._entries

    def search(
        self,
        kind: str,
        tenant: str,
        scope: Any,
        ids: tuple[int, ...],
        least: int = 1,
        *,
        use: bool = True,
    ) -> Entry | None:
        """The entry that shares the most of the first ``ids``, pinned as in `find`.

        Parameters
        ----------
        least : int
            How many it must share; ``None`` is returned where none does.
        use : bool
            Whether this is a use of the entry, and counted.
        """
        with self._locked():
            if not self.enabled:
                return None
            entry = self._tree((kind, tenant, scope)).find(ids, least)
            if use:
                self._count(kind, "misses" if entry is None else "hits")
            if entry is not None:
                if use:
                    self._used(entry)
                entry.pins += 1
            return entry

    def within(self, kind: str, tenant: str, scope: Any, ids: tuple[int, ...]) -> list[Key]:
        """The keys of entries whose ids ``ids`` begin with."""
        with self._locked():
            return [entry.key for entry in self._tree((kind, tenant, scope)).within(ids)]

    def remove(self, key: Key) -> None:
        """Drop an entry, if there is one; in use, it ends with its last use."""
        with self._locked() as ended:
            if (entry := self._entries.get(key)) is not None:
                self._drop(entry, ended)

    def put(
        self, key: Key, value: Any, size: int, release: Callable[[], None] | None = None
    ) -> Entry | None:
        """Store a value, in place of the one that the key had.

        Parameters
        ----------
        size : int
            Its bytes.
        release : callable, optional
            Called once, without the lock, when the entry has been dropped and is not in use.

        Returns
        -------
        Entry or None
            Pinned: `unpin` it after use. ``None`` where it does not fit, or nothing is stored now;
            the value then remains the caller's, and ``release`` is not called.
        """
        with self._locked() as ended:
            if not self.enabled or not self._make_room(size, ended, besides=self._entries.get(key)):
                return None
            if (old := self._entries.get(key)) is not None:
                self._drop(old, ended)
            self._groups.setdefault(key.group, OrderedDict())[key] = None
            with self._changing(key.group) as tree:
                entry = self._entries[key] = Entry(key, value, size, release, pins=1)
                if isinstance(key.content, Beginning):
                    tree.add(entry, key.content.ids, key.content.least)
            self._bytes += size
            return entry

    def unpin(self, entry: Entry) -> None:
        """End a use of an entry that `find` or `put` returned."""
        with self._locked() as ended:
            entry.pins -= 1
            if not entry.pins and not entry.stored:
                self._end(entry, ended)
            self._make_room(0, ended)  # the limit may have been lowered meanwhile

    def keys(self, kind: str, tenant: str, scope: Any = None) -> list[Key]:
        """The keys of one scope, the most recently used first."""
        with self._locked():
            return self._keys(kind, tenant, scope)

    def clear(self) -> None:
        """Drop all entries, those in use as soon as they are not, and forget the counts."""
        with self._locked() as ended:
            for entry in list(self._entries.values()):
                self._drop(entry, ended)
            self._counts.clear()

    def free(self) -> None:
        """Drop all entries that are not in use, where memory is exhausted."""
        with self._locked() as ended:
            for entry in [entry for entry in self._entries.values() if not entry.pins]:
                self._evict(entry, ended)

    # --- bound -----------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Upper bound on the bytes of all entries; 0 turns the cache off."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._locked() as ended:
            self._limit = limit
            self._make_room(0, ended)

    @contextmanager
    def bypassed(self, bypassed: bool = True) -> Iterator[None]:
        """Neither find nor store anything for requests that are made inside the block.

        What is timed is timed like this: as if every request were the first one. Requests that
        other threads make meanwhile use the cache, whichever thread answers them.

        Parameters
        ----------
        bypassed : bool
            False uses the cache inside the block, also within another block.
        """
        before = self._bypassed.get()
        self._bypassed.set(bypassed)
        try:
            yield
        finally:
            self._bypassed.set(before)

    def stats(self) -> CacheStats:
        """What is stored, and how often it was found."""
        with self._locked():
            kinds = sorted({*self._counts, *(key.kind for key in self._entries)})
            found = {kind: self._stats(kind) for kind in kinds}
            return CacheStats(
                sum(of.hits for of in found.values()),
                sum(of.misses for of in found.values()),
                sum(of.entries for of in found.values()),
                sum(of.bytes for of in found.values()),
                sum(of.evictions for of in found.values()),
                self._limit,
                found,
            )

    def _stats(self, kind: str) -> KindStats:
        own = [entry for entry in self._entries.values() if entry.key.kind == kind]
        counts = self._counts.get(kind, {})
        return KindStats(entries=len(own), bytes=sum(e.bytes for e in own), **counts)

    # --- under the lock --------------------------------------------------------------------------

    def _keys(self, kind: str, tenant: str, scope: Any) -> list[Key]:
        own = self._groups.get((kind, tenant, scope), OrderedDict())
        return [key for key in reversed(own) if key in self._entries]

    def _used(self, entry: Entry) -> None:
        self._entries.move_to_end(entry.key)
        self._groups[entry.key.group].move_to_end(entry.key)
        if isinstance(entry.key.content, Beginning):
            with self._changing(entry.key.group) as tree:
                tree.use(entry, entry.key.content.ids)

    def _tree(self, group: tuple[str, str, Any]) -> PrefixTree[Entry]:
        """The prefixes of a group by their ids."""
        tree = self._trees.get(group)
        if tree is None:
            tree = PrefixTree[Entry]()
            for key in self._groups.get(group, ()):
                if isinstance(key.content, Beginning) and key in self._entries:
                    tree.add(self._entries[key], key.content.ids, key.content.least)
            if group in self._groups:
                self._trees[group] = tree
        return tree

    @contextmanager
    def _changing(self, group: tuple[str, str, Any]) -> Iterator[PrefixTree[Entry]]:
        """A tree while it changes; an interrupt inside leaves none, and it is built again."""
        tree = self._tree(group)
        self._trees.pop(group, None)
        yield tree
        self._trees[group] = tree

    def _count(self, kind: str, name: str) -> None:
        counts = self._counts.setdefault(kind, {})
        counts[name] = counts.get(name, 0) + 1

    def _make_room(self, size: int, ended: list[Entry], besides: Entry | None = None) -> bool:
        """Evict entries until ``size`` more bytes fit; none where that is impossible.

        ``besides`` is an entry that the new one replaces. Returns whether the bytes fit.
        """
        spare = 0 if besides is None or besides.pins else besides.bytes
        over = self._bytes - spare + size - self._limit
        if over <= 0:
            return True
        idle = [e for e in self._entries.values() if not e.pins and e is not besides]
        fits = sum(entry.bytes for entry in idle) >= over
        if size and not fits:
            return False
        for entry in idle:
            if over <= 0:
                break
            over -= entry.bytes
            self._evict(entry, ended)
        return fits

    def _evict(self, entry: Entry, ended: list[Entry]) -> None:
        self._count(entry.key.kind, "evictions")
        self._drop(entry, ended)

    def _drop(self, entry: Entry, ended: list[Entry]) -> None:
        """Forget an entry; it ends now, or with its last use."""
        key = entry.key
        with self._changing(key.group) as tree:
            del self._entries[key]
            del self._groups[key.group][key]
            if isinstance(key.content, Beginning):
                tree.remove(entry, key.content.ids)
        if not self._groups[key.group]:
            del self._groups[key.group], self._trees[key.group]
        entry.stored = False
        if not entry.pins:
            self._end(entry, ended)

    def _end(self, entry: Entry, ended: list[Entry]) -> None:
        self._bytes -= entry.bytes
        ended.append(entry)


def default_limit(adapter: Adapter) -> int:
    """The bound on the prefix cache of a model: a tenth of the memory of its device."""
    total = total_bytes(adapter.device)
    return _LIMIT if math.isinf(total) else int(total) // _PART


def prefix_cache_of(adapter: Adapter) -> PrefixCache:
    """The prefix cache of a model; there is one for each adapter."""
    cache = adapter.kept.get("prefix_cache")
    if cache is None:
        cache = adapter.kept.setdefault("prefix_cache", PrefixCache(default_limit(adapter)))
        adapter.pool.frees(cache.free)
    return cache
