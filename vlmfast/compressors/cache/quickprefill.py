"""QuickPrefill: prefill a video in blocks, and keep the keys with small norms of each block.

Keys that receive much attention tend to have small norms. QuickVideo (arXiv 2505.16175) prefills
the frames of a video a few at a time. It compresses each block's keys and values in each layer
right after the layer's attention, so that a block attends only to what earlier blocks kept, and the
cache of the whole video never exists. No attention is needed: with ``k[h, j]`` the rotated key of
slot j in KV head h, a block of which ``v`` slots are visual keeps its text and::

    norm_j = sqrt(sum over all heads h of |k[h, j]|^2)
    keep     the int(keep v) visual slots, or top_k, with the smallest norm

the same slots in all heads, in the order of the prompt.

Different from the authors' code, and why:

- Text inside a block is kept; the authors' blocks contain frames only. Only where the limit of the
  block is below its text is text ranked as well, after all visual slots are dropped.
- A block that contains an image keeps at least one visual slot.
- Norms are float32; ties go to the lower index.
- ``score`` offers those of their modes that need keys or values alone. The others ask the question
  of each block or use the layer's output.

Whether small or large norms mark important keys depends on how a model was trained: measure before
using it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.select import top_k


def norms(rows: Tensor) -> Tensor:
    """Norm of each slot's keys or values, over all heads: (H, N, D) to (N,)."""
    return rows.float().square().sum((0, 2)).sqrt()


def worth(kv: KV, score: str) -> Tensor:
    """Score of each slot, float32, (N,)."""
    if score == "value-norm":
        return norms(kv.values)
    return norms(kv.keys) if score == "key-norm" else -norms(kv.keys)


@dataclass(frozen=True)
class QuickPrefill(CacheStage):
    """Prefills in blocks; each keeps its text and the visual keys with small norms."""

    name: ClassVar[str] = "quickprefill"
    paper: ClassVar[str] = "QuickVideo, arXiv 2505.16175"
    lead: ClassVar[str | None] = "keep"
    blockwise: ClassVar[bool] = True

    keep: float = param(0.5, "fraction of each block's visual tokens kept", gt=0.0, le=1.0)
    top_k: int | None = param(
        None, "visual tokens kept of each block, instead of keep", ge=1, excludes=("keep",)
    )
    score: str = param(
        "key-norm-small",
        "which tokens are kept: small keys, large keys, or large values",
        choices=("key-norm-small", "key-norm", "value-norm"),
    )

    def count(self, visual: int) -> int:
        """Visual slots kept of a block with ``visual`` of them."""
        return min(max(int(self.keep * visual), 1) if self.top_k is None else self.top_k, visual)

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        n, visual = len(kv), kv.visual[0]
        whole = kv.layout is context.layout  # nothing was dropped
        total = sum(context.visual()) if whole else int(visual.sum())
        kept = n - total + self.count(total)
        if context.limit is not None:
            kept = min(kept, context.limit)
        if kept >= n:
            return kv
        if not whole and (min(kv.counts) < n or bool((kv.order != kv.order[0]).any())):
            raise RecipeError(
                f"{self.name} must come before the other cache methods of a recipe: one of them "
                "has left different tokens in the heads of a layer"
            )
        return kv.select(top_k(worth(kv, self.score), kept, ~visual))
