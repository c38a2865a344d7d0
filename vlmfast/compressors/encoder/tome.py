"""ToMe: merge the most similar tokens in every block of the vision tower.

Token Merging (ICLR 2023, arXiv 2210.09461) shortens the tower itself. After each block the rows of
a view are split alternately into two sets, A and B. CLS is unchanged. With ``k`` the keys of the
block, mean over heads, and ``s`` the number of patches in a row::

    e(a) = argmax over b in B of cos(k_a, k_b)
    the r rows of A with the largest such cosine are merged:  x_b = sum s_j x_j / sum s_j  over b
                                                              and all j in A with e(j) = b

so that every block removes ``r`` rows. *Proportional attention* adds log(s) to the logits of a key,
as if every patch were still present; ``proportional_attention`` (on, as in the paper for towers
that were not trained with merging) does so in the tower, and in the language model too.

``keep`` and ``budget`` set the fraction of a view's tokens that is left, and solve ``r``: the
smallest number that reaches it, where the last merging block takes the remainder. ``r`` itself may
be given instead. Newlines are dropped.

Many towers make one visual token of several patches (2 x 2 in Qwen-VL and InternVL, pooled frames
of video). There the rows above are *cells*: all patches that become one visual token. Two cells
merge patch by patch, the i-th of one with the i-th of the other, so that a merger or pool after the
tower gets whole cells; a cell's key is the concatenation of its patches' keys.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Rows are merged after a block, not between its attention and its MLP: this is possible in a tower
  of transformers without replacing its layers. The keys are those of the same block.
- After the tower a merged row is copied to each of its positions, so that a family's own packing
  (crops, letterbox, newlines) gets its grid; of each group the token nearest to its middle is kept.
- The paper's towers (ViT, and CLIP in comparisons on LLaVA) have no cells and no windows. In
  Qwen-VL, whose blocks rotate keys by their position, the compared keys are rotated, and a merged
  cell takes the rotary position of its first member. In Qwen2.5-VL, most of whose blocks attend
  within windows, it also belongs to that member's window. Merging ignores windows, and cells keep
  the order of the tower, so that A and B alternate in that order.
- Qwen3-VL reads features of earlier blocks; each of them uses the groups at its block.
- A tower without attention has no keys (FastVLM), and where frames are pooled by interpolation
  patches belong to no single token (LLaVA-OneVision with an odd number of patches in a row). Both
  are refused.
- Ties go to the lower index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest, VisionContext
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import budget_param, param, positions_param, proportional_attention_param
from vlmfast.core.protocols import EncodeStage, InEncoderStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest, VisionStats

from ..part import Part
from ..select import best


def bipartite(metric: Tensor, r: int, cls: bool) -> Tensor:
    """The row of the result that each row merges into: int64, (V, N).

    The result contains the kept rows of A, in their order, then B.

    Parameters
    ----------
    metric : Tensor, (V, N, d)
    r : int
        At most half of the rows that may merge.
    cls : bool
        Whether row 0 must not merge.
    """
    views, n, _ = metric.shape
    units = normalize(metric.float(), dim=-1)
    cosine = units[:, ::2] @ units[:, 1::2].transpose(1, 2)
    if cls:
        cosine[:, 0] = -torch.inf
    value, target = cosine.max(-1)
    target = (cosine == value[..., None]).int().argmax(-1)  # the first on a tie
    a = value.shape[1]
    merges = best(value, [_merged(n, r, cls)] * views)
    stays = (~merges).cumsum(1) - 1
    first = a - merges.sum(1, keepdim=True)  # where B begins
    source = torch.empty(views, n, dtype=torch.int64, device=metric.device)
    source[:, ::2] = torch.where(merges, first + target, stays)
    source[:, 1::2] = first + torch.arange(n - a, device=metric.device)
    return source


def _merged(n: int, r: int, cls: bool) -> int:
    """How many of ``n`` rows `bipartite` merges into others."""
    return min(r, (n - cls) // 2)


def merge(
    rows: Tensor, size: Tensor, source: Tensor, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Means of rows (V, N, D) by ``source`` (V, N), weighted by ``size`` (V, N), and their sizes.

    Products are used because the order of scattered sums is not deterministic on a GPU.
    ``count``: how many rows are left, where the host knows it.
    """
    count = int(source.max()) + 1 if count is None else count
    new = torch.arange(count, device=source.device)
    member = (source[:, None] == new[:, None]).float() * size[:, None]
    total = member.sum(-1)
    return (member @ rows.float() / total[..., None]).to(rows.dtype), total


