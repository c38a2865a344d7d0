"""What can stand in a recipe."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from .params import recipe_name
from .registry import stage_class, stage_names
from .stage import Stage


def methods() -> list[dict[str, Any]]:
    """List every stage and drafter: name, protocol, tier, parameters, paper, whether trained.

    ``floor`` is the lowest fraction of visual tokens that it can keep, averaged over 32 layers.
    """
    return [_method(stage_class(name)) for name in sorted(stage_names())]


def _method(cls: type[Stage]) -> dict[str, Any]:
    return {
        "name": cls.name,
        "protocol": cls.protocol,
        "tier": cls.tier,
        "paper": cls.paper,
        "trained": cls.trained,
        "floor": cls().floor(32),
        "value": cls.lead,
        "summary": (cls.__doc__ or "").strip().partition("\n")[0],
        "parameters": [
            {
                "name": recipe_name(f),
                # Text, or a type where the module does not postpone its annotations.
                "type": f.type.__name__ if isinstance(f.type, type) else str(f.type),
                "default": None if f.default is MISSING else f.default,
                **{key: value for key, value in f.metadata.items() if key != "word"},
            }
            for f in fields(cls)
        ],
    }
