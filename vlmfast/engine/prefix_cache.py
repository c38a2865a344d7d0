"""The prefix cache: what several requests to one model share, bounded in bytes.

It owns all entries, their order of use and the count of their bytes. An entry is anything that was
computed once and is read again: the features of an image, or the keys and values of a prefix.
Entries are never modified. The least recently used ones are dropped first, and an entry that is in
use is not dropped before its last use has ended.

Prefixes are also found by hashes of their beginnings, chained from id to id: a look-up costs the
length of the prompt and the entries that share the longest beginning, however many others there
are. The ids themselves are compared after the lock is released, so that equal hashes of other ids
share nothing.

A use lasts as long as its lock is held: no interrupt comes between a lock and its block, so that
none leaves an entry in use.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

from vlmfast.models.base import Adapter

from .memory import total_bytes

_LIMIT = 1 << 30  # bytes, where the memory of the device is unknown
_PART = 10  # of the memory of the device that entries may take by default
_touched = attrgetter("touched")


class Key(NamedTuple):
    """What an entry is found by.

    Parameters
    ----------
    kind : str
        What is stored, ``"images"`` for example; statistics are counted by kind.
    tenant : str
        Who may use it. Entries of one tenant are never found for another one.
    content : Hashable
        Everything that determines the value, together with ``ids``.
    ids : tuple of int
        Those of a prefix; see `PrefixCache.search`.
    """

    kind: str
    tenant: str
    content: Hashable
    ids: tuple[int, ...] = ()

    def hashes(self, least: int) -> list[int]:
        """Of what it has in common with other prefixes: the first ``least`` ids, to all of them."""
        chain = itertools.accumulate(self.ids, _chained, initial=hash(self[:3]))
        return [*itertools.islice(chain, max(least, 1), None)]

    def begins(self, other: Key, count: int) -> bool:
        """Whether both have the first ``count`` ids, and all else."""
        return self[:3] == other[:3] and self.ids[:count] == other.ids[:count]


def _chained(before: int, token: int) -> int:
    return hash((before, token))


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
    hashes : list of int
        Of a prefix, by which it can be found.
    """

    key: Key
    value: Any
    bytes: int
    release: Callable[[], None] | None = None
    uses: list[Lock] = field(default_factory=list)
    stored: bool = True
    touched: int = 0
    hashes: list[int] = field(default_factory=list)

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
        # Prefixes by hashes of their beginnings, most of which are of one; and of all of their ids.
        self._beginnings: dict[int, Entry | dict[Entry, None]] = {}
        self._ends: dict[int, Entry] = {}
        self._dropped: dict[Entry, None] = {}  # they end after their last use
        self._counts = Counter[tuple[str, str]]()

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
            if entry is not None:
                entry.used(use)
            return self._looked_up(key, entry)

    def search(
        self, key: Key, least: int = 1, use: Lock | None = None, *, counted: bool = True
    ) -> tuple[Entry | None, int]:
        """The prefix that shares the most of the first ids of a key, and how many it shares.

        Of several ones it is the last that was used.

        Parameters
        ----------
        least : int
            How many it must share; ``None`` and 0 are returned where none does.
        use : Lock, optional
            As in `find`.
        counted : bool
            Whether the look-up counts, and the entry becomes the last that was used.
        """
        hashes, entry = key.hashes(least), None
        with self._lock:
            if not self.enabled:
                return None, 0
            while hashes and entry is None:
                found = self._beginnings.get(hashes.pop())
                entry = max(found, key=_touched) if isinstance(found, dict) else found
            if entry is not None:
                entry.used(use)
        count = max(least, 1) + len(hashes)
        if entry is not None and not entry.key.begins(key, count):
            entry = None
        if counted:
            with self._lock:
                self._looked_up(key, entry)
        return entry, 0 if entry is None else count

    def _looked_up(self, key: Key, entry: Entry | None) -> Entry | None:
        """Count a hit or a miss."""
        self._counts[key.kind, "misses" if entry is None else "hits"] += 1
        if entry is not None:
            self._touches += 1
            entry.touched = self._touches
        return entry

    def put(
        self,
        key: Key,
        value: Any,
        size: int,
        release: Callable[[], None] | None = None,
        use: Lock | None = None,
        least: int = 0,
    ) -> Entry | None:
        """Store a value, in place of the one that the key had.

        A prefix also takes the place of those that it contains.

        Parameters
        ----------
        size : int
            Its bytes.
        release : callable, optional
            Called once, when the entry has been dropped and is not in use.
        use : Lock, optional
            As in `find`.
        least : int
            To how many ids a prefix can be cut.

        Returns
        -------
        Entry or None
            ``None`` where it does not fit, or nothing is stored now; the value then remains the
            caller's, and ``release`` is not called.
        """
        hashes = key.hashes(least)
        with self._lock:
            if not self.enabled:
                return None
            known = set(hashes)
            inside = [self._ends[each] for each in hashes if each in self._ends]
            old = [entry for entry in inside if known.issuperset(entry.hashes)]
            if key in self._entries:
                old.append(self._entries[key])
            if not self._make_room(size, old):
                return None
            self._drop(old)
            self._touches += 1
            entry = Entry(key, value, size, release, touched=self._touches, hashes=hashes)
            entry.used(use)
            self._entries[key] = entry
            for each in hashes:
                own = self._beginnings.setdefault(each, entry)
                if isinstance(own, dict):
                    own[entry] = None
                elif own is not entry:
                    self._beginnings[each] = {own: None, entry: None}
            if hashes:
                self._ends[hashes[-1]] = entry
            return entry

    def remove(self, entry: Entry) -> None:
        """Drop an entry; in use, it ends after its last use."""
        with self._lock:
            if entry.stored:
                self._drop([entry])

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
            if not self._make_room(0):
                self.free()
                self._drop(list(self._entries.values()))  # those in use end with their use

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
            kinds = sorted({kind for kind, _ in (*self._counts, *(k[:2] for k in self._entries))})
            found = {kind: self._stats(kind) for kind in kinds}
            names = [each.name for each in fields(KindStats)]
            sums = {name: sum(getattr(of, name) for of in found.values()) for name in names}
            return CacheStats(**sums, limit=self._limit, kinds=found)

    def _stats(self, kind: str) -> KindStats:
        own = [entry for entry in self._entries.values() if entry.key.kind == kind]
        counts = {name: self._counts[kind, name] for name in ("hits", "misses", "evictions")}
        return KindStats(entries=len(own), bytes=sum(e.bytes for e in own), **counts)

    # --- under the lock --------------------------------------------------------------------------

    @property
    def _bytes(self) -> int:
        """Of all entries that are stored or in use."""
        used = sum(entry.bytes for entry in self._dropped if not entry.stored)
        return used + sum(entry.bytes for entry in self._entries.values())

    def _make_room(self, size: int, leaving: Collection[Entry] = ()) -> bool:
        """Evict entries until ``size`` more bytes fit; none where that is impossible.

        Returns whether they fit, once those that are ``leaving`` are gone.
        """
        self._settle()
        over = self._bytes + size - self._limit
        over -= sum(entry.bytes for entry in {*leaving} if not entry.in_use)
        if over <= 0:
            return True
        others = (e for e in self._entries.values() if not e.in_use and e not in leaving)
        idle = sorted(others, key=_touched)
        freed = [*itertools.accumulate((entry.bytes for entry in idle), initial=0)]
        if freed[-1] < over:
            return False
        self._evict([entry for entry, before in zip(idle, freed, strict=False) if before < over])
        return True

    def _evict(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._counts[entry.key.kind, "evictions"] += 1
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
        self._entries.pop(entry.key, None)
        for each in entry.hashes:
            found = self._beginnings.get(each)
            if isinstance(found, dict):
                found.pop(entry, None)
            if found is entry or not found:
                self._beginnings.pop(each, None)
        if entry.hashes:
            self._ends.pop(entry.hashes[-1], None)
        entry.stored = False


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
