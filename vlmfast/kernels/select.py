"""``select``: which slots stay. Ties go to the lower index; what stays is in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor


def ranked(scores: Tensor) -> Tensor:
    """Indices by descending score along the last axis; the lower index first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def top_k(scores: Tensor, k: int, first: Tensor | None = None) -> Tensor:
    """The ``k`` best entries of each row, ascending.

    Parameters
    ----------
    scores : Tensor, (..., N)
    first : Tensor, bool, (..., N), optional
        Entries that come before all others, whatever their score: a lexicographic order, which no
        large number added to a score gives in every dtype.

    Returns
    -------
    Tensor, int64, (..., k)
    """
    order = ranked(scores.float())
    if first is not None:
        later = ~first.expand_as(scores).gather(-1, order)
        order = order.gather(-1, later.to(torch.uint8).argsort(dim=-1, stable=True))
    return order[..., :k].sort(dim=-1).values


def mass_count(mass: Tensor, target: Tensor | float) -> Tensor:
    """Least number of entries whose sum reaches ``target``, largest first; int64, (...,).

    Never more than there are, and at least one.
    """
    total = mass.float().sort(dim=-1, descending=True).values.cumsum(-1)
    target = torch.as_tensor(target, device=mass.device, dtype=torch.float32)
    short = (total < target[..., None]).sum(-1)
    return (short + 1).clamp(max=mass.shape[-1])
