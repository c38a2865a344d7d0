"""Counting and choosing rows: the arithmetic that several methods share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def count(share: float, total: int) -> int:
    """``share`` of ``total`` rows as a whole number (half to even), at least one."""
    return max(1, round(share * total))


def best(scores: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Mark the ``counts[i]`` largest entries of row ``i``; the lower index wins a tie.

    ``topk`` leaves ties open, which makes a selection depend on the device; a stable sort does not.

    Parameters
    ----------
    scores : Tensor, (R, N)
    counts : R numbers

    Returns
    -------
    Tensor, bool, (R, N)
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    counts = torch.as_tensor(counts, device=scores.device)
    wanted = torch.arange(scores.shape[-1], device=scores.device) < counts[:, None]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, wanted)


def top(scores: Tensor, among: Tensor, k: int) -> Tensor:
    """Mark the ``k`` largest of the ``scores`` that ``among`` marks, or all of these.

    Parameters
    ----------
    scores : Tensor, (N,)
    among : Tensor, bool, (N,)

    Returns
    -------
    Tensor, bool, (N,)
    """
    room = among.sum().clamp(max=k)
    return best(scores.masked_fill(~among, -torch.inf)[None], room[None])[0]


def most_alike(rows: Tensor, targets: Tensor) -> Tensor:
    """The target with the largest cosine of each row; the lower index wins a tie.

    Parameters
    ----------
    rows : Tensor, (N, D)
    targets : Tensor, (C, D)

    Returns
    -------
    Tensor, int64, (N,)
    """
    units, others = normalize(rows.float(), dim=-1), normalize(targets.float(), dim=-1)
    return (units @ others.T).argmax(1)


def plus_mean(features: Tensor, home: Tensor) -> Tensor:
    """Every row plus the mean of those that become part of it; alone, it is as it was.

    Parameters
    ----------
    features : Tensor, (N, D)
    home : Tensor, int64, (N,)
        The row that each row becomes part of: its own where it stays, -1 where it is dropped.

    Returns
    -------
    Tensor, (N, D)
        Of use are the rows that stay.
    """
    moved = ((home >= 0) & (home != torch.arange(len(home), device=home.device))).nonzero()[:, 0]
    target, group = home[moved].unique(return_inverse=True)
    # A product rather than a scattered sum, whose order a GPU leaves open.
    member = (group == torch.arange(len(target), device=home.device)[:, None]).float()
    mean = member @ features[moved].float() / member.sum(1, keepdim=True)
    return features.index_copy(0, target, (features[target] + mean).to(features.dtype))


def apportion(total: int, weights: Sequence[float], caps: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` without exceeding ``caps``.

    Largest remainder, the lower index wins a tie; what a full part cannot take goes to the others
    by the same proportion. The parts sum to ``min(total, sum(caps))``. Weights that sum to zero
    count as equal.
    """
    parts = [0] * len(caps)
    left = min(total, sum(caps))
    free = [i for i, cap in enumerate(caps) if cap > 0]
    while True:
        mass = sum(weights[i] for i in free)
        ideal = {i: left * (weights[i] / mass if mass > 0 else 1 / len(free)) for i in free}
        full = [i for i in free if ideal[i] >= caps[i]]
        if not full:
            break
        for i in full:
            parts[i] = caps[i]
            left -= caps[i]
        free = [i for i in free if i not in full]
    for i in free:
        parts[i] = int(ideal[i])
    short = left - sum(parts[i] for i in free)
    for i in sorted(free, key=lambda i: (parts[i] - ideal[i], i))[:short]:
        parts[i] += 1
    return parts
