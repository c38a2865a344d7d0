"""Which sequence the engine works on next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .sequence import Phase, Sequence


class Scheduler:
    """Sequences that wait, the one that is prefilled, and those that are decoded.

    Sequences are admitted by priority, lower values first, and within a priority in the order in
    which they were submitted. One prompt is prefilled at a time. Prompts go before decode steps, so
    that many rows are decoded together. A decode step follows each chunk of a prompt that is not
    its last, and while the answer of a row is streamed, each prompt.

    Attributes
    ----------
    prefilling : Sequence, optional
    active : list of Sequence
        In the order in which their prompts were prefilled.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Sequence]] = []
        self.prefilling: Sequence | None = None
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

    def next(self, admits: Callable[[Sequence], bool]) -> Sequence | None:
        """The sequence whose prompt is prefilled further; ``None`` for a decode step.

        Parameters
        ----------
        admits : callable
            Whether there is memory for one more sequence.
        """
        if self.active and not self._decoded and (self.prefilling is not None or self.streams):
            self._decoded = True
            return None
        if self.prefilling is None and self._waiting and admits(self._waiting[0][2]):
            self.prefilling = heapq.heappop(self._waiting)[2]
            self.prefilling.phase = Phase.PREFILL
        self._decoded = self.prefilling is None
        return self.prefilling

    def activate(self, sequence: Sequence) -> None:
        """Decode a sequence whose prompt has been prefilled."""
        self.prefilling = None
        sequence.phase = Phase.DECODE
        self.active.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its phase is."""
        if sequence is self.prefilling:
            self.prefilling = None
        elif sequence in self.active:
            self.active.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)
