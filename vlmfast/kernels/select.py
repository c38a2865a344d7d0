"""``select``: top-k selection. Ties go to the lower index; indices are in ascending order.

Shapes: scores (..., N), one selection per row; out (..., k) indices or (...) counts.

One program per row on a GPU, which keeps the row in registers: float32 ordered as integers, the
threshold found by bisection over their 32 bits with one count (or sum) per step, ties at the
threshold and positions in the output by two cumulative sums. Nothing is sorted or synchronized.
Rows of more than `LONGEST` entries do not fit. On every device PyTorch sorts them, as the reference
does: stable, so that ties go to the lower index, and without synchronizing.

Bytes: every row once, and the output. Floor: 0.4 MB for 32 rows of 2,944, under a microsecond; in
practice the latency of about 35 reductions, 5 to 10 microseconds. Longer rows: up to three sorts of
scores, preference and indices, at the end of a prefill of more than `LONGEST` tokens.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, padded, tl, triton, use_triton

LONGEST = 8192  # row that fits into the registers of one program


def ranked(scores: Tensor) -> Tensor:
    """Indices by descending score along the last axis; the lower index first among equals.

    Both zeros are equal, and NaN of either sign precedes all numbers.
    """
    if scores.is_floating_point():  # on CUDA PyTorch sorts by bits, and the sign of NaN counts
        scores = (scores + 0.0).masked_fill(scores.isnan(), torch.nan)
    return scores.sort(dim=-1, descending=True, stable=True).indices


def top_k(
    scores: Tensor, k: int | Tensor, first: Tensor | None = None, *, width: int | None = None
) -> Tensor:
    """Indices of the ``k`` largest entries of each row, ascending.

    Parameters
    ----------
    scores : Tensor, (..., N)
        Compared in float32; NaN comes before all numbers. Rows of more than `LONGEST` entries are
        sorted by PyTorch, also on a GPU.
    k : int or Tensor, int64, (...,)
        At most N; a tensor has one value per row, and is not copied to the CPU.
    first : Tensor, bool, (..., N), optional
        Entries that precede all others, whatever their score: a lexicographic order, which adding
        a large number to their scores does not give in every dtype.
    width : int, optional
        Required if ``k`` is a tensor: entries of the output, zeros after the ``k`` of a row. At
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
    assert width is not None  # see `top_k`
    slots = torch.arange(n, device=scores.device)
    # Entries that are not chosen get an invalid index, which sorts last.
    order = order.masked_fill(slots >= k[..., None], n).sort(dim=-1).values
    chosen = order.new_zeros(*order.shape[:-1], width)
    chosen[..., : min(n, width)] = order[..., :width].masked_fill(order[..., :width] == n, 0)
    return chosen


def mass_count(attention_mass: Tensor, target: Tensor | float) -> Tensor:
    """Smallest number of largest entries whose sum reaches ``target``; int64, (...,).

    At least one and at most N. Masses are not negative. Sums are float32: if the target equals a
    sum, the count may differ by one between implementations. Rows of more than `LONGEST` entries
    are sorted by PyTorch, also on a GPU.
    """
    target = _target(attention_mass, target)
    if use_triton("mass_count", attention_mass, target) and 0 < attention_mass.shape[-1] <= LONGEST:
        return _launch_mass_count(attention_mass, target)
    return mass_count_ref(attention_mass, target)


def mass_count_ref(attention_mass: Tensor, target: Tensor | float) -> Tensor:
    """`mass_count` in plain PyTorch."""
    target = _target(attention_mass, target)
    total = attention_mass.float().sort(dim=-1, descending=True).values.cumsum(-1)
    short = (total < target[..., None]).sum(-1)
    return (short + 1).clamp(max=attention_mass.shape[-1])


def _target(attention_mass: Tensor, target: Tensor | float) -> Tensor:
    if isinstance(target, Tensor):
        return target.float()
    # Filled on the device: a copy from the host would synchronize.
    return torch.full((), target, device=attention_mass.device, dtype=torch.float32)


