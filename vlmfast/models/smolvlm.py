"""SmolVLM: like Idefics3, plus videos: one view per frame, after its timestamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmfast.errors import ModelError
from vlmfast.media.info import FrameTimes

from ._media import Frames, Items, Sizes, Tensors, square_views
from ._prompts import framed
from .idefics3 import FamilyAdapter as Idefics3


class FamilyAdapter(Idefics3):
    video_tensors = ("pixel_values",)

    def check_media(self, images: list[Any], videos: list[list[Any]]) -> None:
        if len(videos) > 1 or (videos and images):
            raise ModelError("smolvlm takes images or one video, not both in one prompt")

    def of_videos(self, videos: list[list[Any]], times: Sequence[FrameTimes]) -> dict[str, Any]:
        given = super().of_videos(videos, times)
        # One list of videos per prompt, each an array, so that no frame is mistaken for a video.
        arrays = [np.stack([np.asarray(frame) for frame in shown]) for shown in videos]
        return {**given, "videos": [arrays]}

    def items(self, tensors: Tensors, sizes: Sizes, frames: Frames) -> Items:
        if not any(video >= 0 for video, *_ in frames):
            return super().items(tensors, sizes, frames)
        return framed(square_views(sizes, self.side()), frames)
