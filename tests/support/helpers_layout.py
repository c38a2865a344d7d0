"""Visual tokens in the layout of LLaVA-NeXT, and statistics, without a model."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import Kind, TokenLayout, VisualTokens
from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats

DIM = 8
TOWER = 24  # layers of the vision tower: HiRED uses 0 and 22
REQUEST = EncodeRequest("What is this?", torch.zeros(3, DIM), depth=4)


def unpadded(rows: int, columns: int, size: tuple[int, int]) -> tuple[slice, slice]:
    """The part of the stitched crops that shows the image, without the letterbox."""
    height, width = size
    if width / height > columns / rows:
        cut = (rows - int(round(height * columns / width, 7))) // 2
        return slice(cut, rows - cut), slice(0, columns)
    cut = (columns - int(round(width * rows / height, 7))) // 2
    return slice(0, rows), slice(cut, columns - cut)


def make_image(
    tiles: tuple[int, int] = (2, 2),
    patches: tuple[int, int] = (4, 4),
    size: tuple[int, int] | None = None,
    *,
    newlines: bool = True,
    item: int = 0,
    view: int = 0,
    order: int = 0,
    seed: int = 0,
) -> tuple[VisualTokens, ItemGeometry]:
    """One image: a base view, ``tiles`` crops without letterbox, a newline per row."""
    h, w = patches
    gh, gw = tiles
    if size is None:
        size = (max(gh, 1) * h * 14, max(gw, 1) * w * 14)
    rows = [
        (Kind.IMAGE, 0, y, x, (x / w, y / h, (x + 1) / w, (y + 1) / h))
        for y in range(h)
        for x in range(w)
    ]
    if tiles != (0, 0):
        down, across = unpadded(gh * h, gw * w, size)
        tall, wide = down.stop - down.start, across.stop - across.start
        for y in range(down.start, down.stop):
            for x in range(across.start, across.stop):
                top, left = (y - down.start) / tall, (x - across.start) / wide
                box = (left, top, left + 1 / wide, top + 1 / tall)
                rows.append((Kind.IMAGE, 1 + (y // h) * gw + x // w, y % h, x % w, box))
            if newlines:
                rows.append((Kind.NEWLINE, -1, y, -1, (torch.nan,) * 4))
    kind, tile, ys, xs, boxes = zip(*rows, strict=True)
    kind = torch.tensor([int(k) for k in kind], dtype=torch.uint8)
    tile = torch.tensor(tile, dtype=torch.int32)
    n = len(rows)
    indices = order + torch.arange(n)
    grid = torch.stack([torch.zeros(n, dtype=torch.int64), torch.tensor(ys), torch.tensor(xs)], 1)
    layout = TokenLayout(
        kind=kind,
        item=torch.full((n,), item, dtype=torch.int32),
        tile=tile,
        view=torch.where(tile >= 0, tile + view, -1).int(),
        grid=grid.int(),
        box=torch.tensor(boxes, dtype=torch.float32),
        order=indices,
        position=indices[None],
        weight=torch.ones(n),
        protected=torch.zeros(n, dtype=torch.bool),
    )
    features = torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))
    return VisualTokens(features, layout), ItemGeometry(
        size, tiles, (view, view + 1 + gh * gw), patches
    )


def prompt(*images: dict, seed: int = 0) -> tuple[VisualTokens, VisionStats]:
    """Several images (arguments of `image`) with three text tokens before each."""
    parts, items, view, order = [], [], 0, 0
    for number, arguments in enumerate(images):
        tokens, geometry = make_image(
            **arguments, item=number, view=view, order=order + 3, seed=seed + number
        )
        parts.append(tokens)
        items.append(geometry)
        view, order = geometry.views[1], int(tokens.layout.order[-1]) + 1
    tokens = VisualTokens(
        torch.cat([part.features for part in parts]),
        TokenLayout.cat([part.layout for part in parts]),
    )
    return tokens, stats_of(tuple(items), attention(items, seed))


def stats_of(
    items: tuple[ItemGeometry, ...],
    rows: dict[int, Tensor],
    keys: dict[int, Tensor] | None = None,
    cls: Tensor | None = None,
    source: str = "cls",
) -> VisionStats:
    """Statistics with the saliency of the given blocks, (views, heads, N) of all items.

    The lowest block is the first of the tower, the highest the last, and its output the features.
    """
    keys = keys or {}
    named = {"first": min(rows), "features": max(rows), "last": max(rows)} if rows else {}
    saliency = {}
    for block, layer in named.items():
        for kinds in ({}, {"keys": True}, {"keys": True, "wide": True}):
            if kinds and layer not in keys:
                continue
            saliency[SaliencyRequest(block, **kinds).key] = tuple(
                Saliency(source, rows[layer][views], keys[layer][views] if kinds else None)
                for views in (slice(*item.views) for item in items)
            )
    return VisionStats(items, rows, keys, cls, saliency)


def attention(items: list[ItemGeometry], seed: int, heads: int = 2) -> dict[int, Tensor]:
    """Random CLS rows of layers 0 and 22; those of an image do not depend on the others."""
    rows: dict[int, list[Tensor]] = {0: [], TOWER - 2: []}
    for number, geometry in enumerate(items):
        generator = torch.Generator().manual_seed(1000 + seed + number)
        shape = (
            geometry.views[1] - geometry.views[0],
            heads,
            geometry.patches[0] * geometry.patches[1],
        )
        for part in rows.values():
            part.append((2 * torch.randn(shape, generator=generator)).softmax(-1))
    return {layer: torch.cat(part) for layer, part in rows.items()}


@st.composite
def image_arguments(draw: st.DrawFn, patches: tuple[int, int] | None = None) -> dict:
    """Arguments of `image`: all grids of LLaVA-NeXT and none, with and without letterbox."""
    tiles = draw(st.sampled_from([(0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (2, 3)]))
    patches = patches or draw(st.sampled_from([(4, 4), (6, 6), (3, 5)]))
    size = draw(st.none() | st.tuples(st.integers(20, 90), st.integers(20, 90)))
    return {
        "tiles": tiles,
        "patches": patches,
        "size": size,
        "newlines": draw(st.booleans()),
    }
