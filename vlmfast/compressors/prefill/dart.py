"""DART: keep the tokens that do not duplicate a few pivots.

Redundant tokens can be dropped, whatever attention they receive. DART (EMNLP 2025, arXiv
2502.11494) runs the first ``k`` layers on all ``n`` visual tokens. The 4 visual and 4 text tokens
(after the image) with the largest L1 norm of their key in layer k - 1, over all heads, are
*pivots*. With ``h`` the hidden states after that layer, normalized by the model's last norm, each
pivot p in turn selects from the remaining tokens the ``t`` that are least similar to it::

    argmin over j of cos(h_j, h_p)          t = trunc(n r / 8)

The visual pivots and the selected tokens are kept, with their rotary ids. No attention map is
needed. ``budget`` solves the number of tokens so that the average over all layers is met.

Different from the authors' code, and why:

- ``4 + 8 t`` only approximates ``n r``. Here exactly ``n r`` tokens are kept (half to even): the
  first pivots select one more. A number below 4 keeps as many pivots.
- Pivots select in the order of the prompt; theirs in that of a hash table.
- All images count; theirs supports one span.
- Each key of a group of heads counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import PrefillStage
from vlmfast.errors import RecipeError

from ..budget import solve_counts
from ..select import count, top


def retained(hidden: Tensor, pool: Tensor, pivots: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Mark the tokens that the pivots select: bool, (S,).

    Parameters
    ----------
    hidden : Tensor, (S, D)
    pool : Tensor, bool, (S,)
        Candidates.
    pivots, counts : P numbers
        Rows, and the number of tokens that each selects.
    """
    units = normalize(hidden.float(), dim=-1)
    left = pool
    for pivot, k in zip(pivots, counts, strict=True):
        left = left & ~top(-(units @ units[pivot]), left, k)
    return pool & ~left


@dataclass(frozen=True)
class DART(PrefillStage):
    """Keeps, from one early layer on, the tokens least similar to a few pivots."""

    name: ClassVar[str] = "dart"
    paper: ClassVar[str] = "EMNLP 2025, arXiv 2502.11494"
    tier: ClassVar[str] = "baseline"
    lead: ClassVar[str | None] = "keep"
    query_dependent: ClassVar[bool] = True

    keep: float = param(0.222, "fraction of the visual tokens kept after the drop", gt=0.0, le=1.0)
    k: int = param(2, "layers that see every token", ge=1)
    visual_pivots: int = param(4, "number of visual pivots, those with the largest keys", ge=1)
    text_pivots: int = param(4, "number of text pivots after the image, likewise", ge=0)
    positions: str = positions_param()
    budget: float | None = budget_param()

    def layers(self, depth: int) -> tuple[int, ...]:
        if self.k >= depth:
            raise RecipeError(f"dart: k={self.k} must be below the model's {depth} layers")
        return (self.k,)

    def floor(self, depth: int) -> float:
        return self.k / depth

    def attends(self, depth: int) -> tuple[int, ...]:
        return (self.k - 1,)  # to see its keys

    def attend(
        self,
        context: PrefillContext,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
    ) -> None:
        norm = key[0].float().abs().sum((0, 2))
        context.notes[self.name] = {"norm": norm, "order": context.layout.order}

    def kept(self, n: int, depth: int) -> int:
        """Number of tokens kept of ``n``."""
        if self.budget is None:
            return count(self.keep, n)
        return solve_counts(n, self.budget * n, (self.k,), depth)[0]

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        assert context.norm is not None and context.hidden is not None
        layout, note = context.layout, context.notes[self.name]
        visual, n = layout.visual, layout.visuals
        total = self.kept(n, context.depth)
        if n == 0 or total >= n:
            return None
        # Another stage may have dropped rows since.
        norm = note["norm"][torch.searchsorted(note["order"], layout.order)]
        rows = torch.arange(len(layout), device=visual.device)
        after = (rows >= layout.text_start) & (rows < len(layout) - context.answer)
        first = top(norm, visual, min(self.visual_pivots, total))
        marks = (first | top(norm, after, self.text_pivots)).tolist()
        pivots = [row for row, mark in enumerate(marks) if mark]
        each, more = divmod(total - min(self.visual_pivots, total), len(pivots))
        counts = [each + (i < more) for i in range(len(pivots))]
        chosen = first | retained(context.norm(context.hidden), visual & ~first, pivots, counts)
        return (chosen | ~visual).nonzero().flatten()
