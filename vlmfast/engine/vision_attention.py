"""Attention of the vision tower, with the statistics that stages request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmfast.core.contexts import VisionContext
from vlmfast.core.packing import Packing, PartBatch
from vlmfast.core.statistics import StatRequest

from .attention_maps import Call, context_of, received_sum, scale_of, with_bias


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the vision tower, (V, H, N, D) each; statistics only where requested.

    Towers that pack all images in one row, (1, H, S, D), pass the boundaries of its parts as
    ``cu_seq_lens_q``.
    """
    context = context_of(kwargs)
    assert isinstance(context, VisionContext)
    if (ends := kwargs.get("cu_seq_lens_q")) is not None:
        packing = context.packing(ends)
        call = Call(module, query, key, value, None, scaling, dropout)
        return _packed(call, packing, context), None
    n = key.shape[2]
    if context.lengths is not None:
        valid = (torch.arange(n, device=key.device) < context.lengths[:, None])[:, None, None]
        attention_mask = valid if attention_mask is None else attention_mask & valid
    padding = attention_mask
    bias = None
    if context.proportional_attention and context.merged is not None:
        # Padding rows represent no patch; the mask hides them.
        size = key.new_zeros(len(key), n, dtype=torch.float32)
        size = size.scatter_add(
            1, context.merged, torch.ones_like(context.merged, dtype=size.dtype)
        )
        bias = size.clamp(min=1).log()[:, None, None]
        everything = torch.ones_like(bias, dtype=torch.bool)
        mask = everything if attention_mask is None else attention_mask
        attention_mask = with_bias(mask, bias, query.dtype)
    layer = context.modules.get(id(module), -1)
    if (request := context.requests.get(layer)) is not None:
        # A mask for each head is no padding: the tower adds it to its logits.
        own = visible = None
        if padding is not None and padding.shape[1] > 1:
            own = padding
        elif padding is not None:
            visible = _visible_keys(padding).expand(len(key), n)
        stats = _vision_rows(request, query, key, visible, bias, scaling, context.specials, own)
        keys = _shown_keys(request, key)
        if context.merged is not None:  # back to the rows that entered the tower
            if stats is not None:
                rows = context.merged[:, None, None].expand(-1, *stats.shape[1:3], -1)
                stats = stats.gather(-1, rows)
            if keys is not None:
                keys = keys.gather(1, context.merged[..., None].expand(-1, -1, keys.shape[2]))
        if context.chunks is not None:
            found = context.chunks.setdefault(layer, [])
            for view in range(len(key)):
                here = slice(view, view + 1)
                of = None if keys is None else keys[here]
                found.append((None if stats is None else stats[here], of))
        else:
            if stats is not None:
                context.stats[layer] = stats
            if keys is not None:
                context.keys[layer] = keys
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _packed(call: Call, packing: Packing, context: VisionContext) -> Tensor:
    """Attention of a tower within the parts of a row, (1, S, H, D)."""
    bias = None if context.sizes is None else context.sizes.log()
    query, key = call.query, call.key
    layer = context.modules.get(id(call.module), -1)
    if (request := context.requests.get(layer)) is not None:
        assert context.chunks is not None
        lengths, found = packing.lengths, context.chunks.setdefault(layer, [])
        shown = _shown_keys(request, key)
        own = (None,) * len(lengths) if bias is None else bias[None, None, None].split(lengths, 3)
        keys = (None,) * len(lengths) if shown is None else shown.split(lengths, 1)
        parts = zip(query.split(lengths, 2), key.split(lengths, 2), own, keys, strict=True)
        for q, k, added, of in parts:
            rows = _vision_rows(request, q, k, None, added, call.scaling, context.specials)
            found.append((rows, of))

    def attention(batch: PartBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = batch.mask
        if bias is not None:
            added = batch.take(bias)[:, None, None]
            seen = torch.ones_like(added, dtype=torch.bool) if mask is None else mask
            mask = with_bias(seen, added, query.dtype)
        return call.of(query, key, value, mask, is_causal=False)

    return packing.attend(attention, query, key, call.value)


def _shown_keys(request: StatRequest, key: Tensor) -> Tensor | None:
    """The keys of a block that stages see, float32, (V, N, d)."""
    if not request.keys:
        return None
    return key.transpose(1, 2).flatten(2).float() if request.wide else key.float().mean(1)


def _visible_keys(mask: Tensor) -> Tensor:
    """Keys (V, N) that an attention mask (V, 1, N or 1, N) of a tower leaves visible."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.flatten(1, 2).any(1)


def _vision_rows(
    request: StatRequest,
    query: Tensor,
    key: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    scaling: float | None,
    specials: int,
    own: Tensor | None = None,
) -> Tensor | None:
    """Statistics of one block of a tower, float32, (V, H, 1, N); see `StatRequest`.

    Parameters
    ----------
    visible : Tensor, bool, (V, N), optional
        Valid rows; the others are padding.
    bias : Tensor, float32, (V, 1, 1, N), optional
    specials : int
        Rows before the patches.
    own : Tensor, (V or 1, H, N, N), optional
        What the tower adds to its logits, as relative positions.
    """
    if request.rows == "keys":
        return None
    if request.rows == "cls":
        logits = query[:, :, :1].float() @ key.float().transpose(-1, -2)
        logits = logits * scale_of(scaling, query)
        if bias is not None:
            logits = logits + bias
        if own is not None:
            logits = logits + own[:, :, :1].float()
        if visible is not None:
            logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
        return logits.softmax(-1)
    if request.rows not in ("columns", "received"):
        raise ValueError(f"a vision tower has no {request.rows!r} rows")
    first = specials if request.rows == "received" else 0
    if own is not None:
        shared = own.float() if bias is None else own.float() + bias
        return _received_with(query, key, shared, first, scaling, mean=request.rows == "received")
    views = []
    for number, (q, k) in enumerate(zip(query, key, strict=True)):
        here = torch.arange(k.shape[1], device=k.device)
        if visible is not None:
            here = here[visible[number]]
        at = None if bias is None else bias[number, 0, 0, here]
        rows = None if first == 0 else torch.arange(first, len(here), device=k.device)
        taken = received_sum(q[:, here], k[:, here], rows, scaling, causal=False, bias=at)
        if request.rows == "received":
            taken = taken / max(len(here) - first, 1)
        views.append(taken.new_zeros(*taken.shape[:2], k.shape[1]).index_copy(2, here, taken))
    return torch.stack(views)


def _received_with(
    query: Tensor, key: Tensor, own: Tensor, first: int, scaling: float | None, *, mean: bool
) -> Tensor:
    """What keys receive from the rows after ``first``, (V, H, 1, N), with ``own`` in the logits.

    The map of one view at a time is as large as ``own``.
    """
    views = []
    for q, k, added in zip(query, key, own.expand(len(query), -1, -1, -1), strict=True):
        logits = q[:, first:].float() @ k.float().transpose(-1, -2) * scale_of(scaling, query)
        rows = (logits + added[:, first:]).softmax(-1)
        views.append(rows.mean(1, keepdim=True) if mean else rows.sum(1, keepdim=True))
    return torch.stack(views)
