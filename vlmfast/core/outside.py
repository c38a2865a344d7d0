"""Extensions by other packages, found through their entry points.

A package that cannot be used is skipped with a warning, so that it does no harm to the others: one
that fails to import, one whose entry point is not what its group expects, and one that takes a name
that is in use. A name of vlmfast's own is never replaced, and of two packages with the same name
neither is used.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

STAGES, FAMILIES = "vlmfast.stages", "vlmfast.families"  # groups of entry points


class OutsideWarning(UserWarning):
    """An extension of vlmfast by another package is skipped."""


@dataclass(frozen=True)
class Found:
    """The extensions of one group.

    Parameters
    ----------
    values : dict of str to Any
        Name to what its entry point refers to.
    modules : dict of str to str
        Name to the module of its entry point.
    skipped : dict of str to str
        Name to the reason why it is not used.
    """

    values: dict[str, Any]
    modules: dict[str, str]
    skipped: dict[str, str]


@cache
def found_outside(group: str, own: Collection[str], read: Callable[[str, Any], Any]) -> Found:
    """Load the entry points of a group, once; warns of each one that is skipped.

    Parameters
    ----------
    group : str
        ``"vlmfast.stages"`` or ``"vlmfast.families"``.
    own : frozenset of str
        Names of vlmfast itself.
    read : callable
        ``(name, object) -> value``: the extension that an entry point refers to; raises
        `TypeError` with the reason where it is none.
    """
    entries = sorted(entry_points(group=group), key=lambda e: (e.name, e.value))
    count = Counter(entry.name for entry in entries)
    found = Found({}, {}, {})
    for entry in entries:
        reason = ""
        if entry.name in own:
            reason = "vlmfast has this name itself; names are not replaced"
        elif count[entry.name] > 1:
            reason = "several packages have this name, so that none of them is used"
        else:
            try:
                found.values[entry.name] = read(entry.name, entry.load())
                found.modules[entry.name] = entry.module
            except (Exception, SystemExit) as error:  # an import can raise anything
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if reason:
            text = f"{group}: {entry.name!r} of {_package(entry)} is skipped: {reason}"
            found.skipped[entry.name] = text
            warnings.warn(text, OutsideWarning, stacklevel=2)
    return found


def _package(entry: EntryPoint) -> str:
    if entry.dist is None:
        return entry.value
    return f"{entry.dist.name} {entry.dist.version}"
