"""Reads images and videos as RGB; anything else raises :class:`~vlmfast.errors.MediaError`.

Pillow, NumPy and the video decoders are imported by the functions that use them, so that importing
this module is cheap.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeAlias, cast

from vlmfast.errors import MediaError, MediaUnavailable

from .containers import damage
from .images import (
    check_size,
    from_array,
    from_tensor,
    image_name,
    load_pixels,
    open_image,
    unread,
    upright_rgb,
)
from .info import MAX_ASPECT, MAX_PIXELS, MAX_VIDEO_PIXELS, FrameTimes, VideoFrames, VideoInfo
from .selection import check_choice, check_timestamps, check_total, choose
from .sources import (
    BoundedVideo,
    is_array,
    is_image,
    is_tensor,
    is_url,
    opened,
    shown,
    sniffed,
)

if TYPE_CHECKING:
    from PIL import Image

    from .decoders import Reader
    from .types import ImageLike, VideoLike

Decoder: TypeAlias = Literal["av", "decord"]


def load_image(
    source: ImageLike,
    *,
    max_pixels: int | None = MAX_PIXELS,
    max_aspect: float | None = MAX_ASPECT,
    timeout_s: float = 20.0,
) -> Image.Image:
    """Read an image as RGB.

    The stored camera orientation is applied, transparency is composited on white, and the first
    frame of an animation is used. 16-bit grey is scaled by its range (65535 is white), not clipped.
    Color profiles are ignored. The source is never changed.

    Parameters
    ----------
    source
        - a path (str or :class:`os.PathLike`), an ``http(s)://`` URL (at most 64 MiB), a ``data:``
          URL, or the bytes of a file: PNG, JPEG, GIF, BMP, TIFF, WebP, PPM, and, where Pillow was
          built for them, JPEG 2000, AVIF and HEIF;
        - a PIL image of any mode (``I`` is taken as 16-bit, ``F`` as lying in [0, 1]);
        - a NumPy array, HxW, HxWx1, HxWx3 or HxWx4; uint8, uint16, bool, or floats in [0, 1];
        - a torch tensor of these types, CxHxW, HxWxC or HxW. Where a shape fits both, it is CxHxW.
    max_pixels : int, optional
        Reject larger images. Files are rejected by their header, before pixels are decoded.
        None: no limit.
    max_aspect : float, optional
        Reject images whose sides differ by more than this factor (see `MAX_ASPECT`).
        None: no limit.
    timeout_s : float
        Total time limit of a download in seconds.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, without metadata, so that reading it again returns it unchanged.

    Raises
    ------
    MediaError
        Names the source and the reason: missing, a directory, empty, not an image, truncated or
        damaged, too large, too narrow, an unsupported mode, shape or type, values outside the
        range, or a failed download.
    """
    for argument, value in (("max_pixels", max_pixels), ("max_aspect", max_aspect)):
        if value is not None and not value >= 1:
            raise MediaError(f"{argument}={value!r}: must be at least 1, or None for no limit")
    if is_image(source):
        name, image = image_name(source), source
    elif is_array(source):
        name = f"NumPy array {source.shape} {source.dtype}"
        image = from_array(name, source, max_pixels, max_aspect)
    elif is_tensor(source):
        name = f"torch tensor {tuple(source.shape)} {source.dtype}"
        image = from_array(name, from_tensor(name, source), max_pixels, max_aspect)
    else:
        with opened(source, timeout_s) as (name, file):
            image = open_image(name, file)
            check_size(name, *image.size, max_pixels, max_aspect)
            return upright_rgb(name, image, load_pixels(name, image))
    check_size(name, *image.size, max_pixels, max_aspect)
    image = unread(name, image)
    return upright_rgb(name, image, load_pixels(name, image))


def probe_video(source: VideoLike, *, decoder: Decoder = "av") -> VideoInfo:
    """Count a video's frames and read its rate, length and size; parameters as `load_video`."""
    if isinstance(source, (list, tuple)):
        return _timed(source, None, None).info
    if isinstance(source, VideoFrames):
        return source.info
    with _opened_video(source, decoder) as reader:
        return _info(reader)


