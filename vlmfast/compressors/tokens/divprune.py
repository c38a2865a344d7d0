"""DivPrune: keep the most diverse tokens.

Attention often selects near-duplicates. DivPrune (CVPR 2025, arXiv 2503.02175) uses the visual
tokens alone. Of ``n`` tokens it keeps ``k = round(n r)`` (half to even) such that the two most
similar kept tokens are as different as possible, by a greedy solution of that max-min problem::

    d(i, j) = 1 - cos(x_i, x_j)
    first   argmax over i of  min over j != i of d(i, j)
    then    argmax over i of  min over chosen j of d(i, j)

Newlines compete like other tokens. They are all equal, so hardly more than one of them is chosen.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Every image of a prompt is pruned separately; theirs prunes the first one alone, at a constant
  position in the prompt. Frames of one video are pruned together, as in the paper's videos, so that
  static content is kept once (``across="frame"``: each frame separately).
- Cosines are computed in float32. Half-precision products select other tokens.
- Ties go to the lower index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import TokenCount
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.diversity import cosine, max_min

from ..groups import together
from ..reducer import Reducer


@dataclass(frozen=True)
class DivPrune(Reducer):
    """Keeps the most diverse tokens, by cosine distance."""

    name: ClassVar[str] = "divprune"
    paper: ClassVar[str] = "CVPR 2025, arXiv 2503.02175"
    tier: ClassVar[str] = "baseline"

    keep: float = param(0.098, "fraction of the visual tokens kept", gt=0.0, le=1.0)
    across: str = param(
        "video",
        "frames of one video: prune them together (video), or each separately (frame)",
        choices=("video", "frame"),
    )

    @property
    def joins_frames(self) -> bool:  # type: ignore[override]  # of its settings
        return self.across == "video"

    def count_left(self, before: TokenCount) -> TokenCount:
        """Newlines compete too: how many of them are kept depends on the content."""
        k = self.target(before)
        return before.left(k, k - (before.total - before.least), min(k, before.most))

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.fraction == 1:
            return tokens
        if self.across == "video":
            groups = together(tokens, stats.items)
        else:
            groups = [index for _, index in tokens.items()]
        kept = [
            index[max_min(cosine(tokens.features[index]), self.count_of(len(index)))]
            for index in groups
        ]
        return tokens.select(torch.cat(kept).sort().values)
