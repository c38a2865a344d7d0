"""Deprecated names of parameters and attributes. `core.moved` has those of modules."""

from __future__ import annotations

import warnings
from typing import Any


def warn_renamed(old: str, new: str, category: type[Warning] = DeprecationWarning) -> None:
    """Warn about a deprecated name.

    Python shows a warning once for each line that causes it: a ``DeprecationWarning`` to those
    who run this line, a ``FutureWarning``, for names in recipes, to everyone.
    """
    # The caller of the function that knows the old name.
    warnings.warn(f"{old} is deprecated, use {new}", category, stacklevel=3)


class FormerAttribute:
    """An attribute under its deprecated name, for the body of a class.

    Parameters
    ----------
    name : str
        Of the attribute today.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_renamed(self.old, self.name)
        return getattr(instance, self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        warn_renamed(self.old, self.name)
        setattr(instance, self.name, value)
