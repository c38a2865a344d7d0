"""Detects the format of a media file and whether it is complete, with the standard library alone.

Decoders are tolerant: they guess formats (some of which open other files), play the rest of a
truncated file, and print to stderr. Files are therefore checked here first, and only complete
containers of known formats are passed to a decoder.
"""

from __future__ import annotations

import itertools
import math
import operator
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import BinaryIO, Literal

__all__ = ["HEAD_BYTES", "damage", "is_edited", "looks_like_text", "sniff", "stated_seconds"]

HEAD_BYTES = 1024
"""Number of bytes at the beginning of a file that :func:`sniff` needs."""

_MAX_SAMPLES = 1 << 22  # 19 hours at 60 frames per second; a damaged table may state any number

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


def is_edited(file: BinaryIO) -> bool:
    """Return whether an MP4's edit list differs from showing every stored frame once.

    Phones and editors trim a video by writing an edit list and leaving the frames in the file.

    Parameters
    ----------
    file : BinaryIO
        An MP4, seekable; its position changes.
    """
    size = file.seek(0, 2)
    for moov in _find(file, 0, size, b"moov"):
        movie_scale = _timescale(file, moov, b"mvhd")
        for trak in _find(file, *moov, b"trak"):
            edits = _edits(file, trak)
            if _handler(file, trak) != b"vide" or not edits:
                continue
            if len(edits) > 1:
                return True
            length, start = edits[0]
            for mdia in _find(file, *trak, b"mdia"):
                scale = _timescale(file, mdia, b"mdhd")
                times = _sample_times(file, mdia)
                if not (times and scale and movie_scale):
                    continue
                # An edit of length 0 lasts to the end.
                end = start + length * scale / movie_scale
                if min(times) < start or (length and max(times) >= end):
                    return True
    return False


def stated_seconds(file: BinaryIO, container: str) -> float:
    """Return the length that a file states, in seconds.

    For MP4 the total length of its frames or the latest start of a fragment, for Matroska the
    length of the segment, otherwise 0. decord reserves memory for as many frames, and aborts the
    process if the allocation fails.

    Parameters
    ----------
    file : BinaryIO
        Seekable; its position changes.
    container : str
        As returned by :func:`sniff`.
    """
    size = file.seek(0, 2)
    if container == "Matroska":
        return _matroska_seconds(file)
    if container != "MP4":
        return 0.0
    ends, scales = [0.0], []
    for moov in _find(file, 0, size, b"moov"):
        for trak in _find(file, *moov, b"trak"):
            for mdia in _find(file, *trak, b"mdia"):
                scales.append(scale := max(_timescale(file, mdia, b"mdhd"), 1))
                for body in _bodies(file, mdia, b"minf", b"stbl", b"stts"):
                    runs = _numbers(body[8:], "I")
                    ticks = sum(map(operator.mul, runs[0::2], runs[1::2]))
                    ends.append(ticks / scale)
    for moof in _find(file, 0, size, b"moof"):
        for body in _bodies(file, moof, b"traf", b"tfdt"):
            start = body[4:12] if body[:1] == b"\1" else body[4:8]
            ends.append(int.from_bytes(start, "big") / min(scales, default=1))
    return max(ends)


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start of payload, end) of the MP4 boxes in a byte range.

    The end is as stated by the box, and is beyond the range if the file is truncated.
    """
    while start + 8 <= end:
        file.seek(start)
        head = file.read(16)
        if len(head) < 8:
            return
        length, kind = struct.unpack(">I4s", head[:8])
        payload = start + 8
        if length == 1 and len(head) == 16:
            length, payload = int.from_bytes(head[8:], "big"), start + 16
        elif length == 0:  # to the end of the file
            length = end - start
        if length < payload - start:
            return
        yield kind, payload, start + length
        start += length


def _find(file: BinaryIO, start: int, end: int, kind: bytes) -> Iterator[tuple[int, int]]:
    for name, payload, stop in _boxes(file, start, end):
        if name == kind:
            yield payload, min(stop, end)


def _timescale(file: BinaryIO, parent: tuple[int, int], kind: bytes) -> int:
    """Return the ticks per second that the 'mvhd' or 'mdhd' box in a box states, or 0."""
    for body in _bodies(file, parent, kind):
        at = 20 if body[:1] == b"\1" else 12
        return int.from_bytes(body[at : at + 4], "big")
    return 0


def _bodies(file: BinaryIO, parent: tuple[int, int], *path: bytes) -> Iterator[bytes]:
    """Yield the contents of the boxes at a path below a box."""
    for start, end in _find(file, *parent, path[0]):
        if len(path) > 1:
            yield from _bodies(file, (start, end), *path[1:])
        else:
            file.seek(start)
            yield file.read(end - start)


def _sample_times(file: BinaryIO, mdia: tuple[int, int]) -> list[int]:
    """Return the display times of a track's stored frames in ticks, without fragments."""

    def expanded(kind: bytes, form: str) -> Iterator[int]:
        for body in _bodies(file, mdia, b"minf", b"stbl", kind):
            usable = max(len(body) - 8, 0) // 8 * 8
            for count, value in struct.iter_unpack(form, body[8 : 8 + usable]):
                yield from itertools.repeat(value, count)

    shifts = expanded(b"ctts", ">Ii")
    times, clock = [], 0
    for step in itertools.islice(expanded(b"stts", ">II"), _MAX_SAMPLES):
        times.append(clock + next(shifts, 0))
        clock += step
    return times


