"""Base of methods that share one budget among the layers.

The budget of a layer depends on all other layers. Such a method scores the slots of each layer when
the layer has run, and drops slots after the last layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.select import top_k

from .evictor import Evictor

_BEYOND = torch.iinfo(torch.int64).max  # sorts padding after all tokens


@dataclass(eq=False)
class Scored:
    """Scores of a layer, stored until its budget is known.

    Parameters
    ----------
    order : Tensor, int64, (H, N)
        Token of each slot, ascending.
    scores : Tensor, float32, (H, N)
        Infinite in the window.
    weight : Tensor, float64, ()
        `claim` on the device.
    n : int
        Number of slots.
    average : int
        Slots kept if all layers had equal budgets, the window included.
    window : int
        Number of last slots that are always kept.
    """

    order: Tensor
    scores: Tensor
    weight: Tensor
    n: int
    average: int
    window: int

    @functools.cached_property
    def claim(self) -> float:
        """Weight of the layer when the budget is split, read once."""
        return float(self.weight)

    def reserve(self, window: int) -> None:
        """Keep the last ``window`` slots of each head as well."""
        lengths = (self.order != _BEYOND).sum(1, keepdim=True)
        slots = torch.arange(self.n, device=self.order.device)
        recent = (slots >= lengths - window) & (slots < lengths)
        self.scores, self.window = self.scores.masked_fill(recent, torch.inf), window

    def best(self, kv: KV, count: int) -> KV:
        """The ``count`` best slots of each head of ``kv``, which has these tokens or a subset."""
        if count >= len(kv):
            return kv
        at = torch.searchsorted(self.order, kv.order.contiguous()).clamp(max=self.n - 1)
        scores = self.scores.gather(1, at).masked_fill(~kv.valid, -torch.inf)
        counts = [min(n, count) for n in kv.counts]
        return kv.select(top_k(scores, count), kv.lengths.clamp(max=count), counts)


@dataclass(frozen=True)
class Layered(Evictor):
    """Base of `Evictor` methods that choose the slots per layer after all layers have run."""

    def claim(self, stats: ColumnStats, ranked: Tensor) -> Tensor:
        """Weight of a layer in the split of the budget: float64, (). Arguments as of `score`."""
        raise NotImplementedError(f"{type(self).__name__}.claim")

    def counts(self, layers: list[Scored]) -> list[int]:
        """Slots that each layer keeps, the window included."""
        raise NotImplementedError(f"{type(self).__name__}.counts")

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        assert stats is not None
        n = len(kv)
        average = self._count(context, layer, n)
        if average == n:
            return kv
        window, valid = self.last(average), kv.valid
        slots = torch.arange(n, device=kv.keys.device)
        recent = (slots >= kv.lengths[:, None] - window) & valid
        ranked = valid & ~recent
        scores = self.score(kv, stats, ranked).float().masked_fill(recent, torch.inf)
        self.seen(context)[layer] = Scored(
            order=kv.order.masked_fill(~valid, _BEYOND),
            scores=scores,
            weight=self.claim(stats, ranked),
            n=n,
            average=average,
            window=window,
        )
        return kv

    def finish(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        layers = list(self.seen(context).values())
        if not layers:  # everything is kept
            return cache
        self.read(context, layers)
        counts = self.counts(layers)
        context.notes[self.name] = {"kept": counts, "windows": [scored.window for scored in layers]}
        return [scored.best(kv, k) for scored, kv, k in zip(layers, cache, counts, strict=True)]

    def read(self, context: PrefillContext, layers: list[Scored]) -> None:
        """Read the claims of ``layers`` that are not known yet, at once."""
        unknown = [scored for scored in layers if "claim" not in vars(scored)]
        if unknown:
            weights = [scored.weight.to(context.layout.device) for scored in unknown]
            for scored, claim in zip(unknown, torch.stack(weights).tolist(), strict=True):
                scored.claim = claim

    def seen(self, context: PrefillContext) -> dict[int, Scored]:
        """The layers that have run, in their order."""
        return context.notes.setdefault(self.name, {}).setdefault("layers", {})
