"""A layer's slots in decoding, and cache stages on plain tensors, without model and engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.kernels.col_stats import col_stats

BASE = 1e4


def rotate(keys: Tensor, delta: Tensor) -> Tensor:
    """Keys (H, N, D) with ``delta`` (H, N) added to their rotary ids, halves paired."""
    half = keys.shape[-1] // 2
    angle = delta[..., None].double() * BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = keys.double().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(keys.dtype)


def prompt_kv(keys: Tensor, values: Tensor | None = None, visual: Tensor | None = None) -> KV:
    """A layer's cache of a prompt, (H, N, D), with nothing dropped."""
    heads, n, _ = keys.shape
    order = torch.arange(n).expand(heads, -1)
    visual = torch.zeros(n, dtype=torch.bool) if visual is None else visual
    return KV(
        keys,
        keys.clone() if values is None else values,
        order,
        order,
        visual.expand(heads, -1),
        torch.full((heads,), n),
    )


def prompt_step(n: int, depth: int, visual: Tensor | None = None, ids: int = 1) -> PrefillContext:
    """Context of the prefill of ``n`` tokens."""
    order = torch.arange(n)
    layout = TokenLayout.text(order, order.expand(ids, -1))
    if visual is not None:
        layout = layout.replace(kind=torch.where(visual, int(Kind.IMAGE), 0).to(torch.uint8))
    return PrefillContext(depth=depth, layout=layout, rotate=rotate)


def columns(query: Tensor, key: Tensor, request: ColumnRequest) -> ColumnStats:
    """Statistics of a prompt's attention, query (Hq, N, D) and key (H, N, D)."""
    n = key.shape[1]
    rows = torch.arange(n if request.rows == "all" else min(request.n, n)) + (
        0 if request.rows == "all" else max(n - request.n, 0)
    )
    out = col_stats(query, key, rows)
    return ColumnStats(**out | {"nnz": out["nnz"].expand(len(key), -1)}, rows=rows)


def compressed(
    stage: CacheStage, query: Tensor, kv: KV, depth: int = 1, layer: int = 0, **more: Any
) -> tuple[KV, PrefillContext]:
    """One layer's prompt after a cache stage, and the context of its prefill."""
    step = prompt_step(len(kv), depth, **more)
    request = stage.text_stats(depth).get(layer)
    stats = None if request is None else columns(query, kv.keys, request)
    return stage.compress(step, layer, kv, stats), step


class FakeSlots:
    """`vlmfast.core.protocols.Slots` of a compressed prompt, with ``room`` free slots."""

    def __init__(self, kv: KV, context: PrefillContext, room: int, seen: int | None = None) -> None:
        def buffer(tensor: Tensor, nothing: float) -> Tensor:
            rest = tensor.new_full((tensor.shape[0], room, *tensor.shape[2:]), nothing)
            whole = torch.cat([tensor, rest], 1)
            whole[:, : len(kv)][~kv.valid] = nothing
            return whole

        # Padding is poisoned, since stages must not read it.
        self.keys, self.values = buffer(kv.keys, torch.nan), buffer(kv.values, torch.nan)
        self.order = buffer(kv.order, 10**9)
        mass = torch.zeros_like(kv.keys[..., 0]) if kv.attention_mass is None else kv.attention_mass
        self.attention_mass = buffer(mass, torch.nan)
        self.length, self.prompt, self.max_length = kv.lengths.clone(), kv.lengths.clone(), len(kv)
        self.seen = len(context.layout) if seen is None else seen
        self.notes = context.notes
        self.rotate: Callable[[Tensor, Tensor], Tensor] = context.rotate

    def write(self, key: Tensor, value: Tensor) -> None:
        """Append the next token's key and value, (H, D)."""
        heads = torch.arange(len(key))
        self.keys[heads, self.length], self.values[heads, self.length] = key, value
        self.order[heads, self.length], self.attention_mass[heads, self.length] = self.seen, 0.0
        self.length += 1
        self.max_length += 1
        self.seen += 1

    def attend(self, query: Tensor) -> Tensor:
        """Output (Hq, D) of one token's queries (Hq, D) over all slots; accumulates the mass."""
        outputs = []
        for head, (group, n) in enumerate(
            zip(query.unflatten(0, (len(self.keys), -1)), self.length.tolist(), strict=True)
        ):
            logits = group @ self.keys[head, :n].T * group.shape[-1] ** -0.5
            p = logits.softmax(-1)
            self.attention_mass[head, :n] += p.mean(0)
            outputs.append(p @ self.values[head, :n])
        return torch.cat(outputs)

    def evict(self, slot: Tensor) -> None:
        heads, last = torch.arange(len(slot)), self.length - 1
        for buffer, nothing in (
            (self.keys, torch.nan),
            (self.values, torch.nan),
            (self.order, 10**9),
            (self.attention_mass, torch.nan),
        ):
            buffer[heads, slot] = buffer[heads, last].clone()
            buffer[heads, last] = nothing
        self.length -= 1
        self.max_length -= 1

    def sorted(self, name: str) -> list[Tensor]:
        """One of the buffers in token order, per head."""
        return [
            buffer[:n][order[:n].argsort()]
            for buffer, order, n in zip(
                getattr(self, name), self.order, self.length.tolist(), strict=True
            )
        ]
