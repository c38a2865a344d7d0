"""Attention within parts of one row, such as the images, frames or windows of a vision tower.

Parts of one length attend as one batch. Short parts of different lengths, such as the windows at
the borders of an image, are padded to one length, because a call costs more than their padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_SHORT = 256  # rows; the largest windows of Qwen2.5-VL have 64


@dataclass(frozen=True, eq=False)
class PartBatch:
    """Parts that attend as one batch.

    Parameters
    ----------
    count, length : int
        Parts, and rows of each.
    rows : Tensor, int64, (count * length,), optional
        Their rows, with the last one of a part repeated as padding; ``None`` for all rows in order.
    mask : Tensor, bool, (count, 1, 1, length), optional
        False for padding; ``None`` where there is none.
    """

    count: int
    length: int
    rows: Tensor | None = None
    mask: Tensor | None = None

    def take(self, packed: Tensor) -> Tensor:
        """The batch's part of a packed tensor, (S, ...) to (count, length, ...)."""
        rows = packed if self.rows is None else packed.index_select(0, self.rows)
        return rows.unflatten(0, (self.count, self.length))


@dataclass(frozen=True, eq=False)
class Packing:
    """How the parts of a row of S are batched.

    Parameters
    ----------
    lengths : tuple of int
        Rows of each part, in order.
    batches : tuple of PartBatch
        Each part belongs to one of them. At most one batch has padding.
    back : Tensor, int64, (S,), optional
        Where each row is among the concatenated rows of all batches; ``None`` for the same order.
    """

    lengths: tuple[int, ...]
    batches: tuple[PartBatch, ...]
    back: Tensor | None

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Packing:
        """Batches of parts with these numbers of rows, each positive."""
        starts = [0, *accumulate(lengths)]
        if len(set(lengths)) == 1:
            return Packing(tuple(lengths), (PartBatch(len(lengths), lengths[0]),), None)
        longest = max(lengths)
        padded = max((n for n in lengths if n <= _SHORT and n < longest), default=0)
        groups: dict[int, list[int]] = defaultdict(list)  # parts by the length of their batch
        for part, n in enumerate(lengths):
            groups[max(n, padded)].append(part)
        back, first = torch.empty(starts[-1], dtype=torch.int64), 0
        shapes, parts_of = [], [back]  # of batches; what is copied to the device, at once
        for length, parts in groups.items():
            own = torch.tensor([lengths[part] for part in parts])[:, None]
            start = torch.tensor([starts[part] for part in parts])[:, None]
            slot = torch.arange(length)
            valid = slot < own
            rows = start + torch.minimum(slot, own - 1)
            back[rows[valid]] = first + valid.flatten().nonzero().flatten()
            padding = not bool(valid.all())
            shapes.append((len(parts), length, padding))
            parts_of += [rows.flatten(), valid.flatten().long()] if padding else [rows.flatten()]
            first += rows.numel()
        sizes = [len(of) for of in parts_of]
        back, *copied = torch.cat(parts_of).to(device).split(sizes)
        given, batches = iter(copied), []
        for count, length, padding in shapes:
            rows = next(given)
            mask = next(given).bool().view(count, 1, 1, length) if padding else None
            batches.append(PartBatch(count, length, rows, mask))
        return Packing(tuple(lengths), tuple(batches), back)

    def attend(
        self,
        attention: Callable[[PartBatch, Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attention within each part, (1, S, H, D).

        Parameters
        ----------
        attention : callable
            Of one batch and its queries, keys and values (count, H, length, D); returns
            (count, length, H, D).
        query, key, value : Tensor, (1, H, S, D)
        """
        outputs = [
            attention(
                batch,
                *(batch.take(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value)),
            ).flatten(0, 1)
            for batch in self.batches
        ]
        output = outputs[0] if self.back is None else torch.cat(outputs).index_select(0, self.back)
        return output[None]
