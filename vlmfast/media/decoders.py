"""A common interface to PyAV and decord: exact frame indices and RGB frames.

Both readers count every frame of the file in display order and take ascending indices. They turn
and mirror frames as the file states (other angles than quarter turns, and the shape of pixels, are
ignored), and put transparent ones on white.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from vlmfast.errors import MediaError, check_memory

from .images import on_white
from .info import MAX_PIXELS

if TYPE_CHECKING:
    from PIL import Image

# For FFmpeg: no protocol has this name. Formats that describe streams would open sockets or files.
_ALONE = {"protocol_whitelist": "none"}
# Of a rotation by a degree, as far as players call it none.
_STEEP = 57
_MAX_SECONDS = 1e6
_ADDED = "matroska_block_additional"  # to a packet
_ALPHA = b"\0\0\0\0\0\0\0\1"  # the kind of addition


class Reader(abc.ABC):
    """Interface of the readers.

    Attributes
    ----------
    times : list[float]
        Display time of each frame in seconds, ascending, the first at 0. Exactly ``i / fps`` where
        the frames are one period apart, up to the rounding of the container.
    fps : float
        Average frame rate.
    duration_s : float
        End of the last frame.
    width, height : int
        Size of the frames, upright.
    """

    width: int
    height: int
    _max_pixels: int

    def __init__(
        self, name: str, starts: list[float], last_length: float, fps: float, tick: float
    ) -> None:
        if not starts:
            raise MediaError(f"{name}: has no frames that can be decoded")
        self.name = name
        starts = [start - starts[0] for start in starts]
        count, span = len(starts), starts[-1]
        mean = (count - 1) / span if span > 0 else 1.0
        stated = fps if math.isfinite(fps) and fps > 0 else mean
        # Where a tick is not much shorter than a period, rounding would hide a missing frame.
        slack = 1e-6 + (tick if 4 * tick <= 1.0 / mean else 0.0)
        for rate in (stated, mean):
            if all(abs(start - index / rate) <= slack for index, start in enumerate(starts)):
                self.fps, self.times = rate, [index / rate for index in range(count)]
                # Some containers state no lengths, and demuxers then guess them by the rate.
                usual = any(abs(last_length - 1.0 / of) <= slack for of in (stated, rate))
                usual = usual or last_length <= 0
                self.duration_s = count / rate if usual else self.times[-1] + last_length
                return
        length = last_length if last_length > 0 else 1.0 / stated
        self.times = [round(start, 6) for start in starts]
        self.duration_s = round(span + length, 6)
        self.fps = count / (span + length)

    @abc.abstractmethod
    def read(self, indices: list[int]) -> list[Image.Image]:
        """Decode the frames at ascending `indices`; consecutive calls are cheap."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the decoder; the file stays open."""

    def _fail(self, reason: object) -> MediaError:
        return MediaError(f"{self.name}: cannot be decoded: {_one_line(reason)}")

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn any exception of a decoder into one error that names the video."""
        try:
            yield
        except MediaError:
            raise
        except Exception as error:
            check_memory(error)
            raise self._fail(error) from error

    def _check_size(self, width: int, height: int) -> None:
        most = self._max_pixels
        if not 0 < width * height <= most:
            raise MediaError(
                f"{self.name}: is too large: it has frames of {width}x{height}, the limit is "
                f"{most} pixels"
            )

    def _bounded(self) -> dict[str, str]:
        """Options of a codec, which may find larger frames than its stream states."""
        # Twice, since decoders round sides up. Larger frames are not decoded at all.
        return {"max_pixels": str(2 * self._max_pixels)}


class _Packet(NamedTuple):
    pts: int | None
    duration: int | None
    is_keyframe: bool
    is_discard: bool


class AvReader(Reader):
    """Frames by PyAV.

    Parameters
    ----------
    name : str
        Name of the video in error messages.
    file : BinaryIO
        Seekable; must stay open while the reader is used. A file object rather than a path, so that
        FFmpeg cannot interpret a file name as a protocol.
    max_pixels : int, optional
        Of a frame as it is decoded: some may be larger than the header states. By default as for
        images.

    Raises
    ------
    MediaError
        If the file has no video stream, or it cannot be decoded.
    """

    def __init__(self, name: str, file: BinaryIO, max_pixels: int | None = None) -> None:
        import av

        self.name, self._file, self._av, self._max_pixels = name, file, av, max_pixels or MAX_PIXELS
        # Iterator of decoded frames, and the index of the frame before the next one.
        self._cursor: tuple[Iterator[Any] | None, int] = (None, -1)
        self._container: Any = None
        try:
            with self._decoding():
                self._index()
        except BaseException:
            self.close()
            raise

    def _index(self) -> None:
        """Index the frames, and read their size from the first one."""
        self._open()
        stream = self._stream
        packets = self._packets()
        if "mp4" in self._container.format.name:
            size = self._container.size  # FFmpeg stops at a frame beyond it without an error
            if any(entry.pos + entry.size > size for entry in stream.index_entries):
                raise MediaError(f"{self.name}: is damaged: its index points outside the file")
        shown = [packet for packet in packets if not packet.is_discard]
        # AVI stores no display times, and invisible VP8 frames have packets of their own. For these
        # files, and if times are missing or duplicated, only decoding finds the frames.
        self._by_count = (
            "avi" in self._container.format.name
            or stream.codec_context.name == "vp8"
            or any(packet.pts is None for packet in packets)
            or len({packet.pts for packet in shown}) < len(shown)
        )
        scale = stream.time_base or Fraction(0)
        fps = float(stream.average_rate or 0)
        if self._by_count:
            count = sum(1 for _ in self._decode_from(None))
            rate = fps if fps > 0 else 1.0
            self._pts = list(range(count))
            super().__init__(self.name, [index / rate for index in range(count)], 0.0, fps, 0.0)
        else:
            timed = [(packet.pts, packet) for packet in packets if packet.pts is not None]
            self._keys = sorted(pts for pts, packet in timed if packet.is_keyframe)
            # If a recording starts within a GOP, its first key frame comes first.
            timed = [
                (pts, packet)
                for pts, packet in timed
                if self._keys and pts >= self._keys[0] and not packet.is_discard
            ]
            timed.sort(key=lambda entry: entry[0])
            self._pts = [pts for pts, _ in timed]
            # Whole numbers until the last step, so that a second is not a bit less than one.
            first_pts, up, down = next(iter(self._pts), 0), scale.numerator, scale.denominator
            starts = [(pts - first_pts) * up / down for pts in self._pts]
            length = float((timed[-1][1].duration or 0) * scale) if timed else 0.0
            super().__init__(self.name, starts, length, fps, float(scale))
        first = next(self._decode_from(None), None)
        if first is None:
            raise self._fail("the decoder returns no frame")
        self._check_size(first.width, first.height)
        self._size = first.width, first.height
        # Of the first frame: where the codec states it, only some frames do.
        self._turn = _turn(first)
        self.width, self.height = self._image(first).size

    def close(self) -> None:
        if self._container is not None:
            self._container.close()

    def read(self, indices: list[int]) -> list[Image.Image]:
        """Decode the frames at ascending `indices`."""
        with self._decoding():
            return self._read(indices)

    def _read(self, indices: list[int]) -> list[Image.Image]:
        images = []
        frames, position = self._cursor  # end of the previous call
        if indices[0] <= position:
            frames, position = None, -1
        self._cursor = None, -1  # start over after an error
        for index in indices:
            key = self._key_before(index)
            if frames is None or key > position + 1:
                frames = self._decode_from(key)
                position = key - 1
            frame = self._advance(frames, index, position)
            if frame is None and key > 0:
                # The seek went past the frame: decode from the beginning.
                frames = self._decode_from(None)
                frame = self._advance(frames, index, -1)
            if frame is None:
                raise self._fail(f"frame {index} of {len(self._pts)} is damaged or missing")
            position = index
            images.append(self._image(frame))
        self._cursor = frames, position
        return images

    def _open(self) -> None:
        self._file.seek(0)
        self._container = self._av.open(self._file, metadata_errors="replace", options=_ALONE)
        stream = self._container.streams.best("video")
        # Cover art of an audio file is a video stream of one frame.
        if stream is None or stream.disposition & self._av.stream.Disposition.attached_pic:
            raise MediaError(f"{self.name}: has no video stream")
        if stream.codec_context is None:
            raise MediaError(f"{self.name}: has a video stream that no installed decoder reads")
        self._check_size(stream.codec_context.width, stream.codec_context.height)
        stream.codec_context.options = self._bounded()
        # Threads for frames would delay them, and lose now and then which of them are damaged.
        stream.thread_type = "SLICE"
        self._stream = stream

    def _packets(self) -> list[_Packet]:
        """Return the packets of all frames of the stream, without their data.

        Packets hidden by an edit list are marked as discarded, but may contain the key frame of
        visible frames.
        """
        # The last packet is empty.
        return [
            _Packet(packet.pts, packet.duration, packet.is_keyframe, packet.is_discard)
            for packet in self._container.demux(self._stream)
            if packet.size
        ]

    def _decode_from(self, key: int | None) -> Iterator[Any]:
        """Yield frames from the index of a key frame on; None and 0 start at the beginning."""
        if not key:
            # Some containers do not seek to their beginning correctly, but all open there.
            self._container.close()
            self._open()
        if key:
            self._container.seek(self._pts[key], stream=self._stream, backward=True)
        for frame in self._decoded():
            self._check_size(frame.width, frame.height)
            yield frame

    def _decoded(self) -> Iterator[Any]:
        """Yield frames, which have their transparency in WebM, a grey frame, as `opaque`."""
        if not _has_alpha(self._stream):
            yield from self._container.decode(self._stream)
            return
        # FFmpeg ignores this second video, of which each packet has a part. Its decoder with
        # transparency, libvpx, does not limit the size of frames.
        codec = self._av.CodecContext.create(self._stream.codec_context.name, "r")
        codec.options = self._bounded()
        for packet in self._container.demux(self._stream):
            frames = packet.decode()
            added = bytes(packet.get_sidedata(_ADDED)) if packet.has_sidedata(_ADDED) else b""
            if added.startswith(_ALPHA):
                alphas = codec.decode(self._av.Packet(added.removeprefix(_ALPHA)))
                for frame, alpha in zip(frames, alphas, strict=True):
                    frame.opaque = alpha
            yield from frames

    def _key_before(self, index: int) -> int:
        """Return the index of the frame from which `index` can be decoded."""
        if self._by_count:
            return 0
        key = bisect.bisect_right(self._keys, self._pts[index]) - 1
        return bisect.bisect_left(self._pts, self._keys[key])  # 0 if the key itself is hidden

    def _advance(self, frames: Iterator[Any], index: int, position: int) -> Any:
        """Return the frame at `index`, or None if it is missing or damaged."""
        if self._by_count:
            for _ in range(index - position - 1):
                next(frames, None)
            return next(frames, None)
        target = self._pts[index]
        for frame in frames:
            if frame.pts is not None and frame.pts >= target:
                return frame if frame.pts == target and not frame.is_corrupt else None
        return None

    def _image(self, frame: Any) -> Image.Image:
        from PIL import Image

        width, height = self._size
        if _is_transparent(frame.format):
            pixels = frame.to_ndarray(format="rgba", width=width, height=height)
            image = on_white(Image.fromarray(pixels))
        else:
            image = frame.to_image(width=width, height=height)
            if frame.opaque is not None:  # of which the luma, whatever range it states
                full = {"src_color_range": "JPEG", "dst_color_range": "JPEG"}
                mask = frame.opaque.to_ndarray(format="gray", width=width, height=height, **full)
                image.putalpha(Image.fromarray(mask))
                image = on_white(image)
        return image if self._turn is None else image.transpose(self._turn)


class DecordReader(AvReader):
    """Frames by decord, at the times that PyAV finds; parameters and errors as for `AvReader`.

    It decodes from the beginning up to the last requested frame. After a seek, decord returns wrong
    frames in open GOPs and near the end.
    """

    _reader: Any = None
    _at: int | None = None  # index of the next frame

    def _index(self) -> None:
        import decord

        super()._index()
        # Process-wide, like FFmpeg's log level: decord offers no other way and cannot restore it.
        decord.logging.set_level(decord.logging.QUIET)
        if unfit := self._unfit():
            raise MediaError(f"{self.name}: decord {unfit}; use PyAV, decoder='av'")

    def _unfit(self) -> str | None:
        """Return why decord would not show the same frames, None if it would."""
        stream, container = self._stream, self._container
        if not {"mp4", "matroska"} & {*container.format.name.split(",")}:
            return f"does not find the frames of {container.format.name} files exactly"
        stated = (stream.duration or 0) * (stream.time_base or 0), (container.duration or 0) / 1e6
        if not max(*stated, self.times[-1]) <= _MAX_SECONDS:
            return "reserves memory for the stated length of this file, which is above 11 days"
        if _has_alpha(stream) or _is_transparent(stream.codec_context.format):
            return "ignores the transparency of this file"
        turn = self._turn.name if self._turn is not None else ""
        if turn and not (turn.startswith("ROTATE") and "mp4" in container.format.name):
            return "does not show this file upright: it is mirrored, or not rotated as an MP4 is"
        count = len(self.times)
        if stream.frames in (0, count):  # it also reserves memory for the stated number
            self._restart()
            if len(self._reader) == count:
                return None
        return "finds other frames than this file shows, such as those that its edit list hides"

    def close(self) -> None:
        self._reader = None
        super().close()

    def _read(self, indices: list[int]) -> list[Image.Image]:
        if self._at is None or indices[0] < self._at:
            self._restart()
        at, self._at = self._at or 0, None  # start over after an error
        wanted = set(indices)
        images = []
        for index in range(at, indices[-1] + 1):
            frame = self._reader.next()
            if index in wanted:
                images.append(_decord_image(frame))
        self._at = indices[-1] + 1
        return images

    def _restart(self) -> None:
        import decord

        path = getattr(self._file, "name", None)
        source: Any = self._file
        if isinstance(path, str):  # decord copies file objects into memory, so give it the path
            source = "file:" + os.path.abspath(path) if ":" in path else path
        self._file.seek(0)
        self._at = 0
        # The lowest fault tolerance: otherwise frames that cannot be decoded are replaced by their
        # neighbors, with only a line on stderr.
        self._reader = decord.VideoReader(source, fault_tol=1e-6)


def _decord_image(frame: Any) -> Image.Image:
    import numpy as np
    from PIL import Image

    # A torch tensor if the user has set decord's bridge.
    pixels = frame.asnumpy() if hasattr(frame, "asnumpy") else np.asarray(frame)
    height, width, channels = pixels.shape
    if channels != 3:
        # Rows are padded to the decoder's alignment; in narrow frames decord treats the padding
        # as additional channels.
        pixels = pixels.reshape(height, -1)[:, : 3 * width].reshape(height, width, 3)
    return Image.fromarray(np.ascontiguousarray(pixels))


def _turn(frame: Any) -> Image.Transpose | None:
    """Return how a frame becomes upright: its display matrix without scale, shift and tilt.

    A pixel at (x, y), with y pointing down, is shown at (a x + c y, b x + d y).
    """
    from PIL import Image

    stated = frame.side_data.get("DISPLAYMATRIX")
    if stated is None:
        return None
    a, b, _, c, d = struct.unpack_from("=5i", bytes(stated))
    straight, crossed = min(abs(a), abs(d)), min(abs(b), abs(c))
    if max(abs(b), abs(c)) * _STEEP < straight:
        return {
            (True, False): Image.Transpose.FLIP_LEFT_RIGHT,
            (False, True): Image.Transpose.FLIP_TOP_BOTTOM,
            (True, True): Image.Transpose.ROTATE_180,
        }.get((a < 0, d < 0))
    if max(abs(a), abs(d)) * _STEEP < crossed:
        return {
            (False, False): Image.Transpose.TRANSPOSE,
            (False, True): Image.Transpose.ROTATE_270,
            (True, False): Image.Transpose.ROTATE_90,
            (True, True): Image.Transpose.TRANSVERSE,
        }[b < 0, c < 0]
    return None


def _is_transparent(form: Any) -> bool:
    return form.name == "pal8" or any(part.is_alpha for part in form.components)


def _has_alpha(stream: Any) -> bool:
    """Whether a video in WebM states its transparency, as a field of its track or in capitals."""
    return ("alpha_mode", "1") in ((key.lower(), value) for key, value in stream.metadata.items())


def _one_line(reason: object) -> str:
    """Reduce a decoder's message to one line, without stack trace and source locations."""
    lines = str(reason).strip().splitlines()
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", lines[0] if lines else "")
    text = re.sub(r"\[Errno \d+\] |Check failed: .* vs\. [^)]*\) |^\[.*?\]", "", text)
    return text[:200].strip() or type(reason).__name__
