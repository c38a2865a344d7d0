"""DivPrune: the tokens that are kept lie as far from each other as they can.

Attention finds the same thing many times over. DivPrune (CVPR 2025, arXiv 2503.02175) looks at
nothing but the visual tokens that would enter the language model, and keeps ``k = round(n r)`` of
``n`` (half to even) so that the two of them which are most alike are as different as can be, by a
greedy solution of that max-min problem::

    d(i, j) = 1 - cos(x_i, x_j)
    first   argmax over i of  min over j != i of d(i, j)
    then    argmax over i of  min over chosen j of d(i, j)

Newlines are tokens like others; all are the same, so that hardly more than one of them is chosen.

Different from the authors' code, and why:

- Every picture of a prompt is thinned out by itself; theirs does so for the first one alone, at a
  place in the prompt that is a constant. Frames of one clip are judged together, as in the paper's
  videos, so that what stands still is kept once (``across="frame"``: each by itself).
- Cosines are taken in float32. Those of half-precision products choose other tokens.
- Ties go to the lower index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.diversity import cosine, max_min

from ..groups import together
from ..reducer import Reducer
from ..select import count


@dataclass(frozen=True)
class DivPrune(Reducer):
    """Keeps the tokens that are least alike."""

    name: ClassVar[str] = "divprune"
    paper: ClassVar[str] = "CVPR 2025, arXiv 2503.02175"

    rate: float = param(0.098, "share of the visual tokens that stays", gt=0.0, le=1.0)
    across: str = param(
        "clip",
        "frames of one clip: all of its tokens against each other, or each frame by itself",
        choices=("clip", "frame"),
    )

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.share == 1:
            return tokens
        if self.across == "clip":
            groups = together(tokens, stats.items)
        else:
            groups = [index for _, index in tokens.items()]
        kept = [
            index[max_min(cosine(tokens.features[index]), count(self.share, len(index)))]
            for index in groups
        ]
        return tokens.select(torch.cat(kept).sort().values)
