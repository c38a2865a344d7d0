"""``coverage``: greedy choice of columns that cover the rows of a matrix.

With ``f(S)`` the sum over rows of the largest entry among the columns of S (0 without columns), the
next column is::

    argmax over j of  (f(S + j) - f(S)) scale_j + bonus_j                  f(S + j) - f(S): its gain

The gain of a column never increases (f is submodular; Nemhauser et al., Mathematical Programming
1978), so that an earlier gain is an upper bound. On a CPU the reference evaluates few gains for
each choice; on a GPU, where that would wait for the host, all.

Shapes: one matrix (R, N), any size that fits into memory. Grid: one launch per choice, with one
program per `BLOCK_N` columns. Each reduces the best columns of all programs of the previous launch
to the choice, adds its cover to that of the rows, evaluates its own gains, and leaves its own best
column for the next launch. The first program writes the cover of the rows into the other half of a
double buffer, so that no program reads what another one writes.

Bytes: the matrix once per choice, from the L2 cache if it fits. Floor: one launch per choice, about
2 us; 1,464 x 1,464 entries are 8.6 MB, another 2 us. PyTorch takes twelve launches.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import no_type_check

import numpy as np
import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._blocks import TABLE, architecture, blocks
from ._choices import bounded, first_best, lowest_argmax, previous_best, store_best
from ._triton import Variant, padded, tl, triton, use_triton


def cover(
    worth: Tensor, k: int, bonus: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Choose columns that cover the rows, one after another.

    Parameters
    ----------
    worth : Tensor, (R, N)
        How well column j covers row i; not negative.
    k : int
        At most N.
    bonus, scale : Tensor, (N,), optional
        0 and 1 by default. ``scale`` must not be negative.

    Returns
    -------
    Tensor, int64, (k,)
        In the order of choice. The lower index wins a tie.

    Raises
    ------
    VLMFastError
        If ``worth`` is no matrix, or does not have k columns.

    Notes
    -----
    NaN counts as 0, and larger numbers as 1e15: features that overflowed give some k columns, and
    no index outside of the matrix.
    """
    if worth.dim() != 2:
        raise VLMFastError(f"cover: worth {tuple(worth.shape)}; it takes (R, N)")
    if not 0 <= k <= worth.shape[1]:
        raise VLMFastError(f"cover: k={k} of {worth.shape[1]} columns; it takes 0 to all of them")
    run = _launch if use_triton("cover", worth, bonus, scale) else cover_ref
    return run(worth, k, bonus, scale)


