"""FastV: after two layers, an image is worth half its tokens.

In a trained model the text reads a picture in the first layers; deeper ones hardly look at it.
FastV (ECCV 2024, arXiv 2403.06764) lets all ``n`` visual tokens through the first ``k`` layers and
then keeps the ``round(n r)`` (half to even) to which the last token of the prompt attends most::

    score_j = mean over heads of softmax(q_last K^T / sqrt(d))_j      in layer k - 1

Tokens keep their rotary ids. ``budget`` solves ``r`` so that the average over all layers is met.

Different from the authors' code, and why:

- One row of attention is computed from queries and keys; theirs forces a full attention map.
- Every visual token of the prompt is ranked, wherever it stands; theirs takes one span whose start
  and length are constants, one off in some of its variants.
- The cache of the layers before the drop stays as it is; one of theirs runs a layer twice on it.
- The variant that only masks (no speed-up) and the one that ranks again at each decoded token are
  not offered. Its ``k = 0``, random tokens, is the method ``random``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import PrefillStage
from vlmfast.core.statistics import StatRequest
from vlmfast.errors import RecipeError

from ..budget import solve_counts
from ..select import count, top


@dataclass(frozen=True)
class FastV(PrefillStage):
    """Keeps, from one early layer on, what the last token of the prompt attends to."""

    name: ClassVar[str] = "fastv"
    paper: ClassVar[str] = "ECCV 2024, arXiv 2403.06764"
    lead: ClassVar[str | None] = "rate"
    asks_question: ClassVar[bool] = True

    rate: float = param(0.5, "share of the visual tokens kept behind the drop", gt=0.0, le=1.0)
    k: int = param(2, "layers that see every token", ge=1)
    positions: str = positions_param("keep")
    budget: float | None = budget_param()

    def layers(self, depth: int) -> tuple[int, ...]:
        if self.k >= depth:
            raise RecipeError(f"fastv: k={self.k} must be below the model's {depth} layers")
        return (self.k,)

    def floor(self, depth: int) -> float:
        return self.k / depth

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        return {self.k - 1: StatRequest("last")}

    def kept(self, n: int, depth: int) -> int:
        """How many of ``n`` tokens stay."""
        if self.budget is None:
            return count(self.rate, n)
        return solve_counts(n, self.budget * n, (self.k,), depth)[0]

    def keep(self, context: PrefillContext, layer: int) -> Tensor | None:
        visual = context.layout.visual
        if not bool(visual.any()):
            return None
        score = context.stats[layer - 1].mean(0)[0]
        chosen = top(score, visual, self.kept(int(visual.sum()), context.depth))
        return (chosen | ~visual).nonzero().flatten()
