"""LLaVA-1.5: one square view per image, its patches in raster order."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from vlmfast.core.counting import ImageLayout
from vlmfast.core.layout import TokenLayout
from vlmfast.errors import ModelError

from ._composed import Completed
from ._media import Items, Sizes, Tensors, square_views


class FamilyAdapter(Completed):
    fixed_tower = views_in_rows = True

    @classmethod
    def without_weights(cls, config: Any, processor: Any) -> Self:
        adapter = super().without_weights(config, processor)
        adapter.measure(config.vision_config.model_type)
        return adapter

    def geometry(self, sizes: Sizes) -> Items:
        return square_views(sizes, self.side[0] // self.config.vision_config.patch_size)

    def images(self, inputs: Tensors) -> list[Tensor]:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 4:
            raise ModelError(
                f"{type(self.processor).__name__} made several views of each image; "
                f"it does not belong to a {self.config.model_type} model"
            )
        return self.image_features(pixels)

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        specials = self._specials_left()
        return [self.copied(self.raster_layout(i, of, specials)) for i, of in enumerate(items)]

    def image_layout(self, size: tuple[int, int], *, alone: bool = True) -> ImageLayout:
        """The visual tokens of one image, from its size; without a processor."""
        (geometry,) = self.geometry([size])
        return ImageLayout.of(geometry, self.raster_layout(0, geometry, self._specials_left()))

    def _specials_left(self) -> int:
        """Special rows of a view that become tokens: "default" cuts off one."""
        return self.specials() - (self.config.vision_feature_select_strategy == "default")
