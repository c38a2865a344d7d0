"""Reusable buffers: a cache takes them at the end of prefill and returns them."""

from __future__ import annotations

import torch
from torch import Tensor


def bucket(slots: int) -> int:
    """The capacity for ``slots``, rounded up to few sizes so that buffers can be reused.

    Exceeds ``slots`` by less than 64, or by less than 1/8.
    """
    step = max(64, 1 << max(slots.bit_length() - 4, 0))
    return -(-slots // step) * step


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

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of zeros. Not empty: masked slots still enter a product, and NaN * 0 is NaN."""
        free = self._free.get((shape, dtype, device))
        if not free:
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
