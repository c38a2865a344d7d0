"""Choosing tokens that cover all: every row is as well covered as by the best chosen column."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_AT_ONCE = 64  # gains that are looked at together


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
        0 and 1 by default. ``scale`` is not negative.

    Returns
    -------
    Tensor, int64, (k,)
        The lower index wins a tie.
    """
    worth = worth.float().T.contiguous()

    def gains(covered: Tensor, some: Tensor | slice = slice(None)) -> Tensor:
        gain = (worth[some] - covered).clamp(min=0).sum(1)
        gain = gain if scale is None else gain * scale[some]
        return gain if bonus is None else gain + bonus[some]

    # Looking at all gains each time costs a GPU little, and asks the host for nothing.
    return (_all if worth.is_cuda else _lazily)(worth, k, gains)


def _all(worth: Tensor, k: int, gains: Callable[..., Tensor]) -> Tensor:
    covered = worth.new_zeros(worth.shape[1])
    barred = worth.new_zeros(len(worth))
    index = torch.arange(len(worth), device=worth.device)
    chosen = [index[:0]]
    for _ in range(k):
        gain = gains(covered) + barred
        best = torch.where(gain == gain.max(), index, len(worth)).min()[None]
        chosen.append(best)
        covered = torch.maximum(covered, worth.index_select(0, best)[0])
        barred = barred.index_fill(0, best, -torch.inf)
    return torch.cat(chosen)


def _lazily(worth: Tensor, k: int, gains: Callable[..., Tensor]) -> Tensor:
    """The same: gains only fall, so one that was computed earlier is a bound."""
    covered = worth.new_zeros(worth.shape[1])
    bound, fresh = gains(covered), torch.ones(len(worth), dtype=torch.bool)
    chosen: list[int] = []
    for _ in range(k):
        while not bool(fresh[bound == bound.max()].all()):
            least = bound.topk(min(_AT_ONCE, len(bound))).values[-1]
            some = ((bound >= least) & ~fresh).nonzero()[:, 0]
            bound[some], fresh[some] = gains(covered, some), True
        best = int((bound == bound.max()).nonzero()[0])
        chosen.append(best)
        covered = torch.maximum(covered, worth[best])
        bound[best] = -torch.inf
        fresh = bound == -torch.inf
    return torch.tensor(chosen, dtype=torch.int64, device=worth.device)
