"""FastV: drop visual tokens after an early layer, by the attention of the last token.

In a trained model the text attends to an image mostly in the first layers. FastV (ECCV 2024, arXiv
2403.06764) runs the first ``k`` layers on all ``n`` visual tokens and then keeps the ``round(n r)``
(half to even) that the last token of the prompt attends to most::

    score_j = mean over heads of softmax(q_last K^T / sqrt(d))_j      in layer k - 1

Tokens keep their rotary ids. ``budget`` solves ``r`` so that the average over all layers is met.

Different from the authors' code, and why:

- One row of attention is computed from queries and keys; theirs computes a full attention map.
- All visual tokens of the prompt are ranked, wherever they are; theirs takes one span whose start
  and length are constants, one off in some of its variants.
- The cache of the layers before the drop is unchanged; one of their variants runs a layer twice on
  it.
- The variant that only masks (no speed-up) and the one that ranks again at each decoded token are
  not offered. Its ``k = 0``, random tokens, is the method ``random``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.layout import marked_rows
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import PrefillStage
from vlmfast.core.statistics import StatRequest
from vlmfast.errors import RecipeError

from ..budget import solve_counts
from ..select import count, top


@dataclass(frozen=True)
class FastV(PrefillStage):
    """Keeps, from one early layer on, the tokens that the last prompt token attends to most."""

    name: ClassVar[str] = "fastv"
    paper: ClassVar[str] = "ECCV 2024, arXiv 2403.06764"
    tier: ClassVar[str] = "baseline"
    lead: ClassVar[str | None] = "keep"
    query_dependent: ClassVar[bool] = True

    keep: float = param(0.5, "fraction of the visual tokens kept after the drop", gt=0.0, le=1.0)
    k: int = param(2, "layers that see every token", ge=1)
    positions: str = positions_param()
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
        """Number of tokens kept of ``n``."""
        if self.budget is None:
            return count(self.keep, n)
        return solve_counts(n, self.budget * n, (self.k,), depth)[0]

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        visual, n = context.layout.visual, context.layout.visuals
        if not n:
            return None
        score, kept = context.stats[layer - 1].mean(0)[0], self.kept(n, context.depth)
        chosen = top(score, visual, kept)
        return marked_rows(chosen | ~visual, len(visual) - n + min(kept, n))
