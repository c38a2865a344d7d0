"""Common base of the parts of a method that acts at several steps of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlmfast.core.stage import Stage


@dataclass(frozen=True)
class Part(Stage):
    """One part of the method ``of``, whose hyper-parameters it reads."""

    of: Any

    @property
    def positions(self) -> str:
        return self.of.positions

    @property
    def proportional_attention(self) -> bool:
        return self.of.proportional_attention
