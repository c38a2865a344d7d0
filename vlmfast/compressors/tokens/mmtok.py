"""MMTok: keep the tokens that together cover the question and the image.

One of the two strongest training-free reducers at 64 of LLaVA-1.5's 576 tokens (96.3 % published).
It needs only the input of the language model: no attention and no other model. MMTok (ICLR 2026,
arXiv 2508.18264) chooses tokens Y such that every token of the question and of the image has a
similar one among them::

    P = softmax over v of cos(t, v) / tau_t          for the T text tokens t
    Q = softmax over u of cos(v, u) / tau_v          for the N visual tokens v
    max over Y of  1/T sum over t of max over Y of P_tv + alpha/N sum over v of max over Y of Q_vu

by greedy steps. The text is everything after the first visual token, or all of it if none follows.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Visual tokens are compared with each other after the projector, where encode stages run; theirs
  compares them before it, and with the text after it.
- The text is that of the embedded prompt, not keywords of the question selected by an English word
  list, nor the output of another model.
- Frames of one video are pruned together, several images separately. Newlines are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens, marked_rows
from vlmfast.core.params import param
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.coverage import cover
from vlmfast.kernels.diversity import cosine

from ..groups import groups_of
from ..reducer import Reducer


def coverage(visual: Tensor, text: Tensor, tau_t: float, tau_v: float, alpha: float) -> Tensor:
    """How well each visual token covers the text and the image: float32, (T + N, N).

    Parameters
    ----------
    visual : Tensor, (N, D)
    text : Tensor, (T, D)
    """
    by_text = normalize(text.float(), dim=-1) @ normalize(visual.float(), dim=-1).T
    alike = cosine(visual)
    by_text = (by_text / tau_t).softmax(-1) / max(len(text), 1)
    return torch.cat([by_text, alpha * (alike / tau_v).softmax(-1) / len(visual)])


@dataclass(frozen=True)
class MMTok(Reducer):
    """Keeps tokens that cover both the question and the image."""

    name: ClassVar[str] = "mmtok"
    paper: ClassVar[str] = "ICLR 2026, arXiv 2508.18264"
    query_dependent: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    joins_frames = True

    keep: float = param(1 / 9, "fraction of the visual tokens kept", gt=0.0, le=1.0)
    alpha: float = param(0.5, "weight of image coverage relative to text coverage", ge=0.0)
    tau_t: float = param(0.02, "temperature of text-image similarity", gt=0.0)
    tau_v: float = param(0.2, "temperature of image-image similarity", gt=0.0)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.fraction == 1:
            return tokens
        text, kept = request.question_embeds, []
        if request.order is not None:
            after = request.order > tokens.layout.order[0]
            count = int(after.sum())  # the only read
            text = text[marked_rows(after, count)] if count else text
        for group in groups_of(tokens, stats.items):
            k, index = self.count_of(len(group)), group.patches()
            worth = coverage(tokens.features[index], text, self.tau_t, self.tau_v, self.alpha)
            kept.append(index[cover(worth, min(k, len(index)))])
        return tokens.select(torch.cat(kept).sort().values)
