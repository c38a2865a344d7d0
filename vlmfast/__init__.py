"""vlmfast: faster vision-language models with one-line compression recipes."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from vlmfast.version import __version__

if TYPE_CHECKING:
    from vlmfast.api.answer import Answer, Comparison, ComparisonTable, Request
    from vlmfast.api.attachment import Attachment, attach
    from vlmfast.api.overlays import overlay
    from vlmfast.api.session import Session
    from vlmfast.api.vlm import VLM
    from vlmfast.core.exact import exact_count, exact_counts
    from vlmfast.core.methods import methods
    from vlmfast.core.recipe import Recipe
    from vlmfast.core.weights import StageWeights
    from vlmfast.engine.handle import Handle
    from vlmfast.errors import (
        DeadlineExceeded,
        MediaError,
        MediaUnavailable,
        ModelError,
        OutOfMemory,
        RecipeError,
        RequestCancelled,
        VLMFastError,
    )
    from vlmfast.media.types import ImageLike, VideoLike

# Public name -> module. Everything is imported on first use, so that `import vlmfast` is cheap.
_HOMES = {
    "VLM": "api.vlm",
    "Answer": "api.answer",
    "Comparison": "api.answer",
    "ComparisonTable": "api.answer",
    "Request": "api.answer",
    "methods": "core.methods",
    "Attachment": "api.attachment",
    "attach": "api.attachment",
    "Session": "api.session",
    "overlay": "api.overlays",
    "exact_count": "core.exact",
    "exact_counts": "core.exact",
    "Recipe": "core.recipe",
    "StageWeights": "core.weights",
    "VLMFastError": "errors",
    "RecipeError": "errors",
    "MediaError": "errors",
    "MediaUnavailable": "errors",
    "ModelError": "errors",
    "RequestCancelled": "errors",
    "DeadlineExceeded": "errors",
    "OutOfMemory": "errors",
    "Handle": "engine.handle",
    "ImageLike": "media.types",
    "VideoLike": "media.types",
}

# A library prints no log lines unless the program that uses it asks for them.
logging.getLogger("vlmfast").addHandler(logging.NullHandler())

__all__ = [
    "VLM",
    "Answer",
    "Attachment",
    "Comparison",
    "ComparisonTable",
    "DeadlineExceeded",
    "Handle",
    "ImageLike",
    "MediaError",
    "MediaUnavailable",
    "ModelError",
    "OutOfMemory",
    "Recipe",
    "RecipeError",
    "Request",
    "RequestCancelled",
    "Session",
    "StageWeights",
    "VLMFastError",
    "VideoLike",
    "__version__",
    "attach",
    "exact_count",
    "exact_counts",
    "methods",
    "overlay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
