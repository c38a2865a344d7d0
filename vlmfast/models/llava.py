"""LLaVA-1.5: one square view per image, its patches in raster order."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from vlmfast.core.contexts import VisionContext
from vlmfast.core.counting import ImageLayout
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._composed import Completed
from ._media import square_views
from .base import Encoded


class FamilyAdapter(Completed):
    fixed_tower = views_in_rows = True

    @classmethod
    def without_weights(cls, config: Any, processor: Any) -> Self:
        adapter = super().without_weights(config, processor)
        adapter.measure(config.vision_config.model_type)
        return adapter

    def geometry(self, sizes: list[tuple[int, int]]) -> tuple[ItemGeometry, ...]:
        return square_views(sizes, self.side[0] // self.config.vision_config.patch_size)

    def encode(self, inputs: dict[str, Tensor], context: VisionContext) -> Encoded:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 4:
            raise ModelError(
                f"{type(self.processor).__name__} made several views of each image; "
                f"it does not belong to a {self.config.model_type} model"
            )
        features = self.image_features(pixels)
        layouts = self.layouts(inputs, context.items)
        rows, columns = context.items[0].patches
        stats = self.patch_stats(context, rows * columns)
        return Encoded(features, layouts, stats, [()] * len(features))

    def layouts(
        self, tensors: dict[str, Tensor], items: tuple[ItemGeometry, ...]
    ) -> list[TokenLayout]:
        n = self._tokens(items[0])
        return [self.copied(self._raster(i, geometry, n)) for i, geometry in enumerate(items)]

    def image_layout(self, size: tuple[int, int], *, alone: bool = True) -> ImageLayout:
        """The visual tokens of one image, from its size; without a processor."""
        (geometry,) = self.geometry([size])
        return ImageLayout.of(geometry, self._raster(0, geometry, self._tokens(geometry)))

    def _tokens(self, geometry: ItemGeometry) -> int:
        rows, columns = geometry.patches
        cut = self.config.vision_feature_select_strategy == "default"
        return rows * columns + self.specials() - cut

    def _raster(self, item: int, geometry: ItemGeometry, n: int) -> TokenLayout:
        """The ``n`` tokens of one view, in host memory."""
        rows, columns = geometry.patches
        # Special rows come first; they have no position in the image. "default" cuts off one.
        raster = torch.arange(n, device="cpu") - (n - rows * columns)
        kind = torch.where(raster < 0, int(Kind.SPECIAL), int(self.kind))
        base = torch.zeros_like(raster)
        return self.view_layout(base, raster // columns, raster % columns, kind, item, geometry)
