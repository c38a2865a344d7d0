"""The visual tokens of images and videos from their sizes, for every family.

A blank image passes through the family's processor, whose output depends on sizes where it counts.
"""

from __future__ import annotations

from typing import Any

from PIL import Image

from vlmfast.core.counting import ImageLayout, VideoLayout
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaError
from vlmfast.media.images import check_size
from vlmfast.media.info import MAX_ASPECT, MAX_PIXELS
from vlmfast.models.base import Adapter

from .request import messages_of, render, tensors_of


def image_layout(adapter: Adapter, size: tuple[int, int], alone: bool) -> ImageLayout:
    """As `VLM.image_layout`."""
    return _layouts(adapter, images=[blank(size)] * (1 if alone else 2))[0]


def video_layout(
    adapter: Adapter, size: tuple[int, int], frames: int, fps: float | None
) -> VideoLayout:
    """As `VLM.video_layout`."""
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        raise MediaError(f"frames={frames!r} must be a whole number from 1")
    return VideoLayout(tuple(_layouts(adapter, video=[blank(size)] * frames, fps=fps)))


def _layouts(adapter: Adapter, **media: Any) -> list[ImageLayout]:
    """Of each image, or of each entry of a video in `Adapter.items`."""
    prompt = render(adapter, messages_of("?", **media), Recipe())
    tensors = tensors_of(adapter, prompt)
    items = adapter.items(tensors, prompt.sizes, prompt.frames)
    layouts = adapter.layouts(tensors, items)
    return [ImageLayout.of(*of) for of in zip(items, (x.to("cpu") for x in layouts), strict=True)]


def blank(size: tuple[int, int]) -> Image.Image:
    """An image of a height and a width, if such an image may be read."""
    whole = [isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in size]
    if whole != [True, True]:
        raise MediaError(f"size={size!r} must be a height and a width in pixels, from 1")
    height, width = size
    check_size(f"size={size!r}", width, height, MAX_PIXELS, MAX_ASPECT)
    return Image.new("RGB", (width, height), (1, 2, 3))
