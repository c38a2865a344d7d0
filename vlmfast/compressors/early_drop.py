"""The base of methods that drop visual tokens once, after an early layer."""

from __future__ import annotations

from typing import ClassVar

from vlmfast.core.protocols import PrefillStage
from vlmfast.errors import RecipeError

from .budget import solve_counts
from .select import count


class EarlyDrop(PrefillStage):
    """Drops tokens once, after the first ``k`` layers.

    The fields are those of the method: a dataclass here would put them before its own.
    """

    keep: float
    k: int
    budget: float | None

    lead: ClassVar[str | None] = "keep"
    query_dependent: ClassVar[bool] = True

    def layers(self, depth: int) -> tuple[int, ...]:
        if self.k >= depth:
            raise RecipeError(f"{self.name}: k={self.k} must be below the model's {depth} layers")
        return (self.k,)

    def floor(self, depth: int) -> float:
        return self.k / depth

    def kept(self, n: int, depth: int) -> int:
        """Number of tokens kept of ``n``."""
        if self.budget is None:
            return count(self.keep, n)
        return solve_counts(n, self.budget * n, (self.k,), depth)[0]
