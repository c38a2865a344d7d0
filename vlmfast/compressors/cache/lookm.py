"""LOOK-M: keep text, and merge evicted image slots into the kept ones.

After the prefill of a layer, LOOK-M (EMNLP 2024 Findings, arXiv 2406.18139) scores each of its
``N`` slots by the attention that it received, and keeps the last ones and the best of the others,
text before images::

    a[h, j] = sum over all rows i of P[h, i, j]                 causal softmax attention
    rec     = int(N keep recent)        hh = int(N keep (1 - recent))
    keep      the last rec slots, and the hh first of the rest by (is text, a[h, j])

Keys and values of an evicted slot merge into the kept slot whose key is most similar to its own, by
`kernels.merge`. Without ``text_prior`` the first ``sinks`` slots come before all others instead.

The paper adds ``max(a)`` to the scores of text, which is the order above. So text is never evicted,
nor are sinks: where they exceed ``hh``, all of them are kept, and no image slot before the last
``rec``. A prompt without images is unchanged.

Different from the authors' code, and why:

- Exactly ``hh + rec`` slots are kept unless the text needs more. Their code adds text to ``hh``.
- They add -65516 to the scores of an image. This overflows float16, and in bfloat16 all of these
  scores become equal: the order of ties then decides which image slots are kept. Here text comes
  first by comparison, and scores are unchanged.
- ``merge="avg"`` adds the tokens that belong together. Theirs filters the list of pivots but not
  the rows, so that every row after the first gap is added to a wrong pivot.
- ``filter`` selects the evicted tokens that ``avg`` and ``weighted`` merge. ``token``: those at
  least as similar to their pivot as the head's mean. Theirs, ``slot``, averages over heads the
  similarity of the m-th evicted token of each, which are different tokens. ``pivot`` merges all, as
  theirs.
- A key of length zero has similarity 0 to all; theirs becomes NaN, and so does its pivot.
- Query heads that share a KV head are averaged, scores are not summed over a batch, and visual
  slots are those of the prompt's layout, not 576 tokens after a placeholder.
- Keys merge as stored, rotated to different positions, as theirs do. ``rope_aware`` compares and
  merges them as if all were at one position, and rotates the result to the pivot's; that is new.
- ``proportional_attention`` weights a merged slot by all slots merged into it; that is new as well.

Their published code cannot be imported as it is (one class is missing, another lacks its first
line), and what they call RoCo keeps the whole cache, as its call is commented out. Both are not
included here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param, proportional_attention_param
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.merge import merge_into
from vlmfast.kernels.select import ranked

from ..evictor import kept_param


def sizes(n: int, share: float, recent: float) -> tuple[int, int]:
    """Heavy hitters ``hh`` and last slots ``rec`` kept of ``n``."""
    if int(n * share) >= n:
        return n, 0
    return int(n * share * (1 - recent)), int(n * share * recent)


def heavy_hitters(score: Tensor, first: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """Mark the ``count[h]`` best slots of those in ``among``.

    Parameters
    ----------
    score : Tensor, float32, (H, N)
    first : Tensor, bool, (H, N)
        Slots that come before all others, whatever their score.
    count : Tensor, int64, (H,)

    Returns
    -------
    Tensor, bool, (H, N)
    """
    order = ranked(score)
    group = torch.where(among, torch.where(first, 0, 1), 2).to(torch.uint8)
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    return (order.argsort(1) < count[:, None]) & among


@dataclass(frozen=True)
class LookM(CacheStage):
    """Keeps text, recent and much attended slots, and merges the rest into them."""

    name: ClassVar[str] = "lookm"
    paper: ClassVar[str] = "EMNLP 2024 Findings, arXiv 2406.18139"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "keep"

    keep: float = kept_param(0.2)
    recent: float = param(0.5, "fraction of the kept slots that are the last ones", ge=0.0, lt=1.0)
    merge: str = param(
        "pivot",
        "how evicted slots are merged into kept ones: half pivot and half token, averaged, "
        "weighted by similarity, or not at all",
        choices=("pivot", "avg", "weighted", "none"),
    )
    filter: str = param(
        "token",
        "what avg and weighted merge: tokens more similar than their head's mean, slots more "
        "similar on average over heads (the authors' code), or all",
        choices=("token", "slot", "all"),
    )
    text_prior: bool = param(True, "keep text before any image slot")
    sinks: int | None = param(
        None, "first slots always kept; by default 0 with text_prior and 4 without", ge=0
    )
    rope_aware: bool = param(False, "merge keys as if they were all at one position")
    proportional_attention: bool = proportional_attention_param(False)

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return dict.fromkeys(range(depth), ColumnRequest("all"))

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        whole = kv.layout is context.layout
        visual = context.visual() if whole else None
        if self.text_prior and not (
            bool((kv.visual & kv.valid).any()) if visual is None else any(visual)
        ):
            return kv
        assert stats is not None and stats.sum is not None
        keep = self.select_slots(kv, stats.sum.mean(1))
        counts = keep.sum(1).tolist() if visual is None else self._counts(visual, len(kv.counts))
        return kv if tuple(counts) == kv.counts else self.shrunk(context, kv, keep, counts)

    def _counts(self, visual: list[bool], heads: int) -> list[int]:
        """How many slots `select_slots` keeps of each head, where all hold the whole prompt."""
        n = len(visual)
        hh, rec = sizes(n, self.keep, self.recent)
        first = range(min(self._sinks, n - rec))
        texts = (i for i in range(n - rec) if self.text_prior and not visual[i])
        hh = max(hh, len({*first, *texts}))
        return [min(hh if hh + rec else 1, n - rec) + rec] * heads

    def select_slots(self, kv: KV, score: Tensor) -> Tensor:
        """Slots to keep: bool, (H, N). ``score`` is float32, (H, N)."""
        slots, valid = torch.arange(len(kv), device=score.device), kv.valid
        found = [sizes(n, self.keep, self.recent) for n in kv.counts]
        if len(set(found)) == 1:
            hh, rec = (torch.full_like(kv.lengths, n) for n in found[0])
        else:
            hh, rec = torch.tensor(found).T.to(slots)
        among = slots < (kv.lengths - rec)[:, None]
        first = self.first(kv)
        hh = torch.maximum(hh, (first & among).sum(1))
        hh = torch.where(hh + rec > 0, hh, 1)  # at least one slot
        return heavy_hitters(score, first, among, hh) | (valid & ~among)

    @property
    def _sinks(self) -> int:
        return (0 if self.text_prior else 4) if self.sinks is None else self.sinks

    def first(self, kv: KV) -> Tensor:
        """Slots that must be kept: bool, (H, N)."""
        slots = torch.arange(len(kv), device=kv.visual.device)
        first = (slots < self._sinks).expand_as(kv.visual)
        return (first | ~kv.visual if self.text_prior else first) & kv.valid

    def shrunk(
        self, context: PrefillContext, kv: KV, keep: Tensor, counts: Sequence[int] | None = None
    ) -> KV:
        """The slots that ``keep`` (H, N) marks, with the others merged in.

        ``counts``: how many of each head; read by default.
        """
        lengths = keep.sum(1)
        counts = lengths.tolist() if counts is None else counts
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(counts)]
        kept = kv.select(index, lengths, counts)
        if self.merge == "none":
            return kept
        keys, values, rotate = kv.keys, kv.values, context.rotate
        if self.rope_aware:
            assert rotate is not None
            if len(context.layout.position) > 1:
                raise RecipeError(
                    f"{self.name}: rope_aware=true needs one rotary id per token; this model gives "
                    f"each {len(context.layout.position)}"
                )
            keys, values = rotate(keys.float(), -kv.position), values.float()
        keys, values, weight = merge_into(
            keys,
            values,
            index,
            self.merge,
            rule="all" if self.merge == "pivot" else self.filter,
            valid=kv.valid,
            lengths=lengths,
            weight=None if kv.bias is None else kv.bias.exp(),
        )
        if self.rope_aware:
            assert rotate is not None
            keys, values = rotate(keys, kept.position).to(kv.keys.dtype), values.to(kv.values.dtype)
        bias = weight.log() if self.proportional_attention else kept.bias
        return replace(kept, keys=keys, values=values, bias=bias)
