"""vlmfast: vision-language models, several times faster, by a recipe of one line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .answer import Answer, Comparison, Request
    from .attachment import Attachment, attach
    from .errors import MediaError, ModelError, RecipeError, VLMFastError
    from .overlays import overlay
    from .recipe import Recipe
    from .session import Session
    from .vlm import VLM, methods

# Public name -> module. Everything is imported on first use, so that `import vlmfast` is cheap.
_HOMES = {
    "VLM": "vlm",
    "Answer": "answer",
    "Comparison": "answer",
    "Request": "answer",
    "methods": "vlm",
    "Attachment": "attachment",
    "attach": "attachment",
    "Session": "session",
    "overlay": "overlays",
    "Recipe": "recipe",
    "VLMFastError": "errors",
    "RecipeError": "errors",
    "MediaError": "errors",
    "ModelError": "errors",
}

__all__ = [
    "VLM",
    "Answer",
    "Attachment",
    "Comparison",
    "MediaError",
    "ModelError",
    "Recipe",
    "RecipeError",
    "Request",
    "Session",
    "VLMFastError",
    "__version__",
    "attach",
    "methods",
    "overlay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
