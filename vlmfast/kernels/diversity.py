"""``diversity``: choosing rows that differ, and rows that others gather around.

Everything works on a matrix of what the N rows of a view are to each other, such as `cosine`::

    max_min        first the row whose nearest neighbour is farthest, then always the one whose
                   nearest chosen row is farthest (distance: 1 - similarity)
    dpp            always the row that makes the determinant of the chosen part of L largest
    density_peaks  rows with many close neighbours and far from any row that has more of them

Ties go to the lower index. `dpp` keeps the Cholesky factor of what is chosen (Chen et al., NeurIPS
2018): with ``c_j`` the column of row j so far, and ``d_j = L_jj - |c_j|^2`` what is left of it::

    j = argmax d      e = (L_j - C^T c_j) / sqrt(d_j)      append e to C      d = d - e^2

`density_peaks` (Rodriguez and Laio, Science 2014; densities over nearest neighbours)::

    log rho_i = - mean of squared distances to the nearest rows, itself among them
    delta_i = distance to the nearest denser row; of the densest, to the farthest row
    centres: largest rho delta            labels: nearest centre, of equals the first

Shapes: matrices (B, N, N). Grids: `max_min` and `dpp` one program per matrix, which holds all N in
registers, since every choice waits for the one before; `density_peaks` one program per row for
densities, again for distances, and one per 128 rows for labels.
Bytes: `max_min` k rows of the matrix, `dpp` these and k^2 / 2 rows of N of its own, `density_peaks`
the matrix twice. Floor: latency, some 2 us per choice of `max_min` and 3 of `dpp` while its factor
stays in the second-level cache; the matrix itself is 2 N^2 D operations, 2.7e9 at 576 rows of
4,096.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, padded, tl, triton, use_triton
from .select import ranked

_MOST = 8192  # rows that one program holds
_NOTHING = 1e-6  # of the largest entry of a diagonal: what is left of a row that adds nothing


def cosine(features: Tensor) -> Tensor:
    """Cosines of rows (..., N, D) with each other: float32, (..., N, N)."""
    units = torch.nn.functional.normalize(features.float(), dim=-1)
    return units @ units.transpose(-1, -2)


def max_min(similarity: Tensor, k: int) -> Tensor:
    """Rows far from each other, in the order in which they are chosen.

    Parameters
    ----------
    similarity : Tensor, float32, (..., N, N)
    k : int

    Returns
    -------
    Tensor, int64, (..., k)
    """
    _check("max_min", similarity, k)
    if use_triton("max_min", similarity):
        return _launch_max_min(similarity, k)
    return max_min_ref(similarity, k)


def max_min_ref(similarity: Tensor, k: int) -> Tensor:
    """`max_min` in plain PyTorch."""
    far = 1 - similarity
    score, chosen = _apart(similarity), []
    nearest = torch.full_like(score, torch.inf)
    for _ in range(k):
        best = _first(score)
        chosen.append(best)
        nearest = torch.minimum(nearest, _row(far, best)).scatter(-1, best, -torch.inf)
        score = nearest
    return torch.cat(chosen, -1)


def dpp(kernel: Tensor, k: int) -> Tensor:
    """Rows whose part of a positive semi-definite matrix has a large determinant, in order.

    Parameters
    ----------
    kernel : Tensor, float32, (..., N, N)
    k : int
        Once nothing adds to the determinant any more, the lowest indices follow.

    Returns
    -------
    Tensor, int64, (..., k)
    """
    _check("dpp", kernel, k)
    return _launch_dpp(kernel, k) if use_triton("dpp", kernel) else dpp_ref(kernel, k)


def dpp_ref(kernel: Tensor, k: int) -> Tensor:
    """`dpp` in plain PyTorch."""
    left = kernel.diagonal(dim1=-2, dim2=-1).clone()
    least = _NOTHING * left.amax(-1, keepdim=True)
    taken = torch.zeros_like(left, dtype=torch.bool)
    factor = kernel.new_zeros(*left.shape[:-1], k, left.shape[-1])
    chosen = []
    for i in range(k):
        worth = left.masked_fill(left <= least, 0.0).masked_fill(taken, -1.0)
        best = _first(worth)
        own = worth.gather(-1, best)
        before = factor[..., :i, :]
        at = best[..., None].expand(*before.shape[:-1], 1)
        update = _row(kernel, best) - (before.gather(-1, at) * before).sum(-2)
        update = torch.where(own > 0, update / own.clamp(min=1e-30).sqrt(), 0.0)
        factor[..., i, :] = update
        left = left - update.square()
        taken = taken.scatter(-1, best, True)
        chosen.append(best)
    return torch.cat(chosen, -1)


def density_peaks(distance: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Rows that others gather around, and whose each row is.

    Parameters
    ----------
    distance : Tensor, float32, (..., N, N)
        From each row to each, not negative.
    k : int
        Number of clusters.
    neighbours : int
        Nearest rows, itself among them, that the density of a row is taken from.

    Returns
    -------
    centres : Tensor, int64, (..., k)
        Best first.
    label : Tensor, int64, (..., N)
        Number of the cluster of each row.
    """
    _check("density_peaks", distance, k)
    if not 0 < neighbours <= distance.shape[-1]:
        raise VLMFastError(
            f"density_peaks: {neighbours} neighbours among {distance.shape[-1]} rows; it takes 1 "
            "to as many"
        )
    if use_triton("density_peaks", distance):
        return _launch_peaks(distance, k, neighbours)
    return density_peaks_ref(distance, k, neighbours)


