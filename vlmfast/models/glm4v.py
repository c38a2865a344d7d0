"""GLM-4.1V: like Qwen2.5-VL, with the seconds after each step of a video.

Images and videos have the same placeholder; a video is between two markers. The tower makes one row
of 2 x 2 patches before its merger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from .qwen2_5_vl import FamilyAdapter as Qwen


class FamilyAdapter(Qwen):
    beside = ("mm_token_type_ids",)
    processors = ("Glm4vProcessor",)
    whole_steps = grid_on_device = True

    def modalities(self, ids: Tensor) -> Tensor:
        starts, ends = (
            (ids == token).cumsum(-1)
            for token in (self.config.video_start_token_id, self.config.video_end_token_id)
        )
        return (ids == self.config.image_token_id) * (1 + (starts > ends).int())

    def frame_labels(self, index: int, seconds: float) -> tuple[str, str]:
        return "", str(int(seconds))  # as its processor writes it after a step of a video

    def check_media(self, images: list[Any], videos: list[list[Any]]) -> None:
        if images and videos:
            # Its `forward` counts the placeholders of both together.
            raise ModelError(
                f"{self.config.model_type} takes images or videos, not both in one prompt"
            )

    def mergers(self) -> list[nn.Module]:
        return [self.model.base_model.visual.post_layernorm]

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        counts = [math.prod(items[i].patches) for i in self.tower_order(items)]
        return self._by_item([part[None] for part in torch.cat(calls).split(counts)], items)

    def to_tokens(self, patches: Tensor, item: ItemGeometry) -> Tensor:
        if patches.shape[-1] == math.prod(item.patches):  # of the merger's input
            return patches
        return super().to_tokens(patches, item)
