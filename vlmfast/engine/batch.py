"""The rows that are decoded, in groups that share forward passes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from .decode import Decoder
from .sequence import Sequence


class Group:
    """Sequences that are decoded in the same forward passes.

    Parameters
    ----------
    key : hashable
        What they have in common.
    decoder : Decoder
    sequences : list of Sequence
        Row by row.
    """

    def __init__(self, key: Hashable, decoder: Decoder, sequences: list[Sequence]) -> None:
        self.key, self.decoder, self.sequences = key, decoder, sequences

    @property
    def drafted(self) -> bool:
        """Whether its sequences have drafters."""
        return self.sequences[0].drafts is not None


class Batch:
    """The sequences that are decoded."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def join(self, sequence: Sequence) -> None:
        """Add a sequence whose prompt has been prefilled."""
        assert sequence.decoder is not None
        key = _key(sequence)
        group = next((group for group in self.groups if group.key == key), None)
        if group is None:
            self.groups.append(Group(key, sequence.decoder, [sequence]))
        else:
            group.decoder = Decoder.join([group.decoder, sequence.decoder])
            group.sequences.append(sequence)
        sequence.decoder = None

    def leave(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Remove a sequence; its cache becomes its own again where it is to be kept."""
        group = next((group for group in self.groups if sequence in group.sequences), None)
        if group is None:
            return
        rows = [row for row, other in enumerate(group.sequences) if other is not sequence]
        if rows:
            group.decoder = group.decoder.select(rows)
            group.sequences.remove(sequence)
            return
        self.groups.remove(group)
        if keep:
            sequence.decoder = group.decoder
        else:
            group.decoder.release()

    def modes(self) -> Iterator[list[Group]]:
        """The groups of each mode."""
        modes = list(dict.fromkeys(group.sequences[0].mode for group in self.groups))
        for mode in modes:
            yield [group for group in self.groups if group.sequences[0].mode == mode]


def _key(sequence: Sequence) -> Hashable:
    """What sequences of one group have in common.

    Drafts make a step wider, for all rows of a group. A strict answer compares steps of one width,
    so it has a group of its own.
    """
    alone = sequence.strict or sequence.keeps_cache
    own = id(sequence) if alone else None
    return sequence.mode, sequence.drafts is not None, own
