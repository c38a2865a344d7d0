"""``col_stats``: what each key receives of a softmax attention whose map is never built.

Bytes: queries of the rows and keys once, one output column per statistic. The reference walks over
the rows in blocks, so that rows x keys x heads stays bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ENTRIES_AT_ONCE = 1 << 24  # of one block's map, over all heads


def col_stats(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None = None,
    scaling: float | None = None,
    *,
    threshold: float = 0.0,
    causal: bool = True,
    start: int = 0,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums over query rows of ``softmax(q k^T scaling)``, per query head and key, in float32.

    Parameters
    ----------
    query : Tensor, (Hq, S, D)
    key : Tensor, (Hk, S, D)
        Shared by ``Hq // Hk`` query heads each.
    rows : Tensor, int64, (R,), optional
        Query rows that are summed; all by default.
    scaling : float, optional
        ``D ** -0.5`` by default.
    threshold : float
        ``count`` counts the entries that reach this share of their row's largest.
    causal : bool
        Whether a row sees no key behind it.
    start : int
        First key that exists; rows before it see nothing and count as zero.
    bias : Tensor, float32, (S,), optional
        Added to the logits of each key.

    Returns
    -------
    dict
        ``sum``, ``sumsq``, ``max``, ``entropy`` (of ``-p ln(p + 1e-10)``), float32, and ``count``,
        int32, each (Hk, G, S); ``nnz``, int64, (S,): rows that may see the key.
    """
    hq, s, d = query.shape
    hk = key.shape[0]
    rows = torch.arange(s, device=query.device) if rows is None else rows
    scaling = d**-0.5 if scaling is None else scaling
    columns = torch.arange(s, device=query.device)
    keys = key.float().transpose(-1, -2)[:, None]
    names = ("sum", "sumsq", "max", "entropy", "count")
    out = {name: query.new_zeros(hk, hq // hk, s, dtype=torch.float32) for name in names}
    for block in rows.split(max(_ENTRIES_AT_ONCE // (hq * s), 1)):
        if not len(block):  # no rows at all
            continue
        q = query.index_select(1, block).float() * scaling
        logits = q.unflatten(0, (hk, -1)) @ keys
        if bias is not None:
            logits = logits + bias
        hidden = (columns < start).expand(len(block), -1)
        if causal:
            hidden = hidden | (columns[None] > block[:, None])
        # A finite floor: a row that sees nothing must give zeros and not NaN.
        p = logits.masked_fill_(hidden, -1e30).softmax(-1).masked_fill_(hidden, 0.0)
        out["sum"] += p.sum(2)
        out["sumsq"] += p.square().sum(2)
        out["max"] = torch.maximum(out["max"], p.amax(2))
        out["entropy"] -= torch.xlogy(p, p + 1e-10).sum(2)
        if threshold:
            reach = (p >= threshold * p.amax(-1, keepdim=True)) & ~hidden
            out["count"] += reach.sum(2)
    if causal:
        seen = torch.bincount(rows, minlength=s)[:s]
        nnz = seen.flip(0).cumsum(0).flip(0)
        if start:  # rows before the first key see nothing
            nnz = nnz.clamp(max=int((rows >= start).sum())).masked_fill(columns < start, 0)
    else:
        nnz = torch.full((s,), len(rows), device=query.device).masked_fill(columns < start, 0)
    return out | {"count": out["count"].int(), "nnz": nnz}
