"""Properties of videos, and size limits of images and videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["MAX_ASPECT", "MAX_PIXELS", "MAX_VIDEO_PIXELS", "VideoInfo"]

MAX_PIXELS = 89_478_485
"""Largest image that is decoded by default: Pillow's own limit, 256 MiB of RGB."""
MAX_ASPECT = 100
"""Largest ratio of the sides of an image. Image processors scale the *shorter* side to the vision
encoder's size (336 for LLaVA-1.5), so that a strip of ratio r becomes 336 * 336 * r pixels: at
100 that is 11 Mpx, at 1000 it would be 113 Mpx, however small the file was."""
MAX_VIDEO_PIXELS = 1 << 30
"""Most pixels of frames that one video may take: 3 GiB of RGB, 517 frames of 1920x1080."""


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video before its frames are chosen.

    Attributes
    ----------
    frames : int
        Number of frames, as counted, not as stated in the header.
    fps : float
        Average frame rate. A list of frames counts as one frame per second.
    duration_s : float
        Seconds from the first frame to the end of the last.
    width, height : int
        Size of the frames, upright.
    read : callable, optional
        Maps ascending indices to RGB images, for choosing frames by their content. Available only
        while frames are chosen.
    """

    frames: int
    fps: float
    duration_s: float
    width: int
    height: int
    read: Callable[[list[int]], list[Image.Image]] | None = field(
        default=None, repr=False, compare=False
    )
