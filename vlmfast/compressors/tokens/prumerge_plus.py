"""PruMerge+: the outliers of PruMerge, and patches spread evenly between them.

Outliers cluster where CLS attends and leave the rest of an image uncovered. The second method of
LLaVA-PruMerge (ICCV 2025, arXiv 2403.15388) adds patches of the raster in equal steps. With
``ratio`` and ``k`` of the view as in `prumerge`::

    step = trunc(trunc(1 / ratio) / 3)          add 0, step, 2 step, ... below N - 1

Neighbours and the rest are then merged as in `prumerge`.

Of the ``t`` tokens that ``keep`` or ``budget`` give a view, one is x_rest, ``(t - 1) // 2`` are
spread evenly over the patches that are not outliers, and the others are outliers; the authors'
fixed ratio for training halves them alike.

Different from the authors' code, in addition to the differences of `prumerge`: a step is at least
1, where their code fails for ratios above a third; and no patch is chosen twice. With a fixed ratio
theirs keeps an outlier on the grid as two tokens, counts it twice among the neighbours of others,
and drops as many patches from the beginning of the dropped ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.layout import marked_rows
from vlmfast.core.views import cells

from .prumerge import PruMerge


@dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Keeps the outliers of CLS attention and an even grid, and merges neighbours into them."""

    name: ClassVar[str] = "prumerge-plus"
    tier: ClassVar[str] = "baseline"

    def chosen(self, attention: Tensor, total: int | None, k: int) -> tuple[Tensor, int | None]:
        n = len(attention)
        if total is not None:
            spread = (total - 1) // 2
            kept = self.best(attention[None], [total - 1 - spread])[0]
            rest = marked_rows(~kept, n - min(total - 1 - spread, n))
            even = rest[cells(spread, len(rest)).to(rest.device)]
            return kept.index_fill(0, even, True), total - 1
        kept = self.best(attention[None], [k])[0]
        step = max(int(int(n / k) / 3), 1)
        even = torch.arange(0, max(n - 1, 1), step, device=attention.device)
        return kept.index_fill(0, even, True), None
