"""Counting and choosing rows: arithmetic shared by several methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def count(share: float, total: int) -> int:
    """``share * total`` rounded to a whole number (half to even), at least one."""
    return max(1, round(share * total))


def best(scores: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Mark the ``counts[i]`` largest entries of row ``i``; the lower index wins a tie.

    ``topk`` does not define ties, so its selection depends on the device. A stable sort does.

    Parameters
    ----------
    scores : Tensor, (R, N)
    counts : R numbers

    Returns
    -------
    Tensor, bool, (R, N)
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    slots = torch.arange(scores.shape[-1], device=scores.device)
    if not isinstance(counts, Tensor) and len(set(counts)) == 1:
        wanted = (slots < counts[0]).expand_as(scores)
    else:
        wanted = slots < torch.as_tensor(counts, device=scores.device)[:, None]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, wanted)


def top(scores: Tensor, among: Tensor, k: int) -> Tensor:
    """Mark the ``k`` largest of the ``scores`` where ``among`` is true, or all of them if fewer.

    Parameters
    ----------
    scores : Tensor, (N,)
    among : Tensor, bool, (N,)

    Returns
    -------
    Tensor, bool, (N,)
    """
    limit = among.sum().clamp(max=k)
    return best(scores.masked_fill(~among, -torch.inf)[None], limit[None])[0]


def most_alike(rows: Tensor, targets: Tensor) -> Tensor:
    """The target most similar to each row, by cosine; the lower index wins a tie.

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
    """Add to every row the mean of the rows merged into it; other rows are unchanged.

    Parameters
    ----------
    features : Tensor, (N, D)
    home : Tensor, int64, (N,)
        The row that each row merges into: its own index if it is kept, -1 if it is dropped.

    Returns
    -------
    Tensor, (N, D)
        Only kept rows are meaningful.
    """
    moved = ((home >= 0) & (home != torch.arange(len(home), device=home.device))).nonzero()[:, 0]
    target, group = home[moved].unique(return_inverse=True)
    # A product, since the order of a scattered sum is not deterministic on a GPU.
    member = (group == torch.arange(len(target), device=home.device)[:, None]).float()
    mean = member @ features[moved].float() / member.sum(1, keepdim=True)
    return features.index_copy(0, target, (features[target] + mean).to(features.dtype))


def apportion(total: int, weights: Sequence[float], caps: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` without exceeding ``caps``.

    Largest remainder; the lower index wins a tie. What exceeds a cap is split among the other parts
    in the same proportion. The parts sum to ``min(total, sum(caps))``. Weights that sum to zero
    count as equal.
    """
    parts = [0] * len(caps)
    left = min(total, sum(caps))
    free = [i for i, cap in enumerate(caps) if cap > 0]
    while True:
        total_weight = sum(weights[i] for i in free)
        ideal = {
            i: left * (weights[i] / total_weight if total_weight > 0 else 1 / len(free))
            for i in free
        }
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
