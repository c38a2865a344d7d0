"""``merge``: what is evicted goes into the kept slot whose key is nearest to its own.

For kept slots (pivots) ``c`` and evicted slots ``e`` of one head::

    c(e) = argmax over c of cos(k_e, k_c)     s_e = that cosine     n_c = number of e with c(e) = c

    pivot      x_c' = (x_c + sum over e of (x_e + x_c) / 2) / (1 + n_c)
    avg        x_c' = (x_c + sum over e of x_e)             / (1 + n_c)
    weighted   x_c' = (x_c + sum over e of s_e x_e)         / (1 + n_c)

for keys and values alike; only keys say who is near. Bytes: keys and values once, what is kept once
more. Evicted slots are sorted by pivot and each pivot sums its own run, so the result does not
depend on the order in which threads finish. Everything is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ENTRIES_AT_ONCE = 1 << 26  # of the cosines of one block of evicted slots, over all heads


def merge_into(
    keys: Tensor,
    values: Tensor,
    keep: Tensor,
    mode: str = "pivot",
    *,
    rule: str = "all",
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kept slots with the evicted ones merged in.

    Parameters
    ----------
    keys, values : Tensor, (H, N, D)
    keep : Tensor, int64, (H, S)
        Slots that are kept, ascending; all others are evicted.
    mode : {"pivot", "avg", "weighted"}
    rule : {"all", "token", "slot"}
        Evicted slots that are merged; the others are gone. ``token``: where ``s_e`` reaches its
        mean over the head's evicted slots. ``slot``: where the mean over heads of the m-th evicted
        slot's ``s_e``, whatever tokens these are, reaches the mean over all of them.
    valid : Tensor, bool, (H, N), optional
        Slots that exist; all by default.
    lengths : Tensor, int64, (H,), optional
        How many of the S kept slots exist in each head; all by default.
    weight : Tensor, float32, (H, N), optional
        How many tokens each slot stands for; 1 by default.

    Returns
    -------
    keys, values : Tensor, (H, S, D)
        In the dtypes that came in.
    weight : Tensor, float32, (H, S)
        How many tokens each kept slot stands for now.
    """
    h, n, _ = keys.shape
    s = keep.shape[1]
    slots = torch.arange(s, device=keys.device)
    there = slots < (s if lengths is None else lengths[:, None])
    kept = torch.zeros(h, n + 1, dtype=torch.bool, device=keys.device)
    kept = kept.scatter(1, torch.where(there, keep, n), True)[:, :n]
    # A stable sort puts the evicted slots first, in their order.
    evicted = kept.to(torch.uint8).argsort(dim=1, stable=True)
    evicted = evicted[:, : n - s if lengths is None else n]
    used = ~kept.gather(1, evicted)
    if valid is not None:
        used = used & valid.gather(1, evicted)
    target, similarity = _nearest(keys, keep, evicted, there.expand(h, -1))
    similarity = similarity.masked_fill(~used, 0.0)
    if rule != "all":
        used = used & _above_mean(similarity, used, over=0 if rule == "slot" else None)

    # Runs of equal pivots; what is not used forms a last run of its own, which is cut off.
    pivot = target + s * torch.arange(h, device=keys.device)[:, None]
    pivot, order = torch.where(used, pivot, h * s).flatten().sort(stable=True)
    ends = torch.searchsorted(pivot, torch.arange(h * s + 1, device=keys.device), right=True)
    runs = ends.diff(prepend=ends.new_zeros(1))

    def total(rows: Tensor) -> Tensor:
        rows = rows.flatten(0, 1).index_select(0, order)
        # Not checked, since a check would wait for the device.
        sums = torch.segment_reduce(rows, "sum", lengths=runs, axis=0, unsafe=True)
        return sums[:-1].unflatten(0, (h, s))

    count = runs[:-1].view(h, s, 1)

    def merged(rows: Tensor) -> Tensor:
        own, others = (_rows(rows, index).float() for index in (keep, evicted))
        if mode == "pivot":
            new = (own * (1 + count / 2) + total(others) / 2) / (1 + count)
        elif mode == "weighted":
            new = (own + total(others * similarity[..., None])) / (1 + count)
        else:
            new = (own + total(others)) / (1 + count)
        return new.to(rows.dtype)

    if weight is None:
        weight = keys.new_ones(h, n, dtype=torch.float32)
    weight = weight.gather(1, keep) + total(weight.gather(1, evicted)[..., None])[..., 0]
    return merged(keys), merged(values), weight


def _rows(of: Tensor, index: Tensor) -> Tensor:
    return of.gather(1, index[..., None].expand(-1, -1, of.shape[2]))


def _nearest(keys: Tensor, keep: Tensor, evicted: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest pivot of each evicted slot, the first of equals, and its cosine: (H, E) both."""
    units = keys.float()
    units = units / units.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    pivots = _rows(units, keep).transpose(1, 2)
    found = []
    for block in evicted.split(max(_ENTRIES_AT_ONCE // max(keep.numel(), 1), 1), dim=1):
        cosine = (_rows(units, block) @ pivots).masked_fill(~there[:, None], -torch.inf)
        best = cosine.argmax(-1)
        found.append((best, cosine.gather(-1, best[..., None])[..., 0]))
    target, similarity = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return target, similarity


def _above_mean(similarity: Tensor, used: Tensor, over: int | None) -> Tensor:
    """Where a similarity, averaged over the axis ``over`` if given, reaches the mean of all used.

    The mean is each head's own, or that of all heads where they are averaged.
    """
    if over is None:
        return similarity >= similarity.sum(1, keepdim=True) / used.sum(1, keepdim=True)
    return similarity.sum(over) / used.sum(over) >= similarity.sum() / used.sum()
