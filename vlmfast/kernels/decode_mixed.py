"""``decode_mixed``: attention over quantised segments and a float tail, as one softmax.

Bytes: codes and parameters of every segment once, the tail once, whatever the number of query
heads. The reference dequantises each segment as it comes to it; all logits then share one softmax.
Nothing waits for the device, and no shape depends on what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quantize_kv import Segment

NOTHING = -1e30  # logit of what is not there; finite, so that a row that sees nothing is not NaN


def decode_mixed(
    query: Tensor,
    segments: Sequence[Segment],
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_mask: Tensor,
    scaling: float | None = None,
    tail_bias: Tensor | None = None,
    want_mass: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of a few query rows over ``[segments..., tail]``.

    Parameters
    ----------
    query : Tensor, (B, Hq, T, D)
    segments : sequence of Segment
        With a batch axis, ``Hk`` heads each. Every row sees all slots within ``lengths``; what
        lies beyond them is never read into a result, whatever it holds.
    tail_keys, tail_values : Tensor, (B, Hk, cap, D)
        Shared by ``Hq // Hk`` query heads each.
    tail_mask : Tensor, bool, (B, Hk, T, cap) or what expands to it
        Which slots of the tail a row sees. A slot that no row sees may hold anything.
    scaling : float, optional
        ``D ** -0.5`` by default.
    tail_bias : Tensor, float32, (B, Hk, cap), optional
        Added to the logits of each key of the tail.
    want_mass : bool
        Whether ``mass`` is returned.

    Returns
    -------
    out : Tensor, (B, Hq, T, D)
        In the query's dtype; zeros for a row that sees nothing.
    lse : Tensor, float32, (B, Hq, T)
        Natural logarithm of the sum of exponentiated logits; -1e30 for a row that sees nothing.
    mass : Tensor, float32, (B, Hk, cap), or None
        Attention that each slot of the tail receives: sum over the rows, mean over the query heads
        that share it.
    """
    heads, rows, dim = query.shape[1:]
    shared = tail_keys.shape[1]
    inner = torch.promote_types(query.dtype, torch.float32)  # float32, but for float64
    # (B, Hk, G*T, D): the query heads of a KV head become rows, so that no key is repeated.
    q = query.to(inner).unflatten(1, (shared, heads // shared)).flatten(2, 3)
    q = q * (dim**-0.5 if scaling is None else scaling)

    logits, values = [], []
    for segment in segments:
        k, v = segment.dequantise(inner)
        logits.append(_logits(q, k, segment.bias, segment.valid[:, :, None]))
        values.append(_clean(v, segment.valid))
    mask = tail_mask.expand(len(query), shared, -1, -1)
    of_rows = mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads // shared, 1)
    logits.append(_logits(q, tail_keys.to(inner), tail_bias, of_rows))
    values.append(_clean(tail_values.to(inner), mask.any(2)))

    x = torch.cat(logits, -1)
    top = x.amax(-1, keepdim=True)
    # Where a row sees nothing, every logit is the floor and its exponential would be one.
    p = (x - top).exp().masked_fill(x <= NOTHING, 0.0)
    total = p.sum(-1, keepdim=True)
    lse = torch.where(total > 0, top + total.log(), NOTHING)
    p = p / total.masked_fill(total == 0, 1.0)
    parts = p.split([v.shape[2] for v in values], -1)
    out = sum(part @ v for part, v in zip(parts, values, strict=True))
    mass = None
    if want_mass:
        mass = parts[-1].unflatten(2, (-1, rows)).sum(3).mean(2).float()
    return (
        out.view(query.shape).to(query.dtype),
        lse.squeeze(-1).view(query.shape[:-1]).float(),
        mass,
    )


def _logits(q: Tensor, keys: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
    """(B, Hk, G*T, N), at the floor where a row does not see the key."""
    x = q @ keys.transpose(-1, -2)
    if bias is not None:
        x = x + bias[:, :, None]
    return x.masked_fill(~seen, NOTHING)


def _clean(values: Tensor, seen: Tensor) -> Tensor:
    """Zeros in slots that nobody sees: a weight of zero does not undo a NaN."""
    return values.masked_fill(~seen[..., None], 0.0)
