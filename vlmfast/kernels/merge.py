"""``merge``: each evicted slot is merged into the kept slot with the nearest key.

For kept slots (pivots) ``c`` and evicted slots ``e`` of one head::

    c(e) = argmax over c of cos(k_e, k_c)     s_e = that cosine     n_c = number of e with c(e) = c

    pivot      x_c' = (x_c + sum over e of (x_e + x_c) / 2) / (1 + n_c)
    avg        x_c' = (x_c + sum over e of x_e)             / (1 + n_c)
    weighted   x_c' = (x_c + sum over e of s_e x_e)         / (1 + n_c)

for keys and values alike; the nearest pivot depends on keys alone. Evicted slots are sorted by
pivot and each pivot sums its own run, so the result does not depend on the order of threads.
Everything is computed in float32.

Three launches on a GPU, and a sort between the last two. `_norms`, one program per 64 slots of a
head: the inverse norm of each key. `_nearest`, one program per 32 or 64 evicted slots of a head:
loops over the pivots, 16 to 64 at a time, and scales products of unnormalized keys by the inverse
norms.
`_merge_runs`, one program per pivot and head: reads its own run of evicted slots, 16 at a time.

Bytes: keys twice (the second time mostly from the L2 cache), values once, kept slots once more:
58 MB at 32 heads of 128 and 2,944 slots of which a fifth is kept, 13.5 us at 4.3 TB/s.
Floor: 2 H E S D operations of `_nearest`, 11.4e9 there or 14.4 us at 790e12 per second. The
reference writes and reads the cosines several times: 2.1 GB in 70 launches.
"""

from __future__ import annotations

from typing import no_type_check

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
    """Merge the evicted slots into the kept ones.

    Parameters
    ----------
    keys, values : Tensor, (H, N, D)
    keep : Tensor, int64, (H, S)
        Slots that are kept, ascending; all others are evicted.
    mode : {"pivot", "avg", "weighted"}
    rule : {"all", "token", "slot"}
        Evicted slots that are merged; the others are dropped. ``token``: where ``s_e`` reaches its
        mean over the head's evicted slots. ``slot``: where the mean over heads of the m-th evicted
        slot's ``s_e``, whatever tokens these are, reaches the mean over all of them.
    valid : Tensor, bool, (H, N), optional
        Valid slots; all by default.
    lengths : Tensor, int64, (H,), optional
        Number of valid kept slots in each head; S by default.
    weight : Tensor, float32, (H, N), optional
        Number of tokens that each slot represents; 1 by default.

    Returns
    -------
    keys, values : Tensor, (H, S, D)
        In the dtypes of the inputs.
    weight : Tensor, float32, (H, S)
        Number of tokens that each kept slot represents after merging.
    """
    _check(keys, values, keep, mode, rule)
    kernel = use_triton("merge", keys, values, keep, valid, lengths, weight)
    run = _launch if kernel else merge_into_ref
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
    valid_kept = _valid_kept(keep, lengths)
    evicted, used = _evicted(keep, n, valid_kept, valid, lengths is None)
    target, similarity = _nearest_ref(keys, keep, evicted, valid_kept.expand(h, -1))
    similarity = similarity.masked_fill(~used, 0.0)
    if rule != "all":
        used = used & _above_mean(similarity, used, over=0 if rule == "slot" else None)
    order, ends = _runs(target, used, s)
    runs = ends.diff(prepend=ends.new_zeros(1))

    def total(rows: Tensor) -> Tensor:
        rows = rows.flatten(0, 1).index_select(0, order)
        # Not checked, since a check would synchronize.
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


def _valid_kept(keep: Tensor, lengths: Tensor | None) -> Tensor:
    """Valid kept slots: bool, (H, S) or (S,)."""
    slots = torch.arange(keep.shape[1], device=keep.device)
    return slots < (keep.shape[1] if lengths is None else lengths[:, None])


def _evicted(
    keep: Tensor, n: int, valid_kept: Tensor, valid: Tensor | None, even: bool
) -> tuple[Tensor, Tensor]:
    """Evicted slots, ascending, (H, E), and which of these entries are valid.

    ``even``: every head evicts the same number of slots.
    """
    h, s = keep.shape
    kept = torch.zeros(h, n + 1, dtype=torch.bool, device=keep.device)
    kept = kept.scatter(1, torch.where(valid_kept, keep, n), True)[:, :n]
    # A stable sort puts the evicted slots first, in their order.
    evicted = kept.to(torch.uint8).argsort(dim=1, stable=True)
    evicted = evicted[:, : n - s if even else n]
    used = ~kept.gather(1, evicted)
    if valid is not None:
        used = used & valid.gather(1, evicted)
    return evicted, used