def load_video(
    source: VideoLike,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    timestamps: Sequence[float] | None = None,
    select: Callable[[VideoInfo], Sequence[int]] | None = None,
    decoder: Decoder = "av",
    max_pixels: int | None = MAX_VIDEO_PIXELS,
) -> VideoFrames:
    """Read some frames of a video as RGB.

    At most one of `num_frames`, `fps` and `select` chooses the frames. By default 8 frames of a
    file are read, and all frames of a list, which are considered chosen already. A list has the
    times that `fps` or `timestamps` state; without either, its frames count as one second apart.

    Parameters
    ----------
    source
        A path (str or :class:`os.PathLike`), the bytes of a file, a list of frames of one size,
        each of which may be anything that :func:`load_image` takes, or :class:`VideoFrames`, which
        keep their times. Containers: MP4/MOV, Matroska/WebM, AVI, MPEG-TS, MPEG-PS, FLV, Ogg, ASF;
        also animated GIF, WebP, PNG and AVIF, whose frames of at most 10 ms take 100 ms, as in
        browsers. Videos are not fetched from URLs.
    num_frames : int, optional
        Number of frames, evenly spaced including both ends:
        ``np.linspace(0, frames - 1, num_frames, dtype=int)``, the rule of LLaVA-Video and
        lmms-eval. All frames of a shorter video, without duplicates.
    fps : float, optional
        Of a file, the frames displayed at 0, 1/fps, 2/fps, ... seconds, without duplicates; all
        frames above the video's own rate. Of a list, the rate that its frames have: it chooses
        none, and `num_frames` or `select` may be given too.
    timestamps : sequence of float, optional
        Only of a list, instead of `fps`: the second at which each of its frames is shown,
        ascending, from 0 on.
    select : callable, optional
        Takes the :class:`VideoInfo` and returns the indices, ascending.
    decoder : {"av", "decord"}
        PyAV by default. decord returns the same frames, at the times that PyAV finds, and decodes
        a video from its beginning, since it returns wrong frames after seeking. Files that it reads
        incorrectly even so are rejected: MP4 files trimmed by an edit list, transparent or mirrored
        videos, and containers other than MP4 and Matroska. Name it for files that you trust: it is
        native code that may end the process on a damaged one, although PyAV checks the file first.
    max_pixels : int, optional
        Reject more pixels in all chosen frames together. None: no limit.

    Returns
    -------
    VideoFrames

    Raises
    ------
    MediaError
        Names the source and the reason: missing, empty, truncated, not a video, without a video
        stream, damaged, too large, an argument out of range, or no decoder installed.

    Notes
    -----
    Frames are turned by quarter turns and mirrored as the file states, and transparent ones are
    composited on white. In a damaged file, PyAV rejects frames that the codec flags, and decord
    only those that cannot be decoded. Later frames that depend on a damaged one are decoded as in
    any player.
    """
    with open_video(
        source,
        num_frames=num_frames,
        fps=fps,
        timestamps=timestamps,
        select=select,
        decoder=decoder,
    ) as video:
        check_total(video.name, video.info, len(video.indices), max_pixels)
        frames = video.read(0, len(video.indices))
    return VideoFrames(frames, video.indices, video.timestamps_s, video.info)


@dataclass
class OpenVideo:
    """A video whose frames have been chosen and are read on demand.

    Parameters
    ----------
    name : str
        Its name in error messages.
    info : VideoInfo
    indices : list of int
        The chosen frames.
    timestamps_s : list of float
        Seconds at which each of them is shown.
    """

    name: str
    info: VideoInfo
    indices: list[int]
    timestamps_s: list[float]
    _places: list[int] = field(repr=False)  # of the chosen frames in the source
    _read: Callable[[list[int]], list[Image.Image]] = field(repr=False)

    @property
    def times(self) -> FrameTimes:
        """When the chosen frames are shown."""
        return FrameTimes.of(self.info, self.indices, self.timestamps_s)

    def read(self, start: int, stop: int) -> list[Image.Image]:
        """Read the chosen frames ``start`` to ``stop`` as RGB; consecutive calls are cheap."""
        return self._read(self._places[start:stop])


@contextlib.contextmanager
def open_video(
    source: VideoLike,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    timestamps: Sequence[float] | None = None,
    select: Callable[[VideoInfo], Sequence[int]] | None = None,
    decoder: Decoder = "av",
) -> Iterator[OpenVideo]:
    """Choose frames of a video and read them part by part; parameters as for :func:`load_video`.

    Their number is not limited: they are never all in memory, unless the caller keeps them.
    """
    if isinstance(source, (list, tuple, VideoFrames)):
        check_choice(num_frames, None, select)
        video = _timed(source, fps, timestamps)
        name, info, times = f"list of {len(video)} frames", video.info, video.timestamps_s
        read = partial(_list_frames, video)
        places = list(range(len(video)))
        if num_frames is not None or select is not None:
            listed = replace(info, frames=len(video))
            places = choose(name, listed, times, num_frames, None, _with_read(select, read))
        indices = [video.indices[place] for place in places]
        yield OpenVideo(name, info, indices, [times[place] for place in places], places, read)
    else:
        check_choice(num_frames, fps, select)
        if timestamps is not None:
            raise MediaError("timestamps: a file has its own; they are for a list of frames")
        with _opened_video(source, decoder) as reader:
            name, info, times = reader.name, _info(reader), reader.times
            check_size(name, info.width, info.height, MAX_PIXELS, MAX_ASPECT)
            indices = choose(name, info, times, num_frames, fps, _with_read(select, reader.read))
            yield OpenVideo(name, info, indices, [times[i] for i in indices], indices, reader.read)


