"""Lookup of methods by name.

`stage_class` finds the method ``name`` in the folders of ``vlmfast/compressors`` and in
``vlmfast/drafters``, and in the entry points ``vlmfast.stages`` of other packages (`outside`).
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

from ..errors import RecipeError
from .outside import STAGES, Found, found_outside
from .params import listed, nearest, quoted
from .stage import TIERS, Stage

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
    if cls.tier not in TIERS:
        raise TypeError(f"its class has tier={cls.tier!r}, allowed are {listed(TIERS)}")
    cls()  # its parameters need defaults, and must lie within their bounds
    return cls


def stage_names() -> dict[str, str]:
    """Method name to the module that defines it, for every method that can be found."""
    return _own() | _outside().modules


@cache
def stage_class(name: str) -> type[Stage]:
    """The stage class of a method name; case and hyphens do not matter, as in ``LOOK-M``.

    Raises
    ------
    RecipeError
        When no method has that name, with the nearest ones; or when the package that provides it
        is skipped, with the reason.
    """
    if name not in _own():
        found = _outside()
        if name in found.values:
            return found.values[name]
        if (known := method_name(name)) == name:
            raise unknown_method(name)
        return stage_class(known)
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


def method_name(name: str) -> str:
    """The name of the method that a paper spells ``name``; itself where there is none."""
    names = stage_names()
    same = [known for known in names if _folded(known) == _folded(name)]
    return same[0] if len(same) == 1 and name not in (*names, *_outside().skipped) else name


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def unknown_method(name: str, more: tuple[str, ...] = ()) -> RecipeError:
    """The error for a name that no method has, with the nearest names; ``more`` are known, too."""
    if name in (skipped := _outside().skipped):
        return RecipeError(skipped[name])
    names = [*stage_names(), *more]
    near = difflib.get_close_matches(name[:80].lower(), names, n=3, cutoff=0)
    return RecipeError(
        f"unknown method {quoted(name)}{nearest(name, names)}; nearest are "
        f"{listed(near)}; `vlmfast methods` lists all"
    )
