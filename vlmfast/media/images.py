"""Converts images of any file format, mode, shape or dtype to upright RGB."""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING, Any, BinaryIO

from vlmfast.errors import MediaError, check_memory

from .sources import short, sniffed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image
    from torch import Tensor

_ARRAY_SHAPES = "HxW, HxWx1, HxWx3 or HxWx4"


def image_name(image: Image.Image) -> str:
    """Return the name of a PIL image for messages: its file name, if known."""
    filename = getattr(image, "filename", "")
    if filename:
        return short(os.fsdecode(filename))
    return f"PIL image {image.width}x{image.height} {image.mode}"


def check_size(
    name: str, width: int, height: int, max_pixels: int | None, max_aspect: float | None
) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"{name}: has no pixels ({width}x{height})")
    if max_pixels is not None and width * height > max_pixels:
        raise MediaError(
            f"{name}: is too large: {width}x{height} is {width * height} pixels, "
            f"the limit is {max_pixels}"
        )
    if max_aspect is not None and max(width, height) > max_aspect * min(width, height):
        raise MediaError(
            f"{name}: is too narrow: {width}x{height} has sides in a ratio above "
            f"{max_aspect:g}:1; crop or split it"
        )


def open_image(name: str, file: BinaryIO) -> Image.Image:
    """Read an image's header."""
    from PIL import Image

    kind, fmt = sniffed(name, file, "an image")
    if kind == "video":
        raise MediaError(f"{name}: is a video ({fmt}), not an image")
    Image.init()
    if fmt not in Image.OPEN:
        hint = "; pillow-heif reads it once registered" if fmt == "HEIF" else ""
        raise MediaError(f"{name}: is {fmt}, which this Pillow does not read{hint}")
    # The plugin is called instead of Image.open, which guesses by the name, tries formats that run
    # other programs (EPS), and applies its own size limit before ours.
    try:
        file.seek(0)
        return Image.OPEN[fmt][0](file, "")
    except Exception as error:
        check_memory(error)
        raise MediaError(f"{name}: cannot be read as {fmt}: {_reason(error)}") from error


def unread(name: str, image: Image.Image) -> Image.Image:
    """Return a copy of a PNG with a transparent colour, so that `image` can be read again.

    `load_pixels` needs one that is not decoded. Other images are returned as they are.
    """
    from PIL.PngImagePlugin import PngImageFile

    if "transparency" not in image.info:
        return image
    try:
        if (png := _png(image)) is None:
            return image
        copy = PngImageFile(io.BytesIO(png[0]))
    except Exception as error:
        check_memory(error)
        raise MediaError(f"{name}: cannot be read as PNG: {_reason(error)}") from error
    copy.info = dict(image.info)
    return copy


def load_pixels(name: str, image: Image.Image) -> Image.Image | None:
    """Decode all pixels of an image, and return a mask of the opaque ones if Pillow cannot."""
    try:
        opaque = _opaque(image)
        image.load()
        return opaque
    except Exception as error:
        check_memory(error)
        raise MediaError(f"{name}: is truncated or damaged: {_reason(error)}") from error


def _opaque(image: Image.Image) -> Image.Image | None:
    """Return a mask of the pixels that do not have the transparent colour of an unread PNG.

    The file states this colour with as many bits as its pixels; Pillow compares it with 8 bits. The
    result is None where both are the same, or there is no such colour.
    """
    import numpy as np
    from PIL import Image
    from PIL.PngImagePlugin import PngImageFile

    key = image.info.get("transparency")
    if not isinstance(key, int | tuple) or (png := _png(image)) is None:
        return None
    data, mode = png
    step = {"1": 1, "L;2": 85, "L;4": 17, "I;16B": 1, "RGB;16B": 1}.get(mode)
    if step is None:
        return None

    def decoded(mode: str) -> npt.NDArray[Any]:
        file = PngImageFile(io.BytesIO(data))
        file.tile = [file.tile[0]._replace(args=mode)]
        return np.asarray(file)

    if isinstance(key, int):
        return Image.fromarray(decoded(mode) != (bool(key) if mode == "1" else key * step))
    differs = np.zeros(image.size[::-1], dtype=bool)
    for part, shift in ((mode, 8), ("RGB;16L", 0)):  # Pillow keeps one byte of each value
        pixels = decoded(part)
        for channel, value in enumerate(key):
            differs |= pixels[..., channel] != (value >> shift & 255)
    return Image.fromarray(differs)


