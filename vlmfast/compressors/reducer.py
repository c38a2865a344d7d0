"""Base of methods that reduce the tokens of an image before the language model."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import TokenCount, inexact
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.statistics import VisionStats

from .select import count


@dataclass(frozen=True)
class Reducer(EncodeStage):
    """An encode stage that keeps a fraction of the visual tokens, by ``keep`` or by ``budget``."""

    lead: ClassVar[str | None] = "keep"
    # Whether exactly `target` patches of an image are kept, or all if there are fewer.
    exact: ClassVar[bool] = False

    keep: float = param(0.2, "fraction of the visual tokens kept", gt=0.0, le=1.0)
    _: KW_ONLY  # so that the method's own fields come next as positional arguments
    positions: str = positions_param()
    budget: float | None = budget_param()

    @property
    def fraction(self) -> float | None:
        """Fraction of the tokens kept; ``None`` if the method uses other parameters."""
        return self.keep if self.budget is None else self.budget

    def target(self, tokens: VisualTokens | TokenCount) -> int:
        """Number of tokens kept of one image."""
        return self.count_of(len(tokens))

    def count_of(self, n: int) -> int:
        """Number kept of ``n`` tokens, where `fraction` is given."""
        assert self.fraction is not None
        return count(self.fraction, n)

    def tokens_left(self, before: TokenCount) -> TokenCount:
        """As `EncodeStage.tokens_left`; everything where all tokens are kept."""
        if self.fraction == 1:
            return before
        if self.fraction is None:
            raise inexact(self.name, "the content of the image")
        return self.count_left(before)

    def count_left(self, before: TokenCount) -> TokenCount:
        """`tokens_left` where not all tokens are kept."""
        if not self.exact:
            return super().tokens_left(before)
        return before.left(before.at_most(self.target(before), self.name))

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        """Reduce each image separately; returns ``tokens`` itself when all are kept."""
        return tokens if self.fraction == 1 else super().reduce(tokens, stats, request)
