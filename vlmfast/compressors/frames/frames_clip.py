"""frames-clip: which frames of a clip are read, by the question.

Frames at even distances may all miss what a question is about. An OpenCLIP model looks at
``candidates`` of them, and ``n`` are chosen as CDPruner (NeurIPS 2025, arXiv 2506.10967) chooses
tokens: relevant, and unlike each other. With ``f`` the embeddings of frames and ``q`` that of the
question, ``r`` their cosines taken to [0, 1]::

    L = diag(r) S diag(r)     S_ij = cos(f_i, f_j)     max over n frames Y of det(L_Y), greedily

They are read in the order of the clip. A clip of ``n`` frames or fewer is read whole.
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

from .. import clip as _clip


@dataclass(frozen=True)
class FramesClip(MediaStage):
    """Reads the frames that a CLIP model finds relevant to the question, and unlike each other."""

    name: ClassVar[str] = "frames-clip"
    paper: ClassVar[str] = "ours, after arXiv 2506.10967"
    other_model: ClassVar[bool] = True
    lead: ClassVar[str | None] = "n"

    n: int = param(8, "frames that are read", ge=1)
    candidates: int = param(64, "frames that are looked at, at even distances", ge=1)
    model: str = _clip.model_param()
    pretrained: str = _clip.pretrained_param()

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
            raise RecipeError("frames-clip looks at the frames, and they cannot be read here")
        judge = _clip.load(self.name, self.model, self.pretrained)
        places = cells(min(self.candidates, video.frames), video.frames)
        # A few at a time: hundreds of large frames are no small memory.
        seen = torch.cat([judge.pictures(video.read(part.tolist())) for part in places.split(16)])
        kernel = _clip.conditional(cosine(seen), seen @ judge.text(question))
        return places[dpp(kernel, self.n).cpu()].sort().values.tolist()
