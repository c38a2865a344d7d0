"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858): the likeliest paths of a drafter.

The drafter expands a frontier of k nodes at once. Each gives its k best children, and the k best of
these by cumulative score are the next frontier. The best N - 1 of all candidates form the tree.
D forward passes after the first give ``k + D k^2`` candidates, numbered as they appear.

Without noise the score of a node is the log-probability of its path under the drafter. Where the
target samples with noise that the drafter knows, children are ranked by log q plus that noise
(`Budget.rank`). The target's choice is then mostly the first child, whatever its probability, so
that the value no longer measures confidence. The score of a child is then how often the child of
that rank is accepted.

Equal scores are ordered by number. A child's score is never above its parent's, so that parents,
whose numbers are lower, are never left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vlmfast.core.tree import Tree

# How often the child of each rank is the target's choice where both share the noise: measured on
# random distributions of 2.9 nats whose drafter is 0.29 away (total variation). Halved for each
# rank after these.
RANKS = (0.66, 0.18, 0.075, 0.035)


def grow(
    root: int,
    logits: Tensor,
    step: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    rank: Callable[[Tensor, int], Tensor],
    *,
    top_k: int,
    depth: int,
    nodes: int,
    shared_noise: bool = False,
) -> Tree:
    """A tree below ``root``.

    Parameters
    ----------
    logits : Tensor, (1, V)
        The drafter's after ``root``; minus infinity for banned tokens.
    step : callable
        ``(tokens (F,), origin (F,), mask (F, n), level) -> logits (F, V)``: runs the next frontier
        through the drafter. Row j follows row ``origin[j]`` of the last frontier (at level 0, the
        root) and sees the frontier rows so far, n in all, that ``mask`` selects.
    rank : callable
        `Budget.rank`: ``(logits (F, V), depth) -> (F, V)``.
    top_k, depth, nodes : int
        k, D + 1 and N: children of a node, drafted tokens on a path, nodes including the root.
    shared_noise : bool
        Whether ``rank`` adds the target's noise.

    Returns
    -------
    Tree
        Smaller than ``nodes`` where there are fewer candidates.
    """
    if nodes <= 1 or depth < 1:
        return Tree((root,), (-1,))
    # At most N - 1 nodes of a level can be kept, and the children of the others score no better.
    k = min(top_k, nodes - 1, logits.shape[-1])
    chance = _chances(k, logits.device) if shared_noise else None
    score, tokens = _children(rank(logits, 1), k, chance)
    score, tokens = score[0], tokens[0]
    numbers = torch.arange(k, device=logits.device)  # of the frontier's rows among all candidates
    candidates = [(tokens, score, torch.full_like(numbers, -1))]
    origin, own = torch.zeros_like(numbers), torch.eye(k, dtype=torch.bool, device=logits.device)
    mask, first = own, k
    for level in range(depth - 1):
        value, ids = _children(rank(step(tokens, origin, mask, level), level + 2), k, chance)
        total, ids = (score[:, None] + value).flatten(), ids.flatten()
        candidates.append((ids, total, numbers.repeat_interleave(k)))
        if level == depth - 2:
            break
        best = _ordered(total)[:k]
        origin, tokens, score, numbers = best // k, ids[best], total[best], first + best
        mask = torch.cat([mask[origin], own], dim=1)
        first += k * k
    ids, score, parents = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    chosen = _ordered(score)[: nodes - 1].sort().values
    fields = (chosen, ids[chosen], parents[chosen], score[chosen] > -torch.inf)
    index, rows = {-1: 0}, ([root], [-1])
    for number, token, parent, drafted in torch.stack(fields, dim=1).tolist():  # the one transfer
        if drafted:
            index[number] = len(rows[0])
            rows[0].append(token)
            rows[1].append(index[parent])
    return Tree(tuple(rows[0]), tuple(rows[1]))


def _ordered(score: Tensor) -> Tensor:
    return score.sort(descending=True, stable=True).indices


def _chances(k: int, device: torch.device) -> Tensor:
    """Logarithm of how often the child of each rank is accepted, float32, (k,)."""
    halved = [RANKS[-1] * 0.5**rank for rank in range(1, k - len(RANKS) + 1)]
    return torch.tensor([*RANKS, *halved][:k]).log().to(device)


def _children(ranks: Tensor, k: int, chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores, at most 0, and tokens of the best children of each row of (F, V): (F, k) each."""
    ranks = ranks.masked_fill(ranks.isnan(), -torch.inf)  # a broken drafter drafts nothing
    # ``topk`` does not define which of equal values it takes: take the first ones.
    least = ranks.topk(k).values[:, -1:]
    above, equal = ranks > least, ranks == least
    taken = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    tokens = taken.to(torch.uint8).topk(k).indices.sort().values
    value, order = ranks.gather(1, tokens).sort(descending=True, stable=True)
    if chance is not None:
        value = chance.masked_fill(value == -torch.inf, -torch.inf)
    return value.clamp(max=0), tokens.gather(1, order)
