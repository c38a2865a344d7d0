"""The modules of a model, listed once and again where one was added, replaced or removed."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeVar

from torch import nn

from vlmfast.models.base import Adapter

Kind = TypeVar("Kind", bound=nn.Module)

_children = attrgetter("_modules")


class Modules:
    """All modules that some modules contain, themselves included, each once.

    Parameters
    ----------
    roots : tuple of Module

    Attributes
    ----------
    all : list of Module
    states : list of dict
        Their attributes, as ``vars`` returns them.
    """

    def __init__(self, roots: tuple[nn.Module, ...]) -> None:
        self.roots = roots
        self.all = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self.states: list[dict[str, Any]] = [vars(module) for module in self.all]
        self._of: dict[type, list[Any]] = {}
        self._dicts = [*map(_children, self.all)]
        self._views = [children.values() for children in self._dicts]
        self._seen = [*chain.from_iterable(self._views)]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of a class."""
        if kind not in self._of:
            self._of[kind] = [module for module in self.all if isinstance(module, kind)]
        return self._of[kind]

    @property
    def current(self) -> bool:
        """Whether they are still all: the children of each are the same objects."""
        seen = [*chain.from_iterable(self._views)]
        return (
            len(seen) == len(self._seen)
            and all(map(is_, seen, self._seen))
            and all(map(is_, map(_children, self.all), self._dicts))
        )


def modules_of(adapter: Adapter, name: str, *roots: nn.Module) -> Modules:
    """The modules of some parts of a model, kept under ``name``."""
    key = "modules", name
    known: Modules | None = adapter.kept.get(key)
    if known is None or known.roots != roots or not known.current:
        known = adapter.kept[key] = Modules(roots)
    return known