def _png(image: Image.Image) -> tuple[bytes, str] | None:
    """Return the file of a PNG that is not decoded yet, and the mode of its pixels there."""
    from PIL.PngImagePlugin import PngImageFile

    if not (isinstance(image, PngImageFile) and image.tile and image.fp) or image.tell():
        return None
    at = image.fp.tell()
    image.fp.seek(0)
    data = image.fp.read()
    image.fp.seek(at)
    return data, str(image.tile[0][3])


def _reason(error: Exception) -> str:
    return short(str(error).strip().partition("\n")[0]) or type(error).__name__


def upright_rgb(name: str, image: Image.Image, opaque: Image.Image | None = None) -> Image.Image:
    """Convert a decoded image; `opaque` is what `load_pixels` returned."""
    from PIL import Image

    try:
        orientation = image.getexif().get(0x0112)
    except Exception as error:  # unreadable metadata has no orientation
        check_memory(error)
        orientation = None
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(orientation or 0)
    try:
        rgb = _to_rgb(name, image, opaque)
        rgb = rgb if turn is None else rgb.transpose(turn)
    except MediaError:
        raise
    except Exception as error:
        check_memory(error)
        raise MediaError(f"{name}: mode {image.mode} is not supported: {_reason(error)}") from error
    # Otherwise the next reader would apply the orientation again.
    rgb.info = {}
    return rgb


def _to_rgb(name: str, image: Image.Image, opaque: Image.Image | None) -> Image.Image:
    """Convert any mode to a new RGB image."""
    import numpy as np
    from PIL import Image

    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65535:
            raise MediaError(
                f"{name}: mode {image.mode} has values from {low} to {high}; "
                "only 0 to 65535 are supported"
            )
        rgb = Image.fromarray(_eight_bits(values)).convert("RGB")
        if opaque is None and isinstance(key := image.info.get("transparency"), int):
            opaque = Image.fromarray(values != key)
        return rgb if opaque is None else _over_white(rgb, opaque)
    if image.mode == "F":
        return Image.fromarray(_unit_to_bytes(name, np.asarray(image))).convert("RGB")
    if opaque is not None:
        return _over_white(image.convert("RGB"), opaque)
    if image.has_transparency_data:
        return on_white(image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA"))
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def on_white(rgba: Image.Image) -> Image.Image:
    """Return an RGBA image as RGB, on a white background."""
    return _over_white(rgba, rgba.getchannel("A"))


def _over_white(image: Image.Image, opaque: Image.Image) -> Image.Image:
    from PIL import Image

    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=opaque)
    return white


def _eight_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Scale 0..65535 to 0..255, rounded (65535 = 255 * 257)."""
    return ((values.astype("uint32") + 128) // 257).astype("uint8")


def _unit_to_bytes(name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    import numpy as np

    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise MediaError(f"{name}: contains NaN or infinite values")
    if low < -1e-3 or high > 1 + 1e-3:  # tolerance for half precision
        raise MediaError(
            f"{name}: has values from {low:g} to {high:g}; floats must be in [0, 1] "
            "(0..255 as uint8; undo a normalisation)"
        )
    return np.rint(np.clip(values.astype("float32"), 0, 1) * 255).astype("uint8")


def from_tensor(name: str, tensor: Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to NumPy, channels last."""
    try:
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        array = tensor.numpy()
    except Exception as error:
        check_memory(error)
        raise MediaError(f"{name}: cannot be read: {_reason(error)}") from error
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        return array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise MediaError(f"{name}: must be CxHxW or HxWxC with 1, 3 or 4 channels")
    return array


def from_array(
    name: str, array: npt.NDArray[Any], max_pixels: int | None, max_aspect: float | None
) -> Image.Image:
    import numpy as np
    from PIL import Image

    shape = array.shape
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        hint = ""
        if array.ndim == 4:
            hint = "; for a batch or a video, pass list(array)"
        elif array.ndim == 3 and shape[0] in (1, 3, 4):
            hint = "; its channels come first: transpose(1, 2, 0)"
        raise MediaError(f"{name}: must be {_ARRAY_SHAPES}{hint}")
    check_size(name, shape[1], shape[0], max_pixels, max_aspect)
    kind, width = array.dtype.kind, array.dtype.itemsize
    if kind == "b":
        array = array.astype("uint8") * 255
    elif kind == "f":
        array = _unit_to_bytes(name, array)
    elif kind == "u" and width == 2:
        array = _eight_bits(array)
    elif not (kind == "u" and width == 1):
        raise MediaError(f"{name}: must be uint8, uint16, bool or floats in [0, 1]")
    array = np.ascontiguousarray(array)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and shape[2] == 1 else array)
