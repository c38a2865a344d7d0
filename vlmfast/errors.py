"""The errors a user of vlmfast can meet."""

__all__ = ["MediaError", "ModelError", "RecipeError", "VLMFastError"]


class VLMFastError(ValueError):
    """Base of every error that vlmfast raises on purpose.

    It is a :class:`ValueError`: something the caller handed over cannot be used. The message is
    one line, names the thing and says why, so that a command line can print it as it is.
    """


class RecipeError(VLMFastError):
    """A recipe cannot be used.

    Raised for unknown names or parameters, values out of range and stages that cannot stand
    together. The message names the word, what is allowed and the nearest match.
    """


class MediaError(VLMFastError):
    """An image or a video cannot be used.

    Raised for media that is missing, unreadable, empty, truncated, too large or without frames.
    The message names the file and the reason.
    """


class ModelError(VLMFastError):
    """A model cannot be used.

    Raised for unsupported families, missing processors and checkpoints whose keys do not fit.
    The message lists what is supported.
    """
