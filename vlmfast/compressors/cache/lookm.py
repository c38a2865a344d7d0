"""LOOK-M: text stays, the rest of a picture merges into what stays.

Once a layer has read the prompt, LOOK-M (EMNLP 2024 Findings, arXiv 2406.18139) scores each of its
``N`` slots by the attention that it received, and keeps the last ones and the best of the others,
text before pictures::

    a[h, j] = sum over all rows i of P[h, i, j]                 causal softmax attention
    rec     = int(N share recent)        hh = int(N share (1 - recent))
    keep      the last rec slots, and the hh first of the rest by (is text, a[h, j])

Keys and values of an evicted slot merge into the kept slot whose key is most similar to its own, by
`kernels.merge`. Without ``text_prior`` the first ``sinks`` slots come before all others instead.

The paper adds ``max(a)`` to the scores of text, which is the order above. So text never leaves, and
a share with no room for it is an error; a prompt without pictures is left as it is.

Different from the authors' code, and why:

- Exactly ``hh + rec`` slots stay, as in the paper. Their code keeps all text beyond ``hh`` too;
  ``overrun`` does so, and then the share is a wish.
- They add -65516 to a picture's scores. That is no number in float16, and bfloat16 has one value
  left for all of them: which part of a picture stays is then left to the order of ties. Here text
  comes first by comparison, and scores stay what they are.
- ``merge="avg"`` adds the tokens that belong together. Theirs filters the list of pivots but not
  the rows, so that every row behind the first gap goes to another one's pivot.
- ``filter`` names the evicted tokens that ``avg`` and ``weighted`` merge. ``token``: those at least
  as similar to their pivot as the head's mean. Theirs, ``slot``, averages over heads the similarity
  of the m-th evicted token of each, which are different tokens. ``pivot`` merges all, as theirs.
- A key of length zero has similarity 0 to all; theirs becomes NaN, and so does its pivot.
- Query heads that share a KV head are averaged, scores are not summed over a batch, and what is
  visual is what the prompt says, not 576 tokens behind a placeholder.
- Keys merge as they lie, rotated to different positions, as theirs do. ``rope_aware`` compares and
  merges them as if all stood at one position, and rotates the result to the pivot's; that is new.
- ``repair`` counts a merged slot for all that went into it; that is new as well.

What they published cannot be imported as it stands (one class is missing, another has lost its
first line), and what they call RoCo keeps the whole cache, its call being commented out. Both are
not here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param, repair_param
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.merge import merge_into
from vlmfast.kernels.select import ranked


def sizes(n: int, share: float, recent: float) -> tuple[int, int]:
    """Heavy hitters ``hh`` and last slots ``rec`` that stay of ``n``."""
    if int(n * share) >= n:
        return n, 0
    return int(n * share * (1 - recent)), int(n * share * recent)


def heavy_hitters(score: Tensor, first: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The ``count[h]`` best slots of those ``among`` which to choose.

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
    lead: ClassVar[str | None] = "share"

    share: float = param(
        0.2, "share of the prompt's keys and values that stays in each layer", gt=0.0, le=1.0
    )
    recent: float = param(0.5, "share of these that are the last of the prompt", ge=0.0, lt=1.0)
    merge: str = param(
        "pivot",
        "how evicted slots enter the kept ones: half pivot and half token, averaged, weighted by "
        "similarity, or not at all",
        choices=("pivot", "avg", "weighted", "none"),
    )
    filter: str = param(
        "token",
        "what avg and weighted merge: tokens more similar than their head's mean, slots more "
        "similar on average over heads (the authors' code), or all",
        choices=("token", "slot", "all"),
    )
    text_prior: bool = param(True, "text stays before any part of a picture")
    overrun: bool = param(False, "text stays even beyond the share, as in the authors' code")
    sinks: int | None = param(
        None, "first slots that stay; by default 0 with text_prior and 4 without", ge=0
    )
    rope_aware: bool = param(False, "merge keys as if they all stood at one position")
    repair: bool = repair_param(False)

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return dict.fromkeys(range(depth), ColumnRequest("all"))

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        valid = kv.valid
        if self.text_prior and not bool((kv.visual & valid).any()):
            return kv
        keep = self.keep(kv, stats.sum.mean(1))
        return kv if torch.equal(keep, valid) else self.shrunk(context, kv, keep)

    def keep(self, kv: KV, score: Tensor) -> Tensor:
        """Slots that stay: bool, (H, N). ``score`` is float32, (H, N)."""
        slots, valid = torch.arange(len(kv), device=score.device), kv.valid
        lengths = kv.lengths.tolist()
        hh, rec = torch.tensor([sizes(n, self.share, self.recent) for n in lengths]).T.to(slots)
        among = slots < (kv.lengths - rec)[:, None]
        first = self.first(kv)
        if self.overrun:
            hh = torch.maximum(hh, (first & among).sum(1))
        elif bool(((first & among).sum(1) > hh).any()):
            raise RecipeError(self._too_small(lengths, first.cpu()))
        return heavy_hitters(score, first, among, hh) | (valid & ~among)

    def first(self, kv: KV) -> Tensor:
        """Slots that must stay: bool, (H, N)."""
        sinks = (0 if self.text_prior else 4) if self.sinks is None else self.sinks
        first = (torch.arange(len(kv), device=kv.visual.device) < sinks).expand_as(kv.visual)
        return (first | ~kv.visual if self.text_prior else first) & kv.valid

    def shrunk(self, context: PrefillContext, kv: KV, keep: Tensor) -> KV:
        """The slots that ``keep`` (H, N) marks, with the others merged in."""
        lengths = keep.sum(1)
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(lengths.max())]
        kept = kv.select(index, lengths)
        if self.merge == "none":
            return kept
        keys = context.rotate(kv.keys.float(), -kv.position) if self.rope_aware else kv.keys
        keys, values, weight = merge_into(
            keys,
            kv.values,
            index,
            self.merge,
            rule="all" if self.merge == "pivot" else self.filter,
            valid=kv.valid,
            lengths=lengths,
            weight=None if kv.bias is None else kv.bias.exp(),
        )
        if self.rope_aware:
            keys = context.rotate(keys, kept.position).to(kv.keys.dtype)
        bias = weight.log() if self.repair else kept.bias
        return replace(kept, keys=keys, values=values, bias=bias)

    def _too_small(self, lengths: list[int], first: Tensor) -> str:
        def short(share: float) -> tuple[int, int, int, int]:
            """Of the head that lacks most: how many, ``n``, ``hh``, ``rec``."""
            rows = []
            for n, must in zip(lengths, first, strict=True):
                hh, rec = sizes(n, share, self.recent)
                rows.append((int(must[: n - rec].sum()) - hh, n, hh, rec))
            return max(rows)

        lacking, n, hh, rec = short(self.share)
        # In steps of 1 / 10,000, so that it can be typed.
        least = bisect_left(range(10_000), True, key=lambda i: short(i / 10_000)[0] <= 0) / 10_000
        what = "text tokens" if self.text_prior else "sinks"
        return (
            f"{self.name}: share={self.share:g} leaves {hh} of {n} slots beside the last {rec}, "
            f"less than the {hh + lacking} {what} before these; it must be at least {least:g}"
        )
