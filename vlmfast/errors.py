"""Exceptions raised by vlmfast."""

import errno
import mmap


class VLMFastError(ValueError):
    """Base of every error that vlmfast raises on purpose.

    It is a :class:`ValueError`: an argument cannot be used. The message is one line that names
    the argument and the reason, so that a command line can print it as it is.
    """


class RecipeError(VLMFastError):
    """A recipe cannot be used.

    Raised for unknown names or parameters, values out of range and stages that cannot be
    combined. The message names the offending part, what is allowed and the nearest match.
    """


class MediaError(VLMFastError):
    """An image or a video cannot be used.

    Raised for media that is missing, unreadable, empty, truncated, too large or without frames.
    The message names the file and the reason.
    """


class MediaUnavailable(MediaError):
    """An image or a video cannot be read now: another attempt may succeed.

    Raised for downloads that fail and for files that cannot be opened.
    """


class ModelError(VLMFastError):
    """A model cannot be used.

    Raised for unsupported families, missing processors and checkpoints whose keys do not fit.
    The message lists what is supported.
    """


class RequestCancelled(VLMFastError):
    """A request was cancelled before its answer was complete."""


class DeadlineExceeded(VLMFastError):
    """The deadline of a request passed before its answer was complete."""


class OutOfMemory(MemoryError):
    """The memory is too small for an input beside all else that is in it.

    No :class:`VLMFastError`, since the input may be fine: a smaller one, or another attempt, may
    succeed. PyTorch's own errors of the same kind are passed on: `torch.OutOfMemoryError`, and on a
    CPU `RuntimeError`.
    """


# In the messages of PyTorch's CPU allocator, C++, libavif and Pillow, whose types are not specific.
_EXHAUSTED = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
_FFMPEG_MOST = 1 << 31  # bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library says that the memory is too small, a GPU's included."""
    if type(error).__module__ == "av.error" and isinstance(error, MemoryError):
        # FFmpeg also says so of damaged files that state more than it ever allocates.
        return not _is_free(_FFMPEG_MOST)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError | OSError):
        return False
    text = str(error).lower()
    return any(part in text for part in _EXHAUSTED)


def _is_free(size: int) -> bool:
    try:
        mmap.mmap(-1, size).close()  # not touched, and thus free of cost
    except (OSError, MemoryError):
        return False
    return True


def check_memory(error: BaseException) -> None:
    """Raise `OutOfMemory` from an exception that says so.

    Call it first where exceptions of any type are reported as faults of an input.
    """
    if is_out_of_memory(error):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise OutOfMemory(f"the memory is too small: {reason}") from error


def one_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    text = str(error).strip().partition("\n")[0].strip()
    text = text or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
