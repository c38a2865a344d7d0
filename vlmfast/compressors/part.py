"""What the parts of a method of several parts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlmfast.core.stage import Stage


@dataclass(frozen=True)
class Part(Stage):
    """A part of the recipe word ``of``, whose hyper-parameters it reads."""

    of: Any

    @property
    def positions(self) -> str:
        return self.of.positions

    @property
    def repair(self) -> bool:
        return self.of.repair
