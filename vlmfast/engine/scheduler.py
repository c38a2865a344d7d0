"""Which sequence the engine works on next, and the batches of those that are decoded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator

from vlmfast.core.buffers import caught_shortage

from .decode import Batch
from .sequence import Phase, Sequence


class Scheduler:
    """Sequences that wait, those whose prompts are prefilled, and those that are decoded.

    Sequences are admitted by priority, lower values first, and within a priority in the order in
    which they were submitted. One prompt is prefilled at a time; while it waits for its media, the
    next one is. Prompts go before decode steps, so that many rows are decoded together. A decode
    step follows each chunk of a prompt that is not its last, and while the answer of a row is
    streamed, each prompt.

    Attributes
    ----------
    begun : list of Sequence
        Whose prompts are being prefilled, in the order in which they were begun.
    active : list of Sequence
        In the order in which their prompts were prefilled.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Sequence]] = []
        self.begun: list[Sequence] = []
        self.active: list[Sequence] = []
        self._decoded = True  # whether a decode step has followed the last chunk

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.priority, sequence.arrived, sequence))

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for _, _, sequence in self._waiting]

    @property
    def streams(self) -> bool:
        """Whether any row is streamed."""
        return any(sequence.streamed for sequence in self.active)

    @property
    def running(self) -> list[Sequence]:
        """Those that have, or may have, a cache."""
        return [*self.begun, *self.active]

    def prompts(self, admits: Callable[[Sequence], bool]) -> Iterator[Sequence]:
        """Sequences whose prompts may be prefilled further in this step; none for a decode step.

        The next one is for where there was nothing to do for the one before.

        Parameters
        ----------
        admits : callable
            Whether there is memory for one more sequence.
        """
        if self.active and not self._decoded and (self.begun or self.streams):
            self._decoded = True
            return
        for sequence in list(self.begun):
            self._decoded = False
            yield sequence
        while self._waiting and admits(self._waiting[0][2]):
            self._decoded = False
            sequence = self._waiting[0][2]
            sequence.phase = Phase.PREFILL
            self.begun.append(heapq.heappop(self._waiting)[2])
            yield sequence
        self._decoded = True

    def activate(self, sequence: Sequence) -> None:
        """Decode a sequence whose prompt has been prefilled."""
        self.remove(sequence)
        sequence.phase = Phase.DECODE
        self.active.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its phase is."""
        for listed in (self.begun, self.active):
            if sequence in listed:
                listed.remove(sequence)
                return
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
        heapq.heapify(self._waiting)


class Batches:
    """All sequences that are decoded."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Batch] = {}

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._by_key.values())

    def join(self, sequence: Sequence, expected: int = 1) -> None:
        """Add a sequence whose prompt has been prefilled.

        ``expected``: rows that its batch may get, see `RowGroup`.
        """
        assert sequence.group is not None
        group, sequence.group = sequence.group, None
        batch = self._by_key.setdefault(_key(sequence), Batch())
        batch.size = max(batch.size, expected)
        batch.join(group)

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Remove a sequence, if it is there. ``keep``: its cache becomes its own again.

        Where there is no memory for a copy, it has none.
        """
        batch = self._by_key.get(_key(sequence))
        if batch is None:
            return
        if sequence in batch.rows:
            if keep:
                with caught_shortage():
                    sequence.group = batch.take(sequence)
            if sequence.group is None:
                batch.leave(sequence)
        if not batch.rows:
            del self._by_key[_key(sequence)]


def _key(sequence: Sequence) -> Hashable:
    """What sequences of one batch have in common.

    Drafts make a step wider for all rows of a batch. A strict answer with drafts compares steps of
    one width, so it has a batch of its own.
    """
    drafted = sequence.drafts is not None
    own = id(sequence) if drafted and sequence.strict else None
    return sequence.mode, drafted, own
