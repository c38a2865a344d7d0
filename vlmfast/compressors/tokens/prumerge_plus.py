"""PruMerge+: the outliers of PruMerge, and patches spread evenly between them.

Outliers gather where CLS looks, and leave the rest of a picture dark. The second method of
LLaVA-PruMerge (ICCV 2025, arXiv 2403.15388) adds patches of the raster in equal steps. With
``ratio`` and ``k`` of the view as in `prumerge`::

    step = trunc(trunc(1 / ratio) / 3)          add 0, step, 2 step, ... below N - 1

Then tokens take in what is near them, and one more stands for the rest, as there.

``rate`` and ``budget`` give a view of ``t`` tokens x_rest, ``(t - 1) // 2`` spread evenly over the
patches that are no outliers, and outliers; the authors' fixed ratio for training halves them alike.

Different from the authors' code, beyond what `prumerge` says: a step is at least 1, where their
code fails for ratios above a third; and no patch is chosen twice. With a fixed ratio theirs keeps
an outlier on the grid as two tokens, counts it twice among the neighbours of others, and loses as
many patches from the beginning of what is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.views import cells

from ..select import best
from .prumerge import PruMerge, outliers


@dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Keeps the outliers of CLS attention and an even grid, and adds to them what is near."""

    name: ClassVar[str] = "prumerge-plus"

    def chosen(self, attention: Tensor, total: int | None) -> Tensor:
        n = len(attention)
        if total is not None:
            spread = (total - 1) // 2
            kept = best(attention[None], [total - 1 - spread])[0]
            rest = (~kept).nonzero()[:, 0]
            even = rest[cells(spread, len(rest)).to(rest.device)]
        else:
            k = outliers(attention)
            kept = best(attention[None], [k])[0]
            step = max(int(int(n / k) / 3), 1)
            even = torch.arange(0, max(n - 1, 1), step, device=attention.device)
        return kept.index_fill(0, even, True).nonzero()[:, 0]
