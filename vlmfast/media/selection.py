"""Chooses which frames of a video are read, and checks the times that a user states for them."""

from __future__ import annotations

import bisect
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence, Set

from vlmfast.errors import MediaError

from .info import VideoInfo
from .sources import short, value

DEFAULT_FRAMES = 8


def check_choice(num_frames: object, fps: object, select: object) -> None:
    """Reject invalid arguments of :func:`vlmfast.media.load_video`."""
    given = {"num_frames": num_frames, "fps": fps, "select": select}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise MediaError(f"{' and '.join(given)}: only one of them may be given")
    if num_frames is not None:
        try:
            count = 0 if isinstance(num_frames, bool) else operator.index(num_frames)  # type: ignore[arg-type]
        except TypeError:
            count = 0
        if count < 1:
            raise MediaError(f"num_frames={value(num_frames)}: must be a whole number above 0")
    if fps is not None:
        try:
            number = isinstance(fps, numbers.Real) and not isinstance(fps, bool)
            rate = float(fps) if number else math.nan  # type: ignore[arg-type]
        except OverflowError:
            rate = math.nan
        if not (math.isfinite(rate) and rate > 0):
            raise MediaError(f"fps={value(fps)}: must be a finite number above 0")
    if select is not None and not callable(select):
        raise MediaError("select: must be a function that takes a VideoInfo and returns indices")


def check_timestamps(timestamps: Sequence[float], count: int) -> list[float]:
    """Return the `timestamps` of :func:`vlmfast.media.load_video` for a list of `count` frames."""
    try:
        if isinstance(timestamps, str | bytes | Mapping | Set):
            raise TypeError
        times = [math.nan if isinstance(at, str | bool) else float(at) for at in timestamps]
    except (TypeError, ValueError, OverflowError):
        times = [math.nan]
    ascending = all(a < b for a, b in itertools.pairwise([*times, math.inf]))  # false with nan
    if not ascending or min(times, default=0.0) < 0:
        raise MediaError(
            f"timestamps={value(timestamps)}: must be a list of finite numbers, the second "
            "at which each frame is shown, ascending, from 0 on"
        )
    if len(times) != count:
        raise MediaError(f"timestamps: {len(times)} times for {count} frames; give one for each")
    return times


def choose(
    name: str,
    info: VideoInfo,
    times: list[float],
    num_frames: int | None,
    fps: float | None,
    select: Callable[[VideoInfo], Sequence[int]] | None,
) -> list[int]:
    """Return the indices of the frames to read, as :func:`vlmfast.media.load_video` documents.

    `times` are the display times of the frames in seconds, ascending.
    """
    import numpy as np

    if select is not None:
        chosen = select(info)
        try:
            indices = [operator.index(index) for index in chosen]
        except TypeError as error:
            raise MediaError(f"{name}: select must return whole numbers: {error}") from error
        fine = indices and indices[0] >= 0 and indices[-1] < info.frames
        if not fine or any(a >= b for a, b in itertools.pairwise(indices)):
            raise MediaError(
                f"{name}: select returned {short(str(indices))}: must be ascending, no duplicates, "
                f"at least one, from 0 to {info.frames - 1}"
            )
        return indices
    if fps is not None:
        # Containers round display times to a millisecond. Without this tolerance a frame due at
        # 66.7 ms and stored as 67 would be skipped for the one before it. It is less than a frame.
        rounding = min(1e-3, 0.25 / info.fps)
        rate = min(float(fps), 1e9)
        indices, step = [], 0
        while (due := step / rate) <= times[-1] + rounding:
            index = bisect.bisect_right(times, due + rounding) - 1
            indices.append(index)
            if index == info.frames - 1:
                break
            # Skip steps that find the same frame again, which are many at a high rate.
            step = max(step + 1, math.ceil((times[index + 1] - rounding) * rate))
        return indices
    count = min(DEFAULT_FRAMES if num_frames is None else operator.index(num_frames), info.frames)
    return [int(i) for i in np.linspace(0, info.frames - 1, count, dtype=int)]


def check_total(name: str, info: VideoInfo, count: int, max_pixels: int | None) -> None:
    """Reject more frames than `max_pixels` allows."""
    total = count * info.width * info.height
    if max_pixels is not None and total > max_pixels:
        raise MediaError(
            f"{name}: {count} frames of {info.width}x{info.height} are {total} pixels, "
            f"the limit is {max_pixels}: read fewer"
        )
