"""LLaVA-1.5: one square view per picture, its patches in raster order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stages import ItemGeometry, Step, VisionStats
from .base import Adapter, Encoded


class FamilyAdapter(Adapter):
    def encode(
        self,
        inputs: dict[str, Tensor],
        step: Step,
        sizes: list[tuple[int, int]],
    ) -> Encoded:
        pixels = inputs["pixel_values"]
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        output = self.model.base_model.get_image_features(
            pixels,
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
        )
        features = list(output.pooler_output)
        items = tuple(
            ItemGeometry(size, (0, 0), (i, i + 1), (side, side)) for i, size in enumerate(sizes)
        )
        raster = torch.arange(features[0].shape[0], device=pixels.device)
        # With strategy "full" the CLS row comes first; it has no place in the picture.
        raster = raster - (features[0].shape[0] - side * side)
        nowhere = raster < 0
        layouts = []
        for i, geometry in enumerate(items):
            layout = self.view_layout(
                torch.zeros_like(raster),
                raster // side,
                raster % side,
                nowhere & False,
                i,
                geometry,
            )
            layout.box[nowhere] = torch.nan
            layouts.append(layout)
        stats = VisionStats(items, self.patch_stats(step, side * side))
        return Encoded(features, layouts, stats, [()] * len(features))
