"""FastVLM: a convolutional tower of timm, one square view per image, few large tokens.

The tower consists mostly of convolutions on increasingly coarse grids and ends without attention.
Saliency is therefore the norm of the features that enter the projector. Stages inside the tower are
not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._media import Tensors
from .base import Adapter
from .internvl import Tiled


class FamilyAdapter(Tiled):
    processors = ("LlavaProcessor",)
    attention = "token_mixer"
    blocks = views_in_rows = True

    def vision_blocks(self) -> list[nn.Module]:
        tower = self.model.get_encoder(modality="image").timm_model
        if not hasattr(tower, "stages"):
            raise ModelError(f"{type(tower).__name__} as vision tower is not supported")
        return [block for stage in tower.stages for block in stage.blocks]

    def sources(self) -> tuple[str, ...]:
        return ("norm",)

    def why_no_source(self, source: str) -> str:
        return "its vision tower ends in convolutions, not in attention"

    def cells(self, item: ItemGeometry) -> None:
        return None

    def why_no_cells(self, item: ItemGeometry) -> str:
        return self.why_no_source("received")

    def patches(self) -> int:
        return self.config.image_seq_length

    def side(self) -> int:
        return int(self.patches() ** 0.5)

    def features(self, inputs: Tensors) -> Tensor:
        output = self.model.base_model.get_image_features(inputs["pixel_values"]).pooler_output
        # A list of images in some versions of transformers.
        return output if isinstance(output, Tensor) else torch.stack(list(output))

    view_box = Adapter.view_box
