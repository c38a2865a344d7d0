"""Reads images and videos as RGB; anything else raises `MediaError`."""

from .info import MAX_ASPECT, MAX_PIXELS, MAX_VIDEO_PIXELS, FrameTimes, VideoFrames, VideoInfo
from .loading import (
    OpenVideo,
    kind_of,
    load_image,
    load_video,
    open_video,
    probe_video,
)

__all__ = [
    "MAX_ASPECT",
    "MAX_PIXELS",
    "MAX_VIDEO_PIXELS",
    "FrameTimes",
    "OpenVideo",
    "VideoFrames",
    "VideoInfo",
    "kind_of",
    "load_image",
    "load_video",
    "open_video",
    "probe_video",
]