def _with_read(
    select: Callable[[VideoInfo], Sequence[int]] | None,
    read: Callable[[list[int]], list[Image.Image]],
) -> Callable[[VideoInfo], Sequence[int]] | None:
    """``select`` whose `VideoInfo` can read frames."""
    return select and (lambda info: select(replace(info, read=read)))


def kind_of(source: ImageLike | VideoLike) -> Literal["image", "video"]:
    """Return whether a source is an image or a video, by its content and not by its name.

    Lists are videos; URLs are images, as only images are fetched; animated images are images,
    although `load_video` reads their frames.

    Raises
    ------
    MediaError
        If the source cannot be opened or is neither.
    """
    if isinstance(source, (list, tuple, VideoFrames)):
        return "video"
    if is_url(source) or is_image(source) or is_array(source) or is_tensor(source):
        return "image"
    with opened(source) as (name, file):
        return sniffed(name, file, "an image or a video")[0]


def _frame(source: Sequence[ImageLike], index: int) -> Image.Image:
    try:
        return load_image(source[index])
    except MediaError as error:
        kind = MediaUnavailable if isinstance(error, MediaUnavailable) else MediaError
        raise kind(f"frame {index + 1} of {len(source)}: {error}") from error


def _info(reader: Reader) -> VideoInfo:
    return VideoInfo(len(reader.times), reader.fps, reader.duration_s, reader.width, reader.height)


def _list_frames(video: VideoFrames, places: list[int]) -> list[Image.Image]:
    """Some of the frames of a list, of the size of the first."""
    frames, info = [], video.info
    for i in places:
        frame = _frame(video.frames, i)
        if frame.size != (info.width, info.height):
            raise MediaError(
                f"frame {i + 1} of {len(video)}: is {frame.width}x{frame.height}, the first "
                f"is {info.width}x{info.height}: frames must be of one size"
            )
        frames.append(frame)
    return frames


def _timed(
    source: Sequence[ImageLike] | VideoFrames,
    fps: float | None,
    timestamps: Sequence[float] | None,
) -> VideoFrames:
    """The frames of a list, not read yet, with the times that were stated for them."""
    stated = [name for name, of in (("fps", fps), ("timestamps", timestamps)) if of is not None]
    if isinstance(source, VideoFrames):
        if stated:
            raise MediaError(f"{stated[0]}: the frames of a VideoFrames have times already")
        return source
    count = len(source)
    if not count:
        raise MediaError("list of frames: is empty")
    if len(stated) > 1:
        raise MediaError("fps and timestamps: only one of them may be given")
    if timestamps is None:
        check_choice(None, fps, None)
        rate = 1.0 if fps is None else float(fps)
        times, length = [index / rate for index in range(count)], count / rate
    else:
        times = check_timestamps(timestamps, count)
        length = times[-1]
        rate = (count - 1) / (length - times[0]) if count > 1 else 1.0
    first = _frame(source, 0)
    info = VideoInfo(count, rate, length, first.width, first.height)
    return VideoFrames(cast("list[Image.Image]", source), list(range(count)), times, info)


@contextlib.contextmanager
def _opened_video(source: VideoLike, decoder: str) -> Iterator[Reader]:
    if decoder not in ("av", "decord"):
        raise MediaError(f"decoder={decoder!r}: must be 'av' or 'decord'")
    if is_url(source):
        raise MediaError(f"{shown(source)}: videos are not fetched from URLs; download it first")
    if is_array(source) or is_tensor(source):
        raise MediaError(f"{type(source).__name__}: for an array of frames, pass list(array)")
    with opened(source) as (name, file):
        limit = source.max_pixels if isinstance(source, BoundedVideo) else None
        reader = _reader(name, file, decoder, limit)
        try:
            yield reader
        finally:
            reader.close()


def _reader(name: str, file: BinaryIO, decoder: str, max_pixels: int | None) -> Reader:
    """Open a video with the decoder that `load_video` documents."""
    kind, container = sniffed(name, file, "a video")
    if kind == "image":
        from .animations import AnimationReader

        return AnimationReader(name, file, max_pixels)
    reason = damage(file, container)
    if reason:
        raise MediaError(f"{name}: {reason}")
    from .decoders import AvReader, DecordReader

    # PyAV first: both bring a libvpx, and that of decord is too old for PyAV.
    for module in ("av", "decord") if decoder == "decord" else ("av",):
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:  # OSError: a shared library cannot be loaded
            raise MediaError(f"{name}: {module} must be installed: pip install {module}") from error
    return (DecordReader if decoder == "decord" else AvReader)(name, file, max_pixels)
