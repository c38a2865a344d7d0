"""``select``: which slots stay. Ties go to the lower index; what stays is in ascending order.

Shapes: scores (..., N), one row for each set that is chosen; out (..., k) indices or (...) counts.

One program per row on a GPU, which holds the row in registers: float32 ordered as integers, the
threshold found by bisection over their 32 bits with one count (or sum) per step, ties at the
threshold and places in the output by two running sums. Nothing is sorted and nothing waits for
the device. Rows of more than 8,192 entries do not fit; there PyTorch sorts, on the same device.

Bytes: every row once, and the output. Floor: 0.4 MB for 32 rows of 2,944, under a microsecond;
what it takes is the latency of some 35 reductions, 5 to 10 microseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, padded, tl, triton, use_triton

LONGEST = 8192  # a row in the registers of one program


def ranked(scores: Tensor) -> Tensor:
    """Indices by descending score along the last axis; the lower index first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def top_k(
    scores: Tensor, k: int | Tensor, first: Tensor | None = None, *, width: int | None = None
) -> Tensor:
    """The ``k`` best entries of each row, ascending.

    Parameters
    ----------
    scores : Tensor, (..., N)
        Compared in float32; NaN comes before all numbers.
    k : int or Tensor, int64, (...,)
        At most N; a tensor says it for each row, and stays on its device.
    first : Tensor, bool, (..., N), optional
        Entries that come before all others, whatever their score: a lexicographic order, which no
        large number added to a score gives in every dtype.
    width : int, optional
        Needed where ``k`` is a tensor: entries of the output, zeros behind the ``k`` of a row. At
        least the largest ``k``.

    Returns
    -------
    Tensor, int64, (..., k) or (..., width)
    """
    n = scores.shape[-1]
    if isinstance(k, Tensor):
        if width is None:
            raise VLMFastError("top_k: k is a tensor without a width; it takes both")
        if k.shape != scores.shape[:-1]:
            raise VLMFastError(
                f"top_k: k of shape {tuple(k.shape)} for scores {tuple(scores.shape)}; "
                "it takes one per row"
            )
    else:
        k = width = max(min(k, n), 0)
    each = k if isinstance(k, Tensor) else None
    if use_triton("top_k", scores, first, each) and 0 < n <= LONGEST:
        return _launch_top_k(scores, k, first, width)
    return top_k_ref(scores, k, first, width=width)


def top_k_ref(
    scores: Tensor, k: int | Tensor, first: Tensor | None = None, *, width: int | None = None
) -> Tensor:
    """`top_k` in plain PyTorch."""
    n = scores.shape[-1]
    order = ranked(scores.float())
    if first is not None:
        later = ~first.expand_as(scores).gather(-1, order)
        order = order.gather(-1, later.to(torch.uint8).argsort(dim=-1, stable=True))
    if not isinstance(k, Tensor):
        return order[..., :k].sort(dim=-1).values
    slots = torch.arange(n, device=scores.device)
    # What is not chosen sorts behind, as an index that no entry has.
    order = order.masked_fill(slots >= k[..., None], n).sort(dim=-1).values
    chosen = order.new_zeros(*order.shape[:-1], width)
    chosen[..., : min(n, width)] = order[..., :width].masked_fill(order[..., :width] == n, 0)
    return chosen


def mass_count(mass: Tensor, target: Tensor | float) -> Tensor:
    """Least number of entries whose sum reaches ``target``, largest first; int64, (...,).

    Never more than there are, and at least one. Masses are not negative. Sums are float32: where
    the target falls on one, the count may differ by one between implementations.
    """
    target = _target(mass, target)
    if use_triton("mass_count", mass, target) and 0 < mass.shape[-1] <= LONGEST:
        return _launch_mass_count(mass, target)
    return mass_count_ref(mass, target)


def mass_count_ref(mass: Tensor, target: Tensor | float) -> Tensor:
    """`mass_count` in plain PyTorch."""
    target = _target(mass, target)
    total = mass.float().sort(dim=-1, descending=True).values.cumsum(-1)
    short = (total < target[..., None]).sum(-1)
    return (short + 1).clamp(max=mass.shape[-1])


def _target(mass: Tensor, target: Tensor | float) -> Tensor:
    if isinstance(target, Tensor):
        return target.float()
    # Filled where it is used: a copy from the host would wait.
    return torch.full((), target, device=mass.device, dtype=torch.float32)


# --- Triton --------------------------------------------------------------------------------------


