"""The number of visual tokens before and after a stage, as far as sizes determine it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vlmfast.errors import RecipeError

from .layout import Kind, TokenLayout
from .statistics import ItemGeometry

MOST = 8192  # tokens of a video that are compared with each other


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """The visual tokens of one image before anything is dropped, which its size determines.

    Parameters
    ----------
    geometry : ItemGeometry
        As of the only image of a prompt.
    layout : TokenLayout
        Its N tokens; ``order`` counts from 0.
    """

    geometry: ItemGeometry
    layout: TokenLayout

    @staticmethod
    def of(geometry: ItemGeometry, layout: TokenLayout) -> ImageLayout:
        """One whose tokens count from 0, and of which the patches of a frame are of a video."""
        kind = layout.kind
        if geometry.video >= 0:
            kind = kind.masked_fill(kind == Kind.IMAGE, int(Kind.VIDEO))
        return ImageLayout(geometry, layout.replace(kind=kind, order=torch.arange(len(layout))))

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(frozen=True, eq=False)
class VideoLayout:
    """The visual tokens of one video before anything is dropped.

    Parameters
    ----------
    frames : tuple of ImageLayout
        Its frames, or steps where the family joins frames in pairs.
    """

    frames: tuple[ImageLayout, ...]

    def __len__(self) -> int:
        return sum(map(len, self.frames))


@dataclass(frozen=True, eq=False)
class TokenCount:
    """How many tokens are left of an image, or of frames of a video, before or after a stage.

    Parameters
    ----------
    total : int
    least, most : int
        Bounds on how many of them show a part of the image; the others are newlines, and CLS
        tokens that were kept.
    image : ImageLayout
        Before any stage; of several frames, the first.
    full : bool
        Whether all tokens of ``image`` are left, so that their places are known too.
    frames : int
        Of a video, of which only the sum is known; an image is one.
    """

    total: int
    least: int
    most: int
    image: ImageLayout
    full: bool = True
    frames: int = 1

    def __len__(self) -> int:
        return self.total

    @staticmethod
    def of(image: ImageLayout) -> TokenCount:
        """All tokens of an image."""
        patches = int(image.layout.patches.sum())
        return TokenCount(len(image), patches, patches, image)

    @staticmethod
    def joined(parts: Sequence[TokenCount]) -> TokenCount:
        """The sum of frames that a stage reduces together."""
        total, least, most, frames = (
            sum(getattr(part, name) for part in parts)
            for name in ("total", "least", "most", "frames")
        )
        return TokenCount(total, least, most, parts[0].image, all(p.full for p in parts), frames)

    def left(self, total: int, least: int | None = None, most: int | None = None) -> TokenCount:
        """``total`` tokens, of which ``least`` to ``most`` are patches; by default all of them."""
        least = total if least is None else max(least, 0)
        most = total if most is None else most
        return replace(self, total=total, least=least, most=most, full=False)

    def at_most(self, k: int, name: str) -> int:
        """``k``, or all patches if there are fewer.

        Raises
        ------
        RecipeError
            If it is not known whether there are fewer.
        """
        if k > self.least != self.most:
            raise inexact(name, "how many patches the stages before it keep")
        return min(k, self.least)


def runs(videos: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The group of each image or frame: frames of one video are reduced together.

    A video of more than `MOST` tokens is split into runs of frames of at most `MOST` tokens.

    Parameters
    ----------
    videos : sequence of int
        Of each image the video that it is a frame of, -1 for none.
    sizes : sequence of int
        Its tokens.
    """
    run = size = 0
    last, found = -1, []
    for video, tokens in zip(videos, sizes, strict=True):
        size = size + tokens if video == last >= 0 else tokens
        if video != last or video < 0 or size > MOST:
            run, size = run + 1, tokens
        found.append(run)
        last = video
    return found


def inexact(name: str, what: str) -> RecipeError:
    """The error for a number of tokens that depends on more than sizes."""
    return RecipeError(
        f"{name}: the number of tokens that it keeps depends on {what}, not on sizes alone; "
        "'divprune:budget=0.2' has an exact count"
    )


def newlines(layout: TokenLayout) -> int:
    """Number of newlines."""
    return int((layout.kind == Kind.NEWLINE).sum())


def existing(image: ImageLayout) -> torch.Tensor:
    """Which patches of each view are in the prompt: bool, (views, rows, columns)."""
    (h, w), (first, last) = image.geometry.patches, image.geometry.views
    layout = image.layout.select(image.layout.patches)
    exists = torch.zeros(last - first, h, w, dtype=torch.bool, device=layout.device)
    exists[layout.tile.long(), layout.grid[:, 1].long(), layout.grid[:, 2].long()] = True
    return exists
