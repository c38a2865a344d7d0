"""What attention functions share: their context, logits with a bias, and what keys receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmfast.core.contexts import Context, PrefillContext, current_context
from vlmfast.kernels.col_stats import col_stats, column_sums

_ROWS_AT_ONCE = 512  # bounds the memory of sums over rows, where gradients are needed


@dataclass(eq=False)
class Call:
    """One call of an attention function; the parameters are those of `text_attention`."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    dropout: float

    @property
    def layer(self) -> int:
        """The layer of the language model."""
        return self.module.layer_idx

    def of(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        """Hugging Face's own attention of this module, on other rows and slots."""
        more = {"dropout": self.dropout, "scaling": self.scaling, **more}
        return sdpa_attention_forward(self.module, query, key, value, mask, **more)[0]


def context_of(kwargs: dict) -> Context:
    """The context of a call of attention, taken out of its arguments."""
    # An argument in decode (a ContextVar cannot be read inside a compiled region on torch 2.11),
    # the ContextVar elsewhere.
    context = kwargs.pop("vlmfast_context", None) or current_context.get()
    if context is None:
        raise RuntimeError(
            "vlmfast's attention was reached outside a vlmfast call; "
            "the attention implementation of this model was changed by hand"
        )
    return context


def scale_of(scaling: float | None, query: Tensor) -> float:
    """What logits are multiplied with."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def with_bias(mask: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (..., T, S) to an additive one, with ``bias`` added for each key.

    Returns
    -------
    Tensor, (B or 1, H or 1, T, S)
    """
    biased = torch.where(mask, bias, -torch.inf).to(dtype)
    return biased if biased.dim() == 4 else biased[None, None]


def attention_rows(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None,
    scaling: float | None,
    *,
    causal: bool = True,
    bias: Tensor | None = None,
    first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Softmax attention of a few query rows, in float32.

    Parameters
    ----------
    query : Tensor, (Hq, T, D)
    key : Tensor, (Hkv, T, D)
        Each KV head serves ``Hq // Hkv`` query heads.
    rows : Tensor, int64, (R,), or None
        Query rows; all of them if ``None``.
    bias : Tensor, float32, (T,), optional
        Added to the logits of each key.
    first, last : Tensor, int64, (T,), optional
        The first and the last key that each row sees; by default key 0 and the row itself.

    Returns
    -------
    Tensor, float32, (Hq, R, T)
    """
    t = query.shape[1]
    columns = torch.arange(t, device=query.device)
    rows = columns if rows is None else rows
    groups, keys = query.shape[0] // key.shape[0], key.float().transpose(-1, -2)
    q = query.index_select(1, rows).float() * scale_of(scaling, query)
    logits = (q.unflatten(0, (-1, groups)) @ keys[:, None]).flatten(0, 1)
    if bias is not None:
        logits = logits + bias
    if causal:
        limit = rows if last is None else last[rows]
        logits = logits.masked_fill(columns[None, :] > limit[:, None], -torch.inf)
    if first is not None:
        logits = logits.masked_fill(columns[None, :] < first[rows][:, None], -torch.inf)
    return logits.softmax(-1)


def received_sum(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None,
    scaling: float | None,
    *,
    causal: bool = True,
    bias: Tensor | None = None,
    first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Softmax attention that each key receives, summed over query rows: (Hq, 1, T), float32.

    Parameters are those of `attention_rows`. The map of all rows is never materialized.
    """
    if not torch.is_grad_enabled() and first is None and last is None:
        stats = col_stats(query, key, rows, scaling, causal=causal, bias=bias, want=("sum",))
        return stats["sum"].flatten(0, 1)[:, None]
    rows = torch.arange(query.shape[1], device=query.device) if rows is None else rows
    maps = (
        attention_rows(query, key, block, scaling, causal=causal, bias=bias, first=first, last=last)
        for block in rows.split(_ROWS_AT_ONCE)
    )
    return column_sums(maps, 0.0, ("sum",))["sum"][:, None]


def span(context: PrefillContext, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """The first and the last row that each row of a prompt sees at a layer, (S,) each.

    The first is ``None`` where every row sees row 0; the last is ``None`` where it is the row
    itself. Every mask rule lets a row see all rows up to one; a window cuts off the first ones.
    """
    first = last = None
    if context.mask_rule is not None:
        last = context.mask_rule(context.layout).sum(1) - 1
    if (window := context.window(layer)) is not None:
        place = context.place.contiguous()
        first = torch.searchsorted(place, place - window, right=True)
    return first, last


def received_logits(
    query: Tensor, key: Tensor, rows: Tensor, scaling: float | None, share: Tensor | None = None
) -> Tensor:
    """Logits that each key receives, mean over the query rows ``rows`` (R,): (Hq, 1, T), float32.

    A mean of products is the product with the mean, so that no map is needed. ``share`` (R,)
    weights the rows.
    """
    groups = query.shape[0] // key.shape[0]
    queries = query.index_select(1, rows).float() * scale_of(scaling, query)
    if share is None:
        mean = queries.mean(1, keepdim=True)
    else:
        mean = (queries * share[:, None]).sum(1, keepdim=True) / share.sum()
    keys = key.float().transpose(-1, -2)
    return (mean.unflatten(0, (-1, groups)) @ keys[:, None]).flatten(0, 1)