def schedule(n: int, left: int, blocks: int, r: int | None = None) -> list[int]:
    """Patches that each of ``blocks`` merges, of ``n``, until ``left`` remain.

    Each merges ``r``, or by default the smallest number that suffices, but at most half of its
    input.
    """
    for most in range(-(-(n - left) // blocks), n) if r is None else (r,):
        here, steps = n, []
        for _ in range(blocks):
            steps.append(min(most, here // 2, here - left))
            here -= steps[-1]
        if r is not None or here == left:
            break
    return steps


@dataclass(frozen=True)
class ToMe(Stage):
    """Merges the most similar patches in every block of the vision tower."""

    name: ClassVar[str] = "tome"
    protocol: ClassVar[str] = "in-encoder"
    paper: ClassVar[str] = "ICLR 2023, arXiv 2210.09461"
    tier: ClassVar[str] = "baseline"
    lead: ClassVar[str | None] = "keep"

    keep: float = param(1 / 3, "fraction of each view's visual tokens kept", gt=0.0, le=1.0)
    r: int = param(
        0, "tokens merged in each block; if not 0, it replaces keep", ge=0, excludes=("keep",)
    )
    positions: str = positions_param()
    proportional_attention: bool = proportional_attention_param(True)
    budget: float | None = budget_param("keep", "r")

    def expand(self) -> tuple[Stage, ...]:
        return (Merge(self), Tokens(self))

    @property
    def whole(self) -> bool:
        """Whether nothing merges."""
        return (self.keep if self.budget is None and not self.r else self.budget) == 1

    def steps(self, n: int, blocks: int) -> list[int]:
        """Patches that each block merges, of ``n``."""
        if self.r:
            return schedule(n, 1, blocks, self.r)
        share = self.keep if self.budget is None else self.budget
        return schedule(n, max(1, round(share * n)), blocks)


@dataclass(frozen=True)
class Merge(Part, InEncoderStage):
    """Part 1: merges after each block of the tower whose output is used."""

    name: ClassVar[str] = ToMe.name
    cells = True

    def vision_stats(self, depth: int) -> dict[int, StatRequest]:
        return {block - 1: StatRequest("keys", keys=True) for block in self.blocks(depth)}

    def blocks(self, depth: int) -> tuple[int, ...]:
        # LLaVA uses the features before the last block.
        return () if self.of.whole else tuple(range(1, depth - 1)) or (1,)

    def on_block(
        self, context: VisionContext, index: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        views, rows, _ = hidden.shape
        before = rows if context.merged is None else context.merged.shape[1]
        h, w = context.items[0].patches
        blocks = self.blocks(context.depth)
        r = self.of.steps(h * w, len(blocks))[blocks.index(index)]
        if r == 0:
            return hidden, None
        keys = context.keys[index - 1]  # of the rows that entered the tower
        size = torch.ones(views, before, device=hidden.device)
        if context.merged is not None:
            target = context.merged[..., None].expand_as(keys)
            keys = keys.new_zeros(views, rows, keys.shape[2]).scatter(1, target, keys)
            size = size.new_zeros(views, rows).scatter_add(1, context.merged, size)
        source = bipartite(keys, r, context.specials == 1)
        left = rows - _merged(rows, r, context.specials == 1)
        return merge(hidden, size, source, left)[0], source


@dataclass(frozen=True)
class Tokens(Part, EncodeStage):
    """Part 2: drops newlines after the tower."""

    name: ClassVar[str] = ToMe.name

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        return tokens if self.of.whole else tokens.patches()
