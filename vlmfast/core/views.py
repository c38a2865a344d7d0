"""Mapping between an image's tokens and the grids of patches of its views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layout import Kind, TokenLayout, VisualTokens, marked_rows
from .saliency import SaliencyRequest
from .statistics import ItemGeometry, VisionStats


def cells(n: int, parts: int) -> Tensor:
    """The part, of ``parts`` equal ones, that holds the centre of each of ``n``: int64, (n,)."""
    return (2 * torch.arange(n) + 1) * parts // (2 * n)


def spread(grid: tuple[int, int], over: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of each token of a view among more rows and columns.

    Parameters
    ----------
    grid : (int, int)
        Rows and columns of the view.
    over : (int, int)
        At least as many.

    Returns
    -------
    Tensor, int64, (N, 2)
        Different for each token, in raster order.
    """
    places = [cells(n, parts) for n, parts in zip(grid, over, strict=True)]
    return torch.cartesian_prod(*places).view(-1, 2).to(device)


def slots(layout: TokenLayout, item: ItemGeometry) -> Tensor:
    """Index of each token of one image in the flattened (views, N) grids of its views.

    The whole view comes first, as in `Saliency`. Tokens that show no part of the image, newlines
    for example, have the index after the last.

    Returns
    -------
    Tensor, int64, (S,)
    """
    (h, w), views = item.patches, item.views[1] - item.views[0]
    slot = (layout.tile * h + layout.grid[:, 1]) * w + layout.grid[:, 2]
    return torch.where(layout.patches, slot, views * h * w).long()


def marked(slot: Tensor, like: Tensor) -> Tensor:
    """Which patches of ``like`` (views, N) are among ``slot``: bool, (views, N)."""
    marks = torch.zeros(like.numel() + 1, dtype=torch.bool, device=slot.device)
    return marks.index_fill(0, slot, True)[:-1].view_as(like)


def per_token(values: Tensor, slot: Tensor, other: float = 0) -> Tensor:
    """The entry of ``values`` (views, N) at the patch of each token; ``other`` without one."""
    return torch.cat([values.flatten(), values.new_full((1,), other)])[slot]


def token_saliency(tokens: VisualTokens, stats: VisionStats, asked: SaliencyRequest) -> Tensor:
    """Saliency of each token, mean over heads, 0 for newlines: float32, (S,)."""
    saliency = tokens.layout.weight.new_zeros(len(tokens), dtype=torch.float32)
    for number, index in tokens.items():
        item = stats.items[number]
        rows = stats.salient(asked, item).rows.mean(1)
        slot = slots(tokens.layout.select(index), item)
        saliency = saliency.index_copy(0, index, per_token(rows, slot))
    return saliency


def open_rows(kept: Tensor, layout: TokenLayout, tiled: bool) -> Tensor:
    """Tokens in a row of the stitched crops, newline included, that has a kept token.

    A newline closes the row of the tokens before it. The whole view of a tiled image has no
    newlines, so keeping its tokens never adds one, and they count as open.

    Returns
    -------
    Tensor, bool, (S,)
    """
    newline = (layout.kind == Kind.NEWLINE).long()
    row = newline.cumsum(0) - newline
    outside = (layout.tile == 0) & tiled
    hits = torch.zeros_like(row).index_add(0, row, (kept & ~outside).long())
    return (hits[row] > 0) | outside


def covering(boxes: Tensor, group: Tensor, groups: int) -> Tensor:
    """The smallest box around the boxes of each group.

    Parameters
    ----------
    boxes : Tensor, (S, 4)
    group : Tensor, int64, (S,)

    Returns
    -------
    Tensor, (groups, 4)
    """
    index = group[:, None].expand(-1, 2)
    low, high = boxes.new_full((2, groups, 2), torch.inf).unbind()
    low = low.scatter_reduce(0, index, boxes[:, :2], "amin")
    high = (-high).scatter_reduce(0, index, boxes[:, 2:], "amax")
    return torch.cat([low, high], dim=1)


def by_view(layout: TokenLayout, geometry: ItemGeometry, *values: Tensor) -> list[list[Tensor]]:
    """For each view of an image: its tokens, and the entries of ``values`` at their patches.

    Parameters
    ----------
    layout : TokenLayout
        Tokens of one image.
    values : Tensor, (V, N, ...)
        One row per view of the image, the whole view first.

    Returns
    -------
    list of list of Tensor
        Indices of the view's tokens, int64, (S_v,), then (S_v, ...) of each value.
    """
    patch = layout.grid[:, 1] * geometry.patches[1] + layout.grid[:, 2]
    views = []
    for tile in range(geometry.views[1] - geometry.views[0]):
        index = marked_rows(layout.tile == tile, int((layout.on_host[2] == tile).sum()))
        views.append([index, *(v[tile].index_select(0, patch[index]) for v in values)])
    return views


def merged(
    tokens: VisualTokens,
    home: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor],
    cls: Tensor,
    cls_features: Tensor,
    count: int | None = None,
) -> VisualTokens:
    """The tokens of one image after some of them were merged into others.

    Parameters
    ----------
    home : Tensor, int64, (S,)
        The token that each one becomes part of: itself where it stays, -1 where it is dropped.
    combine : callable
        ``(features, home) -> features`` of those that stay.
    cls : Tensor, int64, (K,)
        Tokens that do not stay and are replaced by the CLS token of their view, which shows no part
        of the image.
    cls_features : Tensor, (V, D)
    count : int, optional
        How many tokens there are afterwards; read by default.
    """
    own, layout = torch.arange(len(home), device=home.device), tokens.layout
    here, target = home >= 0, home.clamp(min=0)
    none = torch.zeros_like(layout.weight)
    weight = none.index_add(0, target, layout.weight * here)  # whole numbers, in any order
    protected = none.index_add(0, target, (layout.protected & here).to(none)) > 0
    return VisualTokens(
        combine(tokens.features, home).index_copy(0, cls, cls_features[layout.view[cls].long()]),
        TokenLayout(
            kind=layout.kind.index_fill(0, cls, int(Kind.SPECIAL)),
            item=layout.item,
            tile=layout.tile.index_fill(0, cls, -1),
            view=layout.view.index_fill(0, cls, -1),
            grid=layout.grid.index_fill(0, cls, -1),
            box=layout.box.index_fill(0, cls, torch.nan),
            order=layout.order,
            position=layout.position,
            weight=weight.index_fill(0, cls, 1),
            protected=protected.index_fill(0, cls, False),
        ),
        tuple(combine(level, home).index_fill(0, cls, 0) for level in tokens.extra),
    ).select(marked_rows((home == own).index_fill(0, cls, True), count))
