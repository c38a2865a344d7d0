"""SCOPE: keep salient tokens that cover what the others do not.

Among the strongest published reducers at 64 of LLaVA-1.5's 576 tokens (95.4 %) that use neither the
question nor another model, so that one selection serves every question. The most salient tokens
concentrate on a few objects and leave out their surroundings. SCOPE (NeurIPS 2025, arXiv
2510.24214) weighs saliency ``a``, the CLS row of the layer that feeds the projector (mean over
heads), with the gain of coverage::

    f(Y) = sum over v of max over y in Y of max(cos(x_v, x_y), 0)
    add  argmax over y of  a_y^alpha (f(Y + y) - f(Y))          until k tokens are chosen

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Features are those after the projector, where encode stages run.
- Frames of one video are pruned together, several images separately. Newlines are dropped.
- ``alpha`` is 1, plain saliency; a cosine below 0 covers nothing.
- On vision towers without CLS the saliency is the attention that patches receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import VisionStats
from vlmfast.core.views import token_saliency
from vlmfast.kernels.coverage import cover
from vlmfast.kernels.diversity import cosine

from ..groups import groups_of
from ..guard import Guarded


@dataclass(frozen=True)
class SCOPE(Guarded):
    """Keeps salient tokens that cover what the others do not."""

    name: ClassVar[str] = "scope"
    paper: ClassVar[str] = "NeurIPS 2025, arXiv 2510.24214"
    tier: ClassVar[str] = "core"
    exact: ClassVar[bool] = True
    joins_frames = True

    keep: float = param(1 / 9, "fraction of the visual tokens kept", gt=0.0, le=1.0)
    alpha: float = param(1.0, "exponent of saliency; 0: coverage alone", ge=0.0)
    saliency: str = saliency_param()

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        return (self.guarded(SaliencyRequest("features", self.saliency)),)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.fraction == 1:
            return tokens
        weight = token_saliency(tokens, stats, *self.saliencies()) ** self.alpha
        kept = []
        for group in groups_of(tokens, stats.items):
            k, index = self.count_of(len(group)), group.patches()
            alike = cosine(tokens.features[index]).clamp(min=0)
            kept.append(index[cover(alike, min(k, len(index)), scale=weight[index])])
        return tokens.select(torch.cat(kept).sort().values)
