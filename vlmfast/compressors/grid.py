"""Evenly spaced selection: a control that knows nothing but covers everything.

Of ``P`` patches in raster order it keeps numbers ``floor((i + 1/2) P / k)`` for ``i`` in
``0 .. k-1``, the middles of ``k`` equal runs; newlines go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..contexts import EncodeRequest
from ..layout import VisualTokens
from ..statistics import ItemGeometry, VisionStats
from ._reducer import Reducer
from ._views import cells


def evenly(n: int, k: int) -> Tensor:
    """``k`` of ``n`` indices, evenly spaced: int64, (k,), ascending."""
    return cells(k, n)


@dataclass(frozen=True)
class Grid(Reducer):
    """Keeps evenly spaced patches."""

    name: ClassVar[str] = "grid"
    paper: ClassVar[str] = "control"

    def keep(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor:
        """Rows of one picture that stay."""
        patches = tokens.layout.patches.nonzero().flatten()
        chosen = evenly(len(patches), min(self.target(tokens), len(patches)))
        return patches[chosen.to(patches.device)]
