"""Keys and values as the engine stores them, and the rows that decode together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from support.engine.driven import Driven
from vlmfast import VLM
from vlmfast.core.buffers import BufferPool
from vlmfast.core.kv import KV
from vlmfast.engine.attention import switched
from vlmfast.engine.cache import KVCache, RowSlots
from vlmfast.engine.decode import Batch, RowGroup, run_step
from vlmfast.engine.kv_layer import KVLayer, bucket
from vlmfast.engine.memory import total_bytes

__all__ = [
    "Batch",
    "KVCache",
    "KVLayer",
    "RowGroup",
    "RowSlots",
    "bucket",
    "run_step",
    "total_bytes",
]


# --- what methods store ---------------------------------------------------------------------------


@contextmanager
def compressed() -> Iterator[dict[int, KV]]:
    """What cache stages leave of prompts that are prefilled meanwhile, by id of the layer."""
    seen, put = {}, KVLayer.put

    def note(self: KVLayer, kv: KV) -> None:
        seen[id(self)] = kv
        put(self, kv)

    with mock.patch.object(KVLayer, "put", note):
        yield seen


def storage_of(run: Driven, kept: dict[int, KV]) -> list[KV | None]:
    """By layer what `compressed` has ``kept`` of ``run``; None for layers that hold a state."""
    assert all(layer.stateful == (id(layer) not in kept) for layer in run.cache.layers)
    return [kept.get(id(layer)) for layer in run.cache.layers]


def prompt_storage(run: Driven) -> list[KV]:
    """Prefill a prompt; what is left of it in each layer."""
    with compressed() as kept, torch.no_grad(), switched(run.adapter.model):
        run.start(1)
    return [kv for kv in storage_of(run, kept) if kv is not None]


def windowed(run: Driven) -> list[bool]:
    """By layer, whether tokens of ``run`` leave its window."""
    return [layer.window is not None for layer in run.cache.layers]


def aged(run: Driven) -> list[bool]:
    """By layer, whether it knows how old each of its slots is."""
    return [layer.rank is not None for layer in run.cache.layers]


def ages(run: Driven) -> list[int]:
    """How far the oldest slot of each layer with a window is behind the next token."""
    layers = [layer for layer in run.cache.layers if layer.window is not None]
    return [
        int(layer.seen) - int(layer.rank[0, :, : layer.max_lengths[0]].min()) for layer in layers
    ]


def captured_masks(vlm: VLM) -> set[tuple[bool, ...]]:
    """Of the captured steps of a model, in which layers they mask the slots before a window."""
    return {key[-1] for steps in vlm.adapter.kept["graphs"]._idle for key in steps._replays}


def kept_with_ages(vlm: VLM) -> bool:
    """Whether a prompt that is kept for later requests knows how old its slots are."""
    entries = vlm.prefix_cache._entries.values()
    kept = [entry.value for entry in entries if entry.key.kind == "prefixes"]
    return any(layer.rank is not None for prefix in kept for layer in prefix.cache.layers)


class SlotTracker:
    """Tracks the tokens in the slots of a layer.

    Parameters
    ----------
    kv : KV
        Cache of the prompt after compression.
    size : int
        Number of tokens of the prompt.
    """

    def __init__(self, layer: KVLayer, kv: KV, size: int) -> None:
        self.layer, self.size = layer, size
        self.segments = [segment.order.long() for segment in kv.segments]
        self.tail = [row[:n].tolist() for row, n in zip(kv.order, kv.lengths, strict=True)]

    def slots(self, evicts: bool) -> tuple[Tensor, ...]:
        """Keys, values, tokens, validity and bias of the slots, as `Dense.feed` takes them."""
        layer, lengths = self.layer, self.layer.length[0].tolist()
        if evicts:
            self.tail = [row[:n].tolist() for row, n in zip(layer.order[0], lengths, strict=True)]
        if (count := len(self.tail[0]) - lengths[0]) > 0:  # the oldest are now a page
            page = torch.tensor([slots[:count] for slots in self.tail])
            self.tail = [slots[count:] for slots in self.tail]
            grown = [len(segment[0]) for segment in self.segments]
            stored = [count for (count,) in layer.stored]
            if len(stored) > len(grown):
                self.segments.append(page)
            else:
                (at,) = [i for i, n in enumerate(grown) if stored[i] > n]
                self.segments[at] = torch.cat([self.segments[at], page], 1)
        assert [len(slots) for slots in self.tail] == lengths
        parts = []
        for whole, order in zip(layer.segments, self.segments, strict=True):
            segment = whole.first(order.shape[1])  # free slots follow
            keys, values = segment.dequantize(torch.float32)
            bias = torch.zeros(order.shape) if segment.bias is None else segment.bias[0]
            parts.append((keys[0], values[0], order, segment.valid[0], bias))
        order = torch.zeros(layer.keys.shape[1:3], dtype=torch.long)
        valid = torch.zeros_like(order, dtype=torch.bool)
        for head, slots in enumerate(self.tail):
            order[head, : len(slots)] = torch.tensor(slots, dtype=torch.long)
            valid[head, : len(slots)] = True
        bias = torch.zeros(order.shape) if layer.bias is None else layer.bias[0]
        parts.append((layer.keys[0], layer.values[0], order, valid, bias))
        return tuple(torch.cat(part, 1) for part in zip(*parts, strict=True))

    def fed(self, number: int) -> None:
        """Add token ``number`` of the answer."""
        for slots in self.tail:
            slots.append(self.size + number)


def trackers_of(run: Driven, kept: dict[int, KV]) -> list[SlotTracker]:
    """A tracker of each layer after the prefill, of whose caches `compressed` has ``kept``."""
    size = run.inputs.tensors["input_ids"].shape[1]
    return [SlotTracker(layer, kept[id(layer)], size) for layer in run.cache.layers]


# --- buffers --------------------------------------------------------------------------------------


def idle_buffers(pool: BufferPool) -> list[Tensor]:
    """The buffers that a pool keeps for later requests."""
    return [buffer for buffers in pool._free.values() for buffer in buffers]


def whole_buffers(layer: KVLayer, names: Sequence[str]) -> dict[str, Tensor | None]:
    """The buffers of a layer with all their free slots."""
    return {name: layer._buffers.get(name, getattr(layer, name)) for name in names}
