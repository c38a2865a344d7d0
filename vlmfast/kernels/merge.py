"""``merge``: what is evicted goes into the kept slot whose key is nearest to its own.

For kept slots (pivots) ``c`` and evicted slots ``e`` of one head::

    c(e) = argmax over c of cos(k_e, k_c)     s_e = that cosine     n_c = number of e with c(e) = c

    pivot      x_c' = (x_c + sum over e of (x_e + x_c) / 2) / (1 + n_c)
    avg        x_c' = (x_c + sum over e of x_e)             / (1 + n_c)
    weighted   x_c' = (x_c + sum over e of s_e x_e)         / (1 + n_c)

for keys and values alike; only keys say who is near. Evicted slots are sorted by pivot and each
pivot sums its own run, so the result does not depend on the order in which threads finish.
Everything is computed in float32.

Three launches on a GPU, and a sort between the last two. `_norms`, one program per 64 slots of a
head: one over each key's length. `_nearest`, one program per 64 evicted slots of a head: walks over
the pivots 64 or 32 at a time, products of keys as they are, the lengths applied to what comes out.
`_merge_runs`, one program per pivot and head: reads its own run of evicted slots, 16 at a time.

Bytes: keys twice (the second time mostly from the second-level cache), values once, what is kept
once more: 58 MB at 32 heads of 128 and 2,944 slots of which a fifth stays, 13.5 us at 4.3 TB/s.
Floor: 2 H E S D operations of `_nearest`, 11.3e9 there or 14.4 us at 790e12 per second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, check_heads, padded, pointer, tl, triton, upcast, use_triton

MODES, RULES = ("pivot", "avg", "weighted"), ("all", "token", "slot")
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
    _check(keys, values, keep, mode, rule)
    run = merge_into_ref
    if use_triton("merge", keys, values, keep, valid, lengths, weight):
        run = _launch
    return run(keys, values, keep, mode, rule=rule, valid=valid, lengths=lengths, weight=weight)


def merge_into_ref(
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
    """`merge_into` in plain PyTorch."""
    h, n, _ = keys.shape
    s = keep.shape[1]
    there = _there(keep, lengths)
    evicted, used = _evicted(keep, n, there, valid, lengths is None)
    target, similarity = _nearest_ref(keys, keep, evicted, there.expand(h, -1))
    similarity = similarity.masked_fill(~used, 0.0)
    if rule != "all":
        used = used & _above_mean(similarity, used, over=0 if rule == "slot" else None)
    order, ends = _runs(target, used, s)
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


def _check(keys: Tensor, values: Tensor, keep: Tensor, mode: str, rule: str) -> None:
    if keys.shape != values.shape or keys.dim() != 3 or keep.dim() != 2 or len(keep) != len(keys):
        raise VLMFastError(
            f"merge: keys {tuple(keys.shape)}, values {tuple(values.shape)} and kept slots "
            f"{tuple(keep.shape)}; it takes (H, N, D) twice and (H, S)"
        )
    if not 0 < keep.shape[1] <= keys.shape[1]:
        raise VLMFastError(
            f"merge: {keep.shape[1]} kept of {keys.shape[1]} slots; it takes at least one"
        )
    if keys.dtype != values.dtype:
        raise VLMFastError(
            f"merge: keys in {keys.dtype}, values in {values.dtype}; it takes one dtype"
        )
    for name, value, allowed in (("mode", mode, MODES), ("rule", rule, RULES)):
        if value not in allowed:
            raise VLMFastError(f"merge: {name}={value!r} must be one of {', '.join(allowed)}")


def _there(keep: Tensor, lengths: Tensor | None) -> Tensor:
    """Kept slots that exist: bool, (H, S) or (S,)."""
    slots = torch.arange(keep.shape[1], device=keep.device)
    return slots < (keep.shape[1] if lengths is None else lengths[:, None])


def _evicted(
    keep: Tensor, n: int, there: Tensor, valid: Tensor | None, even: bool
) -> tuple[Tensor, Tensor]:
    """Slots that are not kept, ascending, (H, E), and which of these entries are such slots.

    ``even``: as many in each head.
    """
    h, s = keep.shape
    kept = torch.zeros(h, n + 1, dtype=torch.bool, device=keep.device)
    kept = kept.scatter(1, torch.where(there, keep, n), True)[:, :n]
    # A stable sort puts the evicted slots first, in their order.
    evicted = kept.to(torch.uint8).argsort(dim=1, stable=True)
    evicted = evicted[:, : n - s if even else n]
    used = ~kept.gather(1, evicted)
    if valid is not None:
        used = used & valid.gather(1, evicted)
    return evicted, used


def _runs(target: Tensor, used: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Evicted slots of all heads in runs of equal pivots.

    Returns
    -------
    order : Tensor, int64, (H E,)
        What is not used forms a last run of its own.
    ends : Tensor, int64, (H S + 1,)
        Where each run ends.
    """
    h = len(target)
    pivot = target + s * torch.arange(h, device=target.device)[:, None]
    pivot, order = torch.where(used, pivot, h * s).flatten().sort(stable=True)
    every = torch.arange(h * s + 1, device=target.device)
    return order, torch.searchsorted(pivot, every, right=True)


