"""Views of an image in equal cells, each of which becomes one token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ItemGeometry
from vlmfast.core.views import cells
from vlmfast.kernels.pool import cell_average


def copied(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Whole numbers on a device, as int64, by one copy."""
    flat = torch.cat([part.flatten().long() for part in parts]).to(device)
    own = flat.split([part.numel() for part in parts])
    return [x.view(part.shape) for x, part in zip(own, parts, strict=True)]


def occupied(exists: Tensor) -> Tensor:
    """Count the cells that contain a token, for every number of rows and columns of cells.

    Parameters
    ----------
    exists : Tensor, bool, (views, h, w)

    Returns
    -------
    Tensor, int64, (h, w)
        Entry (a-1, b-1) is the count for ``a x b`` cells, summed over views.
    """
    _, h, w = exists.shape

    def members(n: int) -> tuple[Tensor, Tensor]:
        """Members of each part of every division of ``n``, and the parts of each division."""
        parts = torch.cat([cells(n, k)[None] == torch.arange(k)[:, None] for k in range(1, n + 1)])
        owner = torch.arange(n).repeat_interleave(torch.arange(1, n + 1))
        return parts.float(), torch.nn.functional.one_hot(owner, n).float()

    (rows, a), (columns, b) = members(h), members(w)
    filled = (rows @ exists.float() @ columns.T > 0).sum(0).float()  # whole numbers, exact
    return (a.T @ filled @ b).long()


def resolution(exists: Tensor, target: int) -> tuple[int, int]:
    """Rows and columns of cells that give a count nearest to ``target``."""
    _, h, w = exists.shape
    totals = occupied(exists).tolist()

    def worth(shape: tuple[int, int]) -> tuple[int, int, float]:
        a, b = shape
        total = totals[a - 1][b - 1]
        return abs(total - target), total, abs(math.log((h * b) / (w * a)))

    # A strip one token high would often hit the target exactly but lose the layout of the image.
    shapes = [
        (a, b)
        for a in range(1, h + 1)
        for b in range(1, w + 1)
        if max(h * b, w * a) <= 2 * min(h * b, w * a) or a == b == 1
    ]
    return min(shapes, key=worth)


@dataclass(frozen=True)
class Cells:
    """The patches of an image in groups, each of which becomes one row.

    Parameters
    ----------
    table : Tensor, int64, (C, m)
        Rows of each cell, ascending, then padding.
    there : Tensor, bool, (C, m)
        False at padding.
    cell : Tensor, int64, (N,)
        The cell of each row.
    index : Tensor, int64, (C,)
        The row nearest to the centre of each cell, the first on a tie; ascending.
    offset : Tensor, float32, (N, 2)
        (y, x) of each row from the centre of its cell, in cells.
    size : (float, float)
        Rows and columns of patches in a cell.
    """

    table: Tensor
    there: Tensor
    cell: Tensor
    index: Tensor
    offset: Tensor
    size: tuple[float, float]

    def gather(self, rows: Tensor) -> Tensor:
        """Rows (..., N, D) by cell: (..., C, m, D); padding is a copy of a row."""
        return rows[..., self.table, :]

    def average(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Mean of the rows (N, D) of each cell, weighted by ``weight`` (N,): (C, D).

        A table is used because scattered atomic sums are not deterministic.
        """
        return cell_average(rows, weight, self.table, self.there)

    def total(self, weight: Tensor) -> Tensor:
        """Sum of ``weight`` (N,) over each cell: (C,)."""
        return (weight[self.table] * self.there).sum(1)

    def any(self, marks: Tensor) -> Tensor:
        """Cells with a marked row: bool (N,) to (C,)."""
        return (marks[self.table] & self.there).any(1)


def grouped(layout: TokenLayout, geometry: ItemGeometry, target: int) -> Cells:
    """Split every view of an image into ``a x b`` cells, as near to ``target`` as possible.

    Parameters
    ----------
    layout : TokenLayout
        The N patches of one image.
    """
    device, (h, w) = layout.device, geometry.patches
    first, last = geometry.views
    # On the host: tensor sizes depend on it, and it is a few numbers per patch.
    view, row, column = layout.on_host[3:].long()
    view = view - first
    exists = torch.zeros(last - first, h, w, dtype=torch.bool)
    exists[view, row, column] = True
    a, b = resolution(exists, target)
    down, across = cells(h, a)[row], cells(w, b)[column]
    # Distances in whole numbers, so that ties are exact.
    y, x = (2 * row + 1) * a - (2 * down + 1) * h, (2 * column + 1) * b - (2 * across + 1) * w
    far = (y * b).square() + (x * a).square()
    _, cell = ((view * a + down) * b + across).unique(return_inverse=True)
    rank = far.argsort(stable=True)
    rank = rank[cell[rank].argsort(stable=True)]
    sizes = cell.bincount()
    index = rank[sizes.cumsum(0) - sizes]
    cell = index.argsort().argsort()[cell]  # cells in the order of their centre rows
    sizes, index = cell.bincount(), index.sort().values
    members = cell.argsort(stable=True)
    slot = torch.arange(int(sizes.max()))
    start = (sizes.cumsum(0) - sizes)[:, None]
    there = slot < sizes[:, None]
    table = members[(start + slot).clamp(max=len(members) - 1)]
    table, there, cell, index, y, x = copied([table, there, cell, index, y, x], device)
    offset = torch.stack([y / (2 * h), x / (2 * w)], dim=1).float()
    return Cells(table, there.bool(), cell, index, offset, (h / a, w / b))
