"""What methods have in common that share one budget among the layers.

How much a layer deserves shows only beside the others. Such a method scores the slots of each layer
when it has run, and drops them when the last one has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.select import top_k

from .evictor import Evictor

_BEYOND = torch.iinfo(torch.int64).max  # sorts padding behind all tokens


@dataclass(eq=False)
class Scored:
    """What is remembered of a layer until its budget is known.

    Parameters
    ----------
    order : Tensor, int64, (H, N)
        Token of each slot, ascending.
    scores : Tensor, float32, (H, N)
        Infinite in the window.
    claim : float
        How much the layer deserves, beside the others.
    n : int
        Its slots.
    average : int
        Slots of it that would stay if all layers were equal, the window included.
    window : int
        Last slots, which stay.
    """

    order: Tensor
    scores: Tensor
    claim: float
    n: int
    average: int
    window: int

    def best(self, kv: KV, count: int) -> KV:
        """The ``count`` best slots of each head of ``kv``, which holds these tokens or fewer."""
        if count >= len(kv):
            return kv
        at = torch.searchsorted(self.order, kv.order.contiguous()).clamp(max=self.n - 1)
        scores = self.scores.gather(1, at).masked_fill(~kv.valid, -torch.inf)
        return kv.select(top_k(scores, count), kv.lengths.clamp(max=count))


@dataclass(frozen=True)
class Layered(Evictor):
    """Base of `Evictor` methods that say, once all layers have run, how many slots each keeps."""

    def claim(self, stats: ColumnStats, ranked: Tensor) -> Tensor:
        """How much a layer deserves: float64, (). Arguments as of `score`."""
        raise NotImplementedError(f"{type(self).__name__}.claim")

    def counts(self, layers: list[Scored]) -> list[int]:
        """Slots that each layer keeps, the window included."""
        raise NotImplementedError(f"{type(self).__name__}.counts")

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        n = len(kv)
        average = self._count(context, layer, n)
        if average == n:
            return kv
        window, valid = self.last(average), kv.valid
        slots = torch.arange(n, device=kv.keys.device)
        behind = (slots >= kv.lengths[:, None] - window) & valid
        ranked = valid & ~behind
        scores = self.score(kv, stats, ranked).float().masked_fill(behind, torch.inf)
        self.seen(context)[layer] = Scored(
            order=kv.order.masked_fill(~valid, _BEYOND),
            scores=scores,
            claim=float(self.claim(stats, ranked)),
            n=n,
            average=average,
            window=window,
        )
        return kv

    def finish(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        layers = list(self.seen(context).values())
        if not layers:  # the share keeps everything
            return cache
        counts = self.counts(layers)
        context.notes[self.name] = {"kept": counts, "windows": [of.window for of in layers]}
        return [of.best(kv, k) for of, kv, k in zip(layers, cache, counts, strict=True)]

    def seen(self, context: PrefillContext) -> dict[int, Scored]:
        """The layers that have run, in their order."""
        return context.notes.setdefault(self.name, {}).setdefault("layers", {})
