"""Evenly spaced selection: a control that knows nothing but covers everything.

Of ``P`` patches in raster order it keeps numbers ``floor((i + 1/2) P / k)`` for ``i`` in
``0 .. k-1``, the middles of ``k`` equal runs; newlines go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layout import VisualTokens
from ..stages import (
    EncodeRequest,
    EncodeStage,
    ItemGeometry,
    VisionStats,
    budget_param,
    param,
    positions_param,
)
from ._select import count


def evenly(n: int, k: int) -> Tensor:
    """``k`` of ``n`` indices, evenly spaced: int64, (k,), ascending."""
    return (2 * torch.arange(k) + 1) * n // (2 * k)


@dataclass(frozen=True)
class Grid(EncodeStage):
    """Keeps evenly spaced patches."""

    name: ClassVar[str] = "grid"
    paper: ClassVar[str] = "control"
    lead: ClassVar[str | None] = "rate"

    rate: float = param(0.2, "share of the visual tokens that stays", gt=0.0, le=1.0)
    positions: str = positions_param("compact")
    budget: float | None = budget_param()

    def keep(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor | None:
        """Rows of one picture that stay."""
        share = self.rate if self.budget is None else self.budget
        if share == 1:
            return None
        patches = tokens.layout.patches.nonzero().flatten()
        chosen = evenly(len(patches), min(count(share, len(tokens)), len(patches)))
        return patches[chosen.to(patches.device)]
