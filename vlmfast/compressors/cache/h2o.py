"""H2O: keep heavy hitters and the last slots, in the prompt and during the answer.

A few keys receive most of the attention, and continue to do so. H2O (NeurIPS 2023, arXiv
2306.14048) accumulates what each slot has received from all rows so far, ``acc``. Whenever a layer
exceeds its budget, it evicts the slot with the lowest ``acc``, except for the last ones::

    acc[h, j] = sum over all rows i of P[h, i, j]         the prompt
    acc[h, j] += P[h, t, j]                               each token t of the answer
    keep        the last r slots and those with the largest acc of the others

Of N slots, ``C = int(keep N)`` are kept, ``r = int(recent C)`` of them as the last ones. Each
further token evicts one slot per KV head, so that a layer keeps its size while the answer grows.

Different from the authors' code, and why:

- One KV head has one ``acc``, the mean over its query heads; the authors' code supports only models
  without grouped queries. Ports that compress the prompt alone also take the maximum of the group
  (``agg=max,decode=false``). Sums run over one sequence, theirs over the whole batch.
- One fraction, and how much of it the last slots get, instead of a fraction for each: with
  ``keep=1`` everything is kept, during the answer as well.
- ``acc`` is float32; in half precision the sums of a long prompt absorb later additions.
- Prompt slots are evicted after each layer's attention over the whole prompt, as in the authors'
  caching code. Their simulation, which hides keys from the prompt's own rows, is a tool for scoring
  texts and saves no memory.
- ``decode=false`` evicts from the prompt alone. Then ``average=true`` divides ``acc`` of a slot by
  the number of rows that see it, since sums favour early slots, which more rows see. With
  ``recent=0`` this is the score that kvpress calls observed attention.
- Ties go to the lower index in the prompt, to the older token in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import DecodeStage, Slots
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.errors import RecipeError

from ..evictor import Evictor, per_kv_head
from ..part import Part


def lightest(order: Tensor, attention_mass: Tensor, length: Tensor, recent: Tensor) -> Tensor:
    """The slot of each head with the least attention that is not among its last ones.

    Parameters
    ----------
    order : Tensor, int64, (H, N)
    attention_mass : Tensor, float32, (H, N)
    length, recent : Tensor, int64, (H,)
        Number of valid slots, which come first, and of the latest ones by order, which are kept.

    Returns
    -------
    Tensor, int64, (H,)
        On a tie the older token is evicted.
    """
    valid = torch.arange(order.shape[1], device=order.device) < length[:, None]
    latest = order.masked_fill(~valid, -1).sort(dim=1, descending=True).values
    # Only slots that are not among the latest ``recent`` may be evicted.
    youngest = latest.gather(1, recent[:, None].clamp(max=order.shape[1] - 1))
    free = valid & (order <= youngest)
    attention_mass = attention_mass.masked_fill(~free, torch.inf)
    least = free & (attention_mass == attention_mass.amin(1, keepdim=True))
    return order.masked_fill(~least, torch.iinfo(order.dtype).max).argmin(1)


@dataclass(frozen=True)
class H2O(Evictor):
    """Keeps the keys that receive most attention and the last ones, in the answer too."""

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "NeurIPS 2023, arXiv 2306.14048"
    tier: ClassVar[str] = "baseline"

    recent: float = param(0.5, "fraction of the kept slots that are the last ones", ge=0.0, lt=1.0)
    decode: bool = param(True, "evict one slot per head for each token of the answer")
    agg: str = param(
        "mean",
        "how the attention of the query heads of one KV head is combined; max needs decode=false",
        choices=("mean", "max", "sum"),
    )

    average: bool = param(
        False, "divide the attention of a slot by the rows that see it; needs decode=false"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average and self.decode:
            raise RecipeError(
                "h2o: average=true ranks the prompt alone, as the answer adds to sums; use "
                "decode=false"
            )
        if self.agg == "max" and self.decode:
            raise RecipeError(
                "h2o: agg=max ranks the prompt alone, as the answer adds to the mean of a group; "
                "use agg=mean, or decode=false"
            )

    def expand(self) -> tuple[Stage, ...]:
        return (self, Answer(self)) if self.decode else (self,)

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return dict.fromkeys(range(depth), ColumnRequest("all"))

    def last(self, capacity: int) -> int:
        return int(self.recent * capacity)

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        assert stats is not None and stats.sum is not None
        received = per_kv_head(stats.sum, self.agg)
        return received / stats.nnz.clamp(min=1) if self.average else received

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        assert stats is not None and stats.sum is not None
        counted = replace(kv, attention_mass=stats.sum.mean(1)) if self.decode else kv
        kept = super().compress(context, layer, counted, stats)
        if kept is counted:
            return kv
        recent = (kept.lengths.double() * self.recent).long()
        context.notes.setdefault(self.name, {})[layer] = len(kept), recent
        return kept


@dataclass(frozen=True)
class Answer(Part, DecodeStage):
    """Evicts the slot with the least attention whenever a layer exceeds its budget."""

    name: ClassVar[str] = H2O.name
    attention_mass: ClassVar[bool] = True

    def step(self, slots: Slots, layer: int) -> None:
        note, length = slots.notes.get(self.name, {}).get(layer), slots.max_length
        if note is None:  # the whole prompt was kept
            return
        budget, recent = note
        for evicted in range(length - budget):
            now = slice(length - evicted)
            slots.evict(
                lightest(slots.order[:, now], slots.attention_mass[:, now], slots.length, recent)
            )
