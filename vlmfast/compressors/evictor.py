"""Base of methods that keep a part of a prompt's keys and values.

A method scores the slots of a layer. `Evictor` does the rest: how many are kept, which are kept
whatever their score, ties (the lower index wins), the order of kept slots (ascending), and heads of
different lengths, where an earlier stage left them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.select import top_k


def kept_param(default: float, per: str = " in each layer") -> Any:
    """The fraction of the prompt's slots that a method keeps."""
    return param(default, f"fraction of the prompt's keys and values kept{per}", gt=0.0, le=1.0)


def pooled(scores: Tensor, kernel: int, kind: str) -> Tensor:
    """Average (``avg``) or maximum (``max``) of each score and its neighbours, (..., N).

    ``kernel`` is odd. Both ends are padded with zeros, which an average counts; scores must not be
    negative.
    """
    rows = scores.flatten(0, -2)
    if kind == "avg":
        return F.avg_pool1d(rows, kernel, 1, kernel // 2).view_as(scores)
    return F.max_pool1d(rows, kernel, 1, kernel // 2).view_as(scores)


def per_kv_head(received: Tensor, agg: str) -> Tensor:
    """Combine what the query heads of one KV head gave: (H, G, N) to (H, N).

    ``agg`` is ``mean``, ``max`` or ``sum``.
    """
    means: dict[str, Callable[[int], Tensor]]
    means = {"mean": received.mean, "max": received.amax, "sum": received.sum}
    return means[agg](1)


@dataclass(frozen=True)
class Evictor(CacheStage):
    """Base of methods that score the slots of each layer and keep the best of each KV head.

    A method overrides `score`, and if needed `capacity` and `first`. Its fields or attributes
    ``window`` and ``sinks`` are the number of last and first slots that are always kept. A window
    below 1 is a fraction of the kept slots. Where they are no fewer than what ``keep`` leaves of a
    short prompt, they are kept with one more slot.
    """

    lead: ClassVar[str | None] = "keep"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    window = cast("float", 0)
    sinks = 0

    keep: float = kept_param(0.2)

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        """Score of each slot; the highest are kept: float32, (H, N).

        Parameters
        ----------
        ranked : Tensor, bool, (H, N)
            Slots whose score matters: neither sinks nor window nor padding.
        """
        raise NotImplementedError(f"{type(self).__name__}.score")

    def capacity(self, context: PrefillContext, layer: int, n: int) -> int:
        """Slots kept of ``n`` in each head of ``layer``, window and sinks included."""
        return int(self.keep * n)

    def first(self, kv: KV) -> Tensor | None:
        """Slots kept before all others, whatever their scores: bool, (H, N)."""
        return None

    def last(self, capacity: int) -> int:
        """The window in slots, where ``capacity`` slots are kept."""
        if 0 < self.window < 1:
            return max(int(self.window * capacity), 1)
        return int(self.window)

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        lengths = kv.counts
        kept = {n: self._count(context, layer, n) for n in set(lengths)}
        if all(count == n for n, count in kept.items()):
            return kv

        def per_head(values: list[int]) -> Tensor | int:
            same = len(set(values)) == 1
            return values[0] if same else torch.tensor(values, device=kv.keys.device)[:, None]

        counts = [kept[n] for n in lengths]
        slots = torch.arange(len(kv), device=kv.keys.device)
        recent = slots >= per_head([n - self.last(c) for n, c in zip(lengths, counts, strict=True)])
        valid = kv.valid
        forced = ((slots < self.sinks) | recent) & valid
        scores = self.score(kv, stats, valid & ~forced).float()
        # Window and sinks come first, then preferred slots, padding last.
        scores = scores.masked_fill(forced, torch.inf).masked_fill(~valid, -torch.inf)
        preferred = self.first(kv)
        preferred = forced if preferred is None else forced | (preferred & valid)
        if len(set(lengths)) == 1:
            return kv.select(top_k(scores, counts[0], preferred))
        heads = zip(scores, counts, preferred, strict=True)
        index = pad_sequence([top_k(*head) for head in heads], batch_first=True)
        return kv.select(index, torch.tensor(counts, device=kv.keys.device), counts)

    def _count(self, context: PrefillContext, layer: int, n: int) -> int:
        """Slots kept of ``n``: more than the window and the sinks, or all of them."""
        count = self.capacity(context, layer, n)
        fewest = (c for c in range(max(count, 1), n) if c > self.sinks + self.last(c))
        return next(fewest, n)
