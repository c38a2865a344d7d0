"""Greedy choices with several programs: one launch per choice.

Each program leaves the best of its scores for the next launch, whose programs all reduce them to
the choice. Two buffers alternate, so that no program reads what another one writes, and the host
waits for none of them.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ._triton import tl, triton

_LARGE = 1e15  # the largest entry: the product of a weight and a sum of 1e8 of them is finite


def bounded(x: Tensor) -> Tensor:
    """Float32 without NaN or values that overflow in sums: a choice is then a row that exists."""
    return x.float().nan_to_num(0.0).clamp(-_LARGE, _LARGE)


@triton.jit
@no_type_check
def previous_best(best_score, best_index, step, BLOCK_T: tl.constexpr):
    """Score and row of the choice of this ``step``: the best that any program left, the first of
    equals."""
    b, num_tiles = tl.program_id(1), tl.num_programs(0)
    tile = tl.arange(0, BLOCK_T)
    offset = (step % 2 * tl.num_programs(1) + b) * num_tiles
    b_score = tl.load(best_score + offset + tile, mask=tile < num_tiles, other=float("-inf"))
    score, at = tl.max(b_score, 0, return_indices=True)
    return score, tl.load(best_index + offset + at)


@triton.jit
@no_type_check
def store_best(score, n0, best_score, best_index, step):
    """Leave the best of this program's scores, those of the rows from ``n0``, for the next step."""
    best, at = tl.max(score, 0, return_indices=True)
    offset = ((step + 1) % 2 * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
    tl.store(best_score + offset + tl.program_id(0), best)
    tl.store(best_index + offset + tl.program_id(0), n0 + at)


def first_best(score: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Best scores and rows as the programs of an earlier step would have left them.

    The first of the two buffers contains the largest of ``score`` (B, N) as its first tile's.

    Returns
    -------
    best_score : Tensor, float32, (2, B, tiles)
    best_index : Tensor, int32, (2, B, tiles)
    """
    size = (2, len(score), tiles)
    best_score = torch.full(size, -torch.inf, dtype=torch.float32, device=score.device)
    best_index = torch.zeros(size, dtype=torch.int32, device=score.device)
    best_score[0, :, 0] = score.amax(-1)
    best_index[0, :, :1] = lowest_argmax(score)
    return best_score, best_index


def lowest_argmax(score: Tensor) -> Tensor:
    """Index of the maximum, the first of equals: (..., N) to (..., 1)."""
    index = torch.arange(score.shape[-1], device=score.device)
    best = score == score.amax(-1, keepdim=True)
    return torch.where(best, index, score.shape[-1]).amin(-1, keepdim=True)