def _runs(target: Tensor, used: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Sort the evicted slots of all heads into runs of equal pivots.

    Returns
    -------
    order : Tensor, int64, (H E,)
        Unused entries form a last run.
    ends : Tensor, int64, (H S + 1,)
        End of each run.
    """
    h = len(target)
    pivot = target + s * torch.arange(h, device=target.device)[:, None]
    pivot, order = torch.where(used, pivot, h * s).flatten().sort(stable=True)
    every = torch.arange(h * s + 1, device=target.device)
    return order, torch.searchsorted(pivot, every, right=True)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _nearest_ref(
    keys: Tensor, keep: Tensor, evicted: Tensor, valid_kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Nearest pivot of each evicted slot, the first of equals, and its cosine: (H, E) both."""
    units = keys.float()
    units = units / units.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    pivots = _rows(units, keep).transpose(1, 2)
    found = []
    for block in evicted.split(max(_ENTRIES_AT_ONCE // max(keep.numel(), 1), 1), dim=1):
        cosine = (_rows(units, block) @ pivots).masked_fill(~valid_kept[:, None], -torch.inf)
        best = cosine.argmax(-1)
        found.append((best, cosine.gather(-1, best[..., None])[..., 0]))
    target, similarity = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return target, similarity


def _above_mean(similarity: Tensor, used: Tensor, over: int | None) -> Tensor:
    """Whether a similarity, averaged over axis ``over`` if given, reaches the mean of all used.

    The mean is that of each head, or that of all heads if ``over`` is given.
    """
    if over is None:
        return similarity >= similarity.sum(1, keepdim=True) / used.sum(1, keepdim=True)
    return similarity.sum(over) / used.sum(over) >= similarity.sum() / used.sum()


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("N",))
@no_type_check
def _norms(
    keys,
    out,  # float32 (H, N)
    stride_h,
    stride_n,
    N,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    offsets = n.to(tl.int64)[:, None] * stride_n + d[None, :]
    b_k = tl.load(
        keys + head * stride_h + offsets, mask=(n < N)[:, None] & (d < D)[None, :], other=0.0
    )
    b_k = b_k.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 1)), 1e-6)
    tl.store(out + head * N + n, 1.0 / norm, mask=n < N)


