"""KIVI: quantize keys per channel and values per token to 2 bits, except for the newest tokens.

A few channels of the keys are far larger than the rest, in every token; values have no such
channels. KIVI (ICML 2024, arXiv 2402.02750) therefore shares a step and a minimum along the tokens
for keys and along the channels for values::

    step = (max - min) / (2^b - 1),   q = round((x - min) / step)
    keys      per channel, over a group of G tokens
    values    per token, over a group of G channels

The keys of a group can only be quantized when it is complete. The newest tokens, fewer than ``R``,
thus stay in full precision, and every ``R`` tokens are quantized at once. Of a prompt of ``L``
tokens the last ``L mod R`` are left. No token is quantized twice.

An entry takes, at b = 2 and G = 32, 2 bits and its part of 2 x 16 bits: 3 instead of 16.

Different from the authors' code, and why:

- A value is quantized together with its key, so that each token is stored in one form. The authors
  keep the values (not the keys) of the newest ``R`` tokens in full precision at all times and
  quantize one value in each step. Once quantized, codes and bytes are the same; but here the values
  of the newest tokens are quantized up to ``R`` steps earlier.
- Codes are computed in float32 from the stored (float16) step and minimum. The authors use float16,
  which changes a code by one at a tie.
- Steps of zero, where a group is constant, are guarded. A head narrower than a group is one group.
- Bytes pack channels that are half (a quarter of) a head apart, not neighbours.
- Heads may have different numbers of tokens after an eviction: of each, as many are quantized as
  the shortest allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import CacheStage, DecodeStage, Slots
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.quantize_kv import Segment, quantize

from ..coded import check_bits
from ..part import Part


def oldest(kv: KV, count: int) -> tuple[KV, KV]:
    """The first ``count`` slots of every head, and the others."""
    slots = torch.arange(len(kv), device=kv.keys.device)
    left = [n - count for n in kv.counts]
    return kv.select(slots[:count]), kv.select(slots[count:], kv.lengths - count, left)


@dataclass(frozen=True)
class Kivi(CacheStage):
    """Quantizes keys per channel and values per token, to 2 bits, in groups."""

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "ICML 2024, arXiv 2402.02750"
    tier: ClassVar[str] = "baseline"
    lead: ClassVar[str | None] = "bits"
    quantizes: ClassVar[bool] = True

    bits: int = param(2, "bits of a code: 2, 4 or 8", ge=2, le=8)
    group: int = param(32, "tokens (of keys) and channels (of values) that share a step", ge=1)
    residual: int = param(128, "tokens quantized at once; fewer stay in full precision", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self, "bits")
        if self.residual % self.group:
            raise RecipeError(
                f"kivi: residual={self.residual} does not consist of groups of {self.group} "
                "tokens; it must be a multiple of group"
            )

    def expand(self) -> tuple[Stage, ...]:
        return (self, Pages(self))

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        shortest = min(kv.counts)
        note = context.notes.setdefault(self.name, {})
        note[layer] = {"apart": len(kv) - shortest}
        if not (count := shortest // self.residual * self.residual):
            return kv
        old, rest = oldest(kv, count)
        dtype = context.parameter_dtype(old.keys, old.values)
        segment = self.segment(old.keys, old.values, old.order, old.bias, dtype)
        note[layer]["dtype"] = segment.key_step.dtype
        return replace(rest, segments=(*kv.segments, segment))

    def segment(
        self,
        keys: Tensor,
        values: Tensor,
        order: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Segment:
        """Quantize keys and values (H, N, D); ``dtype`` is that of the parameters."""
        lengths = torch.full((len(keys),), keys.shape[1], device=keys.device)
        try:
            return quantize(
                keys,
                values,
                order,
                lengths,
                self.bits,
                key_group=self.group,
                value_group=min(self.group, keys.shape[-1]),
                bias=bias,
                dtype=dtype,
            )
        except ValueError as error:
            raise RecipeError(f"kivi: {error}") from None


@dataclass(frozen=True)
class Pages(Part, DecodeStage):
    """Quantizes the oldest tokens of the answer, ``residual`` of them at a time."""

    name: ClassVar[str] = Kivi.name

    def step(self, slots: Slots, layer: int) -> None:
        note = slots.notes.get(self.name, {}).get(layer, {})
        # All heads grow alike: their lengths differ as much as after the prompt.
        count = (slots.max_length - note.get("apart", 0)) // self.of.residual * self.of.residual
        if count <= 0:
            return
        order = slots.order[:, :count]
        dtype = note.get("dtype", torch.float16)
        slots.quantize(count, lambda k, v: self.of.segment(k, v, order, dtype=dtype))

    def quiet(self, slots: Slots, layer: int) -> int:
        note = slots.notes.get(self.name, {}).get(layer, {})
        return self.of.residual - 1 - (slots.max_length - note.get("apart", 0))
