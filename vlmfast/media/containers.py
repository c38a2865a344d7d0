"""Detects the format of a media file and whether it is complete, with the standard library alone.

FFmpeg guesses formats, some of which open other files, and plays the rest of a truncated file
without an error. Files are therefore checked here first, and only complete containers of known
formats are passed to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal

HEAD_BYTES = 1024
"""Number of bytes at the beginning of a file that :func:`sniff` needs."""

_IMAGE_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
)
_VIDEO_MAGIC = (
    (b"\x1a\x45\xdf\xa3", "Matroska"),
    (b"OggS", "Ogg"),
    (b"FLV\1", "FLV"),
    (b"\0\0\1\xba", "MPEG-PS"),
    (b"\0\0\1\xb3", "MPEG-PS"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF"),
)
_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}


def sniff(head: bytes) -> tuple[Literal["image", "video"], str] | None:
    """Detect the format of an image or a video by its content.

    Parameters
    ----------
    head : bytes
        The first `HEAD_BYTES` bytes of a file (fewer if it is shorter).

    Returns
    -------
    tuple[str, str] or None
        ``("image", format)`` with the format's name in Pillow, ``("video", container)``, or None
        if the content is neither.
    """
    if head[:4] == b"RIFF":
        if head[8:12] == b"WEBP":
            return "image", "WEBP"
        return ("video", "AVI") if head[8:12] == b"AVI " else None
    if head[4:8] == b"ftyp":
        end = min(int.from_bytes(head[:4], "big"), len(head))
        brands = {head[8:12], *(head[i : i + 4] for i in range(16, end - 3, 4))}
        if brands & {b"avif", b"avis"}:
            return "image", "AVIF"
        return ("image", "HEIF") if head[8:12] in _HEIF_BRANDS else ("video", "MP4")
    if head[4:8] in (b"moov", b"mdat", b"wide", b"pnot"):
        return "video", "MP4"  # QuickTime files from before 'ftyp'
    for magic, name in _IMAGE_MAGIC:
        if head.startswith(magic):
            return "image", name
    for magic, name in _VIDEO_MAGIC:
        if head.startswith(magic):
            return "video", name
    if head[:1] == b"P" and head[1:2] in b"123456f" and head[2:3] in (b" ", b"\n", b"\r", b"\t"):
        return "image", "PPM"
    if len(head) > 376 and head[0] == head[188] == head[376] == 0x47:
        return "video", "MPEG-TS"
    return None


def looks_like_text(head: bytes) -> bool:
    """Return whether the beginning of a file is text (only used in an error message)."""
    try:
        text = head[: HEAD_BYTES - 4].decode("utf-8")  # a cut character would not decode
    except UnicodeDecodeError as error:
        if error.start < min(len(head), HEAD_BYTES) - 8:
            return False
        text = head[: error.start].decode("utf-8")
    return bool(text) and all(character.isprintable() or character.isspace() for character in text)


def damage(file: BinaryIO, container: str) -> str | None:
    """Return why a video container cannot be complete, judging by its own byte counts.

    Parameters
    ----------
    file : BinaryIO
        Seekable; its position changes.
    container : str
        As returned by :func:`sniff`. MP4, Matroska/WebM and AVI state their lengths; streaming
        containers do not, so a truncated one is simply a shorter video.

    Returns
    -------
    str or None
        The reason, or None if nothing is wrong.
    """
    size = file.seek(0, 2)
    if container == "MP4":
        return _mp4_damage(file, size)
    file.seek(0)
    head = file.read(HEAD_BYTES)
    end = None
    if container == "Matroska":
        end = _matroska_end(head)
    elif container == "AVI" and len(head) >= 8:
        stated = int.from_bytes(head[4:8], "little")
        end = stated + 8 if 0 < stated < 0xFFFFFFFF else None  # 0 and -1: never filled in
    if end is not None and end > size:
        return f"is truncated: its header states {end} bytes, the file has {size}"
    return None


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start of payload, end) of the boxes of an MP4, and of those inside.

    The end is as stated by the box, and is beyond the file if this is truncated.
    """
    while start + 8 <= end:
        file.seek(start)
        head = file.read(16)
        length, kind = struct.unpack(">I4s", head[:8])
        payload = start + 8
        if length == 1:
            length, payload = int.from_bytes(head[8:], "big"), start + 16
        elif length == 0:  # to the end of the file
            length = end - start
        if length < payload - start:
            return
        yield kind, payload, start + length
        if kind in _PARENTS:
            yield from _boxes(file, payload, min(start + length, end))
        start += length


def _mp4_damage(file: BinaryIO, size: int) -> str | None:
    seen = set()
    for kind, start, end in _boxes(file, 0, size):
        # Only these contain the video: a truncated 'free' or 'udta' box at the end is harmless.
        if end > size and kind in (b"moov", b"mdat", b"moof"):
            return (
                f"is truncated: its {kind.decode()!r} part ends at byte {end}, "
                f"the file has {size} bytes"
            )
        seen.add(kind)
        if kind in (b"stsz", b"trun"):
            # FFmpeg reserves memory for the stated number of frames before it finds their data.
            file.seek(start)
            flags, *stated = struct.unpack(">III", file.read(12).ljust(12, b"\0"))
            if kind == b"stsz":
                each, count = stated[0] or 4, stated[1]
            else:
                each, count = 4 * (flags >> 8 & 0xF).bit_count() or 1, stated[0]
            if each * count > size:
                return "is damaged: its index points outside the file"
    if b"moov" not in seen:
        return "is truncated, or its recording was never finished: it has no index ('moov' part)"
    if not seen & {b"mdat", b"moof"}:
        return "is truncated: it has an index but no media data ('mdat' part)"
    return None


def _matroska_end(head: bytes) -> int | None:
    """Return the stated end of the Matroska segment in bytes, None if it states none."""
    header = _vint(head, 4)
    if header is None:
        return None
    position = header[0] + header[1]
    if head[position : position + 4] != b"\x18\x53\x80\x67":
        return None
    segment = _vint(head, position + 4)
    if segment is None or segment[2]:
        return None
    return segment[0] + segment[1]


def _vint(data: bytes, position: int) -> tuple[int, int, bool] | None:
    """Read an EBML length: (position after it, value, whether it is the value for "unknown")."""
    if position >= len(data) or data[position] == 0:
        return None
    width = 9 - data[position].bit_length()
    raw = data[position : position + width]
    if len(raw) < width:
        return None
    mask = (1 << (7 * width)) - 1
    value = int.from_bytes(raw, "big") & mask
    return position + width, value, value == mask
