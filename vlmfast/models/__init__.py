"""Adapters, one file per model family, found by the checkpoint's ``model_type``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from vlmfast.errors import ModelError

from ._wrapped import base_of

if TYPE_CHECKING:
    from .base import Adapter


def families() -> list[str]:
    """Supported ``model_type`` names."""
    return sorted(
        info.name
        for info in pkgutil.iter_modules(__path__)
        if not info.ispkg and info.name != "base" and not info.name.startswith("_")
    )


def adapter_for(model: Any, processor: Any) -> Adapter:
    """The adapter of ``model``'s family; a ``PeftModel`` has the family of its base model.

    Raises
    ------
    ModelError
        If the family is not supported, or the processor belongs to another one.
    """
    model = base_of(model)
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if name not in families():
        raise ModelError(
            f"model family {name!r} is not supported; supported are {', '.join(families())}"
        )
    module = importlib.import_module(f"{__name__}.{name}")
    return module.FamilyAdapter(model, processor)
