"""MMTok: the tokens that together cover the question and the picture.

One of the two strongest training-free reducers at 64 of LLaVA-1.5's 576 tokens (96.3 % published),
and the one that needs nothing but what enters the language model: no attention, no other model.
That is why it is here. MMTok (ICLR 2026, arXiv 2508.18264) asks of the chosen tokens Y that every
word of the question and every token of the picture has something like it among them::

    P = softmax over v of cos(t, v) / tau_t          for the T text tokens t
    Q = softmax over u of cos(v, u) / tau_v          for the N visual tokens v
    max over Y of  1/T sum over t of max over Y of P_tv + alpha/N sum over v of max over Y of Q_vu

by greedy steps. Text is everything behind the first visual token, or all of it where there is none.

Different from the authors' code, and why:

- Visual tokens are compared behind the projector, where encode stages work; theirs compares them
  in front of it, and with the text behind it.
- Text is that of the prompt as it is embedded, not keywords of the question, which a list of words
  in English picks, or what another model makes of it.
- Frames of one clip are chosen from together, several pictures each by itself. Newlines go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.diversity import cosine

from ..cover import cover
from ..groups import together
from ..reducer import Reducer
from ..select import count


def coverage(visual: Tensor, text: Tensor, tau_t: float, tau_v: float, alpha: float) -> Tensor:
    """What each visual token covers of text and picture: float32, (T + N, N).

    Parameters
    ----------
    visual : Tensor, (N, D)
    text : Tensor, (T, D)
    """
    named = normalize(text.float(), dim=-1) @ normalize(visual.float(), dim=-1).T
    alike = cosine(visual)
    named = (named / tau_t).softmax(-1) / max(len(text), 1)
    return torch.cat([named, alpha * (alike / tau_v).softmax(-1) / len(visual)])


@dataclass(frozen=True)
class MMTok(Reducer):
    """Keeps tokens that cover both the words of the question and the picture."""

    name: ClassVar[str] = "mmtok"
    paper: ClassVar[str] = "ICLR 2026, arXiv 2508.18264"
    asks_question: ClassVar[bool] = True

    rate: float = param(1 / 9, "share of the visual tokens that stays", gt=0.0, le=1.0)
    alpha: float = param(0.5, "weight of the picture beside the text", ge=0.0)
    tau_t: float = param(0.02, "temperature of text and picture", gt=0.0)
    tau_v: float = param(0.2, "temperature of the picture and itself", gt=0.0)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.share == 1:
            return tokens
        text, kept = request.question_embeds, []
        if request.order is not None:
            behind = request.order > tokens.layout.order[0]
            text = text[behind] if bool(behind.any()) else text
        for index in together(tokens, stats.items):
            k = count(self.share, len(index))
            index = index[tokens.layout.patches[index]]
            worth = coverage(tokens.features[index], text, self.tau_t, self.tau_v, self.alpha)
            kept.append(index[cover(worth, min(k, len(index)))])
        return tokens.select(torch.cat(kept).sort().values)
