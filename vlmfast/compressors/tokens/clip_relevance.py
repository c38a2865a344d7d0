"""clip-relevance: what an OpenCLIP model finds relevant to the question, without repeating it.

The tokens most relevant to a question are often copies of each other, and diverse ones may have
nothing to do with it. CDPruner (NeurIPS 2025, arXiv 2506.10967) wants both. With ``S`` the cosines
of the visual tokens and ``r`` their relevance, taken to [0, 1], it keeps the tokens Y that a
determinantal point process finds most likely, by greedy steps::

    L = diag(r) S diag(r)          max over Y of det(L_Y)

Relevance is minus the cosine of a patch of CLIP, behind its last norm and projection, with the
question: patches of a CLIP that was trained for CLS alone lie on the far side of what they show.

Different from the authors' code, and why:

- The judge is any model of OpenCLIP, which looks at the picture itself, beside the model's own
  tower; theirs is CLIP's text tower beside a tower that must be CLIP. Its map is read at the middle
  of each token, whatever views a family makes. A model that is no plain ViT judges windows of the
  picture, as they are.
- Frames of one clip are chosen from together. Newlines go.
- When all that is left repeats what is there, relevance alone decides.
- A question that is longer than the judge can read is cut by its tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param
from vlmfast.core.statistics import VisionStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.diversity import cosine, dpp

from .. import clip as _clip
from ..groups import together
from ..reducer import Reducer
from ..select import count, top


@dataclass(frozen=True)
class ClipRelevance(Reducer):
    """Keeps what a CLIP model finds relevant to the question, without repeating it."""

    name: ClassVar[str] = "clip-relevance"
    paper: ClassVar[str] = "NeurIPS 2025, arXiv 2506.10967"
    other_model: ClassVar[bool] = True
    asks_question: ClassVar[bool] = True

    rate: float = param(1 / 9, "share of the visual tokens that stays", gt=0.0, le=1.0)
    model: str = _clip.model_param()
    pretrained: str = _clip.pretrained_param()
    diversity: bool = param(True, "the determinant; false: the most relevant tokens, alike or not")

    def relevance(self, tokens: VisualTokens, request: EncodeRequest) -> Tensor:
        """Of each token that shows a part of a picture, float32, (S,); of others what there is."""
        judge = _clip.load(self.name, self.model, self.pretrained)
        text, found = judge.text(request.question), torch.zeros(len(tokens))
        for item, index in tokens.items():
            boxes = tokens.layout.box[index].cpu().nan_to_num(0.5)
            values = judge.relevance(request.pictures[item], text).cpu()
            found[index.cpu()] = _clip.at_boxes(values, boxes)
        return found.to(tokens.features.device)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.share == 1:
            return tokens
        if len(request.pictures) < len(stats.items):
            raise RecipeError(
                f"{self.name} looks at the pictures themselves, and only their features are here"
            )
        relevance, kept = self.relevance(tokens, request), []
        for index in together(tokens, stats.items):
            k = count(self.share, len(index))
            index = index[tokens.layout.patches[index]]
            r, k = relevance[index], min(k, len(index))
            if self.diversity:
                kernel = _clip.conditional(cosine(tokens.features[index]), r)
                kept.append(index[dpp(kernel, k)])
            else:
                kept.append(index[top(r, torch.ones_like(r, dtype=torch.bool), k)])
        return tokens.select(torch.cat(kept).sort().values)
