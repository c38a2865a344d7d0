"""Reads the media of requests within limits, and only from sources that the options allow.

Strings of a request never reach the loaders of `vlmfast.media`, which open paths and fetch any URL.
They become bytes here, and the content of the bytes decides whether they are an image or a video.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vlmfast.errors import MediaError, check_memory
from vlmfast.media import load_image, open_video
from vlmfast.media.containers import HEAD_BYTES, damage, sniff
from vlmfast.media.selection import check_choice
from vlmfast.media.sources import BoundedVideo, sniffed

from .config import MediaLimits
from .errors import RequestError
from .media_sources import Kind, MediaSources, Refused

if TYPE_CHECKING:
    from PIL import Image

# Those that browsers show. Decoders of other formats are rarely needed and have more defects.
_IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF")
# Each scan of a progressive JPEG visits all pixels, and may take a few bytes. Usual are ten.
_MAX_SCANS = 100
# FFmpeg guesses formats again, and some open sockets or other files. Its names of those that
# `sniff` finds.
_DEMUXERS = {
    "MP4": {"mov"},
    "Matroska": {"matroska"},
    "AVI": {"avi"},
    "MPEG-TS": {"mpegts"},
    "MPEG-PS": {"mpeg", "mpegvideo"},
    "FLV": {"flv"},
    "Ogg": {"ogg"},
    "ASF": {"asf"},
}
# Reading some frames of a video may decode all of them. Per second of the longest video:
_MAX_STORED_FPS = 120
MAX_DECODED_PIXELS = 60 * 1920 * 1080


class RequestMedia:
    """The media of one request, counted over all its turns; used by one thread at a time.

    Parameters
    ----------
    sources : MediaSources
    deadline : float
        By `time.monotonic`. A decoder is not interrupted: the deadline is checked before and after.
    """

    def __init__(self, sources: MediaSources, deadline: float) -> None:
        self._sources, self._deadline = sources, deadline
        self._images = self._frames = self._pixels = 0
        self._videos: list[str] = []

    def image(self, url: str, *, param: str) -> Image.Image:
        """Read an image.

        Parameters
        ----------
        url : str
            ``data:``, or ``http``, ``https`` or ``file:`` where the limits allow it.
        param : str
            The argument, for messages, such as ``messages[0].content[1].image_url``.

        Returns
        -------
        PIL.Image.Image
            RGB, upright.

        Raises
        ------
        RequestError
            400 for a source that is not allowed or cannot be read, and content that is not an
            image; 408 after the deadline; 413 for too many images, bytes or pixels; 415 for another
            declared type, and for a format that is not accepted.
        """
        limits = self._sources.limits
        with self._reported("image", param):
            if self._images >= limits.max_images:
                raise Refused(f"is one too many: a request has at most {limits.max_images}", 413)
            self._images += 1
            data = self._sources.read(url, "image", self._deadline)
            _check_image(data)
            image = load_image(data, max_pixels=limits.max_pixels)
        return image

    def video(
        self, url: str, *, param: str, num_frames: int | None = None, fps: float | None = None
    ) -> bytes:
        """Read the file of a video, of which frames can be chosen.

        Parameters
        ----------
        url, param
            As for `image`.
        num_frames, fps : optional
            As for `vlmfast.media.load_video`, which reads 8 frames without either.

        Returns
        -------
        bytes
            For `vlmfast.media.load_video` with the same `num_frames` and `fps`. Its errors are for
            `as_request_error`.

        Raises
        ------
        RequestError
            As `image`; 413 also for a video that is too long, and for too many frames.
        """
        limits = self._sources.limits
        with self._reported("video", param):
            check_choice(num_frames, fps, None)
            self._check_frames(num_frames or 0)
            data = self._sources.read(url, "video", self._deadline)
            data = BoundedVideo(data, param, _check_video(data, limits))
            with open_video(data, num_frames=num_frames, fps=fps) as video:
                _check_seconds(video.info.duration_s, limits)
                count, pixels = len(video.indices), video.info.width * video.info.height
            self._check_frames(count)
            self._frames += count
            self._pixels += count * pixels
            if self._pixels > limits.max_video_pixels:
                raise Refused(
                    f"is too large: {count} frames of {pixels} pixels; the videos of a request "
                    f"have at most {limits.max_video_pixels} pixels in all frames that are read",
                    413,
                )
        self._videos.append(param)
        return data

    def as_request_error(self, error: MediaError) -> Exception:
        """An error of a video, when its frames are read, as an error of the request.

        Other errors are returned as they are.
        """
        for param in self._videos:
            if str(error).startswith(f"{param}: "):
                return _as_request_error(error, "video", param)
        return error

    def _check_frames(self, count: int) -> None:
        limit = self._sources.limits.max_frames
        if self._frames + count > limit:
            raise Refused(
                f"has too many frames to read ({self._frames + count} with those of other "
                f"videos): a request has at most {limit}; lower num_frames or fps",
                413,
            )

    @contextlib.contextmanager
    def _reported(self, kind: Kind, param: str) -> Iterator[None]:
        """Raise errors of media as errors of the request."""
        self._check_deadline(kind, param)
        try:
            yield
        except MediaError as error:
            self._check_deadline(kind, param)  # it may have ended a download
            raise _as_request_error(error, kind, param) from error
        self._check_deadline(kind, param)

    def _check_deadline(self, kind: Kind, param: str) -> None:
        if time.monotonic() >= self._deadline:
            raise RequestError(
                f"{param}: the {kind} was not read within the time limit of the request",
                408,
                param=param,
                code="timeout",
            )


def _as_request_error(error: MediaError, kind: Kind, param: str) -> RequestError:
    from PIL.Image import DecompressionBombError

    text = str(error)
    # Loaders put the name of the source first, which is one of these.
    reason = re.sub(rf"^(bytes \(\d+\)|the {kind}|{re.escape(param)}): ", "", text)
    if isinstance(error, Refused):
        status = error.status
    else:
        bomb = isinstance(error.__cause__, DecompressionBombError)
        status = 413 if bomb or reason.startswith("is too large") else 400
    if isinstance(error, Refused) or reason != text:
        reason = f"the {kind} {reason}"
    return RequestError(f"{param}: {reason}", status, param=param)


# --- content -------------------------------------------------------------------------------------


def _check_image(data: bytes) -> None:
    """Refuse formats that are not accepted, and JPEGs that would take minutes to decode."""
    kind, name = sniff(data[:HEAD_BYTES]) or ("", "")
    if kind == "image" and name not in _IMAGE_FORMATS:
        raise Refused(f"is {name}; accepted are {', '.join(_IMAGE_FORMATS)}", 415)
    if name == "JPEG" and sum(1 for _ in _jpeg_scans(data)) > _MAX_SCANS:
        raise Refused(f"is a JPEG of more than {_MAX_SCANS} scans; encode it again")


def _jpeg_scans(data: bytes) -> Iterator[int]:
    """Yield the positions of the scans of a JPEG, up to its end or the first above the limit."""
    # Neither data (FF 00) nor a marker without a length: restart (D0 to D7), temporary (01).
    marker, at, count = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])"), 2, 0
    while (found := marker.search(data, at)) and found[1] != b"\xd9" and count <= _MAX_SCANS:
        if found[1] == b"\xda":
            count += 1
            yield found.start()
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if not seconds <= limits.max_video_seconds:
        raise Refused(
            f"is too long: {seconds:.6g} s, the limit is {limits.max_video_seconds:g} s", 413
        )


def _check_video(data: bytes, limits: MediaLimits) -> int:
    """Refuse files that are not a complete video, and those that take too long to decode.

    First by the length that a file states, which may be wrong, then by the frames in it.

    Returns
    -------
    int
        Most pixels of a frame, which may be larger than the stream states: so many that all of them
        can be decoded in time.
    """
    file = io.BytesIO(data)
    kind, container = sniffed("the video", file, "a video")
    if kind == "image":
        raise Refused(f"is an image ({container}), not a video")
    if reason := damage(file, container):
        raise Refused(reason)
    file.seek(0)
    import av

    try:
        return _check_packets(file, container, limits)
    except MediaError:
        raise
    except (av.FFmpegError, OSError, ValueError) as error:
        check_memory(error)
        raise Refused(f"cannot be read as {container}") from error


def _check_packets(file: io.BytesIO, container: str, limits: MediaLimits) -> int:
    """Refuse other formats than the one found, too many stored frames, and too large ones."""
    import av

    most = limits.max_video_seconds * _MAX_STORED_FPS
    pixels = limits.max_video_seconds * MAX_DECODED_PIXELS
    count = 0
    # No protocol has this name: whatever the format, nothing else is opened.
    nothing = {"protocol_whitelist": "none"}
    with av.open(file, "r", metadata_errors="replace", options=nothing) as video:
        if _DEMUXERS[container].isdisjoint(video.format.name.split(",")):
            raise Refused(f"cannot be read as {container}")
        if container in ("MP4", "Matroska"):  # of others, it is guessed
            _check_seconds((video.duration or 0) / 1e6, limits)
        stream = video.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise Refused("has no video stream that can be decoded")
        frame: Any = stream.codec_context
        width, height = frame.width, frame.height
        if width * height > limits.max_pixels:
            raise Refused(
                f"is too large: its frames have {width}x{height} pixels, the limit is "
                f"{limits.max_pixels}",
                413,
            )
        for packet in video.demux(stream):
            count += bool(packet.size)
            if count > most or count * width * height > pixels:
                raise Refused(
                    f"is too long: {count} frames of {width}x{height} and more after them; the "
                    f"limit is {limits.max_video_seconds:g} s, with at most {most:.0f} frames",
                    413,
                )
    return int(min(limits.max_pixels, pixels / max(count, 1)))
