"""Ovis2: the whole image, followed by its crops, with a marker after each view.

Each visual token is a distribution over a visual vocabulary, and its feature the mean of that
vocabulary's embeddings. The markers around and between the views have embeddings of that vocabulary
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._media import tiling
from .base import Adapter
from .cohere2_vision import Marked


class FamilyAdapter(Marked):
    processors = ("Ovis2Processor",)
    base_first = True

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        if self.config.vision_config.tokenize_function == "gumbel_argmax":
            raise ModelError(
                "tokenize_function=gumbel_argmax draws visual tokens at random, which is not "
                "supported; supported are softmax, st_argmax"
            )
        self.markers = torch.tensor(list(self.config.visual_indicator_token_ids))

    def marker(self) -> int:
        return self.processor.tokenizer.convert_tokens_to_ids("<IMG_START>")

    def embed_around(self, ids: Tensor) -> Tensor:
        base = self.model.base_model
        markers = self.markers.to(ids.device)
        # Their embeddings are the last ones of the visual vocabulary.
        last = self.config.vision_config.num_visual_indicator_tokens
        table = base.visual_embeddings_table.weight[-last:]
        here = ids[..., None] == markers
        own = table[here.int().argmax(-1)].to(self.dtype)
        text = super().embed_around(ids.masked_fill(here.any(-1), 0))
        return torch.where(here.any(-1, keepdim=True), own, text)

    def tower(self) -> nn.Module:
        """Without the head, which takes cells of its rows."""
        return self.model.base_model.vision_tower.transformer

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.model.base_model.vision_tower.transformer.encoder.layers)

    def projector(self) -> nn.Module:
        return self.model.base_model.vision_tower.head_linear

    def side(self) -> int:
        vision = self.config.vision_config
        return -(-(vision.image_size // vision.patch_size) // vision.hidden_stride)

    def cells(self, item: ItemGeometry) -> Tensor | None:
        vision = self.config.vision_config
        whole = vision.image_size // vision.patch_size % vision.hidden_stride == 0
        return super().cells(item) if whole else None

    def tiling(self, views: Tensor) -> tuple[int, int]:
        return tiling(views.roll(-1, 0))

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        from transformers.models.ovis2 import image_processing_ovis2 as own

        images = self.processor.image_processor
        tile, most = (images.size["height"], images.size["width"]), images.max_patches
        if images.use_covering_area_grid:
            across, down = own.get_min_tile_covering_grid(size, tile[0], most)
        else:
            across, down = own.get_optimal_tiled_canvas(size, tile, images.min_patches, most)
        return down, across

    whole_first = Adapter.whole_first