@triton.jit(do_not_specialize=("N", "E", "S"))
@no_type_check
def _nearest(
    keys,
    inverse,  # float32 (H, N): inverse norm of each key
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
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    p_k = keys + head * stride_h
    p_inverse = inverse + head * N
    m_evicted = tl.load(used + head * E + e, mask=e < E, other=0) != 0
    offsets = head * E + e
    num_pivots = S
    if lengths is not None:
        num_pivots = tl.load(lengths + head).to(tl.int32)
    # Skip the loop for a block of padding alone.
    num_pivots = tl.where(tl.max(m_evicted.to(tl.int32), 0) > 0, num_pivots, 0)
    evicted_slot = tl.load(evicted + head * stride_eh + e, mask=m_evicted, other=0)
    b_e = tl.load(  # [BE, BD]
        p_k + evicted_slot[:, None] * stride_n + d[None, :],
        mask=m_evicted[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if UPCAST:
        b_e = b_e.to(tl.float32)
    row_max = tl.full((BLOCK_E,), -1e30, tl.float32)  # [BE]
    row_index = tl.zeros((BLOCK_E,), tl.int32)
    for s0 in range(0, num_pivots, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        pivot = tl.load(keep + head * S + s, mask=s < num_pivots, other=0)
        b_pivot = tl.load(  # [BD, BS]
            p_k + pivot[None, :] * stride_n + d[:, None],
            mask=(s < num_pivots)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        if UPCAST:
            b_pivot = b_pivot.to(tl.float32)
        pivot_inverse = tl.load(p_inverse + pivot, mask=s < num_pivots, other=0.0)
        # Dividing by the evicted key's norm does not change the maximum: done after the loop.
        b_cos = tl.dot(b_e, b_pivot, input_precision="ieee") * pivot_inverse[None, :]  # [BE, BS]
        b_cos = tl.where((s < num_pivots)[None, :], b_cos, -1e30)
        block_max, block_index = tl.max(b_cos, 1, return_indices=True)  # the first of equals
        m_better = block_max > row_max
        row_index = tl.where(m_better, s0 + block_index, row_index)
        row_max = tl.where(m_better, block_max, row_max)
    own_inverse = tl.load(p_inverse + evicted_slot, mask=m_evicted, other=0.0)
    tl.store(target + offsets, row_index.to(tl.int64), mask=e < E)
    tl.store(
        similarity + offsets,
        tl.where(m_evicted & (num_pivots > 0), row_max * own_inverse, 0.0),
        mask=e < E,
    )


@triton.jit(do_not_specialize=("N", "E", "S"))
@no_type_check
def _merge_runs(
    keys,
    values,
    weight,  # float32 (H, N), or None for 1
    keep,  # int64 (H, S)
    evicted,  # int64 (H, E)
    similarity,  # float32 (H E,)
    order,  # int64 (H E,): entries of `evicted`, sorted by pivot
    ends,  # int64 (H S + 1,): end of the run of each pivot
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
    OWN: tl.constexpr,  # weight of the pivot per merged slot: 1/2 or 0
    OTHER: tl.constexpr,  # weight of a merged slot: 1/2 or 1
    WEIGHTED: tl.constexpr,  # multiply by its similarity
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    s, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    run = head * S + s
    d = tl.arange(0, BLOCK_D)
    first = tl.load(ends + run - 1, mask=run > 0, other=0)
    last = tl.load(ends + run)
    p_k = keys + head * stride_kh
    p_v = values + head * stride_vh
    acc_k = tl.zeros((BLOCK_D,), tl.float32)
    acc_v = tl.zeros((BLOCK_D,), tl.float32)
    acc_w = tl.zeros((BLOCK_R,), tl.float32)
    for r0 in range(first, last, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        entry = tl.load(order + r, mask=r < last, other=0)
        slot = tl.load(evicted + head * stride_eh + entry - head * E, mask=r < last, other=0)
        m_run = (r < last)[:, None] & (d < D)[None, :]
        b_k = tl.load(p_k + slot[:, None] * stride_kn + d[None, :], mask=m_run, other=0.0)
        b_v = tl.load(p_v + slot[:, None] * stride_vn + d[None, :], mask=m_run, other=0.0)
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
        if WEIGHTED:
            b_similarity = tl.load(similarity + entry, mask=r < last, other=0.0)[:, None]
            b_k, b_v = b_k * b_similarity, b_v * b_similarity
        acc_k += tl.sum(b_k, 0)
        acc_v += tl.sum(b_v, 0)
        if weight is not None:
            acc_w += tl.load(weight + head * N + slot, mask=r < last, other=0.0)
    pivot = tl.load(keep + run)
    count = (last - first).to(tl.float32)
    b_k = tl.load(p_k + pivot * stride_kn + d, mask=d < D, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + pivot * stride_vn + d, mask=d < D, other=0.0).to(tl.float32)
    b_k = (b_k * (1.0 + OWN * count) + OTHER * acc_k) / (1.0 + count)
    b_v = (b_v * (1.0 + OWN * count) + OTHER * acc_v) / (1.0 + count)
    tl.store(new_keys + run * D + d, b_k.to(new_keys.dtype.element_ty), mask=d < D)
    tl.store(new_values + run * D + d, b_v.to(new_values.dtype.element_ty), mask=d < D)
    if weight is None:
        tl.store(new_weight + run, 1.0 + count)
    else:
        tl.store(new_weight + run, tl.load(weight + head * N + pivot) + tl.sum(acc_w, 0))


def _sizes(block: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile and launch of `_nearest` for heads whose dimension is padded to ``block``."""
    if dtype == torch.float32:
        return {"BLOCK_E": 32, "BLOCK_S": 16, "num_warps": 4}
    if 64 < block <= 128:
        return {"BLOCK_E": 64, "BLOCK_S": 64, "num_warps": 4}
    if block <= 64:  # with 64 pivots Triton 3.8 spills on 8.9
        return {"BLOCK_E": 64, "BLOCK_S": 32, "num_warps": 4}
    return {"BLOCK_E": 64, "BLOCK_S": 32, "num_warps": 8}


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
    valid_kept = _valid_kept(keep, lengths)
    evicted, used = _evicted(keep, n, valid_kept, valid, lengths is None)
    e, device = evicted.shape[1], keys.device
    block = padded(d)
    sizes = _sizes(block, keys.dtype)

    inverse = torch.empty(h, n, dtype=torch.float32, device=device)
    target = torch.empty(h, e, dtype=torch.int64, device=device)
    similarity = torch.empty(h, e, dtype=torch.float32, device=device)
    if e:
        _norms[(triton.cdiv(n, 64), h)](
            keys, inverse, *keys.stride()[:2], n, D=d, BLOCK_D=block, BLOCK_N=64, num_warps=4
        )
        _nearest[(triton.cdiv(e, sizes["BLOCK_E"]), h)](
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
            BLOCK_D=block,
            **sizes,
            UPCAST=upcast(keys),
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
        BLOCK_D=block,
        BLOCK_R=16,
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
    types, shape = _TYPES | dict.fromkeys(names, pointer(dtype)), {"D": d, "BLOCK_D": padded(d)}
    tile = _sizes(padded(d), dtype)
    warps = tile.pop("num_warps")
    near = {**shape, **tile, "UPCAST": dtype == torch.float32}
    return [
        Variant(_norms, types | {"out": "*fp32"}, {**shape, "BLOCK_N": 64}),
        Variant(_nearest, types, near, warps, 2),
        Variant(_nearest, types, {**near, "lengths": None}, warps, 2),
        Variant(
            _merge_runs,
            types,
            {**shape, "BLOCK_R": 16, "OWN": 0.0, "OTHER": 1.0, "WEIGHTED": True},
        ),
    ]


VARIANTS = [
    *_variants(torch.float16, 128),
    *(v for d in (64, 80, 96, 128, 256) for v in _variants(torch.bfloat16, d)),
    *(v for d in (64, 128, 256) for v in _variants(torch.float32, d)),
]
