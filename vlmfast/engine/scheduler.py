"""Which sequence the engine works on next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

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
    def waiting_count(self) -> int:
        return len(self._waiting)

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
