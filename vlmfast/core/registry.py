"""Lookup of methods by name.

`stage_class` finds the method ``name`` in the folders of ``vlmfast/compressors`` and in
``vlmfast/drafters``, and in the entry points ``vlmfast.stages`` of other packages.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from functools import cache

from ..errors import RecipeError
from .params import listed, nearest, quoted
from .stage import Stage

_HOMES = (
    "compressors.frames",
    "compressors.encoder",
    "compressors.tokens",
    "compressors.prefill",
    "compressors.cache",
    "drafters",
)


@cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {e.name: e for e in importlib.metadata.entry_points(group="vlmfast.stages")}


@cache
def stage_names() -> dict[str, str]:
    """Method name to the module that defines it, for every method that can be found."""
    found = {}
    for home in _HOMES:
        package = importlib.import_module(f"vlmfast.{home}")
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                found[info.name.replace("_", "-")] = f"{package.__name__}.{info.name}"
    return found | {name: entry.module for name, entry in _entry_points().items()}


@cache
def stage_class(name: str) -> type[Stage]:
    """The stage class of a method name.

    Raises
    ------
    RecipeError
        When no method has that name; lists the nearest and all of them.
    """
    names = stage_names()
    if name not in names:
        raise unknown_method(name)
    module = importlib.import_module(names[name])
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Stage) and value.name == name:
            return value
    raise RecipeError(f"module {names[name]} defines no stage called {name!r}")


def unknown_method(name: str, meant: str = "") -> RecipeError:
    """The error for a name that no method has; ``meant`` is suggested, or else the nearest name."""
    names = stage_names()
    hint = f" (did you mean {meant!r}?)" if meant else nearest(name, list(names))
    return RecipeError(f"unknown method {quoted(name)}{hint}; known: {listed(sorted(names))}")
