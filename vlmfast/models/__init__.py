"""Adapters, one file per model family, found by the checkpoint's ``model_type``.

Families of other packages are found through their entry points ``vlmfast.families``. What an
adapter of another package needs can be imported from here.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vlmfast.core.lazy import public_names
from vlmfast.core.outside import FAMILIES, Found, found_outside
from vlmfast.errors import ModelError

from ._wrapped import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

    from .base import Adapter

_SHARED = {"base", "rope"}  # modules that are no family

__getattr__, __dir__, __all__ = public_names(
    __name__,
    {
        "vlmfast.models": "adapter_class adapter_for families",
        "vlmfast.models.base": "Adapter Encoded Part by_views",
        # Bases that several families share.
        "vlmfast.models._composed": "Completed Composed",
        "vlmfast.models.cohere2_vision": "Marked",
        "vlmfast.models.internvl": "Tiled",
        "vlmfast.models.llava_next": "Packing",
        "vlmfast.models.mistral3": "Shaped",
        "vlmfast.models._media": "Media runs square_views tiling without_placeholders",
        "vlmfast.core.contexts": "VisionContext",
        "vlmfast.core.counting": "ImageLayout VideoLayout",
        "vlmfast.core.layout": "Kind Numbering TokenLayout",
        "vlmfast.core.saliency": "SaliencyRequest to_tokens window_order",
        "vlmfast.core.statistics": "ItemGeometry VisionStats",
        "vlmfast.errors": "ModelError RecipeError",
        "vlmfast.media.info": "FrameTimes",
    },
)


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


def skipped(name: str) -> str:
    """Why the package that provides a family is not used; empty where no such package exists."""
    return _outside().skipped.get(name, "")


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
        If the family is not supported, with those that have similar names; or the package that
        provides it is skipped.
    """
    if name in _own():
        return importlib.import_module(f"{__name__}.{name}").FamilyAdapter
    if reason := skipped(name):
        raise ModelError(reason)
    found = _outside()
    if name not in found.values:
        raise ModelError(f"model family {name!r} is not supported; {alternatives(name)}")
    return found.values[name]


def alternatives(name: str) -> str:
    """What an error says about a family that is not supported: others, and how to add it."""
    known = families()
    near = difflib.get_close_matches(name, known)
    also = f"; nearest are {', '.join(near)}" if near else ""
    return f"supported are {', '.join(known)}{also}; docs/extending.md shows how to add a family"


def adapter_for(model: PreTrainedModel, processor: ProcessorMixin) -> Adapter:
    """The adapter of ``model``'s family; a ``PeftModel`` has the family of its base model.

    Raises
    ------
    ModelError
        If the family is not supported, or the processor belongs to another one.
    """
    base = base_of(model)
    name = getattr(getattr(base, "config", None), "model_type", type(base).__name__)
    return adapter_class(name)(base, processor)
