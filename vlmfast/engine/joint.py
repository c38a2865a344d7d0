"""The caches of several groups of rows in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache import KVCache
from .kv_layer import KVLayer


class JointLayer(CacheLayerMixin):
    """One layer of the caches of several groups."""

    keys: Tensor  # never assigned: those of the parts are read
    values: Tensor

    def __init__(self, parts: Sequence[KVLayer]) -> None:
        super().__init__()
        self.parts = list(parts)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows (B, ...) of each group."""
        return x.split([len(part.max_lengths) for part in self.parts])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows of each group to its buffers; attention reads them from there."""
        keys, values = self.split(key_states), self.split(value_states)
        for part, key, value in zip(self.parts, keys, values, strict=True):
            part.update(key, value)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return max(part.get_seq_length() for part in self.parts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(part.get_mask_sizes(query_length) for part in self.parts)

    def get_max_length(self) -> int:
        return -1


class JointCache(Cache):
    """The caches of several groups of rows in one forward pass, in this order.

    Parameters
    ----------
    caches : sequence of KVCache
        Frozen, with free slots for the new tokens.
    """

    layers: list[JointLayer]  # type: ignore[assignment]  # as in `KVCache`

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = list(caches)
        layers = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[JointLayer(parts) for parts in layers])

    @property
    def split(self) -> bool:
        """As in `KVCache`."""
        return any(cache.split for cache in self.caches)

    @property
    def position(self) -> Tensor:
        """As in `KVCache`, of all rows."""
        positions = [x for cache in self.caches if (x := cache.position) is not None]
        return torch.cat(positions, -2)

    @property
    def offsets(self) -> dict[int, Tensor]:
        """As in `KVCache`, of all rows; zeros where a group was not renumbered."""
        found: dict[tuple, Tensor] = {}
        offsets = {}
        for layer in sorted({layer for cache in self.caches for layer in cache.offsets}):
            parts = [cache.offsets.get(layer) for cache in self.caches]
            key = tuple(map(id, parts))
            if key not in found:
                zeros = (cache.seen.new_zeros(cache.rows, 1) for cache in self.caches)
                pairs = zip(parts, zeros, strict=True)
                found[key] = torch.cat([zero if part is None else part for part, zero in pairs])
            offsets[layer] = found[key]
        return offsets

    def count_token(self) -> None:
        """As in `KVCache`."""
        for cache in self.caches:
            cache.count_token()
