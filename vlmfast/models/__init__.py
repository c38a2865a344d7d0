"""Adapters, one file per model family, found by the checkpoint's ``model_type``.

Families of other packages are found through their entry points ``vlmfast.families``. What an
adapter of another package needs can be imported from here.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vlmfast.core.outside import FAMILIES, Found, found_outside
from vlmfast.errors import ModelError

if TYPE_CHECKING:
    from vlmfast.core.contexts import VisionContext
    from vlmfast.core.layout import Kind, TokenLayout
    from vlmfast.core.statistics import ItemGeometry, VisionStats
    from vlmfast.errors import RecipeError

    from ._media import Media, runs, tiling
    from .base import Adapter, Encoded, Part, by_views
    from .internvl import Tiled

# Imported on first use: listing the families must stay cheap.
_PUBLIC = {
    "Adapter": ".base",
    "Encoded": ".base",
    "ItemGeometry": "vlmfast.core.statistics",
    "Kind": "vlmfast.core.layout",
    "Media": "._media",
    "Part": ".base",
    "RecipeError": "vlmfast.errors",
    "Tiled": ".internvl",
    "TokenLayout": "vlmfast.core.layout",
    "VisionContext": "vlmfast.core.contexts",
    "VisionStats": "vlmfast.core.statistics",
    "by_views": ".base",
    "runs": "._media",
    "tiling": "._media",
}
_SHARED = {"base", "rope"}  # modules that are no family

__all__ = [
    "Adapter",
    "Encoded",
    "ItemGeometry",
    "Kind",
    "Media",
    "ModelError",
    "Part",
    "RecipeError",
    "Tiled",
    "TokenLayout",
    "VisionContext",
    "VisionStats",
    "adapter_class",
    "adapter_for",
    "by_views",
    "families",
    "runs",
    "tiling",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def families() -> list[str]:
    """Supported ``model_type`` names, with those of other packages."""
    return sorted([*_own(), *_outside().values])


@cache
def _own() -> frozenset[str]:
    return frozenset(
        info.name
        for info in pkgutil.iter_modules(__path__)
        if not info.ispkg and info.name not in _SHARED and not info.name.startswith("_")
    )


def _outside() -> Found:
    return found_outside(FAMILIES, _own(), _read)


def _read(name: str, value: Any) -> type[Adapter]:
    """The adapter that an entry point refers to: its class, or a module with `FamilyAdapter`."""
    from .base import Adapter

    cls = getattr(value, "FamilyAdapter", None) if isinstance(value, ModuleType) else value
    if not (isinstance(cls, type) and issubclass(cls, Adapter)):
        raise TypeError("it refers to no subclass of vlmfast.models.Adapter")
    return cls


def adapter_class(name: str) -> type[Adapter]:
    """The adapter class of a ``model_type``.

    Raises
    ------
    ModelError
        If the family is not supported, or the package that provides it is skipped.
    """
    if name in _own():
        return importlib.import_module(f"{__name__}.{name}").FamilyAdapter
    found = _outside()
    if name in found.skipped:
        raise ModelError(found.skipped[name])
    if name not in found.values:
        raise ModelError(
            f"model family {name!r} is not supported; supported are {', '.join(families())}"
        )
    return found.values[name]


def adapter_for(model: Any, processor: Any) -> Adapter:
    """The adapter of ``model``'s family.

    Raises
    ------
    ModelError
        If the family is not supported, or the processor belongs to another one.
    """
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return adapter_class(name)(model, processor)
