"""Downsampling: every view at a lower resolution, the control for methods that merge.

The ``h x w`` tokens of a view fall into ``a x b`` cells, the same for all views of a picture; a
token belongs to the cell that holds its centre. Each cell that has tokens becomes one: the mean of
their features, weighted by what they stand for, with the sum of their weights. Order, position and
tile are those of the token nearest to the cell's centre; its box covers the cell. Newlines go.

``a x b`` gives the number of tokens nearest to the target among cells at most twice as long as wide
(of equals fewer tokens, then the squarer cell). One token per view is the least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layout import VisualTokens
from ..stages import EncodeRequest, ItemGeometry, VisionStats, repair_param
from ._reducer import Reducer
from ._views import cells, covering


def occupied(exists: Tensor) -> Tensor:
    """Cells that hold a token, for every number of rows and columns of cells.

    Parameters
    ----------
    exists : Tensor, bool, (views, h, w)

    Returns
    -------
    Tensor, int64, (h, w)
        Entry (a-1, b-1) is the number for ``a x b`` cells, summed over views.
    """
    _, h, w = exists.shape

    def members(n: int) -> tuple[Tensor, Tensor]:
        """Which of ``n`` lie in each part of every division, and which parts each division has."""
        parts = torch.cat([cells(n, k)[None] == torch.arange(k)[:, None] for k in range(1, n + 1)])
        owner = torch.arange(n).repeat_interleave(torch.arange(1, n + 1))
        return parts.float(), torch.nn.functional.one_hot(owner, n).float()

    (rows, a), (columns, b) = members(h), members(w)
    held = (rows @ exists.float() @ columns.T > 0).sum(0).float()  # whole numbers, exact
    return (a.T @ held @ b).long()


def resolution(exists: Tensor, target: int) -> tuple[int, int]:
    """Rows and columns of cells whose number comes nearest to ``target``."""
    _, h, w = exists.shape
    totals = occupied(exists).tolist()

    def worth(shape: tuple[int, int]) -> tuple[int, int, float]:
        a, b = shape
        total = totals[a - 1][b - 1]
        return abs(total - target), total, abs(math.log((h * b) / (w * a)))

    # A strip one token high would often hit the target exactly and show nothing.
    shapes = [
        (a, b)
        for a in range(1, h + 1)
        for b in range(1, w + 1)
        if max(h * b, w * a) <= 2 * min(h * b, w * a) or a == b == 1
    ]
    return min(shapes, key=worth)


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
        target = self.target(tokens)
        tokens = tokens.select(tokens.layout.patches)
        layout, (h, w) = tokens.layout, geometry.patches
        first, last = geometry.views
        view, row, column = (layout.view - first).long(), *layout.grid[:, 1:].long().unbind(1)

        exists = torch.zeros(last - first, h, w, dtype=torch.bool)
        exists[view.cpu(), row.cpu(), column.cpu()] = True
        a, b = resolution(exists, target)
        down, across = cells(h, a).to(row.device)[row], cells(w, b).to(row.device)[column]
        cell = (view * a + down) * b + across

        # The token nearest to the centre of each cell, the first of equals; distances in whole
        # numbers, so that equals are equal.
        far = ((2 * row + 1) * a - (2 * down + 1) * h).square() * b * b
        far = far + ((2 * column + 1) * b - (2 * across + 1) * w).square() * a * a
        key = far * len(tokens) + torch.arange(len(tokens), device=far.device)
        none = torch.iinfo(torch.int64).max
        nearest = key.new_full(((last - first) * a * b,), none).scatter_reduce(0, cell, key, "amin")
        index = (nearest[nearest < none] % len(tokens)).sort().values

        def pooled(values: Tensor) -> Tensor:
            """Sums of ``values`` (S, ...) over the cells of ``index``, weighted, float32.

            Two small products on the dense grid: adding up with atomics would not be repeatable.
            """
            dense = values.new_zeros(last - first, h, w, values.shape[1], dtype=torch.float32)
            dense[view, row, column] = values.float() * layout.weight[:, None]
            to_rows = torch.nn.functional.one_hot(cells(h, a), a).to(dense)
            to_columns = torch.nn.functional.one_hot(cells(w, b), b).to(dense)
            sums = torch.einsum("vhwd,ha,wb->vabd", dense, to_rows, to_columns)
            return sums.flatten(0, 2)[cell[index]]

        weight = pooled(layout.weight.new_ones(len(tokens), 1))
        protected = pooled(layout.protected[:, None]).flatten() > 0
        box = covering(layout.box, cell, (last - first) * a * b)[cell[index]]
        return VisualTokens(
            (pooled(tokens.features) / weight).to(tokens.features.dtype),
            layout.select(index).replace(weight=weight.flatten(), protected=protected, box=box),
            tuple((pooled(level) / weight).to(level.dtype) for level in tokens.extra),
        )
