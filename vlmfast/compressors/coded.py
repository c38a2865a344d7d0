"""Keys and values as codes: what the methods that quantize a cache share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.stage import Stage
from vlmfast.errors import RecipeError
from vlmfast.kernels.quantize_kv import BITS, Segment, quantize


def check_bits(stage: Stage, *names: str) -> None:
    """Raise `RecipeError` where the codes of a parameter of ``names`` cannot be packed."""
    for name in names:
        if (bits := getattr(stage, name)) not in BITS:
            raise RecipeError(
                f"{stage.name}: {name}={bits} cannot be packed; allowed are 2, 4 and 8"
            )


def dtype_of(context: PrefillContext, kv: KV) -> torch.dtype:
    """Dtype of the parameters of a layer's codes."""
    gone = ~kv.valid[..., None]
    return context.parameter_dtype(kv.keys.masked_fill(gone, 0), kv.values.masked_fill(gone, 0))


def coded(kv: KV, parts: Sequence[tuple[int, KV]], scaled: bool | Tensor, dtype: torch.dtype) -> KV:
    """A layer whose slots are in segments: each of ``parts`` that has slots, in its bits.

    ``scaled`` and ``dtype`` are as of `quantize`.
    """
    segments = [
        quantize(
            part.keys,
            part.values,
            part.order,
            part.lengths,
            bits,
            scaled=scaled,
            bias=part.bias,
            dtype=dtype,
        )
        for bits, part in parts
        if len(part)
    ]
    empty = kv.select(torch.arange(0, device=kv.keys.device))
    return replace(empty, segments=(*kv.segments, *segments))


def paged(
    keys: Tensor, values: Tensor, order: Tensor, bits: int, page: int, scale: Tensor
) -> Segment:
    """Tokens of an answer (H, N, D), of which each ``page`` of keys shares a step."""
    lengths = torch.full((len(keys),), keys.shape[1], device=keys.device)
    return quantize(
        keys, values, order, lengths, bits, key_group=page, scaled=scale, dtype=scale.dtype
    )
