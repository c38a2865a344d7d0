"""Greedy coverage: choose tokens so that every row is covered by its best chosen column."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_AT_ONCE = 64  # gains that are recomputed together


def cover(
    worth: Tensor, k: int, bonus: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Choose columns that cover the rows, one after another (greedy, submodular).

    With ``f(S)`` the sum over rows of the largest entry among the columns of S, the next is::

        argmax over j of  (f(S + j) - f(S)) scale_j + bonus_j

    Parameters
    ----------
    worth : Tensor, (R, N)
        How well column j covers row i; not negative.
    k : int
    bonus, scale : Tensor, (N,), optional
        0 and 1 by default. ``scale`` must not be negative.

    Returns
    -------
    Tensor, int64, (k,)
        The lower index wins a tie.
    """
    worth = worth.float().T.contiguous()

    def gains(covered: Tensor, columns: Tensor | slice = slice(None)) -> Tensor:
        gain = (worth[columns] - covered).clamp(min=0).sum(1)
        gain = gain if scale is None else gain * scale[columns]
        return gain if bonus is None else gain + bonus[columns]

    # On a GPU, computing all gains each time is cheap and avoids synchronization with the host.
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
    """The same result: gains only decrease, so an earlier gain is an upper bound."""
    covered = worth.new_zeros(worth.shape[1])
    bound, fresh = gains(covered), torch.ones(len(worth), dtype=torch.bool)
    chosen: list[int] = []
    for _ in range(k):
        while not bool(fresh[bound == bound.max()].all()):
            least = bound.topk(min(_AT_ONCE, len(bound))).values[-1]
            stale = ((bound >= least) & ~fresh).nonzero()[:, 0]
            bound[stale], fresh[stale] = gains(covered, stale), True
        best = int((bound == bound.max()).nonzero()[0])
        chosen.append(best)
        covered = torch.maximum(covered, worth[best])
        bound[best] = -torch.inf
        fresh = bound == -torch.inf
    return torch.tensor(chosen, dtype=torch.int64, device=worth.device)
