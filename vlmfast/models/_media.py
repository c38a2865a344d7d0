"""Images and videos within a processor's output for a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError, check_memory, one_line

Frames = Sequence[tuple]  # of each image: its video or -1, its index, the number of frames
Items = tuple[ItemGeometry, ...]  # the images and frames of a prompt
Size = tuple[int, int]
Sizes = list[Size]  # heights and widths in pixels
Tensors = dict[str, Tensor]  # a processor's output, or a part of it


@dataclass(frozen=True)
class Media:
    """An image or a video within a batch.

    Parameters
    ----------
    tokens : int
        Number of its placeholders.
    tensors : dict of str to Tensor
        Its part of the processor's output for all images and videos.
    size : (int, int)
        Height and width in pixels, of each frame.
    frames : int
        Entries of a video in `Adapter.items`; 0 for an image.
    tiles : (int, int), optional
        Rows and columns of crops, if ``size`` does not determine them.
    """

    tokens: int
    tensors: Tensors
    size: tuple[int, int]
    frames: int = 0
    tiles: tuple[int, int] | None = None


def runs(ids: Tensor, token: int) -> list[tuple[int, int]]:
    """First index and length of each unbroken run of ``token`` in ``ids`` (S,)."""
    here = (ids == token).int()
    edges = here.diff(prepend=here.new_zeros(1), append=here.new_zeros(1))
    first, stop = (edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten()
    return list(zip(first.tolist(), (stop - first).tolist(), strict=True))


def view_size(processor: Any) -> tuple[int, int]:
    """Height and width in pixels of the views that a processor makes of a square image.

    Raises
    ------
    ModelError
        If it cannot read one.
    """
    from PIL import Image

    try:
        views = processor.image_processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
        height, width = views["pixel_values"].shape[-2:]
    except Exception as error:  # whatever its code raises with settings that do not fit
        check_memory(error)
        name = type(processor).__name__
        raise ModelError(f"{name} makes no view of an image: {one_line(error)}") from error
    return height, width


def square_views(sizes: Sizes, side: int) -> Items:
    """Images with one view of ``side`` x ``side`` patches each."""
    return tiled_views([(size, (0, 0), 1) for size in sizes], side)


def tiled_views(images: Iterable[tuple[Size, Size, int]], side: int) -> Items:
    """Images with several such views: size, rows and columns of crops, number of views of each."""
    items, first = [], 0
    for size, tiles, count in images:
        items.append(ItemGeometry(size, tiles, (first, first + count), (side, side)))
        first += count
    return tuple(items)


def without_placeholders(pixels: Tensor | None, first: int) -> list[Media]:
    """The views (V, C, H, W) from ``first`` on, as an image that no prompt contains."""
    if pixels is None or first >= len(pixels):
        return []
    return [Media(0, {"pixel_values": pixels[first:]}, (pixels.shape[-2], pixels.shape[-1]))]


def tiling(views: Tensor) -> tuple[int, int]:
    """Rows and columns of the crops of an image (V, C, H, W), whose last view is the whole image.

    Processors may not report them: 1 x 6, 2 x 3, 3 x 2 and 6 x 1 are all six crops. The arrangement
    that looks most like the whole image is returned.
    """
    crops, whole = views[:-1].float(), views[-1:].float()
    n = len(crops)

    def distance(down: int) -> float:
        rows = [torch.cat(list(row), dim=-1) for row in crops.split(n // down)]
        canvas = torch.cat(rows, dim=-2)[None]
        shown = torch.nn.functional.interpolate(
            canvas, size=whole.shape[-2:], mode="bilinear", antialias=True
        )
        return float((shown - whole).square().mean())

    down = min((d for d in range(1, n + 1) if n % d == 0), key=distance)
    return down, n // down
