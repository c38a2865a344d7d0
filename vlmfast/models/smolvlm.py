"""SmolVLM: as Idefics3, and clips: one view per frame, with its time in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from .idefics3 import FamilyAdapter as Idefics3


class FamilyAdapter(Idefics3):
    clip_tensors = ("pixel_values",)

    def inputs(
        self, text: str, images: list[Any], frames: Sequence[tuple] = ()
    ) -> dict[str, Tensor]:
        pictures, clips = self.parted(images, frames)
        if len(clips) > 1 or (clips and pictures):
            raise ModelError("smolvlm reads pictures or one clip, not both in one prompt")
        return super().inputs(text, images, frames)

    def of_clips(self, clips: list[tuple[list[Any], list[float]]]) -> dict[str, Any]:
        given = super().of_clips(clips)
        # One list of clips per prompt, each an array: so that no frame is taken for a clip.
        return {**given, "videos": [[np.stack([np.asarray(f) for f in of]) for of, _ in clips]]}

    def items(
        self, tensors: dict[str, Tensor], sizes: list[tuple[int, int]], frames: Sequence[tuple]
    ) -> tuple[ItemGeometry, ...]:
        if not any(clip >= 0 for clip, *_ in frames):
            return super().items(tensors, sizes, frames)
        return tuple(
            replace(self._item(size, (0, 0), i, 1), clip=clip, frame=(index, total))
            for i, (size, (clip, index, total, *_)) in enumerate(zip(sizes, frames, strict=True))
        )
