"""ViP-LLaVA: one square view per image; the projector takes several layers of the tower."""

import torch

from vlmfast.models import Adapter, Encoded, ItemGeometry


class FamilyAdapter(Adapter):
    processors = ("LlavaProcessor",)  # others are refused
    fixed = True  # all images have the size that the tower takes

    def side(self):
        vision = self.config.vision_config
        return vision.image_size // vision.patch_size

    def geometry(self, sizes):
        side = self.side()
        return tuple(
            ItemGeometry(size, (0, 0), (i, i + 1), (side, side)) for i, size in enumerate(sizes)
        )

    def encode(self, inputs, context):
        output = self.model.base_model.get_image_features(inputs["pixel_values"])
        features = list(output.pooler_output)  # one (N, D) per image
        raster = torch.arange(len(features[0]), device=self.device)
        tile, kind = torch.zeros_like(raster), torch.full_like(raster, int(self.kind))
        y, x = raster // self.side(), raster % self.side()
        layouts = [
            self.view_layout(tile, y, x, kind, i, item) for i, item in enumerate(context.items)
        ]
        stats = self.patch_stats(context, len(raster))
        return Encoded(features, layouts, stats, [()] * len(features))
