"""What every method that thins out a picture before the language model has in common."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.statistics import VisionStats

from .select import count


@dataclass(frozen=True)
class Reducer(EncodeStage):
    """An encode stage that keeps a share of the visual tokens, by ``rate`` or by ``budget``."""

    lead: ClassVar[str | None] = "rate"

    rate: float = param(0.2, "share of the visual tokens that stays", gt=0.0, le=1.0)
    _: KW_ONLY  # so that the method's own fields come next where values are given by place
    positions: str = positions_param("compact")
    budget: float | None = budget_param()

    @property
    def share(self) -> float | None:
        """Share of the tokens that stays; ``None`` where a method has other defaults."""
        return self.rate if self.budget is None else self.budget

    def target(self, tokens: VisualTokens) -> int:
        """Number of tokens of one picture that stay."""
        return count(self.share, len(tokens))

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        """Each picture by itself; the very same tokens when all of them stay."""
        return tokens if self.share == 1 else super().reduce(tokens, stats, request)
