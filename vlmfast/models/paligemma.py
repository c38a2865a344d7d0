"""PaliGemma: one square view per image; all rows of a prompt attend to each other.

Its processor needs an image and a chat template; rotary ids begin at 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.core.layout import TokenLayout

from ._media import Tensors
from .base import Adapter
from .gemma3 import FamilyAdapter as Gemma3


class FamilyAdapter(Gemma3):
    processors = ("PaliGemmaProcessor",)
    nested, prefix_lm = False, True
    image_token = Adapter.image_token

    def mask_rule(self, layout: TokenLayout) -> Tensor:
        return torch.ones(len(layout), len(layout), dtype=torch.bool, device=layout.device)

    def positions(self, inputs: Tensors) -> Tensor:
        return super().positions(inputs) + 1

    def side(self) -> int:
        vision = self.config.vision_config
        return vision.image_size // vision.patch_size