@triton.jit
def _ordered(x):
    """Integers that compare as the numbers do; both zeros are one, NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit(do_not_specialize=("K", "N", "W"))
def _top_k(
    scores,  # float32 (rows, N)
    first,  # uint8 (rows, N), or None
    counts,  # int64 (rows,), or None: K for every row
    out,  # out: int64 (rows, W)
    K,
    N,
    W,
    BN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    here = n < N
    key = _ordered(tl.load(scores + row * N + n, mask=here, other=0.0))
    k = K
    if counts is not None:
        k = tl.maximum(tl.minimum(tl.load(counts + row), tl.minimum(N, W)), 0).to(tl.int32)
    pool = here
    need = k
    if first is not None:
        before = (tl.load(first + row * N + n, mask=here, other=0) != 0) & here
        ahead = tl.sum(before.to(tl.int32), 0)
        # Either not all who come first find a place, or all do and the others share what is left.
        pool = here & (before == (k <= ahead))
        need = tl.where(k <= ahead, k, k - ahead)
    # Greatest threshold that at least `need` of the pool reach.
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        reached = tl.sum((pool & (key >= middle.to(tl.int32))).to(tl.int32), 0)
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached >= need, high, middle)
    threshold = low.to(tl.int32)
    above = pool & (key > threshold)
    tie = pool & (key == threshold)
    left = need - tl.sum(above.to(tl.int32), 0)
    chosen = above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= left))
    if first is not None:
        chosen = tl.where(k > ahead, chosen | before, chosen)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + row * W + place, n.to(tl.int64), mask=chosen)
    if counts is not None:
        for w0 in range(0, W, BN):
            w = w0 + n
            tl.store(out + row * W + w, tl.zeros((BN,), tl.int64), mask=(w >= k) & (w < W))


@triton.jit(do_not_specialize=("N",))
def _mass_count(
    mass,  # float32 (rows, N)
    target,  # float32 (rows,)
    out,  # out: int64 (rows,)
    N,
    BN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    here = n < N
    x = tl.load(mass + row * N + n, mask=here, other=0.0)
    key = _ordered(x)
    aim = tl.load(target + row)
    # Greatest threshold whose entries reach the aim; not negative, as the masses are.
    low = tl.full((), 0, tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(31):
        middle = (low + high) >> 1
        total = tl.sum(tl.where(key >= middle.to(tl.int32), x, 0.0), 0)
        low = tl.where(total >= aim, middle, low)
        high = tl.where(total >= aim, high, middle)
    threshold = low.to(tl.int32)
    above = here & (key > threshold)
    have = tl.sum(tl.where(above, x, 0.0), 0)
    value = threshold.to(tl.float32, bitcast=True)
    # Entries at the threshold that are still needed; as many as there are where value is 0.
    ties = tl.sum((here & (key == threshold)).to(tl.int32), 0)
    missing = tl.ceil((aim - have) / tl.where(value > 0.0, value, 1.0))
    missing = tl.minimum(tl.maximum(missing, 0.0), ties.to(tl.float32)).to(tl.int32)
    missing = tl.where(value > 0.0, missing, tl.where(aim > have, ties, 0))
    count = tl.sum(above.to(tl.int32), 0) + missing
    tl.store(out + row, tl.minimum(tl.maximum(count, 1), N).to(tl.int64))


def _sizes(n: int) -> dict[str, int]:
    block = padded(n)
    return {"BN": block, "num_warps": 8 if block > 2048 else 4}


def _launch_top_k(scores: Tensor, k: int | Tensor, first: Tensor | None, width: int) -> Tensor:
    n = scores.shape[-1]
    flat = scores.float().reshape(-1, n).contiguous()
    if first is not None:
        first = first.bool().expand_as(scores).reshape(-1, n).contiguous().view(torch.uint8)
    out = torch.empty(len(flat), width, device=scores.device, dtype=torch.int64)
    if out.numel():
        counts = k.reshape(-1).long().contiguous() if isinstance(k, Tensor) else None
        most = 0 if counts is not None else k
        _top_k[(len(flat),)](flat, first, counts, out, most, n, width, **_sizes(n))
    return out.view(*scores.shape[:-1], width)


def _launch_mass_count(mass: Tensor, target: Tensor) -> Tensor:
    n = mass.shape[-1]
    flat = mass.float().reshape(-1, n).contiguous()
    out = torch.empty(len(flat), device=mass.device, dtype=torch.int64)
    if len(flat):
        each = target.expand(mass.shape[:-1]).reshape(-1).contiguous()
        _mass_count[(len(flat),)](flat, each, out, n, **_sizes(n))
    return out.view(mass.shape[:-1])


_TYPES = {
    **dict.fromkeys(("scores", "mass", "target"), "*fp32"),
    **dict.fromkeys(("counts", "out"), "*i64"),
    **dict.fromkeys(("K", "N", "W"), "i32"),
    "first": "*u8",
}


VARIANTS = [
    Variant(_top_k, _TYPES, {"BN": 4096, "first": None, "counts": None}, warps=8),
    *(
        Variant(kernel, _TYPES, {"BN": n}, warps=_sizes(n)["num_warps"])
        for kernel in (_top_k, _mass_count)
        for n in (2048, LONGEST)
    ),
]
