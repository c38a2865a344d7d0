"""Sequences that a test decodes together, and the buffers that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from support.engine.driven import Driven
from vlmfast import VLM
from vlmfast.core.buffers import BufferPool
from vlmfast.engine import fused
from vlmfast.engine.cache import KVCache
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.joint import JointCache
from vlmfast.engine.kv_layer import KVLayer


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


# --- what rows use -------------------------------------------------------------------------------


def place_of(batch: Batch, row: Any) -> tuple[RowGroup, int]:
    """The group of a row of a batch, and the row's place there."""
    return batch._place(row)


def buffers_of(cache: KVCache) -> list[Tensor]:
    """All buffers of a cache."""
    return [buffer for layer in cache.layers for buffer in layer._buffers.values()]


def idle_caches(vlm: VLM) -> list[KVCache]:
    """Caches of ended groups, which wait with their captured steps for the next group."""
    graphs = vlm.adapter.kept.get("graphs")
    return [] if graphs is None else [each.cache for each in graphs._idle]


def twin(run: Driven, cache: KVCache) -> RowGroup:
    """A sequence before the token that it was fed last, with a copy of its cache of then."""
    return RowGroup(run.adapter, cache, run.position - 1, [run.sequence])


@contextmanager
def caches_at_end() -> Iterator[list[list[tuple[tuple[str, str], list[list[int]]]]]]:
    """Of each cache that is released, by layer: devices of keys and of lengths, and the lengths."""
    release, found = RowGroup.release, []

    def released(group: RowGroup) -> None:
        layers = [(each.keys.device, each.length) for each in group.cache.layers]
        found.append([((str(at), str(x.device)), x.tolist()) for at, x in layers])
        release(group)

    with mock.patch.object(RowGroup, "release", released):
        yield found


@contextmanager
def whole_buffers() -> Iterator[None]:
    """Decode steps read whole buffers, as on CUDA."""
    with mock.patch.object(KVLayer, "extent", lambda layer, tokens: layer.capacity):
        yield


@dataclass(frozen=True)
class Mask:
    """Tokens and slots of a mask; slots of the longest row, and of the buffers."""

    tokens: int
    slots: int
    longest: int
    capacity: int


@contextmanager
def masks() -> Iterator[list[Mask]]:
    """The masks that the attention of the decoder reads."""
    mask, found = KVLayer.mask, []

    def watched(layer: KVLayer, *given: Any) -> Tensor:
        made = mask(layer, *given)
        found.append(Mask(*made.shape[2:], max(layer.max_lengths), layer.capacity))
        return made

    with mock.patch.object(KVLayer, "mask", watched):
        yield found


# --- a GPU that is pretended ---------------------------------------------------------------------


def groups_of(batch: Batch | RowGroup) -> list[RowGroup]:
    return getattr(batch, "groups", [batch])


def move(batch: Batch | RowGroup, moved: Callable[[Any], Any]) -> None:
    """Replace all tensors with which rows are decoded by ``moved`` ones, on ``cuda``."""
    for group in groups_of(batch):
        cache = group.cache
        for name in ("length", "seen", "position", "offsets", "_buffers"):
            setattr(cache, name, moved(getattr(cache, name)))
        for layer, length in zip(cache.layers, cache.length, strict=True):
            layer.length, layer.seen, layer.device = length, cache.seen, torch.device("cuda")
            for name in ("keys", "values", "order", "rank", "attention_mass", "bias", "segments"):
                setattr(layer, name, moved(getattr(layer, name)))
            layer._buffers, layer._stores = moved(layer._buffers), moved(layer._stores)
    for row in batch.rows:
        row.prompt_slots, row.notes = moved(row.prompt_slots), moved(row.notes)


@contextmanager
def fusing(*types: type) -> Iterator[None]:
    """Steps are fused for weights of some types."""
    with mock.patch.object(fused, "_PLAIN", types):
        yield


def unfuse(vlm: VLM) -> None:
    """Later steps run the modules of the model."""
    vlm.adapter.kept["step_modules"].kind = None
