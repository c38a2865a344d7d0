"""Common base of the parts of a method that acts at several steps of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

from vlmfast.core.stage import Stage


@dataclass(frozen=True)
class Part(Stage):
    """One part of the method ``of``, whose hyper-parameters it reads."""

    of: Any

    # For types plain attributes, as in the classes of the protocols.
    positions = cast(str, property(attrgetter("of.positions")))
    proportional_attention = cast(bool, property(attrgetter("of.proportional_attention")))