def density_peaks_ref(distance: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """`density_peaks` in plain PyTorch."""
    distance = distance.clamp(min=0)
    n = distance.shape[-1]
    near = distance.sort(-1).values[..., :neighbours]
    density = -near.square().sum(-1) / neighbours
    index = torch.arange(n, device=distance.device)
    one, other = density[..., :, None], density[..., None, :]
    denser = (other > one) | ((other == one) & (index < index[:, None]))
    apart = distance.masked_fill(~denser, torch.inf).amin(-1)
    apart = torch.where(denser.any(-1), apart, distance.amax(-1))
    centres = ranked(density + apart.clamp(min=1e-30).log())[..., :k]
    rows = distance.gather(-2, centres[..., None].expand(*centres.shape, n))
    number = torch.arange(k, device=distance.device)
    nearest = torch.where(rows == rows.amin(-2, keepdim=True), number[:, None], k).amin(-2)
    return centres, nearest.scatter(-1, centres, number.expand_as(centres))


def _check(name: str, matrix: Tensor, k: int) -> None:
    n = matrix.shape[-1]
    if matrix.dim() < 2 or matrix.shape[-2] != n or matrix.dtype != torch.float32:
        raise VLMFastError(
            f"{name}: a matrix {tuple(matrix.shape)} in {matrix.dtype}; it takes (..., N, N) in "
            "float32"
        )
    if not 0 < k <= n:
        raise VLMFastError(f"{name}: {k} of {n} rows; it takes 1 to {n}")


def _apart(similarity: Tensor) -> Tensor:
    """Distance of each row to its nearest neighbour; of a row alone 0."""
    n = similarity.shape[-1]
    own = torch.eye(n, dtype=torch.bool, device=similarity.device)
    return 1 - similarity.masked_fill(own, -torch.inf if n > 1 else 1.0).amax(-1)


def _first(score: Tensor) -> Tensor:
    """Index of the best, the first of equals: (..., N) to (..., 1)."""
    index = torch.arange(score.shape[-1], device=score.device)
    best = score == score.amax(-1, keepdim=True)
    return torch.where(best, index, score.shape[-1]).amin(-1, keepdim=True)


def _row(matrix: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` (..., 1) of matrices (..., N, N)."""
    wide = index[..., None].expand(*index.shape, matrix.shape[-1])
    return matrix.gather(-2, wide)[..., 0, :]


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("N", "K"))
def _max_min(
    similarity,  # (B, N, N)
    apart,  # (B, N): what the first choice goes by
    chosen,  # out: int64 (B, K)
    N,
    K,
    BN: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    similarity += b * N * N
    score = tl.load(apart + b * N + n, mask=n < N, other=-1e30)
    nearest = tl.where(n < N, 1e30, -1e30)
    for i in range(K):
        _, best = tl.max(score, 0, return_indices=True)
        tl.store(chosen + b * K + i, best.to(tl.int64))
        row = tl.load(similarity + best.to(tl.int64) * N + n, mask=n < N, other=0.0)
        nearest = tl.where(n == best, -1e30, tl.minimum(nearest, 1.0 - row))
        score = nearest


@triton.jit(do_not_specialize=("N", "K"))
def _dpp(
    kernel,  # (B, N, N)
    factor,  # scratch: (B, K, N)
    chosen,  # out: int64 (B, K)
    nothing,
    N,
    K,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    kernel += b * N * N
    factor += b * K * N
    left = tl.load(kernel + n.to(tl.int64) * (N + 1), mask=n < N, other=-1e30)
    least = nothing * tl.max(left, 0)
    taken = n >= N
    for i in range(K):
        worth = tl.where(taken, -1.0, tl.where(left > least, left, 0.0))
        own, best = tl.max(worth, 0, return_indices=True)
        tl.store(chosen + b * K + i, best.to(tl.int64))
        update = tl.load(kernel + best.to(tl.int64) * N + n, mask=n < N, other=0.0)
        for p0 in range(0, i, BP):
            p = p0 + tl.arange(0, BP)
            at = p.to(tl.int64) * N
            weight = tl.load(factor + at + best, mask=p < i, other=0.0)
            rows = tl.load(
                factor + at[:, None] + n[None, :],
                mask=(p < i)[:, None] & (n < N)[None, :],
                other=0.0,
            )
            update -= tl.sum(rows * weight[:, None], 0)
        update = tl.where(own > 0, update / tl.sqrt(tl.maximum(own, 1e-30)), 0.0)
        tl.store(factor + i * N + n, update, mask=n < N)
        # Other threads of this program read it next time.
        tl.debug_barrier()
        left -= update * update
        taken = taken | (n == best)


@triton.jit(do_not_specialize=("neighbours", "N"))
def _density(
    distance,  # (B, N, N)
    density,  # out: (B, N), the logarithm
    neighbours,
    N,
    BN: tl.constexpr,
):
    i, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.load(distance + (b * N + i) * N + n, mask=n < N, other=float("inf"))
    row = tl.maximum(row, 0.0)
    # Numbers that are not negative stand in the order of their bits. The last of the neighbours is
    # the largest number that fewer than `neighbours` are below.
    bits = row.to(tl.int32, bitcast=True)
    last = tl.zeros((), tl.int32)
    for step in range(31):
        trial = last | (1 << (30 - step))
        below = tl.sum((bits < trial).to(tl.int32), 0)
        last = tl.where(below < neighbours, trial, last)
    inside = bits < last
    value = last.to(tl.float32, bitcast=True)
    total = tl.sum(tl.where(inside, row * row, 0.0), 0)
    total += (neighbours - tl.sum(inside.to(tl.int32), 0)) * value * value
    tl.store(density + b * N + i, -total / neighbours)


@triton.jit(do_not_specialize=("N",))
def _peaks(
    distance,  # (B, N, N)
    density,  # (B, N)
    score,  # out: (B, N)
    N,
    BN: tl.constexpr,
):
    i, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BN)
    row = tl.load(distance + (b * N + i) * N + n, mask=n < N, other=0.0)
    row = tl.maximum(row, 0.0)
    other = tl.load(density + b * N + n, mask=n < N, other=float("-inf"))
    own = tl.load(density + b * N + i)
    denser = (n < N) & ((other > own) | ((other == own) & (n < i)))
    apart = tl.min(tl.where(denser, row, 1e30), 0)
    apart = tl.where(tl.sum(denser.to(tl.int32), 0) > 0, apart, tl.max(row, 0))
    tl.store(score + b * N + i, own + tl.log(tl.maximum(apart, 1e-30)))


@triton.jit(do_not_specialize=("N", "K"))
def _assign(
    distance,  # (B, N, N)
    centres,  # int64 (B, K)
    label,  # out: int64 (B, N)
    N,
    K,
    BK: tl.constexpr,
    BN: tl.constexpr,
):
    n, b = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1).to(tl.int64)
    best = tl.full((BN,), 1e30, tl.float32)
    which = tl.zeros((BN,), tl.int32)
    mine = tl.full((BN,), -1, tl.int32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        centre = tl.load(centres + b * K + k, mask=k < K, other=-1)
        rows = tl.load(
            distance + (b * N + centre)[:, None] * N + n[None, :],
            mask=(k < K)[:, None] & (n < N)[None, :],
            other=1e30,
        )
        least, at = tl.min(tl.maximum(rows, 0.0), 0, return_indices=True)
        which = tl.where(least < best, k0 + at, which)
        best = tl.minimum(best, least)
        itself = tl.where(centre[:, None] == n[None, :], k[:, None], -1)
        mine = tl.maximum(mine, tl.max(itself, 0))
    which = tl.where(mine >= 0, mine, which)
    tl.store(label + b * N + n, which.to(tl.int64), mask=n < N)


def _matrices(name: str, matrix: Tensor) -> tuple[Tensor, int]:
    """As contiguous (B, N, N), and the block that holds a row."""
    n = matrix.shape[-1]
    if n > _MOST:
        raise VLMFastError(f"{name}: {n} rows; it takes up to {_MOST}")
    return matrix.reshape(-1, n, n).contiguous(), padded(n, 128)


def _warps(block: int) -> int:
    return min(max(block // 128, 1), 16)


def _launch_max_min(similarity: Tensor, k: int) -> Tensor:
    matrix, block = _matrices("max_min", similarity)
    b, n, _ = matrix.shape
    chosen = torch.empty(b, k, dtype=torch.int64, device=matrix.device)
    if b:
        apart = _apart(matrix)
        _max_min[(b,)](matrix, apart, chosen, n, k, BN=block, num_warps=_warps(block), num_stages=1)
    return chosen.view(*similarity.shape[:-2], k)


def _launch_dpp(kernel: Tensor, k: int) -> Tensor:
    matrix, block = _matrices("dpp", kernel)
    b, n, _ = matrix.shape
    chosen = torch.empty(b, k, dtype=torch.int64, device=matrix.device)
    factor = torch.empty(b, k, n, dtype=torch.float32, device=matrix.device)
    if b:
        _dpp[(b,)](
            matrix,
            factor,
            chosen,
            _NOTHING,
            n,
            k,
            BN=block,
            BP=_history(block),
            num_warps=_warps(block),
            num_stages=1,
        )
    return chosen.view(*kernel.shape[:-2], k)


def _history(block: int) -> int:
    """Rows of the factor that are read at a time."""
    return min(max(8192 // block, 1), 16)


def _launch_peaks(distance: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    matrix, block = _matrices("density_peaks", distance)
    b, n, _ = matrix.shape
    density, score = (
        torch.empty(b, n, dtype=torch.float32, device=matrix.device) for _ in range(2)
    )
    label = torch.empty(b, n, dtype=torch.int64, device=matrix.device)
    warps = _warps(block)
    if b:
        _density[(n, b)](matrix, density, neighbours, n, BN=block, num_warps=warps)
        _peaks[(n, b)](matrix, density, score, n, BN=block, num_warps=warps)
        centres = ranked(score)[:, :k].contiguous()
        _assign[(triton.cdiv(n, 128), b)](matrix, centres, label, n, k, BK=16, BN=128, num_warps=4)
    else:
        centres = torch.empty(b, k, dtype=torch.int64, device=matrix.device)
    batch = distance.shape[:-2]
    return centres.view(*batch, k), label.view(*batch, n)


_TYPES = {
    **dict.fromkeys(("similarity", "apart", "kernel", "factor"), "*fp32"),
    **dict.fromkeys(("distance", "density", "score"), "*fp32"),
    **dict.fromkeys(("chosen", "centres", "label"), "*i64"),
    "nothing": "fp32",
    **dict.fromkeys(("N", "K", "neighbours"), "i32"),
}


def _variants(rows: int) -> list[Variant]:
    block = padded(rows, 128)
    warps, shape = _warps(block), {"BN": block}
    return [
        Variant(_max_min, _TYPES, shape, warps, 1),
        Variant(_dpp, _TYPES, {**shape, "BP": _history(block)}, warps, 1),
        Variant(_density, _TYPES, shape, warps),
        Variant(_peaks, _TYPES, shape, warps),
    ]


VARIANTS = [
    *(v for rows in (100, 576, 2928, _MOST) for v in _variants(rows)),
    Variant(_assign, _TYPES, {"BK": 16, "BN": 128}),
]
