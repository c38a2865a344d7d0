"""The origin of every token of a prompt.

A `TokenLayout` accompanies the features of a sequence. Reducers and caches read from it which
tokens are visual, which image and tile they belong to and their position in it. Code that selects
rows of the features selects the same rows of the layout.
"""

from __future__ import annotations

import functools
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


_KNOWN = ("visuals", "run", "text_start", "on_host")  # what the host may know of a layout


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

    @functools.cached_property
    def visuals(self) -> int:
        """How many `visual` rows there are: read from the device, unless it was `counted`."""
        return int(self.visual.sum())

    @functools.cached_property
    def text_start(self) -> int:
        """The first row after the last `visual` one, read once."""
        if not self.visuals:
            return 0
        if self.run is not None:
            return self.run + self.visuals
        rows = torch.arange(1, len(self) + 1, device=self.device)
        return int((rows * self.visual).max())

    @property
    def run(self) -> int | None:
        """The first `visual` row, where the host knows that they all follow each other."""
        return vars(self).get("run")

    @functools.cached_property
    def on_host(self) -> Tensor:
        """Tensor, int32, (6, S): kind, item, tile, view, y and x of the rows, read once."""
        _, y, x = self.grid.unbind(1)
        return torch.stack([self.kind.int(), self.item, self.tile, self.view, y, x]).cpu()

    def counted(self, visuals: int, run: int | None = None) -> TokenLayout:
        """This layout, of which the host knows how many rows are visual, and perhaps `run`."""
        vars(self).update(visuals=visuals, run=run)
        return self

    @property
    def is_seen(self) -> bool:
        """Whether `on_host` is known without reading the device."""
        return "on_host" in vars(self)

    def seen(self, on_host: Tensor) -> TokenLayout:
        """This layout, whose `on_host` is known."""
        vars(self)["on_host"] = on_host
        return self

    def visual_rows(self) -> Tensor:
        """Indices of the `visual` rows, int64, (`visuals`,), ascending."""
        return marked_rows(self.visual, self.visuals)

    def patch_rows(self) -> Tensor:
        """Indices of the rows that are `patches`, int64, ascending."""
        return marked_rows(self.patches, int(self.patches_on_host.sum()))

    @property
    def patches_on_host(self) -> Tensor:
        """`patches` on the host."""
        kinds = self.on_host[0]
        return (kinds == Kind.IMAGE) | (kinds == Kind.VIDEO)

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
        made = replace(self, **changes)
        moved = {"kind", "item", "tile", "view", "grid"} & changes.keys()
        return made if moved else made._known_from(self)

    def to(self, device: torch.device | str) -> TokenLayout:
        parts = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return TokenLayout(**parts)._known_from(self)

    def _known_from(self, other: TokenLayout) -> TokenLayout:
        """This layout, with what the host knows of another one with rows of the same kinds."""
        known = vars(other)
        vars(self).update({key: known[key] for key in _KNOWN if key in known})
        return self

    @staticmethod
    def cat(layouts: list[TokenLayout]) -> TokenLayout:
        """Rows of all ``layouts``, one after another."""
        made = TokenLayout(
            **{
                f.name: torch.cat(
                    [getattr(layout, f.name) for layout in layouts],
                    dim=1 if f.name == "position" else 0,
                )
                for f in fields(TokenLayout)
            }
        )
        if all(layout.is_seen for layout in layouts):
            made.seen(torch.cat([layout.on_host for layout in layouts], dim=1))
        return made

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
        ).counted(0)


def marked_rows(mask: Tensor, count: int | None = None) -> Tensor:
    """Indices that a mask marks, as ``nonzero`` gives them.

    Parameters
    ----------
    mask : Tensor, bool, (N,)
    count : int, optional
        How many rows it marks, where the host knows it; otherwise the host waits for the device.

    Returns
    -------
    Tensor, int64, (count,)
        Ascending.
    """
    if count is None:
        return mask.nonzero().flatten()
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


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
            index = marked_rows(index)
        return VisualTokens(
            self.features.index_select(0, index),
            self.layout.select(index),
            tuple(level.index_select(0, index) for level in self.extra),
        )

    def items(self) -> list[tuple[int, Tensor]]:
        """``(item, indices)`` of every image, in the order of the prompt."""
        ids, own = self.layout.on_host[1], self.layout.item
        found = ids.unique().tolist()
        if len(found) == 1:
            return [(found[0], torch.arange(len(self), device=own.device))]
        return [(i, marked_rows(own == i, int((ids == i).sum()))) for i in found]

    def patches(self) -> VisualTokens:
        """The tokens that show a part of an image."""
        return self.marked(self.layout.patches, self.layout.patches_on_host)

    def marked(self, mask: Tensor, known: Tensor) -> VisualTokens:
        """The tokens that a mask marks, bool, (N,), which is ``known`` on the host."""
        tokens = self.select(marked_rows(mask, int(known.sum())))
        tokens.layout.seen(self.layout.on_host[:, known])
        return tokens

    def parts(self) -> list[tuple[int, VisualTokens]]:
        """``(item, tokens)`` of every image, in the order of the prompt."""
        items, known = self.items(), self.layout.on_host
        if len(items) == 1:
            return [(items[0][0], self)]
        found = [(item, self.select(index)) for item, index in items]
        for item, tokens in found:
            tokens.layout.seen(known[:, known[1] == item])
        return found
