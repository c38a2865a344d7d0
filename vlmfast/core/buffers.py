"""Reusable buffers: a cache takes them at the end of prefill and returns them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SMALLEST = 256  # slots of the smallest capacity class


def bucket(slots: int) -> int:
    """The capacity for ``slots``, rounded up to few sizes so that buffers can be reused.

    Exceeds ``slots`` by less than 64, or by less than 1/8.
    """
    step = max(64, 1 << max(slots.bit_length() - 4, 0))
    return -(-slots // step) * step


def capacity_class(slots: int) -> int:
    """The capacity of a row with ``slots`` in a group of rows: classes double from 256.

    Rows of one class share buffers, so the longest of them is at most twice as long as another,
    or fits into the smallest class.
    """
    return max(_SMALLEST, 1 << (slots - 1).bit_length())


class BufferPool:
    """Tensors by shape, dtype and device.

    Parameters
    ----------
    limit : int
        Maximum bytes of idle buffers; buffers returned beyond them are freed.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.idle = limit, 0
        self._free: dict[tuple, list[Tensor]] = {}
        self._others: list[Callable[[], None]] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of zeros. Not empty: masked slots still enter a product, and NaN * 0 is NaN.

        Where memory is exhausted, everything idle is freed before a second attempt.

        Raises
        ------
        torch.OutOfMemoryError
            When the buffer does not fit either way.
        """
        free = self._free.get((shape, dtype, device))
        if not free:
            try:
                return torch.zeros(shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError:
                self.clear()
                for release in self._others:
                    release()
                return torch.zeros(shape, dtype=dtype, device=device)
        buffer = free.pop()
        self.idle -= buffer.nbytes
        return buffer.zero_()

    def give(self, buffer: Tensor | None) -> None:
        """Return ``buffer``; no other reference to it or a view of it may exist."""
        if buffer is None or self.idle + buffer.nbytes > self.limit:
            return
        self.idle += buffer.nbytes
        key = (tuple(buffer.shape), buffer.dtype, buffer.device)
        self._free.setdefault(key, []).append(buffer)

    def clear(self) -> None:
        """Free all idle buffers."""
        self._free.clear()
        self.idle = 0

    def frees(self, release: Callable[[], None]) -> None:
        """Call ``release`` too where memory is exhausted: it frees what else is idle."""
        if release not in self._others:
            self._others.append(release)
