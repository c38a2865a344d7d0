"""The prefix cache: what several requests to one model share, bounded in bytes.

An entry is anything that was computed once and is read again: the features of an image, for
example. Entries are never modified. The least recently used ones are dropped first, and an entry
that is in use is not dropped before its last use has ended.

A use lasts as long as its lock is held: no interrupt comes between a lock and its block, so that
none leaves an entry in use.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from threading import Lock
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
    """A stored value.

    Parameters
    ----------
    key : Key
    value : object
        Not to be modified.
    bytes : int
    release : callable, optional
        Called once, when the entry is neither stored nor in use any longer.
    uses : list of Lock
        Those that are held are in use of it.
    stored : bool
        Whether it can still be found.
    touched : int
        When it was last used, in uses of all entries.
    """

    key: Key
    value: Any
    bytes: int
    release: Callable[[], None] | None = None
    uses: list[Lock] = field(default_factory=list)
    stored: bool = True
    touched: int = 0

    @property
    def in_use(self) -> bool:
        return any(use.locked() for use in self.uses)

    def used(self, use: Lock | None) -> None:
        """Keep it as long as a lock is held."""
        if use is not None:
            self.uses = [*(own for own in self.uses if own.locked()), use]


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
        self._process, self._own_lock = os.getpid(), threading.RLock()
        # An interrupt while keys are hashed or compared breaks an OrderedDict, and no dict.
        self._entries: dict[Key, Entry] = {}
        self._touches = 0
        # The same, by group; those of prefixes also by their ids. An interrupt may leave a key here
        # that has no entry any more, or none yet, and no tree.
        self._groups: dict[tuple[str, str, Any], dict[Key, None]] = {}
        self._trees: dict[tuple[str, str, Any], PrefixTree[Entry]] = {}
        self._dropped: dict[Entry, None] = {}  # they end after their last use
        self._counts: dict[str, dict[str, int]] = {}

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        """Blocks take it themselves: an interrupt cannot come between it and the block."""
        if self._process != os.getpid():
            self._reset()  # after a fork, threads that used entries or the lock do not exist
        return self._own_lock

    # --- entries ---------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether anything is stored and found: the limit is above 0, and it is not `bypassed`."""
        return self._limit > 0 and not self.is_bypassed

    @property
    def is_bypassed(self) -> bool:
        """Whether this thread is inside a block of `bypassed`."""
        return self._bypassed.get()

    def find(self, key: Key, use: Lock | None = None) -> Entry | None:
        """The entry of a key. Counts a hit or a miss.

        Parameters
        ----------
        use : Lock, optional
            Held as long as the entry must not end.
        """
        with self._lock:
            if not self.enabled:
                return None
            entry = self._entries.get(key)
            self._count(key.kind, "misses" if entry is None else "hits")
            if entry is not None:
                self._touch(entry)
                entry.used(use)
            return entry

    def search(
        self,
        kind: str,
        tenant: str,
        scope: Any,
        ids: tuple[int, ...],
        least: int = 1,
        use: Lock | None = None,
        *,
        counted: bool = True,
    ) -> Entry | None:
        """The entry that shares the most of the first ``ids``.

        Parameters
        ----------
        least : int
            How many it must share; ``None`` is returned where none does.
        use : Lock, optional
            As in `find`.
        counted : bool
            Whether the look-up counts, and the entry becomes the last that was used.
        """
        with self._lock:
            if not self.enabled:
                return None
            entry = self._tree((kind, tenant, scope)).find(ids, least)
            if counted:
                self._count(kind, "misses" if entry is None else "hits")
            if entry is not None:
                if counted:
                    self._touch(entry)
                entry.used(use)
            return entry

    def within(self, kind: str, tenant: str, scope: Any, ids: tuple[int, ...]) -> list[Key]:
        """The keys of entries whose ids ``ids`` begin with."""
        with self._lock:
            return [entry.key for entry in self._tree((kind, tenant, scope)).within(ids)]

    def remove(self, key: Key) -> None:
        """Drop an entry, if there is one; in use, it ends after its last use."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._drop([entry])

    def put(
        self,
        key: Key,
        value: Any,
        size: int,
        release: Callable[[], None] | None = None,
        use: Lock | None = None,
    ) -> Entry | None:
        """Store a value, in place of the one that the key had.

        Parameters
        ----------
        size : int
            Its bytes.
        release : callable, optional
            Called once, when the entry has been dropped and is not in use.
        use : Lock, optional
            As in `find`.

        Returns
        -------
        Entry or None
            ``None`` where it does not fit, or nothing is stored now; the value then remains the
            caller's, and ``release`` is not called.
        """
        with self._lock:
            if not self.enabled or not self._make_room(size, besides=self._entries.get(key)):
                return None
            if (old := self._entries.get(key)) is not None:
                self._drop([old])
            self._touches += 1
            entry = Entry(key, value, size, release, touched=self._touches)
            entry.used(use)
            self._groups.setdefault(key.group, {})[key] = None
            with self._changing(key.group) as tree:
                self._entries[key] = entry
                if isinstance(key.content, Beginning):
                    tree.add(entry, key.content.ids, key.content.least)
            return entry

    def keys(self, kind: str, tenant: str, scope: Any = None) -> list[Key]:
        """The keys of one scope, the most recently used first."""
        with self._lock:
            return [entry.key for entry in reversed(self._of_group((kind, tenant, scope)))]

    def clear(self) -> None:
        """Drop all entries, those in use as soon as they are not, and forget the counts."""
        with self._lock:
            self._drop(list(self._entries.values()))
            self._counts.clear()

    def free(self) -> None:
        """Drop all entries that are not in use, where memory is exhausted."""
        with self._lock:
            self._evict([entry for entry in self._entries.values() if not entry.in_use])

    # --- bound -----------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Upper bound on the bytes of all entries; 0 turns the cache off."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            if not self._make_room(0):  # those in use end with their use
                self._drop(list(self._entries.values()))

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
        try:
            self._bypassed.set(bypassed)
            yield
        finally:
            self._bypassed.set(before)

    def stats(self) -> CacheStats:
        """What is stored, and how often it was found."""
        with self._lock:
            self._settle()
            kinds = sorted({*self._counts, *(key.kind for key in self._entries)})
            found = {kind: self._stats(kind) for kind in kinds}
            names = [each.name for each in fields(KindStats)]
            sums = {name: sum(getattr(of, name) for of in found.values()) for name in names}
            return CacheStats(**sums, limit=self._limit, kinds=found)

    def _stats(self, kind: str) -> KindStats:
        own = [entry for entry in self._entries.values() if entry.key.kind == kind]
        counts = self._counts.get(kind, {})
        return KindStats(entries=len(own), bytes=sum(e.bytes for e in own), **counts)

    # --- under the lock --------------------------------------------------------------------------

    def _of_group(self, group: tuple[str, str, Any]) -> list[Entry]:
        """The entries of a group, the least recently used first."""
        own = [self._entries[key] for key in self._groups.get(group, ()) if key in self._entries]
        return sorted(own, key=_touched)

    def _touch(self, entry: Entry) -> None:
        self._touches += 1
        entry.touched = self._touches
        if isinstance(entry.key.content, Beginning):
            with self._changing(entry.key.group) as tree:
                tree.use(entry, entry.key.content.ids)

    def _tree(self, group: tuple[str, str, Any]) -> PrefixTree[Entry]:
        """The prefixes of a group by their ids."""
        tree = self._trees.get(group)
        if tree is None:
            tree = PrefixTree[Entry]()
            for entry in self._of_group(group):
                if isinstance(content := entry.key.content, Beginning):
                    tree.add(entry, content.ids, content.least)
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

    @property
    def _bytes(self) -> int:
        """Of all entries that are stored or in use."""
        used = sum(entry.bytes for entry in self._dropped if not entry.stored)
        return used + sum(entry.bytes for entry in self._entries.values())

    def _make_room(self, size: int, besides: Entry | None = None) -> bool:
        """Evict entries until ``size`` more bytes fit; none where that is impossible.

        ``besides`` is an entry that the new one replaces. Returns whether the bytes fit.
        """
        self._settle()
        spare = 0 if besides is None or besides.in_use else besides.bytes
        over = self._bytes - spare + size - self._limit
        if over <= 0:
            return True
        idle = [e for e in self._entries.values() if not e.in_use and e is not besides]
        idle.sort(key=_touched)
        fits = sum(entry.bytes for entry in idle) >= over
        if size and not fits:
            return False
        freed = itertools.accumulate((entry.bytes for entry in idle), initial=0)
        self._evict([entry for entry, before in zip(idle, freed, strict=False) if before < over])
        return fits

    def _evict(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._count(entry.key.kind, "evictions")
        self._drop(entries)

    def _drop(self, entries: list[Entry]) -> None:
        """Forget entries; they end now, or after their last use."""
        self._dropped |= dict.fromkeys(entries)
        self._settle()

    def _settle(self) -> None:
        """Forget and end what was dropped, also what an interrupt has left of it."""
        for entry in self._dropped:
            if entry.stored:
                self._forget(entry)
        ended = [entry for entry in self._dropped if not entry.in_use]
        self._dropped = {entry: None for entry in self._dropped if entry.in_use}
        for entry in ended:  # those that an interrupt leaves are garbage
            if entry.release is not None:
                entry.release()

    def _forget(self, entry: Entry) -> None:
        """Find an entry no longer. It may be called again."""
        key = entry.key
        keys = self._groups.get(key.group, {})
        with self._changing(key.group) as tree:
            self._entries.pop(key, None)
            keys.pop(key, None)
            if isinstance(key.content, Beginning):
                tree.remove(entry, key.content.ids)
        if not keys:
            self._groups.pop(key.group, None)
            self._trees.pop(key.group, None)
        entry.stored = False


def _touched(entry: Entry) -> int:
    return entry.touched


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
