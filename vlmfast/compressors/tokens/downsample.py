"""Downsampling: every view at a lower resolution, the control for methods that merge.

The ``h x w`` tokens of a view fall into ``a x b`` cells, the same for all views of a picture; a
token belongs to the cell that holds its centre. Each cell that has tokens becomes one: the mean of
their features, weighted by what they stand for, with the sum of their weights. Order, position and
tile are those of the token nearest to the cell's centre; its box covers the cell. Newlines go.

``a x b`` gives the number of tokens nearest to the target among cells at most twice as long as wide
(of equals fewer tokens, then the squarer cell). One token per view is the least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import repair_param
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import covering

from ..cells import grouped
from ..reducer import Reducer


@dataclass(frozen=True)
class Downsample(Reducer):
    """Averages neighbouring patches until the target count is met."""

    name: ClassVar[str] = "downsample"
    paper: ClassVar[str] = "control"

    repair: bool = repair_param(False)

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens:
        """One token per cell of each view of one picture."""
        patches = tokens.select(tokens.layout.patches)
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
