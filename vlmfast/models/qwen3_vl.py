"""Qwen3-VL: like Qwen2.5-VL, with a timestamp before each step of a video, and deepstack features.

Features of earlier vision blocks are added to the visual rows after the first layers of the
language model, and are dropped together with their tokens. Between layers, tokens can be dropped
only after the last of these additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vlmfast.core.layout import TokenLayout

from .qwen2_5_vl import FamilyAdapter as Qwen

if TYPE_CHECKING:
    from .base import Model


class FamilyAdapter(Qwen):
    processors = ("Qwen3VLProcessor",)
    whole_steps = True

    def __init__(self, model: Model, processor: Any) -> None:
        super().__init__(model, processor)
        self.min_drop_layer = len(self.config.vision_config.deepstack_visual_indexes)

    def frame_labels(self, index: int, seconds: float) -> tuple[str, str]:
        return f"<{seconds:.1f} seconds>", ""  # as its processor writes it before a step of a video

    def mergers(self) -> list[nn.Module]:
        return [self.projector(), *self.model.base_model.visual.deepstack_merger_list]

    def decoder_kwargs(self, layout: TokenLayout, extra: tuple[Tensor, ...]) -> dict[str, Any]:
        if not extra:
            return {}
        return {"visual_pos_masks": layout.visual[None], "deepstack_visual_embeds": list(extra)}
