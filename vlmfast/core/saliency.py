"""Saliency: how much each visual token mattered to the vision tower.

Papers on visual-token reduction mostly rank patches by the attention of a CLS token, which CLIP has
and most later towers lack. A stage therefore requests saliency (`SaliencyRequest`), and the model's
adapter returns what its tower has (`Saliency`), with the source:

``cls``
    The attention of the CLS token to each patch.
``received``
    The attention that each patch receives from all patches, mean over the query rows. In towers
    with window attention, of a block that attends to the whole image. This is what the authors of
    VisionZip (arXiv 2412.04467) and FlashVID (arXiv 2602.08024) use on SigLIP and Qwen-VL.
``norm``
    The L2 norm of the features that enter the projector, for towers that do not end in attention.

Where several patches make one visual token, it gets the sum of their attention, or their mean norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

SOURCES = ("cls", "received", "norm")
BLOCKS = ("first", "features", "last")


@dataclass(frozen=True)
class SaliencyRequest:
    """Saliency that a stage wants to read.

    Parameters
    ----------
    block : {"first", "features", "last"}
        Of the first block of the tower, of the one whose output goes to the projector, or of the
        last. Where a source is not available, the nearest block that has it is used.
    source : {"auto", "cls", "received", "norm"}
        ``auto``: the first of the three that the tower has.
    keys : bool
        Also the keys of the same block, mean over heads; for ``norm`` the features.
    wide : bool
        With ``keys``: those of all heads concatenated, instead of their mean.
    jitter : int
        Mean of the saliency over the image and this many jittered views of it, each of which costs
        a forward pass of the tower. Keys are those of the image.
    """

    block: str = "features"
    source: str = "auto"
    keys: bool = False
    wide: bool = False
    jitter: int = 0

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"SaliencyRequest: block={self.block!r} must be one of {BLOCKS}")
        if self.source not in ("auto", *SOURCES):
            raise ValueError(f"SaliencyRequest: source={self.source!r} must be one of {SOURCES}")

    @property
    def key(self) -> str:
        """The key in `VisionStats.saliency`."""
        width = ("mean", "wide")[self.wide] if self.keys else "none"
        views = f"/{self.jitter}" if self.jitter else ""
        return f"{self.block}/{self.source}/{width}{views}"


@dataclass(frozen=True, eq=False)
class Saliency:
    """Saliency of the visual tokens of one image, video frame or time step.

    Parameters
    ----------
    source : {"cls", "received", "norm"}
    rows : Tensor, float32, (V, H, N)
        Of V views (the whole image first, then its crops) of N tokens each, by attention head.
        ``norm`` has one head. Not negative.
    keys : Tensor, float32, (V, N, D), optional
        Where they were requested.
    """

    source: str
    rows: Tensor
    keys: Tensor | None = None


def to_tokens(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Values of the patches of square views as those of the visual tokens that they become.

    Parameters
    ----------
    patches : Tensor, (..., P)
        In raster order.
    grid : (int, int)
        Rows and columns of visual tokens.

    Returns
    -------
    Tensor, (..., N)
        The mean over each token's patches; where these do not tile the view, bilinear
        interpolation, as LLaVA-OneVision pools its frames.
    """
    side = round(patches.shape[-1] ** 0.5)
    if (side, side) == grid:
        return patches
    if side % grid[0] == 0 and side % grid[1] == 0:
        cells = patches.unflatten(-1, (grid[0], side // grid[0], grid[1], side // grid[1]))
        return cells.mean(dim=(-3, -1)).flatten(-2)
    flat = patches.flatten(0, -2)[:, None].unflatten(-1, (side, side))
    return interpolate(flat, size=grid, mode="bilinear").view(*patches.shape[:-1], -1)


def window_order(rows: int, columns: int, window: int) -> Tensor:
    """Raster indices of a grid in the order of its windows: int64, (rows * columns,).

    Windows of ``window x window`` in raster order, each in raster order inside; those at the right
    and lower edge are smaller.
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    across = -(-columns // window)
    place = (y // window * across + x // window) * window**2 + y % window * window + x % window
    return place.flatten().argsort()
