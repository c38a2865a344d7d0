"""Evenly spaced selection: a baseline that ignores the content but covers the whole image.

Of ``P`` patches in raster order it keeps numbers ``floor((i + 1/2) P / k)`` for ``i`` in
``0 .. k-1``, the middles of ``k`` equal runs. Newlines are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import cells

from ..reducer import Reducer


@dataclass(frozen=True)
class Grid(Reducer):
    """Keeps evenly spaced patches."""

    name: ClassVar[str] = "grid"
    paper: ClassVar[str] = "control"
    tier: ClassVar[str] = "baseline"
    exact: ClassVar[bool] = True

    def select_tokens(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor:
        """Rows kept of one image."""
        patches = tokens.layout.patch_rows()
        chosen = cells(min(self.target(tokens), len(patches)), len(patches))
        return patches[chosen.to(patches.device)]
