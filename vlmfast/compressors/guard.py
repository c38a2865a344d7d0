"""Guards of reducers that rank tokens by saliency, against small perturbations of an image.

A perturbation too small to see can change which tokens are kept (arXiv 2601.12042). Two options
make the selection less sensitive. Both are off by default.

``guard=k``
    Scores are the mean over the image and ``k`` jittered views of it, shifted by a pixel and with
    noise (as in randomized smoothing, arXiv 1902.02918; see `engine.vision.jittered`). Each view
    costs a forward pass of the vision tower. Stages inside the tower do not run on these views.
``reserve=r``
    A fraction ``r`` of the kept tokens is not chosen by rank. It is spread evenly, in raster order,
    over the other tokens whose score is above `MARGIN` times that of the last token kept. The
    number of kept tokens does not change, and no forward pass is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from vlmfast.core.params import param
from vlmfast.core.saliency import SaliencyRequest

from .reducer import Reducer
from .select import best

MARGIN = 0.5


@dataclass(frozen=True)
class Guarded(Reducer):
    """A reducer whose scores come from the saliency of the vision tower."""

    _: KW_ONLY
    guard: int = param(
        0,
        "jittered views of the image over which the scores are averaged; each costs a forward pass "
        "of the vision tower",
        ge=0,
        le=16,
    )

    def guarded(self, request: SaliencyRequest) -> SaliencyRequest:
        """A request for saliency, averaged over the jittered views unless all tokens are kept."""
        return request if self.fraction == 1 else replace(request, jitter=self.guard)


@dataclass(frozen=True)
class GuardedRanking(Guarded):
    """A reducer that keeps the tokens with the highest scores."""

    _: KW_ONLY
    reserve: float = param(
        0.0,
        "fraction of the kept tokens that is spread over those with scores near the threshold",
        ge=0.0,
        lt=1.0,
    )

    def best(self, scores: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        """`select.best`, with the reserve."""
        none = scores.shape[-1] == 0  # a view whose tokens an earlier stage dropped
        if none or not self.reserve:
            return best(scores, counts)
        return reserved(scores, counts, self.reserve)


def reserved(scores: Tensor, counts: Sequence[int] | Tensor, share: float) -> Tensor:
    """Mark ``counts[i]`` entries of row ``i``: the largest, and a reserve near the threshold.

    Parameters
    ----------
    scores : Tensor, (R, N)
        Not negative; those of entries that cannot be kept may be ``-inf``.
    counts : R numbers
    share : float
        Of the marked entries: the reserve, rounded down.

    Returns
    -------
    Tensor, bool, (R, N)
    """
    counts = torch.as_tensor(counts, device=scores.device)[:, None]
    extra = (counts * share).long()
    largest = best(scores, (counts - extra)[:, 0])
    ranked = scores.sort(dim=-1, descending=True).values
    threshold = ranked.gather(1, (counts - 1).clamp(min=0))
    near = ~largest & (scores >= MARGIN * threshold)
    # Of n entries, numbers floor((i + 1/2) n / m) for i in 0 .. m-1: `before` counts those below j.
    n, j = near.sum(1, keepdim=True).clamp(min=1), near.cumsum(1)

    def before(j: Tensor) -> Tensor:
        return -((n - 2 * j * extra) // (2 * n))

    return largest | (near & (before(j) > before(j - 1)))
