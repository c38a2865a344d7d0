"""clip-relevance: keep tokens that an OpenCLIP model finds relevant, without redundancy.

The tokens most relevant to a question are often near-duplicates, and diverse ones may be unrelated
to it. CDPruner (NeurIPS 2025, arXiv 2506.10967) combines both. With ``S`` the cosines of the visual
tokens and ``r`` their relevance, scaled to [0, 1], it keeps the tokens Y that a determinantal point
process finds most likely, by greedy steps::

    L = diag(r) S diag(r)          max over Y of det(L_Y)

Relevance is minus the cosine of a CLIP patch, after the last norm and projection, with the
question: in a CLIP trained on CLS alone, patches are anticorrelated with the text of what they
show.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- The relevance model is any OpenCLIP model, run on the image in addition to the model's own tower;
  theirs is CLIP's text tower on top of a vision tower that must be CLIP. Its map is sampled at the
  centre of each token, whatever views a family makes. A model other than a plain ViT scores windows
  of the image.
- Frames of one video are pruned together. Newlines are dropped.
- When all remaining tokens are redundant, relevance alone decides.
- A question longer than the model's context is truncated by its tokenizer.
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

from .. import clip as open_clip_models
from ..groups import groups_of
from ..reducer import Reducer
from ..select import top


@dataclass(frozen=True)
class ClipRelevance(Reducer):
    """Keeps diverse tokens that a CLIP model finds relevant to the question."""

    name: ClassVar[str] = "clip-relevance"
    paper: ClassVar[str] = "NeurIPS 2025, arXiv 2506.10967"
    other_model: ClassVar[bool] = True
    query_dependent: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    joins_frames = True

    keep: float = param(1 / 9, "fraction of the visual tokens kept", gt=0.0, le=1.0)
    model: str = open_clip_models.model_param()
    pretrained: str = open_clip_models.pretrained_param()
    diversity: bool = param(True, "select by the determinant; false: by relevance alone")

    def relevance(self, tokens: VisualTokens, request: EncodeRequest) -> Tensor:
        """Relevance of each token, float32, (S,); undefined for tokens without an image region."""
        judge = open_clip_models.load(self.name, self.model, self.pretrained)
        text, found = judge.text(request.question), torch.zeros(len(tokens))
        for item, index in tokens.items():
            boxes = tokens.layout.box[index].cpu().nan_to_num(0.5)
            values = judge.relevance(request.images[item], text).cpu()
            found[index.cpu()] = open_clip_models.at_boxes(values, boxes)
        return found.to(tokens.features.device)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.fraction == 1:
            return tokens
        if len(request.images) < len(stats.items):
            raise RecipeError(
                f"{self.name} needs the images, but only their features are available"
            )
        relevance, kept = self.relevance(tokens, request), []
        for group in groups_of(tokens, stats.items):
            k, index = self.count_of(len(group)), group.patches()
            r, k = relevance[index], min(k, len(index))
            if self.diversity:
                kernel = open_clip_models.conditional(cosine(tokens.features[index]), r)
                kept.append(index[dpp(kernel, k)])
            else:
                kept.append(index[top(r, torch.ones_like(r, dtype=torch.bool), k)])
        return tokens.select(torch.cat(kept).sort().values)
