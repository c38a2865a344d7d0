"""Types of what may be passed as ``images=`` and ``video=``.

Imports Pillow, NumPy and torch: other modules import this one for type checking alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
from PIL import Image
from torch import Tensor

from .info import VideoFrames

ImageLike: TypeAlias = (
    str
    | os.PathLike[str]
    | bytes
    | bytearray
    | memoryview
    | Image.Image
    | npt.NDArray[Any]
    | Tensor
)
"""An image: a path, an ``http(s)://`` or ``data:`` URL, the bytes of a file, a PIL image, a NumPy
array or a torch tensor; see `vlmfast.media.load_image`."""

VideoLike: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | Sequence[ImageLike] | VideoFrames
)
"""A video: a path, the bytes of a file, a list or tuple of frames, or frames with their times as
`vlmfast.media.load_video` returns them."""
