"""A layer's slots in decode, and cache stages run on plain tensors: no model, no engine."""

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
    """What a layer's own attention leaves behind of a prompt: (H, N, D), nothing dropped."""
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
    """The pass that reads a prompt of ``n`` tokens."""
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
    """One layer's prompt through a cache stage, and the pass that it went with."""
    step = prompt_step(len(kv), depth, **more)
    request = stage.text_stats(depth).get(layer)
    stats = None if request is None else columns(query, kv.keys, request)
    return stage.compress(step, layer, kv, stats), step


class FakeSlots:
    """`vlmfast.core.protocols.Slots` of a compressed prompt, with room for ``room`` more tokens."""

    def __init__(self, kv: KV, context: PrefillContext, room: int, seen: int | None = None) -> None:
        def buffer(of: Tensor, nothing: float) -> Tensor:
            rest = of.new_full((of.shape[0], room, *of.shape[2:]), nothing)
            whole = torch.cat([of, rest], 1)
            whole[:, : len(kv)][~kv.valid] = nothing
            return whole

        # What does not exist is poisoned: stages must not look at it.
        self.keys, self.values = buffer(kv.keys, torch.nan), buffer(kv.values, torch.nan)
        self.order = buffer(kv.order, 10**9)
        mass = torch.zeros_like(kv.keys[..., 0]) if kv.mass is None else kv.mass
        self.mass = buffer(mass, torch.nan)
        self.length, self.prompt, self.held = kv.lengths.clone(), kv.lengths.clone(), len(kv)
        self.seen = len(context.layout) if seen is None else seen
        self.notes = context.notes
        self.rotate: Callable[[Tensor, Tensor], Tensor] = context.rotate

    def write(self, key: Tensor, value: Tensor) -> None:
        """The next token's key and value, (H, D)."""
        heads = torch.arange(len(key))
        self.keys[heads, self.length], self.values[heads, self.length] = key, value
        self.order[heads, self.length], self.mass[heads, self.length] = self.seen, 0.0
        self.length += 1
        self.held += 1
        self.seen += 1

    def attend(self, query: Tensor) -> Tensor:
        """Output of one token's queries (Hq, D) over all slots, (Hq, D); counts the mass."""
        outputs = []
        for head, (group, n) in enumerate(
            zip(query.unflatten(0, (len(self.keys), -1)), self.length.tolist(), strict=True)
        ):
            logits = group @ self.keys[head, :n].T * group.shape[-1] ** -0.5
            p = logits.softmax(-1)
            self.mass[head, :n] += p.mean(0)
            outputs.append(p @ self.values[head, :n])
        return torch.cat(outputs)

    def evict(self, slot: Tensor) -> None:
        heads, last = torch.arange(len(slot)), self.length - 1
        for of, nothing in (
            (self.keys, torch.nan),
            (self.values, torch.nan),
            (self.order, 10**9),
            (self.mass, torch.nan),
        ):
            of[heads, slot] = of[heads, last].clone()
            of[heads, last] = nothing
        self.length -= 1
        self.held -= 1

    def sorted(self, name: str) -> list[Tensor]:
        """One of the buffers, by the tokens' order, per head."""
        return [
            buffer[:n][order[:n].argsort()]
            for buffer, order, n in zip(
                getattr(self, name), self.order, self.length.tolist(), strict=True
            )
        ]