# --- Triton --------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _ordered(x):
    """Integers in the order of the floats; both zeros are equal, NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit(do_not_specialize=("K", "N", "W"))
@no_type_check
def _top_k(
    scores,  # float32 (rows, N)
    first,  # uint8 (rows, N), or None
    counts,  # int64 (rows,), or None: K for every row
    out,  # out: int64 (rows, W)
    K,
    N,
    W,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    m_n = n < N
    b_key = _ordered(tl.load(scores + row * N + n, mask=m_n, other=0.0))
    k = K
    if counts is not None:
        k = tl.maximum(tl.minimum(tl.load(counts + row), tl.minimum(N, W)), 0).to(tl.int32)
    m_pool = m_n
    need = k
    if first is not None:
        m_first = (tl.load(first + row * N + n, mask=m_n, other=0) != 0) & m_n
        num_first = tl.sum(m_first.to(tl.int32), 0)
        # Either select among the preferred entries alone, or take them all and select the rest.
        m_pool = m_n & (m_first == (k <= num_first))
        need = tl.where(k <= num_first, k, k - num_first)
    # Greatest threshold that at least `need` entries of the pool reach.
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(32):
        mid = (low + high) >> 1
        num_reached = tl.sum((m_pool & (b_key >= mid.to(tl.int32))).to(tl.int32), 0)
        low = tl.where(num_reached >= need, mid, low)
        high = tl.where(num_reached >= need, high, mid)
    threshold = low.to(tl.int32)
    m_above = m_pool & (b_key > threshold)
    m_tie = m_pool & (b_key == threshold)
    num_ties = need - tl.sum(m_above.to(tl.int32), 0)
    m_chosen = m_above | (m_tie & (tl.cumsum(m_tie.to(tl.int32), 0) <= num_ties))
    if first is not None:
        m_chosen = tl.where(k > num_first, m_chosen | m_first, m_chosen)
    position = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(out + row * W + position, n.to(tl.int64), mask=m_chosen)
    if counts is not None:
        for w0 in range(0, W, BLOCK_N):
            w = w0 + n
            tl.store(out + row * W + w, tl.zeros((BLOCK_N,), tl.int64), mask=(w >= k) & (w < W))


@triton.jit(do_not_specialize=("N",))
@no_type_check
def _mass_count(
    attention_mass,  # float32 (rows, N)
    target,  # float32 (rows,)
    out,  # out: int64 (rows,)
    N,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    m_n = n < N
    b_mass = tl.load(attention_mass + row * N + n, mask=m_n, other=0.0)
    b_key = _ordered(b_mass)
    goal = tl.load(target + row)
    # Greatest threshold at which the sum reaches the goal; not negative, like the masses.
    low = tl.full((), 0, tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(31):
        mid = (low + high) >> 1
        mass_reached = tl.sum(tl.where(b_key >= mid.to(tl.int32), b_mass, 0.0), 0)
        low = tl.where(mass_reached >= goal, mid, low)
        high = tl.where(mass_reached >= goal, high, mid)
    threshold = low.to(tl.int32)
    m_above = m_n & (b_key > threshold)
    mass_above = tl.sum(tl.where(m_above, b_mass, 0.0), 0)
    value = threshold.to(tl.float32, bitcast=True)
    # Entries at the threshold that are still needed; all of them if the value is 0.
    ties = tl.sum((m_n & (b_key == threshold)).to(tl.int32), 0)
    missing = tl.ceil((goal - mass_above) / tl.where(value > 0.0, value, 1.0))
    missing = tl.minimum(tl.maximum(missing, 0.0), ties.to(tl.float32)).to(tl.int32)
    missing = tl.where(value > 0.0, missing, tl.where(goal > mass_above, ties, 0))
    count = tl.sum(m_above.to(tl.int32), 0) + missing
    tl.store(out + row, tl.minimum(tl.maximum(count, 1), N).to(tl.int64))


def _sizes(n: int) -> dict[str, int]:
    block = padded(n)
    return {"BLOCK_N": block, "num_warps": min(max(block // 512, 4), 16)}


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


def _launch_mass_count(attention_mass: Tensor, target: Tensor) -> Tensor:
    n = attention_mass.shape[-1]
    flat = attention_mass.float().reshape(-1, n).contiguous()
    out = torch.empty(len(flat), device=attention_mass.device, dtype=torch.int64)
    if len(flat):
        each = target.expand(attention_mass.shape[:-1]).reshape(-1).contiguous()
        _mass_count[(len(flat),)](flat, each, out, n, **_sizes(n))
    return out.view(attention_mass.shape[:-1])


_TYPES = {
    **dict.fromkeys(("scores", "attention_mass", "target"), "*fp32"),
    **dict.fromkeys(("counts", "out"), "*i64"),
    **dict.fromkeys(("K", "N", "W"), "i32"),
    "first": "*u8",
}


VARIANTS = [
    Variant(_top_k, _TYPES, {"BLOCK_N": 4096, "first": None, "counts": None}, warps=8),
    *(
        Variant(kernel, _TYPES, {"BLOCK_N": n}, warps=_sizes(n)["num_warps"])
        for kernel in (_top_k, _mass_count)
        for n in (2048, 4096, LONGEST)
    ),
]
