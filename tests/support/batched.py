"""Sequences that a test decodes together, and the buffers that they use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.buffers import BufferPool
from vlmfast.engine.cache import KVCache
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.joint import JointCache


class Together(Batch):
    """A batch of ``groups`` of one row each."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        super().__init__()
        for group in groups:
            self.join(group)

    def only(self, numbers: Sequence[int]) -> Together:
        """All other sequences leave."""
        for row in [row for number, row in enumerate(self.rows) if number not in numbers]:
            self.leave(row)
        return self

    def cache_of(self, number: int) -> tuple[KVCache, int]:
        """The cache of a given sequence and its row there."""
        group, row = self._place(self.rows[number])
        return group.cache, row

    @property
    def position(self) -> Tensor:
        """Rotary ids of the next tokens, (B, 1), or (3, B, 1) for M-RoPE."""
        places = map(self._place, self.rows)
        return torch.cat([group.position[..., at : at + 1, :] for group, at in places], -2)

    @property
    def caches(self) -> list[KVCache]:
        return [group.cache for group in self.groups]

    def as_group(self) -> RowGroup:
        """The only group."""
        (group,) = self.groups
        return group


def together(caches: Sequence[KVCache]) -> KVCache | JointCache:
    """One cache for a forward pass over the rows of all."""
    return caches[0] if len(caches) == 1 else JointCache(caches)


def joined_caches(caches: Sequence[KVCache]) -> KVCache:
    """One cache with the rows of all, which share a kind and are released."""
    first, *others = caches
    for cache in caches:
        cache.start(torch.tensor(cache.logical)[:, None])
    for other in others:
        assert first.kind() == other.kind()
        first.join(other)
        other.release()
    return first


class CountingPool(BufferPool):
    """Counts buffers that were allocated, and the bytes that were taken and not returned."""

    new = out = 0

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **more: Any
    ) -> Tensor:
        self.new += not self._free.get((shape, dtype, device))
        buffer = super().take(shape, dtype, device, **more)
        self.out += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor | None) -> None:
        self.out -= 0 if buffer is None else buffer.nbytes
        super().give(buffer)
