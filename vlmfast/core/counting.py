"""The number of an image's tokens before and after a stage, as far as its size determines it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vlmfast.errors import RecipeError

from .layout import Kind, TokenLayout
from .statistics import ItemGeometry


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

    def __len__(self) -> int:
        return len(self.layout)


@dataclass(frozen=True, eq=False)
class TokenCount:
    """How many tokens of an image are left, before or after a stage.

    Parameters
    ----------
    total : int
    least, most : int
        Bounds on how many of them show a part of the image; the others are newlines, and CLS
        tokens that were kept.
    image : ImageLayout
        Before any stage.
    full : bool
        Whether all tokens of ``image`` are left, so that their places are known too.
    """

    total: int
    least: int
    most: int
    image: ImageLayout
    full: bool = True

    def __len__(self) -> int:
        return self.total

    @staticmethod
    def of(image: ImageLayout) -> TokenCount:
        """All tokens of an image."""
        patches = int(image.layout.patches.sum())
        return TokenCount(len(image), patches, patches, image)

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


def inexact(name: str, what: str) -> RecipeError:
    """The error for a number of tokens that depends on the content of an image."""
    return RecipeError(
        f"{name}: the number of tokens that it keeps depends on {what}, not on the size of the "
        "image alone; 'divprune:budget=0.2' has an exact count"
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