def _handler(file: BinaryIO, trak: tuple[int, int]) -> bytes:
    return next((body[8:12] for body in _bodies(file, trak, b"mdia", b"hdlr")), b"")


def _edits(file: BinaryIO, trak: tuple[int, int]) -> list[tuple[int, int]]:
    """Return (length in movie time, start in media time) of a track's edits.

    Empty edits, which delay a track, are skipped.
    """
    for body in _bodies(file, trak, b"edts", b"elst"):
        entry = struct.Struct(">Qq4x" if body[:1] == b"\1" else ">Ii4x")
        usable = max(len(body) - 8, 0) // entry.size * entry.size
        return [edit for edit in entry.iter_unpack(body[8 : 8 + usable]) if edit[1] >= 0]
    return []


def _mp4_damage(file: BinaryIO, size: int) -> str | None:
    seen, handlers, lost, usual = set(), set(), False, {}
    for kind, start, stop in _boxes(file, 0, size):
        # Only these contain the video: a truncated 'free' or 'udta' box at the end is harmless.
        if stop > size and kind in (b"moov", b"mdat", b"moof"):
            return (
                f"is truncated: its {kind.decode()!r} part ends at byte {stop}, "
                f"the file has {size} bytes"
            )
        seen.add(kind)
        if kind == b"moov":
            tracks = [(_handler(file, trak), trak) for trak in _find(file, start, stop, b"trak")]
            handlers |= {handler for handler, _ in tracks}
            lost |= any(k == b"vide" and _points_outside(file, trak, size) for k, trak in tracks)
            usual = _usual_sizes(file, (start, stop))
        elif kind == b"moof":
            lost |= _fragment_points_outside(file, (start, stop), size, usual)
    if b"moov" not in seen:
        return "is truncated, or its recording was never finished: it has no index ('moov' part)"
    if b"vide" not in handlers:
        return "has no video stream"
    if not seen & {b"mdat", b"moof"}:
        return "is truncated: it has an index but no media data ('mdat' part)"
    return "is damaged: its index points outside the file" if lost else None