def cover_ref(
    worth: Tensor, k: int, bonus: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`cover` in plain PyTorch."""
    columns = bounded(worth.T).contiguous()
    weights = (None if of is None else bounded(of) for of in (bonus, scale))
    return (_lazily if worth.device.type == "cpu" else _all)(columns, k, *weights)


def _gains(columns: Tensor, covered: Tensor, bonus: Tensor | None, scale: Tensor | None) -> Tensor:
    """Weighted gains (N,) of ``columns`` (N, R) over what is ``covered`` (R,)."""
    gain = (columns - covered).clamp(min=0).sum(1)
    gain = gain if scale is None else gain * scale
    return gain if bonus is None else gain + bonus


def _all(columns: Tensor, k: int, bonus: Tensor | None, scale: Tensor | None) -> Tensor:
    covered = columns.new_zeros(columns.shape[1])
    barred = columns.new_zeros(len(columns))
    chosen = [torch.zeros(0, dtype=torch.int64, device=columns.device)]
    for _ in range(k):
        best = lowest_argmax(_gains(columns, covered, bonus, scale) + barred)
        chosen.append(best)
        covered = torch.maximum(covered, columns.index_select(0, best)[0])
        barred = barred.index_fill(0, best, -torch.inf)
    return torch.cat(chosen)


def _lazily(columns: Tensor, k: int, bonus: Tensor | None, scale: Tensor | None) -> Tensor:
    """The same columns, from few gains.

    In NumPy: one gain takes less time than PyTorch's threads take to start.
    """
    worth, covered = columns.detach().numpy(), np.zeros(columns.shape[1], np.float32)
    plus, times = (None if of is None else of.detach().numpy() for of in (bonus, scale))

    def gain(column: int) -> float:
        of = np.maximum(worth[column] - covered, 0).sum()
        of = of if times is None else of * times[column]
        return float(of if plus is None else of + plus[column])

    # The largest bound first, of equals the lowest index.
    queue = [(-gain(column), column) for column in range(len(worth))]
    heapify(queue)
    evaluated = [0] * len(queue)
    chosen: list[int] = []
    for step in range(k):
        while evaluated[best := queue[0][1]] != step:
            heapreplace(queue, (-gain(best), best))
            evaluated[best] = step
        heappop(queue)
        chosen.append(best)
        np.maximum(covered, worth[best], out=covered)
    return torch.tensor(chosen, dtype=torch.int64)


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("step", "N", "R"))
@no_type_check
def _cover_step(
    columns,  # (N, R)
    covered,  # in and out: (2, R), of even and odd steps
    barred,  # in and out: (N,), -inf for chosen columns
    bonus,  # (N,)
    scale,  # (N,)
    best_score,  # in and out: (2, 1, tiles), of even and odd steps
    best_index,  # in and out: int32 (2, 1, tiles)
    chosen,  # out: int64 (K,)
    step,
    N,
    R,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n0 = tl.program_id(0) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    _, best = previous_best(best_score, best_index, step, BLOCK_T)
    tl.store(chosen + step, best.to(tl.int64), mask=n0 == 0)
    before, after = covered + step % 2 * R, covered + (step + 1) % 2 * R
    gain = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        b_best = tl.load(columns + best.to(tl.int64) * R + r, mask=r < R, other=0.0)
        b_covered = tl.maximum(tl.load(before + r, mask=r < R, other=0.0), b_best)
        tl.store(after + r, b_covered, mask=(r < R) & (n0 == 0))
        b_columns = tl.load(
            columns + n.to(tl.int64)[:, None] * R + r[None, :],
            mask=(n < N)[:, None] & (r < R)[None, :],
            other=0.0,
        )
        gain += tl.maximum(b_columns - b_covered[None, :], 0.0)
    b_barred = tl.load(barred + n, mask=n < N, other=float("-inf"))
    b_barred = tl.where(n == best, float("-inf"), b_barred)
    tl.store(barred + n, b_barred, mask=n < N)
    b_scale = tl.load(scale + n, mask=n < N, other=0.0)
    b_bonus = tl.load(bonus + n, mask=n < N, other=0.0)
    store_best(tl.sum(gain, 1) * b_scale + b_bonus + b_barred, n0, best_score, best_index, step)


def _launch(worth: Tensor, k: int, bonus: Tensor | None, scale: Tensor | None) -> Tensor:
    columns = bounded(worth.T).contiguous()
    n, r = columns.shape
    chosen = torch.empty(k, dtype=torch.int64, device=columns.device)
    if not k:
        return chosen
    bonus = columns.new_zeros(n) if bonus is None else bounded(bonus)
    scale = columns.new_ones(n) if scale is None else bounded(scale)
    covered, barred = columns.new_zeros(2, r), columns.new_zeros(n)
    of = blocks("coverage", "step", architecture(columns.device))
    tiles = triton.cdiv(n, of.sizes["BLOCK_N"])
    best = first_best(_gains(columns, covered[0], bonus, scale)[None], tiles)
    options = of.resized(BLOCK_T=padded(tiles)).options()
    for step in range(k):
        _cover_step[(tiles, 1)](
            columns, covered, barred, bonus, scale, *best, chosen, step, n, r, **options
        )
    return chosen


_TYPES = {
    **dict.fromkeys(("columns", "covered", "barred", "bonus", "scale", "best_score"), "*fp32"),
    "best_index": "*i32",
    "chosen": "*i64",
    **dict.fromkeys(("step", "N", "R"), "i32"),
}


def variants(arch: int) -> list[Variant]:
    """What the launches compile on an architecture."""
    step = TABLE["coverage"]["step"].on(arch)
    width = step.sizes["BLOCK_N"]
    return [
        step.resized(BLOCK_T=padded(-(-n // width))).variant(_cover_step, _TYPES, {})
        for n in (100, 576, 1464, 2928, 20_000)
    ]
