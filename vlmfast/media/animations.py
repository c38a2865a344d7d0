"""Reads animated images (GIF, WebP, PNG, AVIF) as videos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from vlmfast.errors import MediaError

from .decoders import Reader
from .images import load_pixels, open_image, upright_rgb
from .info import MAX_PIXELS

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")
# As browsers do: frames of at most 10 ms, or without a duration, are shown for 100.
_SHORTEST_MS, _USUAL_MS = 10, 100


class AnimationReader(Reader):
    """Frames of an animated image by Pillow, each complete and composited on white.

    Parameters
    ----------
    name : str
        Name of the file in error messages.
    file : BinaryIO
        An image, seekable; must stay open while the reader is used.
    max_pixels : int, optional
        Of a frame; by default as for images.

    Raises
    ------
    MediaError
        If the image is not animated, or it cannot be decoded.
    """

    def __init__(self, name: str, file: BinaryIO, max_pixels: int | None = None) -> None:
        self.name, self._max_pixels = name, max_pixels or MAX_PIXELS
        image: Any = open_image(name, file)
        self._image = image
        # The pages of a TIFF and the views of an MPO have no times.
        if image.format not in _FORMATS or not image.is_animated:
            raise MediaError(f"{name}: is an image ({image.format}), not a video")
        self._check_size(*image.size)
        # A PNG may have an image for programs that show no animations.
        self._first = int(bool(getattr(image, "default_image", False)))
        starts, clock, lengths = [], 0.0, []
        with self._decoding():
            for index in range(self._first, image.n_frames):
                image.seek(index)
                load_pixels(name, image)  # some plugins know the duration only then
                length = image.info.get("duration") or 0
                lengths.append(length if length > _SHORTEST_MS else _USUAL_MS)
                starts.append(clock)
                clock += lengths[-1] / 1000
            super().__init__(name, starts, lengths[-1] / 1000, len(starts) / clock, 0.0)
            self.width, self.height = self.read([0])[0].size

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""

    def read(self, indices: list[int]) -> list[Image.Image]:
        """Decode the frames at ascending `indices`."""
        images = []
        with self._decoding():
            for index in indices:
                self._image.seek(self._first + index)
                opaque = load_pixels(self.name, self._image)
                images.append(upright_rgb(self.name, self._image, opaque))
        return images
