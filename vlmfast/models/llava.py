"""LLaVA-1.5: one square view per image, its patches in raster order."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import Kind
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._composed import Completed
from .base import Encoded


class FamilyAdapter(Completed):
    fixed_tower = True

    def geometry(self, sizes: list[tuple[int, int]]) -> tuple[ItemGeometry, ...]:
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        return tuple(
            ItemGeometry(size, (0, 0), (i, i + 1), (side, side)) for i, size in enumerate(sizes)
        )

    def encode(self, inputs: dict[str, Tensor], context: VisionContext) -> Encoded:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 4:
            raise ModelError(
                f"{type(self.processor).__name__} made several views of each image; "
                f"it does not belong to a {self.config.model_type} model"
            )
        side = context.items[0].patches[1]
        output = self.model.base_model.get_image_features(
            pixels,
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
        )
        features = list(output.pooler_output)
        raster = torch.arange(features[0].shape[0], device=pixels.device)
        # The CLS row (with strategy "full") and registers come first. They have no position in
        # the image.
        raster = raster - (features[0].shape[0] - side * side)
        kind = torch.where(raster < 0, int(Kind.SPECIAL), int(self.kind))
        base = torch.zeros_like(raster)
        layouts = [
            self.view_layout(base, raster // side, raster % side, kind, i, geometry)
            for i, geometry in enumerate(context.items)
        ]
        stats = self.patch_stats(context, side * side)
        return Encoded(features, layouts, stats, [()] * len(features))
