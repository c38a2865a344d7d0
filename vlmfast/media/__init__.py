"""Reads images and videos as RGB; anything else raises `MediaError`."""

from .info import MAX_ASPECT, MAX_PIXELS, MAX_VIDEO_PIXELS, VideoInfo
from .loading import (
    OpenVideo,
    VideoFrames,
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
    "OpenVideo",
    "VideoFrames",
    "VideoInfo",
    "kind_of",
    "load_image",
    "load_video",
    "open_video",
    "probe_video",
]
