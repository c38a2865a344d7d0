"""``diversity``: selection of diverse rows, and of cluster centres.

All functions take a pairwise matrix of the N rows of a view, such as `cosine`::

    max_min        first the row whose nearest neighbour is farthest, then repeatedly the row whose
                   nearest chosen row is farthest (distance: 1 - similarity)
    dpp            repeatedly the row that maximizes the determinant of the chosen part of L
    density_peaks  rows with many close neighbours and far from any denser row

Ties go to the lower index. `dpp` keeps the Cholesky factor of the chosen part (Chen et al., NeurIPS
2018): with ``c_j`` the column of row j so far, and the residual ``d_j = L_jj - |c_j|^2``::

    j = argmax d      e = (L_j - C^T c_j) / sqrt(d_j)      append e to C      d = d - e^2

`density_peaks` (Rodriguez and Laio, Science 2014; densities over nearest neighbours)::

    log rho_i = - mean of squared distances to the nearest rows, including itself
    delta_i = distance to the nearest denser row; for the densest, to the farthest row
    centres: largest rho delta            labels: nearest centre, the first of equals

Shapes: matrices (B, N, N), any N that fits into memory. Grids: every choice of `max_min` and `dpp`
depends on the previous one. Up to `MAX_MIN_ROWS` or `DPP_ROWS` rows, one program per matrix keeps
all scores in registers and makes all choices in one launch. With more rows there is one launch per
choice, with one program per 128 rows: each reduces the best rows of all programs of the previous
launch to the choice, updates its own scores and leaves its own best row for the next launch. The
host waits for none of them. `density_peaks` takes densities from `torch.topk`, and uses one program
per row for the distances, which reads the row in tiles, and one per 128 rows for labels.

Bytes: `max_min` k rows of the matrix, `dpp` these and k^2 / 2 rows of N of its factor,
`density_peaks` the matrix twice, and once more for each further pass of `torch.topk`.
Floor: latency, about 2 us per choice of `max_min` and 3 of `dpp` while its factor stays in the L2
cache; the matrix itself is 2 N^2 D operations, 2.7e9 at 576 rows of 4,096. The limit of `dpp` is
lower because one program reads the whole factor: 2.1 GB for 600 of 2,928 rows.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._choices import bounded, first_best, lowest_argmax, previous_best, store_best
from ._triton import Variant, padded, tl, triton, use_triton
from .select import ranked

# Rows of a matrix up to which one program makes all choices; beyond, one launch per choice.
MAX_MIN_ROWS = 8192  # all scores fit into its registers
DPP_ROWS = 2048  # it reads the factor at the rate of one multiprocessor
ROW_TILE = 4096  # entries of a row that a program of `density_peaks` reads at once
_TILE = 128  # rows of one program if there are several for a matrix
_MIN_GAIN = 1e-6  # relative to the largest diagonal entry; smaller residuals count as zero


def cosine(features: Tensor) -> Tensor:
    """Pairwise cosine similarities of rows (..., N, D): float32, (..., N, N).

    Features that overflowed are similar to nothing: NaN would give indices outside of the matrix.
    """
    units = torch.nn.functional.normalize(features.float(), dim=-1).nan_to_num(0.0)
    return units @ units.transpose(-1, -2)


def euclidean(features: Tensor) -> Tensor:
    """Pairwise distances of rows (..., N, D), divided by the root of D: float32, (..., N, N).

    NaN counts as 0, and features that overflowed are bounded, for the reason of `cosine`.
    """
    rows = bounded(features)
    exact = "donot_use_mm_for_euclid_dist"  # equal rows are at distance 0
    return torch.cdist(rows, rows, compute_mode=exact) * rows.shape[-1] ** -0.5


def max_min(similarity: Tensor, k: int) -> Tensor:
    """Select rows that are far from each other, in the order of selection.

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
    distance = 1 - similarity
    score, chosen = _nearest_distance(similarity), []
    nearest = torch.full_like(score, torch.inf)
    for _ in range(k):
        best = lowest_argmax(score)
        chosen.append(best)
        nearest = torch.minimum(nearest, _row(distance, best)).scatter(-1, best, -torch.inf)
        score = nearest
    return torch.cat(chosen, -1)


def dpp(kernel: Tensor, k: int) -> Tensor:
    """Select rows whose part of a positive semi-definite matrix has a large determinant, in order.

    Parameters
    ----------
    kernel : Tensor, float32, (..., N, N)
    k : int
        Once no row increases the determinant, the lowest indices follow.

    Returns
    -------
    Tensor, int64, (..., k)
    """
    _check("dpp", kernel, k)
    return _launch_dpp(kernel, k) if use_triton("dpp", kernel) else dpp_ref(kernel, k)


