"""LLaVA-1.5: one square view per image, its patches in raster order."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.core.contexts import VisionContext
from vlmfast.core.counting import ImageLayout
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from .base import Adapter, Encoded

if TYPE_CHECKING:
    from .base import Model


def complete(model: Model, processor: Any) -> Any:
    """Add settings that older checkpoints lack to the processor, taken from the model.

    From these three it computes the number of placeholders of an image. Returns a copy, since the
    processor is the user's.
    """
    if getattr(processor, "image_processor", None) is None:
        return processor  # the base class raises
    tower = model.get_encoder(modality="image")
    tower = getattr(tower, "vision_model", tower)
    if not hasattr(tower, "encoder"):
        raise ModelError(f"{type(tower).__name__} as vision tower is not supported")
    if getattr(tower.embeddings, "register_tokens", None) is not None:
        raise ModelError(f"{type(tower).__name__}, which has register tokens, is not supported")
    names = ("class_embedding", "cls_token")
    has_cls = any(getattr(tower.embeddings, name, None) is not None for name in names)
    processor = copy.copy(processor)
    patch_size = getattr(processor, "patch_size", None)
    processor.patch_size = patch_size or model.config.vision_config.patch_size
    processor.vision_feature_select_strategy = model.config.vision_feature_select_strategy
    processor.num_additional_image_tokens = int(has_cls)
    return processor


class FamilyAdapter(Adapter):
    fixed_tower = views_in_rows = True

    def __init__(self, model: Model, processor: Any) -> None:
        super().__init__(model, complete(model, processor))

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
        output = self.model.base_model.get_image_features(
            pixels,
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
        )
        features = list(output.pooler_output)
        layouts = [
            self._raster(i, geometry, len(features[0]), pixels.device)
            for i, geometry in enumerate(context.items)
        ]
        rows, columns = context.items[0].patches
        stats = self.patch_stats(context, rows * columns)
        return Encoded(features, layouts, stats, [()] * len(features))

    def image_layout(self, size: tuple[int, int], *, alone: bool = True) -> ImageLayout:
        (geometry,) = self.geometry([size])
        rows, columns = geometry.patches
        cls = self.config.vision_feature_select_strategy == "full" and (
            self.config.vision_config.model_type == "clip_vision_model"
        )
        layout = self._raster(0, geometry, rows * columns + cls, torch.device("cpu"))
        return ImageLayout(geometry, layout.replace(order=torch.arange(len(layout))))

    def _raster(
        self, item: int, geometry: ItemGeometry, n: int, device: torch.device
    ) -> TokenLayout:
        """The ``n`` tokens of one view."""
        rows, columns = geometry.patches
        # With strategy "full" the CLS row comes first; it has no position in the image.
        raster = torch.arange(n, device=device) - (n - rows * columns)
        kind = torch.where(raster < 0, int(Kind.SPECIAL), int(self.kind))
        base = torch.zeros_like(raster)
        return self.view_layout(base, raster // columns, raster % columns, kind, item, geometry)
