"""Opens sources of media: paths, URLs, ``data:`` URLs and bytes."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, TypeGuard
from urllib.parse import unquote_to_bytes

from vlmfast.errors import MediaError, MediaUnavailable, check_memory

from .containers import HEAD_BYTES, looks_like_text, sniff

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image
    from torch import Tensor

MAX_DOWNLOAD_BYTES = 64 << 20
WHITESPACE = b" \t\r\n\f\v"


class BoundedVideo(bytes):
    """The bytes of a video of which no frame may be larger than a number of pixels.

    Attributes
    ----------
    name : str
        Its name in messages.
    max_pixels : int
        Of a frame as it is decoded, whatever the header states.
    """

    name: str
    max_pixels: int

    def __new__(cls, data: bytes, name: str, max_pixels: int) -> Self:
        video = super().__new__(cls, data)
        video.name, video.max_pixels = name, max_pixels
        return video


def is_a(source: object, module: str, kind: str) -> bool:
    """Like isinstance, without importing: a module not yet imported has no instances."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(source, getattr(loaded, kind, ()))


def is_image(source: object) -> TypeGuard[Image.Image]:
    return is_a(source, "PIL.Image", "Image")


def is_array(source: object) -> TypeGuard[npt.NDArray[Any]]:
    return is_a(source, "numpy", "ndarray")


def is_tensor(source: object) -> TypeGuard[Tensor]:
    return is_a(source, "torch", "Tensor")


def is_url(source: object) -> TypeGuard[str]:
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def short(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def value(of: object) -> str:
    """An argument of any type, for messages: the beginning and the end of its ``repr``."""
    try:
        return short(repr(of))
    except ValueError:  # an int with more digits than Python prints
        return "a number of very many digits"


def shown(url: str) -> str:
    """A URL for messages: without user, password, query and fragment, which may be secret."""
    scheme, mark, rest = url.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        rest = "***@" + host.rpartition("@")[2] + rest[len(host) :]
    elif "@" in rest and not re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:\d*)?", host):
        rest = "***@" + rest.rpartition("@")[2]  # a password may contain one of these characters
    return short(scheme + mark + re.split(r"[?#]", rest, maxsplit=1)[0])


@contextlib.contextmanager
def opened(source: object, timeout_s: float = 20.0) -> Iterator[tuple[str, BinaryIO]]:
    """Open a path, URL or bytes as (name for messages, seekable file), not empty."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = source if isinstance(source, bytes) else bytes(source)
        name = source.name if isinstance(source, BoundedVideo) else f"bytes ({len(data)})"
    elif isinstance(source, str) and source[:5].lower() == "data:":
        name = f"data: URL ({len(source)} characters)"
        data = _decode_data_url(name, source)
    elif is_url(source):
        from .download import download

        name = shown(str(source))
        data = download(name, str(source), timeout_s, MAX_DOWNLOAD_BYTES)
    elif isinstance(source, (str, os.PathLike)):
        with _opened_path(os.fsdecode(source)) as opened:
            yield opened
        return
    else:
        raise MediaError(f"{type(source).__name__}: is not a supported source")
    if not data:
        raise MediaError(f"{name}: is empty")
    yield name, io.BytesIO(data)


@contextlib.contextmanager
def _opened_path(path: str) -> Iterator[tuple[str, BinaryIO]]:
    name = short(path) or "''"
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise MediaError(f"{name}: is a directory")
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may block
            raise MediaError(f"{name}: is not a regular file")
        if status.st_size == 0:
            raise MediaError(f"{name}: is empty")
        file = open(path, "rb")  # noqa: SIM115 - closed below, outside this try
    except OSError as error:
        check_memory(error)
        if (what := _no_path(path)) is not None:
            raise MediaError(f"{name}: {what}") from error
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if missing else f"cannot be opened: {error.strerror}"
        raise MediaUnavailable(f"{name}: {reason}") from error
    except MediaError:
        raise
    except ValueError as error:  # a null character
        raise MediaError(f"{name}: is not a path") from error
    with file:
        yield name, file


def _no_path(text: str) -> str | None:
    """What else a text is that names no file, None if it may be a path."""
    if kind := _in_base64(text[:HEAD_BYTES].encode(errors="replace")):
        return f"is {kind} in base64, not a path; write 'data:;base64,' before it"
    url = re.match(r"(file:(?=/)|[a-z][a-z0-9+.-]+://)(.*)", text, re.IGNORECASE | re.DOTALL)
    if url is None:
        return None
    if url[1][:5].lower() == "file:":
        path = re.sub(r"^//(localhost)?(?=/)", "", url[2])
        return f"is a file: URL; pass its path, {short(os.fsdecode(unquote_to_bytes(path)))!r}"
    return "is a URL that is not fetched: only http, https and data: are read; download it first"


def _in_base64(head: bytes) -> str | None:
    """The format of media in base64."""
    head = head.translate(None, WHITESPACE)
    try:
        found = sniff(base64.b64decode(head[: len(head) // 4 * 4], validate=True))
    except binascii.Error:
        return None
    return found and found[1]


def _decode_data_url(name: str, url: str) -> bytes:
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise MediaError(f"{name}: has no comma before its data")
    try:
        data = unquote_to_bytes(payload)
        if header.lower().replace(" ", "").endswith(";base64"):
            data = data.translate(None, WHITESPACE)
            data = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, UnicodeError) as error:
        raise MediaError(f"{name}: is not valid base64: {error}") from error
    return data


def sniffed(name: str, file: BinaryIO, wanted: str) -> tuple[Literal["image", "video"], str]:
    file.seek(0)
    head = file.read(HEAD_BYTES)
    found = sniff(head)
    if found is None:
        what = "its content has no known format"
        if looks_like_text(head):
            kind = _in_base64(head)
            what = f"its content is {kind} in base64" if kind else "its content is text"
        raise MediaError(f"{name}: is not {wanted}: {what}")
    return found