def _rows(of: Tensor, index: Tensor) -> Tensor:
    return of.gather(1, index[..., None].expand(-1, -1, of.shape[2]))


def _nearest_ref(
    keys: Tensor, keep: Tensor, evicted: Tensor, there: Tensor
) -> tuple[Tensor, Tensor]:
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


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("N",))
def _norms(
    keys,
    out,  # float32 (H, N)
    stride_h,
    stride_n,
    N,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    at = n.to(tl.int64)[:, None] * stride_n + d[None, :]
    x = tl.load(keys + head * stride_h + at, mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
    x = x.to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-6)
    tl.store(out + head * N + n, 1.0 / length, mask=n < N)


@triton.jit(do_not_specialize=("N", "E", "S"))
def _nearest(
    keys,
    inverse,  # float32 (H, N): one over each key's length
    evicted,  # int64 (H, E)
    used,  # bool (H, E)
    keep,  # int64 (H, S)
    lengths,  # int64 (H,), or None: S kept slots everywhere
    target,  # out: int64 (H, E)
    similarity,  # out: float32 (H, E)
    stride_h,
    stride_n,
    stride_eh,
    N,
    E,
    S,
    D: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    UP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    d = tl.arange(0, BD)
    keys += head * stride_h
    inverse += head * N
    real = tl.load(used + head * E + e, mask=e < E, other=0) != 0
    out = head * E + e
    count = S
    if lengths is not None:
        count = tl.load(lengths + head).to(tl.int32)
    # A block of nothing but padding costs no walk.
    count = tl.where(tl.max(real.to(tl.int32), 0) > 0, count, 0)
    slot = tl.load(evicted + head * stride_eh + e, mask=real, other=0)
    x = tl.load(
        keys + slot[:, None] * stride_n + d[None, :],
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if UP:
        x = x.to(tl.float32)
    best = tl.full((BE,), -1e30, tl.float32)
    which = tl.zeros((BE,), tl.int32)
    for s0 in range(0, count, BS):
        s = s0 + tl.arange(0, BS)
        pivot = tl.load(keep + head * S + s, mask=s < count, other=0)
        y = tl.load(
            keys + pivot[None, :] * stride_n + d[:, None],
            mask=(s < count)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        if UP:
            y = y.to(tl.float32)
        scale = tl.load(inverse + pivot, mask=s < count, other=0.0)
        # Dividing by the evicted key's length moves no maximum, so that waits for the end.
        cosine = tl.dot(x, y, input_precision="ieee") * scale[None, :]
        cosine = tl.where((s < count)[None, :], cosine, -1e30)
        top, at = tl.max(cosine, 1, return_indices=True)  # the first of equals
        better = top > best
        which = tl.where(better, s0 + at, which)
        best = tl.where(better, top, best)
    own = tl.load(inverse + slot, mask=real, other=0.0)
    tl.store(target + out, which.to(tl.int64), mask=e < E)
    tl.store(similarity + out, tl.where(real & (count > 0), best * own, 0.0), mask=e < E)


@triton.jit(do_not_specialize=("N", "E", "S"))
def _merge_runs(
    keys,
    values,
    weight,  # float32 (H, N), or None for 1
    keep,  # int64 (H, S)
    evicted,  # int64 (H, E)
    similarity,  # float32 (H E,)
    order,  # int64 (H E,): entries of `evicted`, those of one pivot beside each other
    ends,  # int64 (H S + 1,): where the run of each pivot ends
    new_keys,  # out: (H, S, D)
    new_values,
    new_weight,  # out: float32 (H, S)
    stride_kh,
    stride_kn,
    stride_vh,
    stride_vn,
    stride_eh,
    N,
    E,
    S,
    OWN: tl.constexpr,  # what the pivot counts per merged slot: 1/2 or 0
    OTHER: tl.constexpr,  # what a merged slot counts: 1/2 or 1
    WEIGHTED: tl.constexpr,  # times its similarity
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    s, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    run = head * S + s
    d = tl.arange(0, BD)
    first = tl.load(ends + run - 1, mask=run > 0, other=0)
    last = tl.load(ends + run)
    keys += head * stride_kh
    values += head * stride_vh
    sum_k = tl.zeros((BD,), tl.float32)
    sum_v = tl.zeros((BD,), tl.float32)
    sum_w = tl.zeros((BR,), tl.float32)
    for r0 in range(first, last, BR):
        r = r0 + tl.arange(0, BR)
        entry = tl.load(order + r, mask=r < last, other=0)
        slot = tl.load(evicted + head * stride_eh + entry - head * E, mask=r < last, other=0)
        inside = (r < last)[:, None] & (d < D)[None, :]
        k = tl.load(keys + slot[:, None] * stride_kn + d[None, :], mask=inside, other=0.0)
        v = tl.load(values + slot[:, None] * stride_vn + d[None, :], mask=inside, other=0.0)
        k, v = k.to(tl.float32), v.to(tl.float32)
        if WEIGHTED:
            near = tl.load(similarity + entry, mask=r < last, other=0.0)[:, None]
            k, v = k * near, v * near
        sum_k += tl.sum(k, 0)
        sum_v += tl.sum(v, 0)
        if weight is not None:
            sum_w += tl.load(weight + head * N + slot, mask=r < last, other=0.0)
    pivot = tl.load(keep + run)
    count = (last - first).to(tl.float32)
    k = tl.load(keys + pivot * stride_kn + d, mask=d < D, other=0.0).to(tl.float32)
    v = tl.load(values + pivot * stride_vn + d, mask=d < D, other=0.0).to(tl.float32)
    k = (k * (1.0 + OWN * count) + OTHER * sum_k) / (1.0 + count)
    v = (v * (1.0 + OWN * count) + OTHER * sum_v) / (1.0 + count)
    tl.store(new_keys + run * D + d, k.to(new_keys.dtype.element_ty), mask=d < D)
    tl.store(new_values + run * D + d, v.to(new_values.dtype.element_ty), mask=d < D)
    if weight is None:
        tl.store(new_weight + run, 1.0 + count)
    else:
        tl.store(new_weight + run, tl.load(weight + head * N + pivot) + tl.sum(sum_w, 0))


def _sizes(block: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile and launch of `_nearest` for heads whose dimension is padded to ``block``."""
    if block <= 128 and dtype != torch.float32:
        return {"BE": 64, "BS": 64, "num_warps": 4}
    return {"BE": 64, "BS": 32, "num_warps": 8}


def _launch(
    keys: Tensor,
    values: Tensor,
    keep: Tensor,
    mode: str,
    *,
    rule: str,
    valid: Tensor | None,
    lengths: Tensor | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    h, n, d = keys.shape
    s = keep.shape[1]
    check_heads("merge", d)
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    keep = keep.contiguous()
    weight = None if weight is None else weight.contiguous()
    there = _there(keep, lengths)
    evicted, used = _evicted(keep, n, there, valid, lengths is None)
    e, device = evicted.shape[1], keys.device
    block = padded(d)
    sizes = _sizes(block, keys.dtype)

    inverse = torch.empty(h, n, dtype=torch.float32, device=device)
    target = torch.empty(h, e, dtype=torch.int64, device=device)
    similarity = torch.empty(h, e, dtype=torch.float32, device=device)
    if e:
        _norms[(triton.cdiv(n, 64), h)](
            keys, inverse, *keys.stride()[:2], n, D=d, BD=block, BN=64, num_warps=4
        )
        _nearest[(triton.cdiv(e, sizes["BE"]), h)](
            keys,
            inverse,
            evicted,
            used.contiguous(),
            keep,
            lengths,
            target,
            similarity,
            *keys.stride()[:2],
            evicted.stride(0),
            n,
            e,
            s,
            D=d,
            BD=block,
            **sizes,
            UP=upcast(keys),
            num_stages=2,
        )
    if rule != "all":
        used = used & _above_mean(similarity, used, over=0 if rule == "slot" else None)
    order, ends = _runs(target, used, s)

    new_keys, new_values = (
        torch.empty(h, s, d, dtype=x.dtype, device=device) for x in (keys, values)
    )
    new_weight = torch.empty(h, s, dtype=torch.float32, device=device)
    _merge_runs[(s, h)](
        keys,
        values,
        weight,
        keep,
        evicted,
        similarity,
        order,
        ends,
        new_keys,
        new_values,
        new_weight,
        *keys.stride()[:2],
        *values.stride()[:2],
        evicted.stride(0),
        n,
        e,
        s,
        OWN=0.5 if mode == "pivot" else 0.0,
        OTHER=0.5 if mode == "pivot" else 1.0,
        WEIGHTED=mode == "weighted",
        D=d,
        BD=block,
        BR=16,
        num_warps=4,
    )
    return new_keys, new_values, new_weight


_TYPES = {
    **dict.fromkeys(("inverse", "similarity", "weight", "new_weight"), "*fp32"),
    **dict.fromkeys(("evicted", "keep", "lengths", "target", "order", "ends"), "*i64"),
    "used": "*i1",
    **dict.fromkeys(("stride_h", "stride_n", "stride_kh", "stride_kn"), "i32:16"),
    **dict.fromkeys(("stride_vh", "stride_vn"), "i32:16"),
    **dict.fromkeys(("stride_eh", "N", "E", "S"), "i32"),
}


def _variants(dtype: torch.dtype, d: int) -> list[Variant]:
    names = ("keys", "values", "new_keys", "new_values")
    types, shape = _TYPES | dict.fromkeys(names, pointer(dtype)), {"D": d, "BD": padded(d)}
    tile = _sizes(padded(d), dtype)
    warps = tile.pop("num_warps")
    near = {**shape, **tile, "UP": dtype == torch.float32}
    return [
        Variant(_norms, types | {"out": "*fp32"}, {**shape, "BN": 64}),
        Variant(_nearest, types, near, warps),
        Variant(_nearest, types, {**near, "lengths": None}, warps),
        Variant(
            _merge_runs,
            types,
            {**shape, "BR": 16, "OWN": 0.0, "OTHER": 1.0, "WEIGHTED": True},
        ),
    ]


VARIANTS = [
    *_variants(torch.float16, 128),
    *(v for d in (64, 80, 96, 128, 256) for v in _variants(torch.bfloat16, d)),
    *(v for d in (64, 128, 256) for v in _variants(torch.float32, d)),
]
