"""Downsampling: every view at a lower resolution, the baseline for methods that merge.

The ``h x w`` tokens of a view are split into ``a x b`` cells, the same for all views of an image; a
token belongs to the cell that contains its centre. Each non-empty cell becomes one token: the mean
of its features, weighted by token weight, with the sum of the weights. Order, position and tile are
those of the token nearest to the cell's centre; its box covers the cell. Newlines are dropped.

``a x b`` gives the token count nearest to the target among cells at most twice as long as wide (on
a tie fewer tokens, then the squarer cell). Every view keeps at least one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import TokenCount, existing, inexact
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import proportional_attention_param
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import covering

from ..cells import grouped, occupied, resolution
from ..reducer import Reducer


@dataclass(frozen=True)
class Downsample(Reducer):
    """Averages neighbouring patches until the target count is met."""

    name: ClassVar[str] = "downsample"
    paper: ClassVar[str] = "control"
    tier: ClassVar[str] = "baseline"

    proportional_attention: bool = proportional_attention_param(False)

    def count_left(self, before: TokenCount) -> TokenCount:
        if not before.full:
            raise inexact(self.name, "which patches the stages before it keep")
        exists, target = existing(before.image), self.target(before)
        a, b = resolution(exists, target)
        return before.left(int(occupied(exists)[a - 1, b - 1]))

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens:
        """One token per cell of each view of one image."""
        patches = tokens.patches()
        if not len(patches):
            return patches
        layout = patches.layout
        cells = grouped(layout, geometry, self.target(tokens))

        def pooled(rows: Tensor) -> Tensor:
            return cells.average(rows, layout.weight)

        return VisualTokens(
            pooled(patches.features),
            layout.select(cells.index).replace(
                weight=cells.total(layout.weight),
                protected=cells.any(layout.protected),
                box=covering(layout.box, cells.cell, len(cells.index)),
            ),
            tuple(map(pooled, patches.extra)),
        )
