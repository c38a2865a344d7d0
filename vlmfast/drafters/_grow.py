"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858): the best paths that a drafter knows of.

A frontier of k nodes goes through the drafter at once; each gives its k best children, and the k
best of these by cumulative score are the next frontier. Of all candidates the best N - 1 become the
tree. With D passes behind the first there are ``k + D k^2`` candidates, numbered as they appear.

Without noise the score of a node is the logarithm of the probability that the drafter gives to its
path. Where the target samples with noise that the drafter knows, children are ranked by log q plus
that noise (`Budget.rank`): the target's own choice is mostly the first of them, whatever its
probability, and says nothing of how sure it is. The score of a child is then how often the child of
that rank is the right one.

Equals are ordered by number. A child's score is never above its parent's, so that parents, whose
numbers are lower, are never left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vlmfast.core.tree import Tree

# How often the child of each rank is the target's choice where both share the noise: measured on
# random distributions of 2.9 nats whose drafter is 0.29 away (total variation). Halved from rank to
# rank behind these.
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
        The drafter's behind ``root``; minus infinity for what must not be drafted.
    step : callable
        ``(tokens (F,), origin (F,), mask (F, n), level) -> logits (F, V)``: the next frontier
        through the drafter. Row j follows row ``origin[j]`` of the last frontier (of the first, at
        level 0, the root) and sees those of all n frontier rows so far that ``mask`` says.
    rank : callable
        `Budget.rank`: ``(logits (F, V), depth) -> (F, V)``.
    top_k, depth, nodes : int
        k, D + 1 and N: children of a node, drafted tokens on a path, nodes with the root.
    shared_noise : bool
        Whether ``rank`` adds the target's noise.

    Returns
    -------
    Tree
        Smaller than ``nodes`` where there are not as many candidates.
    """
    if nodes <= 1 or depth < 1:
        return Tree((root,), (-1,))
    # Of a level no more than N - 1 nodes can be kept, and what follows the others is no better.
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
    ids, score, parents = (torch.cat(of) for of in zip(*candidates, strict=True))
    chosen = _ordered(score)[: nodes - 1].sort().values
    fields = (chosen, ids[chosen], parents[chosen], score[chosen] > -torch.inf)
    place, rows = {-1: 0}, ([root], [-1])
    for number, token, parent, drafted in torch.stack(fields, dim=1).tolist():  # the one transfer
        if drafted:
            place[number] = len(rows[0])
            rows[0].append(token)
            rows[1].append(place[parent])
    return Tree(tuple(rows[0]), tuple(rows[1]))


def _ordered(score: Tensor) -> Tensor:
    return score.sort(descending=True, stable=True).indices


def _chances(k: int, device: torch.device) -> Tensor:
    """Logarithm of how often the child of each rank is right, float32, (k,)."""
    halved = [RANKS[-1] * 0.5**behind for behind in range(1, k - len(RANKS) + 1)]
    return torch.tensor([*RANKS, *halved][:k]).log().to(device)


def _children(ranks: Tensor, k: int, chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores, at most 0, and tokens of the best children of each row of (F, V): (F, k) each."""
    ranks = ranks.masked_fill(ranks.isnan(), -torch.inf)  # a broken drafter drafts nothing
    # ``topk`` leaves open which of equals it takes: the first ones.
    least = ranks.topk(k).values[:, -1:]
    above, equal = ranks > least, ranks == least
    taken = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    tokens = taken.to(torch.uint8).topk(k).indices.sort().values
    value, order = ranks.gather(1, tokens).sort(descending=True, stable=True)
    if chance is not None:
        value = chance.masked_fill(value == -torch.inf, -torch.inf)
    return value.clamp(max=0), tokens.gather(1, order)