def dpp_ref(kernel: Tensor, k: int) -> Tensor:
    """`dpp` in plain PyTorch."""
    residual = kernel.diagonal(dim1=-2, dim2=-1).clone()
    threshold = _MIN_GAIN * residual.amax(-1, keepdim=True)
    is_taken = torch.zeros_like(residual, dtype=torch.bool)
    factor = kernel.new_zeros(*residual.shape[:-1], k, residual.shape[-1])
    chosen = []
    for i in range(k):
        gain = residual.masked_fill(residual <= threshold, 0.0).masked_fill(is_taken, -1.0)
        best = lowest_argmax(gain)
        best_gain = gain.gather(-1, best)
        chosen_rows = factor[..., :i, :]
        column = best[..., None].expand(*chosen_rows.shape[:-1], 1)
        update = _row(kernel, best) - (chosen_rows.gather(-1, column) * chosen_rows).sum(-2)
        update = torch.where(best_gain > 0, update / best_gain.clamp(min=1e-30).sqrt(), 0.0)
        factor[..., i, :] = update
        residual = residual - update.square()
        is_taken = is_taken.scatter(-1, best, True)
        chosen.append(best)
    return torch.cat(chosen, -1)


def density_peaks(distance: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Cluster centres, and the cluster of each row.

    Parameters
    ----------
    distance : Tensor, float32, (..., N, N)
        Pairwise, not negative.
    k : int
        Number of clusters.
    neighbours : int
        Nearest rows, including itself, that define the density of a row.

    Returns
    -------
    centres : Tensor, int64, (..., k)
        Best first.
    label : Tensor, int64, (..., N)
        Index of each row's cluster.
    """
    _check("density_peaks", distance, k)
    if not 0 < neighbours <= distance.shape[-1]:
        raise VLMFastError(
            f"density_peaks: {neighbours} neighbours among {distance.shape[-1]} rows; it takes 1 "
            f"to {distance.shape[-1]}"
        )
    if use_triton("density_peaks", distance):
        return _launch_peaks(distance, k, neighbours)
    return density_peaks_ref(distance, k, neighbours)


def density_peaks_ref(distance: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """`density_peaks` in plain PyTorch."""
    distance = distance.clamp(min=0)
    n = distance.shape[-1]
    nearest = distance.sort(-1).values[..., :neighbours]
    density = -nearest.square().sum(-1) / neighbours
    index = torch.arange(n, device=distance.device)
    own, other = density[..., :, None], density[..., None, :]
    denser = (other > own) | ((other == own) & (index < index[:, None]))
    delta = distance.masked_fill(~denser, torch.inf).amin(-1)
    delta = torch.where(denser.any(-1), delta, distance.amax(-1))
    centres = ranked(density + delta.clamp(min=1e-30).log())[..., :k]
    rows = distance.gather(-2, centres[..., None].expand(*centres.shape, n))
    number = torch.arange(k, device=distance.device)
    label = torch.where(rows == rows.amin(-2, keepdim=True), number[:, None], k).amin(-2)
    return centres, label.scatter(-1, centres, number.expand_as(centres))


def _check(name: str, matrix: Tensor, k: int) -> None:
    n = matrix.shape[-1]
    if matrix.dim() < 2 or matrix.shape[-2] != n or matrix.dtype != torch.float32:
        raise VLMFastError(
            f"{name}: matrix {tuple(matrix.shape)} in {matrix.dtype}; it takes (..., N, N) in "
            "float32"
        )
    if not 0 < k <= n:
        raise VLMFastError(f"{name}: {k} of {n} rows; it takes 1 to {n}")


def _nearest_distance(similarity: Tensor) -> Tensor:
    """Distance of each row to its nearest neighbour; 0 for a single row."""
    n = similarity.shape[-1]
    own = torch.eye(n, dtype=torch.bool, device=similarity.device)
    return 1 - similarity.masked_fill(own, -torch.inf if n > 1 else 1.0).amax(-1)


def _row(matrix: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` (..., 1) of matrices (..., N, N)."""
    wide = index[..., None].expand(*index.shape, matrix.shape[-1])
    return matrix.gather(-2, wide)[..., 0, :]


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("N", "K"))
@no_type_check
def _max_min(
    similarity,  # (B, N, N)
    first_score,  # (B, N): scores of the first choice
    chosen,  # out: int64 (B, K)
    N,
    K,
    BLOCK_N: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    similarity += b * N * N
    score = tl.load(first_score + b * N + n, mask=n < N, other=-1e30)
    nearest = tl.where(n < N, 1e30, -1e30)
    for i in range(K):
        _, best = tl.max(score, 0, return_indices=True)
        tl.store(chosen + b * K + i, best.to(tl.int64))
        b_row = tl.load(similarity + best.to(tl.int64) * N + n, mask=n < N, other=0.0)
        nearest = tl.where(n == best, -1e30, tl.minimum(nearest, 1.0 - b_row))
        score = nearest


@triton.jit(do_not_specialize=("step", "N", "K"))
@no_type_check
def _max_min_step(
    similarity,  # (B, N, N)
    nearest,  # in and out: (B, N), distance to the nearest chosen row; -1e30 for chosen rows
    best_score,  # in and out: (2, B, tiles), of even and odd steps
    best_index,  # in and out: int32 (2, B, tiles)
    chosen,  # out: int64 (B, K)
    step,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n0, b = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    n = n0 + tl.arange(0, BLOCK_N)
    _, best = previous_best(best_score, best_index, step, BLOCK_T)
    tl.store(chosen + b * K + step, best.to(tl.int64), mask=n0 == 0)
    b_row = tl.load(similarity + (b * N + best) * N + n, mask=n < N, other=0.0)
    b_nearest = tl.load(nearest + b * N + n, mask=n < N, other=-1e30)
    b_nearest = tl.where(n == best, -1e30, tl.minimum(b_nearest, 1.0 - b_row))
    tl.store(nearest + b * N + n, b_nearest, mask=n < N)
    store_best(b_nearest, n0, best_score, best_index, step)


@triton.jit
@no_type_check
def _factor_row(kernel, factor, best, best_gain, i, n, N, BLOCK_P: tl.constexpr):
    """Entries ``n`` of row ``i`` of the factor, for the choice ``best``; stored as well."""
    update = tl.load(kernel + best.to(tl.int64) * N + n, mask=n < N, other=0.0)
    for row0 in range(0, i, BLOCK_P):
        row = row0 + tl.arange(0, BLOCK_P)
        offsets = row.to(tl.int64) * N
        b_weight = tl.load(factor + offsets + best, mask=row < i, other=0.0)
        b_factor = tl.load(
            factor + offsets[:, None] + n[None, :],
            mask=(row < i)[:, None] & (n < N)[None, :],
            other=0.0,
        )
        update -= tl.sum(b_factor * b_weight[:, None], 0)
    update = tl.where(best_gain > 0, update / tl.sqrt(tl.maximum(best_gain, 1e-30)), 0.0)
    tl.store(factor + i * N.to(tl.int64) + n, update, mask=n < N)
    return update


@triton.jit(do_not_specialize=("N", "K"))
@no_type_check
def _dpp(
    kernel,  # (B, N, N)
    factor,  # scratch: (B, K, N)
    chosen,  # out: int64 (B, K)
    min_gain,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    kernel += b * N * N
    factor += b * K * N
    residual = tl.load(kernel + n.to(tl.int64) * (N + 1), mask=n < N, other=-1e30)
    threshold = min_gain * tl.max(residual, 0)
    is_taken = n >= N
    for i in range(K):
        gain = tl.where(is_taken, -1.0, tl.where(residual > threshold, residual, 0.0))
        best_gain, best = tl.max(gain, 0, return_indices=True)
        tl.store(chosen + b * K + i, best.to(tl.int64))
        update = _factor_row(kernel, factor, best, best_gain, i, n, N, BLOCK_P)
        # Other threads of this program read it in the next iteration.
        tl.debug_barrier()
        residual -= update * update
        is_taken = is_taken | (n == best)


@triton.jit(do_not_specialize=("step", "N", "K"))
@no_type_check
def _dpp_step(
    kernel,  # (B, N, N)
    factor,  # scratch: (B, K, N)
    residual,  # in and out: (B, N), -inf for chosen rows
    threshold,  # (B,): smaller residuals count as zero
    best_score,  # in and out: (2, B, tiles), of even and odd steps
    best_index,  # in and out: int32 (2, B, tiles)
    chosen,  # out: int64 (B, K)
    step,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    n0, b = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    n = n0 + tl.arange(0, BLOCK_N)
    best_gain, best = previous_best(best_score, best_index, step, BLOCK_T)
    tl.store(chosen + b * K + step, best.to(tl.int64), mask=n0 == 0)
    kernel += b * N * N
    factor += b * K * N
    update = _factor_row(kernel, factor, best, best_gain, step, n, N, BLOCK_P)
    b_residual = tl.load(residual + b * N + n, mask=n < N, other=float("-inf"))
    b_residual = tl.where(n == best, float("-inf"), b_residual - update * update)
    tl.store(residual + b * N + n, b_residual, mask=n < N)
    gain = tl.where(b_residual > tl.load(threshold + b), b_residual, 0.0)
    gain = tl.where(b_residual == float("-inf"), -1.0, gain)
    store_best(gain, n0, best_score, best_index, step)


@triton.jit(do_not_specialize=("N",))
@no_type_check
def _peaks(
    distance,  # (B, N, N)
    density,  # (B, N), the logarithm
    score,  # out: (B, N)
    N,
    BLOCK_N: tl.constexpr,
):
    i, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own_density = tl.load(density + b * N + i)
    nearest = tl.full((BLOCK_N,), float("inf"), tl.float32)
    farthest = tl.zeros((BLOCK_N,), tl.float32)
    num_denser = tl.zeros((BLOCK_N,), tl.int32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        b_row = tl.load(distance + (b * N + i) * N + n, mask=n < N, other=0.0)
        b_row = tl.maximum(b_row, 0.0)
        b_density = tl.load(density + b * N + n, mask=n < N, other=float("-inf"))
        m_denser = (n < N) & ((b_density > own_density) | ((b_density == own_density) & (n < i)))
        nearest = tl.minimum(nearest, tl.where(m_denser, b_row, float("inf")))
        farthest = tl.maximum(farthest, b_row)
        num_denser += m_denser.to(tl.int32)
    delta = tl.where(tl.sum(num_denser, 0) > 0, tl.min(nearest, 0), tl.max(farthest, 0))
    tl.store(score + b * N + i, own_density + tl.log(tl.maximum(delta, 1e-30)))


@triton.jit(do_not_specialize=("N", "K"))
@no_type_check
def _assign(
    distance,  # (B, N, N)
    centres,  # int64 (B, K)
    label,  # out: int64 (B, N)
    N,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n, b = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1).to(tl.int64)
    best = tl.full((BLOCK_N,), 1e30, tl.float32)
    label_index = tl.zeros((BLOCK_N,), tl.int32)
    own_index = tl.full((BLOCK_N,), -1, tl.int32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        centre = tl.load(centres + b * K + k, mask=k < K, other=-1)
        b_distance = tl.load(
            distance + (b * N + centre)[:, None] * N + n[None, :],
            mask=(k < K)[:, None] & (n < N)[None, :],
            other=1e30,
        )
        block_min, block_index = tl.min(tl.maximum(b_distance, 0.0), 0, return_indices=True)
        label_index = tl.where(block_min < best, k0 + block_index, label_index)
        best = tl.minimum(best, block_min)
        own_match = tl.where(centre[:, None] == n[None, :], k[:, None], -1)
        own_index = tl.maximum(own_index, tl.max(own_match, 0))
    label_index = tl.where(own_index >= 0, own_index, label_index)
    tl.store(label + b * N + n, label_index.to(tl.int64), mask=n < N)


def _matrices(matrix: Tensor) -> Tensor:
    """The matrices as contiguous (B, N, N)."""
    n = matrix.shape[-1]
    return matrix.reshape(-1, n, n).contiguous()


def _warps(block: int) -> int:
    return min(max(block // 128, 1), 16)


def _tiles(n: int) -> dict[str, int]:
    """Block sizes of one program per `_TILE` rows, which reads the best rows of all."""
    return {"BLOCK_N": _TILE, "BLOCK_T": padded(-(-n // _TILE))}


def _launch_max_min(similarity: Tensor, k: int) -> Tensor:
    matrix = _matrices(similarity)
    b, n, _ = matrix.shape
    chosen = torch.empty(b, k, dtype=torch.int64, device=matrix.device)
    if b:
        first_score = _nearest_distance(matrix)
        if n <= MAX_MIN_ROWS:
            block = padded(n, 128)
            _max_min[(b,)](
                matrix,
                first_score,
                chosen,
                n,
                k,
                BLOCK_N=block,
                num_warps=_warps(block),
                num_stages=1,
            )
        else:
            _spread_max_min(matrix, first_score, chosen)
    return chosen.view(*similarity.shape[:-2], k)


def _spread_max_min(matrix: Tensor, first_score: Tensor, chosen: Tensor) -> None:
    """`max_min` with several programs per matrix."""
    (b, n, _), k = matrix.shape, chosen.shape[1]
    best = first_best(first_score, triton.cdiv(n, _TILE))
    nearest = torch.full_like(first_score, 1e30)
    for step in range(k):
        _max_min_step[(triton.cdiv(n, _TILE), b)](
            matrix, nearest, *best, chosen, step, n, k, **_tiles(n), num_warps=4
        )


def _launch_dpp(kernel: Tensor, k: int) -> Tensor:
    matrix = _matrices(kernel)
    b, n, _ = matrix.shape
    chosen = torch.empty(b, k, dtype=torch.int64, device=matrix.device)
    factor = torch.empty(b, k, n, dtype=torch.float32, device=matrix.device)
    if b and n <= DPP_ROWS:
        block = padded(n, 128)
        _dpp[(b,)](
            matrix,
            factor,
            chosen,
            _MIN_GAIN,
            n,
            k,
            BLOCK_N=block,
            BLOCK_P=_history(block),
            num_warps=_warps(block),
            num_stages=1,
        )
    elif b:
        _spread_dpp(matrix, factor, chosen)
    return chosen.view(*kernel.shape[:-2], k)


def _spread_dpp(matrix: Tensor, factor: Tensor, chosen: Tensor) -> None:
    """`dpp` with several programs per matrix."""
    b, k, n = factor.shape
    residual = matrix.diagonal(dim1=1, dim2=2).clone()
    threshold = _MIN_GAIN * residual.amax(-1)
    gain = residual.masked_fill(residual <= threshold[:, None], 0.0)
    best = first_best(gain, triton.cdiv(n, _TILE))
    for step in range(k):
        _dpp_step[(triton.cdiv(n, _TILE), b)](
            matrix,
            factor,
            residual,
            threshold,
            *best,
            chosen,
            step,
            n,
            k,
            **_tiles(n),
            BLOCK_P=_history(_TILE),
            num_warps=4,
            num_stages=1,
        )


def _history(block: int) -> int:
    """Rows of the factor that are loaded at once."""
    return min(max(8192 // block, 1), 16)


def _launch_peaks(distance: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    matrix = _matrices(distance)
    b, n, _ = matrix.shape
    # Sorted: rows with equal distances have equal sums, and the tie goes to the lower index.
    nearest = matrix.topk(neighbours, largest=False).values.clamp(min=0)
    density = -nearest.square().sum(-1) / neighbours
    score = torch.empty(b, n, dtype=torch.float32, device=matrix.device)
    label = torch.empty(b, n, dtype=torch.int64, device=matrix.device)
    if b:
        block = min(padded(n, 128), ROW_TILE)
        _peaks[(n, b)](matrix, density, score, n, BLOCK_N=block, num_warps=_warps(block))
        centres = ranked(score)[:, :k].contiguous()
        _assign[(triton.cdiv(n, 128), b)](
            matrix, centres, label, n, k, BLOCK_K=16, BLOCK_N=128, num_warps=4
        )
    else:
        centres = torch.empty(b, k, dtype=torch.int64, device=matrix.device)
    batch = distance.shape[:-2]
    return centres.view(*batch, k), label.view(*batch, n)


_TYPES = {
    **dict.fromkeys(("similarity", "first_score", "nearest", "best_score"), "*fp32"),
    **dict.fromkeys(("kernel", "factor", "residual", "threshold"), "*fp32"),
    **dict.fromkeys(("distance", "density", "score"), "*fp32"),
    **dict.fromkeys(("chosen", "centres", "label"), "*i64"),
    "best_index": "*i32",
    "min_gain": "fp32",
    **dict.fromkeys(("step", "N", "K"), "i32"),
}


def _row_variants(rows: int) -> list[Variant]:
    """Kernels of which one program reads whole rows."""
    block = padded(rows, 128)
    warps, shape = _warps(block), {"BLOCK_N": block}
    found = [Variant(_max_min, _TYPES, shape, warps, 1)]
    if rows <= DPP_ROWS:
        found.append(Variant(_dpp, _TYPES, {**shape, "BLOCK_P": _history(block)}, warps, 1))
    if block <= ROW_TILE:
        found.append(Variant(_peaks, _TYPES, shape, warps))
    return found


def _step_variants(rows: int) -> list[Variant]:
    shape = _tiles(rows)
    dpp = Variant(_dpp_step, _TYPES, {**shape, "BLOCK_P": _history(_TILE)}, 4, 1)
    return [Variant(_max_min_step, _TYPES, shape), dpp]


VARIANTS = [
    *(v for rows in (100, 576, DPP_ROWS, 2928, MAX_MIN_ROWS) for v in _row_variants(rows)),
    *(
        v
        for rows in (DPP_ROWS + 1, 4 * MAX_MIN_ROWS, 20 * MAX_MIN_ROWS)
        for v in _step_variants(rows)
    ),
    Variant(_assign, _TYPES, {"BLOCK_K": 16, "BLOCK_N": 128}),
]
