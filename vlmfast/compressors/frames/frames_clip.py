"""frames-clip: choose the frames of a video that are relevant to the question.

Evenly spaced frames may all miss what a question is about. An OpenCLIP model embeds ``candidates``
evenly spaced frames, and ``n`` of them are chosen as CDPruner (NeurIPS 2025, arXiv 2506.10967)
chooses tokens: relevant to the question and different from each other. With ``f`` the embeddings of
the frames, ``q`` that of the question, and ``r`` their cosines scaled to [0, 1]::

    L = diag(r) S diag(r)     S_ij = cos(f_i, f_j)     max over n frames Y of det(L_Y), greedily

Chosen frames stay in temporal order. All frames of a video with ``n`` or fewer are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vlmfast.core.params import param
from vlmfast.core.protocols import MediaStage
from vlmfast.core.views import cells
from vlmfast.errors import RecipeError
from vlmfast.kernels.diversity import cosine, dpp

from .. import clip as open_clip_models


@dataclass(frozen=True)
class FramesClip(MediaStage):
    """Chooses frames that a CLIP model finds relevant to the question, and diverse."""

    name: ClassVar[str] = "frames-clip"
    paper: ClassVar[str] = "ours, after arXiv 2506.10967"
    other_model: ClassVar[bool] = True
    lead: ClassVar[str | None] = "n"

    n: int = param(8, "frames passed to the model", ge=1)
    candidates: int = param(64, "evenly spaced frames to choose from", ge=1)
    model: str = open_clip_models.model_param()
    pretrained: str = open_clip_models.pretrained_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < self.n:
            raise RecipeError(
                f"frames-clip: candidates={self.candidates} must be at least n={self.n}"
            )

    def frames(self, video: Any, question: str) -> list[int]:
        if video.frames <= self.n:
            return list(range(video.frames))
        if video.read is None:
            raise RecipeError("frames-clip needs the frames of the video, which are not available")
        judge = open_clip_models.load(self.name, self.model, self.pretrained)
        candidates = cells(min(self.candidates, video.frames), video.frames)
        # A few at a time: hundreds of large frames need much memory.
        parts = candidates.split(16)
        embeds = torch.cat([judge.images(video.read(part.tolist())) for part in parts])
        kernel = open_clip_models.conditional(cosine(embeds), embeds @ judge.text(question))
        return candidates[dpp(kernel, self.n).cpu()].sort().values.tolist()
