"""Exceptions raised by vlmfast."""

__all__ = [
    "DeadlineExceeded",
    "MediaError",
    "MediaUnavailable",
    "ModelError",
    "RecipeError",
    "RequestCancelled",
    "VLMFastError",
]


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
