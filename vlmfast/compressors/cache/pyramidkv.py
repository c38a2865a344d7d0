"""PyramidKV: SnapKV with more slots for the first layers and fewer for the last.

Shallow layers spread their attention over the whole prompt, deep ones concentrate it on few keys.
PyramidKV (arXiv 2406.02069) ranks slots as SnapKV does (see `snapkv`) and decreases the number of
slots from layer to layer. Of N slots, ``C = int(keep N)`` are kept in the middle of L layers,
``w`` of them being the window that every layer keeps; layer l keeps ``w + n_l``::

    m = floor((C - w) / beta)      M = 2 (C - w) - m
    if M >= N - w:                 M = N - w         m = 2 (C - w) - M
    n_l = M - l floor((M - m) / (L - 1))
    if N < 2 (C - w):              n_l = C - w       the budget is too large for a pyramid

``m`` is the target of the last layer, without the window, and ``M`` that of the first.

Different from the authors' code, and why:

- As in `snapkv`: grouped-query heads vote together, the budget is a fraction, arithmetic is
  float32.
- The step between layers is a whole number, as theirs. It is rounded down, so the last layer keeps
  up to L - 2 slots more than ``m`` and all layers together somewhat more than ``L C``. The common
  cost axis counts the slots actually kept.
- Every layer keeps at least one slot in addition to the window; ``m`` is zero if C - w is below
  beta.
- A model of a single layer keeps C slots; their step would divide by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.params import param

from .snapkv import SnapKV


def pyramid(n: int, capacity: int, window: int, depth: int, beta: int) -> list[int]:
    """Slots that each of ``depth`` layers keeps of ``n``, window included."""
    if n <= capacity:
        return [n] * depth
    ranked = capacity - window
    if n < 2 * ranked or depth == 1:
        return [capacity] * depth
    last = ranked // beta
    most = 2 * ranked - last
    if most >= n - window:
        most = n - window
        last = 2 * ranked - most
    step = (most - last) // (depth - 1)
    return [max(most - layer * step, 1) + window for layer in range(depth)]


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with more slots for the first layers and fewer for the last."""

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "arXiv 2406.02069"
    tier: ClassVar[str] = "baseline"

    window: float = param(
        8.0, "last slots, which vote and are kept; below 1 a fraction of the kept slots", gt=0.0
    )
    beta: int = param(20, "the last layer keeps about 1 / beta of the average", ge=1)

    def capacity(self, context: PrefillContext, layer: int, n: int) -> int:
        capacity = super().capacity(context, layer, n)
        window = self.last(capacity)
        if capacity <= window:  # each layer keeps the window and little more
            return capacity
        return pyramid(n, capacity, window, context.depth, self.beta)[layer]
