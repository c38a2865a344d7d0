"""ZipCache: salient slots in 4 bits, the rest in 2.

ZipCache (NeurIPS 2024, arXiv 2405.14256) keeps every token of the prompt, in one of two precisions.
After the attention of each layer, a few *probe* rows measure how salient each slot is: the
``recent`` last rows and as many drawn at random. Their softmax attention ``A``, summed over the
query heads of a KV head, is divided by the number of rows that could see the slot, since early
slots would win otherwise::

    a_j = sum over probes i of A[i, j]          saliency_j = a_j / (L - j)

The ``int((1 - important) L)`` least salient slots of a KV head become its 2-bit segment, the others
its 4-bit segment. In each of them::

    keys     per channel:  step = (max - min) / (2^b - 1),   q = round((x - min) / step)
    values   per channel   c = sqrt(max |x|) over all slots of both segments,   y = x / c
             per slot      step, min and q of y over the channels, as above

Bytes of a slot of D channels: D b / 4 of codes and 2 x 2 of value parameters; per segment and
channel, 2 x 2 of key parameters and 2 of channel scale.

Different from the authors' code, and why:

- Parameters belong to one KV head of one sequence. The authors quantize all heads as one long row,
  although row t is a different token in each of them, and share key parameters over a batch.
- No slot is quantized twice. The authors dequantize everything, add the newest 100 tokens, sort
  again by the attention of the last row, and quantize everything again, which adds error each time.
  Here the oldest ``page`` tokens of the answer become a page, at ``bits_high``, with key parameters
  of their own and the channel scale of the prompt.
- ``norm="full"`` divides by ``L - j`` as the authors' code does; ``norm="probe"`` is the paper's
  mean: divided by the probe rows that see the slot.
- Probe rows are drawn without replacement. Ties go to the lower index. Steps of zero are guarded.
- Attention reads the codes. The authors restore the whole cache in float16 in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import CacheStage, DecodeStage, Slots
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.quantize_kv import Segment, channel_scale, check
from vlmfast.kernels.select import ranked

from ..coded import check_bits, coded, dtype_of, paged
from ..part import Part


def saliency(received: Tensor, rows: Tensor) -> Tensor:
    """Attention per row that could see the slot.

    Parameters
    ----------
    received : Tensor, float32, (..., G, N)
        Sum over the probe rows, of each of the G query heads of a KV head.
    rows : Tensor, int64, (..., N)
        Number of rows that could see the slot.

    Returns
    -------
    Tensor, float32, (..., N)
    """
    return received.sum(-2) / rows.clamp(min=1)


def least_salient(score: Tensor, share: float, lengths: Tensor) -> Tensor:
    """Mark the ``int(share n)`` lowest of the first ``n = lengths`` scores of each head.

    Parameters
    ----------
    score : Tensor, (H, N)
    lengths : Tensor, int64, (H,)

    Returns
    -------
    Tensor, bool, (H, N)
    """
    slots = torch.arange(score.shape[-1], device=score.device)
    valid = slots < lengths[:, None]
    kept = lengths - (share * lengths.double()).long()
    order = ranked(score.masked_fill(~valid, -torch.inf))
    rank = torch.empty_like(order).scatter_(-1, order, slots.expand_as(order))
    return (rank >= kept[:, None]) & valid


@dataclass(frozen=True)
class ZipCache(CacheStage):
    """Quantizes salient slots to 4 bits and the others to 2."""

    name: ClassVar[str] = "zipcache"
    paper: ClassVar[str] = "NeurIPS 2024, arXiv 2405.14256"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "important"
    quantizes: ClassVar[bool] = True

    important: float = param(0.6, "fraction of the slots stored in bits_high", ge=0.0, le=1.0)
    bits_high: int = param(4, "bits of salient slots and of the answer: 2, 4 or 8", ge=2, le=8)
    bits_low: int = param(2, "bits of the other slots: 2, 4 or 8", ge=2, le=8)
    recent: float = param(0.05, "fraction of the prompt's rows, the last, that probe", gt=0, lt=1)
    random: float = param(0.05, "fraction of the other rows that is drawn to probe", ge=0, lt=1)
    seed: int = param(0, "seed of the random probe rows", ge=0)
    norm: str = param(
        "full",
        "divisor of the attention: all rows that could see the slot, or the probe rows alone",
        choices=("full", "probe"),
    )
    page: int = param(128, "tokens of the answer that are quantized together", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self, "bits_high", "bits_low")
        if self.bits_low > self.bits_high:
            raise RecipeError(
                f"zipcache: bits_low={self.bits_low} is more than bits_high={self.bits_high}; "
                "it must not exceed it"
            )

    def expand(self) -> tuple[Stage, ...]:
        return (self, Pages(self))

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        probe = ColumnRequest("probe", n=self.recent, random=self.random, seed=self.seed)
        return dict.fromkeys(range(depth), probe)

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        for bits in (self.bits_high, self.bits_low):
            try:
                check(bits, kv.keys.shape[-1])
            except ValueError as error:
                raise RecipeError(f"zipcache: {error}") from None
        parts = [(self.bits_high, kv)]
        if self.bits_low < self.bits_high:
            low = least_salient(self.score(context, kv, stats), 1 - self.important, kv.lengths)
            high = kv.valid & ~low
            lows = [int((1 - self.important) * n) for n in kv.counts]  # as in `least_salient`
            highs = [n - low for n, low in zip(kv.counts, lows, strict=True)]
            parts = [
                (self.bits_high, kv.select_mask(high, highs)),
                (self.bits_low, kv.select_mask(low, lows)),
            ]
        dtype = dtype_of(context, kv)
        scale = channel_scale(kv.values, kv.valid, dtype=dtype)
        context.notes.setdefault(self.name, {})[layer] = scale
        return coded(kv, parts, scale, dtype)

    def score(self, context: PrefillContext, kv: KV, stats: ColumnStats | None) -> Tensor:
        """Saliency of each slot, float32, (H, N)."""
        assert stats is not None and stats.sum is not None
        if self.norm == "probe":
            return saliency(stats.sum, stats.nnz)
        order = context.layout.order
        return saliency(stats.sum, len(order) - torch.searchsorted(order, kv.order.contiguous()))


@dataclass(frozen=True)
class Pages(Part, DecodeStage):
    """Quantizes the oldest tokens of the answer, a page at a time."""

    name: ClassVar[str] = ZipCache.name

    def step(self, slots: Slots, layer: int) -> None:
        count = slots.max_length // self.of.page * self.of.page
        if not count:
            return
        # All pages of a layer share a scale, so that they can be concatenated.
        scales, order = slots.notes.setdefault(self.name, {}), slots.order[:, :count]

        def make(keys: Tensor, values: Tensor) -> Segment:
            if layer not in scales:
                scales[layer] = channel_scale(values, dtype=torch.float16)
            return paged(keys, values, order, self.of.bits_high, self.of.page, scales[layer])

        slots.quantize(count, make)

    def quiet(self, slots: Slots, layer: int) -> int:
        return self.of.page - 1 - slots.max_length