def _points_outside(file: BinaryIO, trak: tuple[int, int], size: int) -> bool:
    """Whether an MP4 track's index points outside the file, without fragments.

    decord reads there without a check, and aborts the process.
    """
    path = (b"mdia", b"minf", b"stbl")
    sizes = next(_bodies(file, trak, *path, b"stsz"), b"")
    if len(sizes) < 12:
        return False
    each, count = struct.unpack(">II", sizes[4:12])
    if each:
        return each * count > size
    if count > len(sizes[12:]) // 4:
        return True
    lengths = _numbers(sizes[12 : 12 + 4 * count], "I")
    body = next(_bodies(file, trak, *path, b"stco"), None)
    if body is not None:
        chunks = _numbers(body[8:], "I")
    else:
        chunks = _numbers(next(_bodies(file, trak, *path, b"co64"), b"")[8:], "Q")
    # Runs of chunks with the same number of frames: (first chunk from 1, frames, description).
    runs = _numbers(next(_bodies(file, trak, *path, b"stsc"), b"")[8:], "I")
    firsts, frames = runs[0::3], runs[1::3]
    taken = 0
    for at, (first, each) in enumerate(zip(firsts, frames, strict=False)):
        last = firsts[at + 1] if at + 1 < len(firsts) else max(len(chunks), first) + 1
        if not (1 <= first < last and each):  # ascending runs bound the work below
            return True
        for start in chunks[first - 1 : last - 1]:
            if start + sum(lengths[taken : taken + each]) > size:
                return True
            taken += each
            if taken >= count:
                return False
    return taken < count


def _usual_sizes(file: BinaryIO, moov: tuple[int, int]) -> dict[int, int]:
    """Default bytes per frame in fragments, by track, from the 'trex' boxes."""
    bodies = [body for body in _bodies(file, moov, b"mvex", b"trex") if len(body) >= 20]
    return {_word(body, 4): _word(body, 16) for body in bodies}


def _fragment_points_outside(
    file: BinaryIO, moof: tuple[int, int], size: int, usual: dict[int, int]
) -> bool:
    """`_points_outside` of a fragment; its offsets start at the 'moof' box."""
    for traf in _find(file, *moof, b"traf"):
        head = next(_bodies(file, traf, b"tfhd"), b"")
        flags, base, each = _word(head, 0), moof[0] - 8, usual.get(_word(head, 4), 0)
        at = 8
        if flags & 0x1:
            base, at = int.from_bytes(head[at : at + 8], "big"), at + 8
        at += 4 * bool(flags & 0x2) + 4 * bool(flags & 0x8)
        each = _word(head, at) if flags & 0x10 else each
        for run in _bodies(file, traf, b"trun"):
            flags, count = _word(run, 0), _word(run, 4)
            start = 8 + 4 * bool(flags & 0x1) + 4 * bool(flags & 0x4)
            width = (flags >> 8 & 0xF).bit_count()
            if len(run) < start + 4 * width * count:
                return True
            total = each * count
            if flags & 0x200:
                table = _numbers(run[start : start + 4 * width * count], "I")
                total = sum(table[bool(flags & 0x100) :: width])
            offset = int.from_bytes(run[8:12], "big", signed=True) if flags & 0x1 else 0
            if base + offset < 0 or base + offset + total > size:
                return True
    return False


def _word(body: bytes, at: int) -> int:
    return int.from_bytes(body[at : at + 4], "big")


def _numbers(body: bytes, kind: str) -> array[int]:
    """The big-endian numbers of a table, without an incomplete one at its end."""
    found = array(kind)
    found.frombytes(body[: len(body) // found.itemsize * found.itemsize])
    if sys.byteorder == "little":
        found.byteswap()
    return found


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


def _matroska_seconds(file: BinaryIO) -> float:
    """Return the length that a Matroska segment states before its first cluster, 0 without one."""
    file.seek(0)
    head = file.read(1 << 16)
    tick, length, at = 1_000_000, 0.0, 0
    while at < len(head):
        width = 9 - head[at].bit_length()
        kind, number = head[at : at + width], _vint(head, at + width)
        if number is None or kind == b"\x1f\x43\xb6\x75":  # a cluster
            break
        start, value, _ = number
        body = head[start : start + value]
        if kind == b"\x2a\xd7\xb1":
            tick = int.from_bytes(body[:8], "big")
        elif kind == b"\x44\x89" and len(body) in (4, 8):
            (length,) = struct.unpack(">d" if len(body) == 8 else ">f", body)
        # Enter the segment and its 'Info' part, skip everything else.
        at = start if kind in (b"\x18\x53\x80\x67", b"\x15\x49\xa9\x66") else start + value
    return length * tick / 1e9 if math.isfinite(length) else math.inf


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
