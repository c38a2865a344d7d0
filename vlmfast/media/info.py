"""Properties of videos, frames chosen from them, and size limits of images and videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from vlmfast.errors import MediaError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 89_478_485
"""Largest image that is decoded by default: Pillow's own limit, 256 MiB of RGB."""
MAX_ASPECT = 100
"""Largest ratio of the sides of an image. Image processors scale the *shorter* side to the vision
encoder's size (336 for LLaVA-1.5), so that a strip of ratio r becomes 336 * 336 * r pixels: at
100 that is 11 Mpx, at 1000 it would be 113 Mpx, however small the file was."""
MAX_VIDEO_PIXELS = 1 << 30
"""Most pixels of frames that one video may take: 3 GiB of RGB, 517 frames of 1920x1080."""

_MAX_SECONDS = 1e9  # 31 years; the arithmetic of processors and positions ends somewhere above


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video before its frames are chosen.

    Attributes
    ----------
    frames : int
        Number of frames, as counted, not as stated in the header.
    fps : float
        Average frame rate. A list of frames without times counts as one frame per second.
    duration_s : float
        Seconds from the beginning to the end of the last frame; of a list with `timestamps` to its
        last frame, since it is not known how long that one is shown.
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


@dataclass(frozen=True)
class FrameTimes:
    """Which frames of a video were chosen and when they are shown: what a prompt tells of them.

    Attributes
    ----------
    frames : int
        Number of frames of the whole video.
    fps : float
        Its average frame rate.
    duration_s : float
        Its length in seconds.
    indices : tuple of int
        The chosen frames.
    timestamps_s : tuple of float
        Seconds at which each of them is shown.

    Raises
    ------
    MediaError
        If there are no frames, or these numbers are out of order or range.
    """

    frames: int
    fps: float
    duration_s: float
    indices: tuple[int, ...]
    timestamps_s: tuple[float, ...]

    def __post_init__(self) -> None:
        at, shown = self.indices, self.timestamps_s
        if not at or len(at) != len(shown):
            raise MediaError(
                f"{len(at)} indices and {len(shown)} timestamps_s: give one of both for each frame"
            )
        if at[0] < 0 or at[-1] >= self.frames or any(a >= b for a, b in pairwise(at)):
            raise MediaError(f"indices: must ascend from 0 to at most {self.frames - 1}")
        if not (0 < self.fps < math.inf and 0 <= self.duration_s <= _MAX_SECONDS):
            raise MediaError(
                f"a video of {self.duration_s:g} s at fps={self.fps:g}: fps must be a finite "
                f"number above 0, and a video at most {_MAX_SECONDS:g} s long"
            )
        if not 0 <= shown[0] <= shown[-1] <= self.duration_s or any(
            not a <= b for a, b in pairwise(shown)
        ):
            raise MediaError(
                f"timestamps_s: must ascend from 0 to at most duration_s={self.duration_s:g}"
            )

    @classmethod
    def of(cls, info: VideoInfo, indices: list[int], timestamps_s: list[float]) -> FrameTimes:
        own = tuple(indices), tuple(timestamps_s)
        return cls(info.frames, info.fps, info.duration_s, *own)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class VideoFrames:
    """Frames chosen from a video, with their times; ``video=`` takes it wherever it takes a file.

    Attributes
    ----------
    frames : list of PIL.Image.Image
        RGB, all of one size.
    indices : list[int]
        Their indices in the video, ascending, without duplicates.
    timestamps_s : list[float]
        Seconds after the video's first frame at which each is shown.
    info : VideoInfo
        The whole video, from which they were chosen.

    Raises
    ------
    MediaError
        If there are no frames, not one index and one time for each, or these are not in order.
    """

    frames: list[Image.Image] = field(repr=False)
    indices: list[int]
    timestamps_s: list[float]
    info: VideoInfo

    def __post_init__(self) -> None:
        if len(self.times) != len(self.frames):
            raise MediaError(
                f"{len(self.indices)} indices for {len(self.frames)} frames: give one for each"
            )

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Image.Image:
        return self.frames[index]

    def __iter__(self) -> Iterator[Image.Image]:
        return iter(self.frames)

    @property
    def times(self) -> FrameTimes:
        """Without the frames."""
        return FrameTimes.of(self.info, self.indices, self.timestamps_s)
