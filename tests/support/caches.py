"""Caches with chosen lengths, and prompts that are prefilled into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from support.engine.driven import Driven
from support.engine.prompts import switched
from support.engine.storage import KVCache
from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.core.buffers import BufferPool
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage


def own_mask(layer: int, heads: int, n: int, *, whole: bool = False) -> Tensor:
    """Slots to keep, bool (H, N): different ones and a different number in each layer and head."""
    generator = torch.Generator().manual_seed(100 * layer + n)
    share = 0.35 + 0.1 * layer + 0.12 * torch.arange(heads)[:, None]
    keep = torch.rand(heads, n, generator=generator) < share
    keep[:, -1] = True
    if whole:
        keep[0] = True
    return keep


@dataclass(frozen=True)
class Own(CacheStage):
    """Keeps the slots of `own_mask`."""

    name: ClassVar[str] = "test-own"
    whole: bool = False

    def compress(self, step, layer, kv, stats):
        keep = own_mask(layer, len(kv.keys), len(kv), whole=self.whole)
        return kv.select_mask(keep)


def started(vlm: VLM, recipe=(), seeds=(0,)) -> Driven:
    run = Driven.of(vlm, recipe, [make_image(seed=seed) for seed in seeds])
    with torch.no_grad(), switched(vlm.model):
        run.start(12)
    return run


def frozen(
    lengths: list[list[int]],
    *,
    seed: int = 0,
    logical: int | None = None,
    pool: BufferPool | None = None,
    max_new_tokens: int = 8,
    dim: int = 8,
    bias: bool = False,
    **how,
) -> tuple[KVCache, list[KV]]:
    """A cache of one row whose heads store ``lengths[layer][head]`` slots of noise."""
    generator = torch.Generator().manual_seed(seed)
    cache, stored = KVCache(len(lengths), pool), []
    top = max(max(of) for of in lengths)
    for layer, of in zip(cache.layers, lengths, strict=True):
        n, counts = max(of), torch.tensor(of)
        keys = torch.randn(2, 1, len(of), top, dim, generator=generator)
        layer.update(keys[0], keys[1])
        order = torch.arange(n).expand(len(of), -1)
        kv = KV(
            keys[0, 0, :, :n],
            keys[1, 0, :, :n],
            order,
            order,
            torch.zeros_like(order, dtype=torch.bool),
            counts,
            bias=torch.randn(len(of), n, generator=generator) if bias else None,
        )
        layer.put(kv)
        stored.append(kv)
    cache.freeze(max_new_tokens, top if logical is None else logical, **how)
    return cache, stored
