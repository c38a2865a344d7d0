"""Lookup of methods by name.

`stage_class` finds the method ``name`` in the folders of ``vlmfast/compressors`` and in
``vlmfast/drafters``, and in the entry points ``vlmfast.stages`` of other packages (`outside`).
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

from ..errors import RecipeError
from .outside import STAGES, Found, found_outside
from .params import listed, nearest, quoted
from .stage import Stage

_HOMES = (
    "compressors.frames",
    "compressors.views",
    "compressors.encoder",
    "compressors.tokens",
    "compressors.prefill",
    "compressors.cache",
    "drafters",
)


@cache
def _own() -> dict[str, str]:
    """Names of the project's own methods, and the module that defines each."""
    found = {}
    for home in _HOMES:
        package = importlib.import_module(f"vlmfast.{home}")
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                found[info.name.replace("_", "-")] = f"{package.__name__}.{info.name}"
    return found


def _outside() -> Found:
    return found_outside(STAGES, frozenset(_own()), _read)


def _read(name: str, value: Any) -> type[Stage]:
    """The stage that an entry point of another package refers to: its class, or its module."""
    cls = _stage_in(value, name) if isinstance(value, ModuleType) else value
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise TypeError(f"it refers to no stage class with the name {name!r}")
    if cls.name != name:
        raise TypeError(f"its class {cls.__name__} has the name {cls.name!r}")
    cls()  # its parameters need defaults, and must lie within their bounds
    return cls


def stage_names() -> dict[str, str]:
    """Method name to the module that defines it, for every method that can be found."""
    return _own() | _outside().modules


@cache
def stage_class(name: str) -> type[Stage]:
    """The stage class of a method name.

    Raises
    ------
    RecipeError
        When no method has that name, with the nearest and all of them; or when the package that
        provides it is skipped, with the reason.
    """
    if name not in _own():
        found = _outside()
        if name not in found.values:
            raise unknown_method(name)
        return found.values[name]
    module = importlib.import_module(_own()[name])
    cls = _stage_in(module, name)
    if cls is None:
        raise RecipeError(f"module {module.__name__} defines no stage called {name!r}")
    return cls


def _stage_in(module: ModuleType, name: str) -> type[Stage] | None:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Stage) and value.name == name:
            return value
    return None


def unknown_method(name: str, meant: str = "") -> RecipeError:
    """The error for a name that no method has; ``meant`` is suggested, or else the nearest name."""
    if name in (skipped := _outside().skipped):
        return RecipeError(skipped[name])
    names = stage_names()
    hint = f" (did you mean {meant!r}?)" if meant else nearest(name, list(names))
    return RecipeError(f"unknown method {quoted(name)}{hint}; known: {listed(sorted(names))}")
