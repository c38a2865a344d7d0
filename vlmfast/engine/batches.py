"""The sequences that are decoded, in batches that share forward passes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from vlmfast.core.buffers import caught_shortage

from .decode import Batch
from .sequence import Sequence


class Batches:
    """All sequences that are decoded."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Batch[Sequence]] = {}

    def __iter__(self) -> Iterator[Batch[Sequence]]:
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

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there; a cache that it keeps becomes its own again.

        Where there is no memory for a copy, it has none.
        """
        batch = self._by_key.get(_key(sequence))
        if batch is None:
            return
        if sequence in batch.rows:
            if sequence.keeps_cache:
                with caught_shortage():
                    sequence.group = batch.take(sequence)
            if sequence.group is None:
                batch.leave(sequence)
        if not batch.rows:
            del self._by_key[_key(sequence)]

    def modes(self) -> Iterator[list[Batch[Sequence]]]:
        """The batches of each mode."""
        modes = list(dict.fromkeys(batch.rows[0].mode for batch in self))
        for mode in modes:
            yield [batch for batch in self if batch.rows[0].mode == mode]


def _key(sequence: Sequence) -> Hashable:
    """What sequences of one batch have in common.

    Drafts make a step wider for all rows of a batch. A strict answer with drafts compares steps of
    one width, so it has a batch of its own.
    """
    drafted = sequence.drafts is not None
    own = id(sequence) if drafted and sequence.strict else None
    return sequence.mode, drafted, own
