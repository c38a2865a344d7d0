"""Choosing tokens that cover all: every row is as well covered as by the best chosen column."""

from __future__ import annotations

import torch
from torch import Tensor


def cover(
    worth: Tensor, k: int, bonus: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Columns that cover the rows, chosen one after another (greedy, submodular).

    With ``f(S)`` the sum over rows of the largest entry among the columns of S, the next is::

        argmax over j of  (f(S + j) - f(S)) scale_j + bonus_j

    Parameters
    ----------
    worth : Tensor, (R, N)
        Not negative: how well column j covers row i.
    k : int
    bonus, scale : Tensor, (N,), optional
        0 and 1 by default.

    Returns
    -------
    Tensor, int64, (k,)
        The lower index wins a tie.
    """
    worth = worth.float().T.contiguous()
    covered = worth.new_zeros(worth.shape[1])
    barred = worth.new_zeros(len(worth))
    chosen = []
    index = torch.arange(len(worth), device=worth.device)
    for _ in range(k):
        gain = (worth - covered).clamp(min=0).sum(1)
        gain = gain if scale is None else gain * scale
        gain = (gain if bonus is None else gain + bonus) + barred
        best = torch.where(gain == gain.max(), index, len(worth)).min()[None]
        chosen.append(best)
        covered = torch.maximum(covered, worth.index_select(0, best)[0])
        barred = barred.index_fill(0, best, -torch.inf)
    return torch.cat(chosen) if chosen else index[:0]
