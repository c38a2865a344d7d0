"""QuickPrefill: a clip is read in blocks, each of which leaves the keys with small norms.

Keys that receive much attention tend to have small norms. QuickVideo (arXiv 2505.16175) reads the
frames of a clip a few at a time and cuts down each block's keys and values in each layer as soon as
the layer has attended, so that a block never meets more than what its predecessors left, and no
cache of the whole clip ever exists. No attention is looked at: with ``k[h, j]`` the rotated key of
slot j in KV head h, a block of which ``v`` slots are visual keeps its text and::

    norm_j = sqrt(sum over all heads h of |k[h, j]|^2)
    keep     the int(share v) visual slots, or top_k, with the smallest norm

the same slots in all heads, in the order of the prompt.

Different from the authors' code, and why:

- Text inside a block stays; the authors' blocks hold frames only. Only where the block as a whole
  may not have as many slots is text ranked as well, after all visual slots are gone.
- A block that holds a picture keeps one visual slot at least.
- Norms are float32; ties go to the lower index.
- ``score`` offers those of their modes that need keys or values alone. The others ask the question
  of each block or look at what the layer puts out.

Whether small norms or large ones mark the keys that matter depends on how a model was trained:
measure before trusting it.
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
    """Length of each slot's keys or values, those of all heads in one: (H, N, D) to (N,)."""
    return rows.float().square().sum((0, 2)).sqrt()


def worth(kv: KV, score: str) -> Tensor:
    """Score of each slot, float32, (N,)."""
    if score == "value-norm":
        return norms(kv.values)
    return norms(kv.keys) if score == "key-norm" else -norms(kv.keys)


@dataclass(frozen=True)
class QuickPrefill(CacheStage):
    """Reads a prompt in blocks; each leaves its text and the visual keys with small norms."""

    name: ClassVar[str] = "quickprefill"
    paper: ClassVar[str] = "QuickVideo, arXiv 2505.16175"
    lead: ClassVar[str | None] = "share"
    blockwise: ClassVar[bool] = True

    share: float = param(0.5, "share of each block's visual tokens that stays", gt=0.0, le=1.0)
    top_k: int | None = param(
        None, "visual tokens of each block that stay, instead of a share", ge=1
    )
    score: str = param(
        "key-norm-small",
        "what stays: small keys, large keys, or large values",
        choices=("key-norm-small", "key-norm", "value-norm"),
    )

    def count(self, visual: int) -> int:
        """Visual slots that stay of a block that has some."""
        return min(max(int(self.share * visual), 1) if self.top_k is None else self.top_k, visual)

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        n, visual = len(kv), kv.visual[0]
        pictures = int(visual.sum())
        kept = n - pictures + self.count(pictures)
        if context.limit is not None:
            kept = min(kept, context.limit)
        if kept >= n:
            return kv
        if bool((kv.lengths < n).any() | (kv.order != kv.order[0]).any()):
            raise RecipeError(
                f"{self.name} must stand before the other cache methods of a recipe: one of them "
                "has left different tokens in the heads of a layer"
            )
        return kv.select(top_k(worth(kv, self.score), kept, ~visual))
