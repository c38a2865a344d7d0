"""The origin of every token of a prompt.

A `TokenLayout` accompanies the features of a sequence. Reducers and caches read from it which
tokens are visual, which image and tile they belong to and their position in it. Code that selects
rows of the features selects the same rows of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum

import torch
from torch import Tensor


class Kind(IntEnum):
    """What a token represents."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    NEWLINE = 3  # a learned row separator inside an image (LLaVA-NeXT's ``image_newline``)
    SPECIAL = 4  # an image's token that shows no part of it (a CLS token that is kept)


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Provenance of a sequence of ``S`` tokens; immutable, one row per token.

    Parameters
    ----------
    kind : Tensor, uint8, (S,)
        A `Kind`. Newlines count as visual tokens: they cost as much as any other.
    item : Tensor, int32, (S,)
        Index of the image (or of the frame, when a video is read frame by frame) inside the
        prompt; -1 for text.
    tile : Tensor, int32, (S,)
        0 is the base view of the item, 1.. its crops in raster order; -1 for tokens outside tiles
        (text, newlines, special tokens).
    view : Tensor, int32, (S,)
        Row of the token's tile in the batch that went through the vision tower, so that
        ``stats[view]`` are the statistics of its tile; -1 for tokens outside tiles.
    grid : Tensor, int32, (S, 3)
        (t, y, x) in the token grid of the tile. For a newline, y is the row that it closes in the
        stitched canvas of crops and x is -1. -1 for text.
    box : Tensor, float32, (S, 4)
        (x0, y0, x1, y1) of the token in its image, as fractions of the image's width and height;
        NaN for tokens that show no part of it.
    order : Tensor, int64, (S,)
        Index in the full prompt, before anything was dropped. Causality follows it.
    position : Tensor, int64, (P, S)
        Rotary position ids; P is 1, or 3 for M-RoPE (t, h, w).
    weight : Tensor, float32, (S,)
        How many source tokens this row represents (more than 1 after merging).
    protected : Tensor, bool, (S,)
        Rows that later parts of the same method must not drop.
    """

    kind: Tensor
    item: Tensor
    tile: Tensor
    view: Tensor
    grid: Tensor
    box: Tensor
    order: Tensor
    position: Tensor
    weight: Tensor
    protected: Tensor

    def __len__(self) -> int:
        return self.kind.shape[0]

    @property
    def device(self) -> torch.device:
        return self.kind.device

    @property
    def visual(self) -> Tensor:
        """Tensor, bool, (S,): every token of images and videos, newlines included."""
        return self.kind != Kind.TEXT

    @property
    def patches(self) -> Tensor:
        """Tensor, bool, (S,): tokens that show a part of an image."""
        return (self.kind == Kind.IMAGE) | (self.kind == Kind.VIDEO)

    def select(self, index: Tensor) -> TokenLayout:
        """Rows ``index`` (int64 indices or a boolean mask), in that order."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return TokenLayout(
            **{
                f.name: getattr(self, f.name).index_select(1 if f.name == "position" else 0, index)
                for f in fields(self)
            }
        )

    def replace(self, **changes: Tensor) -> TokenLayout:
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> TokenLayout:
        return TokenLayout(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @staticmethod
    def cat(layouts: list[TokenLayout]) -> TokenLayout:
        """Rows of all ``layouts``, one after another."""
        return TokenLayout(
            **{
                f.name: torch.cat(
                    [getattr(layout, f.name) for layout in layouts],
                    dim=1 if f.name == "position" else 0,
                )
                for f in fields(TokenLayout)
            }
        )

    @staticmethod
    def text(order: Tensor, position: Tensor) -> TokenLayout:
        """Layout of text tokens at ``order`` (S,) with rotary ids ``position`` (P, S)."""
        n, device = order.shape[0], order.device
        none = torch.full((n,), -1, dtype=torch.int32, device=device)
        return TokenLayout(
            kind=torch.full((n,), int(Kind.TEXT), dtype=torch.uint8, device=device),
            item=none,
            tile=none,
            view=none,
            grid=torch.full((n, 3), -1, dtype=torch.int32, device=device),
            box=torch.full((n, 4), torch.nan, device=device),
            order=order,
            position=position,
            weight=torch.ones(n, device=device),
            protected=torch.zeros(n, dtype=torch.bool, device=device),
        )


def next_id(position: Tensor) -> int:
    """The rotary id of what follows rows at ``position`` (P, S), int64.

    Text after a video follows its rows and columns, not its times, which may be larger.
    """
    return int(position[-2:].max()) + 1


@dataclass(frozen=True, eq=False)
class Numbering:
    """Rotary ids of a full prompt, before anything was dropped.

    Parameters
    ----------
    position : Tensor, int64, (P, S)
    segment : Tensor, int64, (S,)
        Counts the runs of text and of visual tokens: an image, or a video that is one block.
    first : int
        Index of the first row in the full prompt, where this is a later part of one.
    """

    position: Tensor
    segment: Tensor
    first: int = 0

    def __len__(self) -> int:
        return self.segment.shape[0]

    @staticmethod
    def of(position: Tensor, kind: Tensor) -> Numbering:
        """``position`` (P, S) of rows of ``kind`` (S,); a segment ends where the kind changes."""
        starts = torch.ones_like(kind, dtype=torch.int64)
        starts[:1] = 0
        starts[1:] = kind[1:] != kind[:-1]
        return Numbering(position, starts.cumsum(0))


@dataclass(frozen=True, eq=False)
class VisualTokens:
    """Visual tokens on their way from the vision encoder to the language model.

    Parameters
    ----------
    features : Tensor, (N, D)
        One row per token, after the projector, in the language model's width.
    layout : TokenLayout
        N rows, ascending in ``order``.
    extra : tuple of Tensor, each (N, D)
        Further features of the same tokens that enter deeper (deepstack levels); usually empty.
    """

    features: Tensor
    layout: TokenLayout
    extra: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.features.shape[0]

    def select(self, index: Tensor) -> VisualTokens:
        """Rows ``index`` (int64 indices or a boolean mask), in that order."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return VisualTokens(
            self.features.index_select(0, index),
            self.layout.select(index),
            tuple(level.index_select(0, index) for level in self.extra),
        )

    def items(self) -> list[tuple[int, Tensor]]:
        """``(item, indices)`` of every image, in the order of the prompt."""
        ids = self.layout.item
        return [(i, (ids == i).nonzero().flatten()) for i in torch.unique(ids).tolist()]
