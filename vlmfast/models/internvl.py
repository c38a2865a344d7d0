"""InternVL: crops of an image, followed by the whole image; a frame is one view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ItemGeometry

from ._media import (
    Items,
    Media,
    Sizes,
    Tensors,
    runs,
    square_views,
    tiled_views,
    tiling,
    without_placeholders,
)
from .base import Adapter, Encoded


def tile_box(geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
    """`Adapter.view_box` where the image is resized to the base view, and to a canvas of crops."""
    down, across = geometry.tiles
    base = (tile == 0)[:, None]
    if down == 0:
        return torch.zeros(len(tile), 2, device=tile.device), torch.ones_like(base * 1.0)
    size = torch.tensor([1 / across, 1 / down], device=tile.device)
    corner = torch.stack([(tile - 1) % across, (tile - 1) // across], dim=1) * size
    return torch.where(base, 0.0, corner), torch.where(base, 1.0, size)


def whole_last(adapter: Adapter, item: ItemGeometry) -> list[int]:
    """`Adapter.whole_first` where the whole image follows its crops."""
    *crops, whole = range(*item.views)
    return [whole, *crops]


class Tiled(Adapter):
    """Families with text around the views of an image, the base view last or first."""

    blocks = False
    base_first: ClassVar[bool] = False

    def side(self) -> int:
        """Tokens in a row of a view."""
        raise NotImplementedError(f"{type(self).__name__}.side")

    def geometry(self, sizes: Sizes) -> Items:
        return square_views(sizes, self.side())

    def items_of(self, tensors: Tensors, media: Sequence[Media]) -> Items:
        side = self.side()
        own = ((one.size, one.tiles or (0, 0), one.tokens // side**2) for one in media)
        return tiled_views(own, side)

    def features(self, inputs: Tensors) -> Tensor:
        """Features of every view, (V, N, D)."""
        return self.model.base_model.get_image_features(inputs["pixel_values"]).pooler_output

    def encode(self, inputs: Tensors, context: VisionContext) -> Encoded:
        views = self.features(inputs)
        parts = [views[slice(*item.views)].flatten(0, 1) for item in context.items]
        layouts = self.layouts(inputs, context.items)
        return Encoded(parts, layouts, self.patch_stats(context, self.patches()), [()] * len(parts))

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        return [self.copied(self._layout(i, geometry)) for i, geometry in enumerate(items)]

    whole_first = whole_last

    def projects_cls(self) -> bool:
        return False

    def _layout(self, item: int, geometry: ItemGeometry) -> TokenLayout:
        (rows, columns), (first, stop) = geometry.patches, geometry.views
        view, y, x = torch.meshgrid(
            *(torch.arange(n, device="cpu") for n in (stop - first, rows, columns)),
            indexing="ij",
        )
        view, y, x = view.flatten(), y.flatten(), x.flatten()
        crops = geometry.tiles[0] * geometry.tiles[1]
        tile = view if self.base_first else torch.where(view < crops, view + 1, 0)
        kind = torch.full_like(view, int(self.kind))
        layout = self.view_layout(tile, y, x, kind, item, geometry)
        return layout.replace(view=(view + first).to(torch.int32))

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        return tile_box(geometry, tile)


class Cropped(Tiled):
    """Families that tell the views of each image from the text of a prompt."""

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the crops of an image that has crops."""
        raise NotImplementedError(f"{type(self).__name__}.canvas")

    def tiling(self, views: Tensor) -> tuple[int, int]:
        """Rows and columns of the crops of an image, from all of its views."""
        return tiling(views)

    def views_in(self, ids: Tensor) -> list[int]:
        """Views of each image of a prompt, ids (S,)."""
        raise NotImplementedError(f"{type(self).__name__}.views_in")

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        found, view, pixels = [], 0, batch.get("pixel_values")
        for count in [max(count, 1) for row in ids for count in self.views_in(row)]:
            if pixels is None or view + count > len(pixels):
                break
            own = pixels[view : view + count]
            down, across = self.tiling(own) if count > 1 else (0, 0)
            size = max(down, 1) * pixels.shape[-2], max(across, 1) * pixels.shape[-1]
            tokens = count * self.side() ** 2
            found.append(Media(tokens, {"pixel_values": own}, size, 0, (down, across)))
            view += count
        return found + without_placeholders(pixels, view)

    def views_of(self, tensors: Tensors, sizes: Sizes) -> Items:
        counts = self.views_in(tensors["input_ids"][0]) if sizes else []
        pairs = zip(sizes, counts, strict=True)
        images = ((size, self.canvas(size) if n > 1 else (0, 0), n) for size, n in pairs)
        return tiled_views(images, self.side())


class FamilyAdapter(Cropped):
    video_tensors = ("pixel_values",)
    processors = ("InternVLProcessor",)
    fixed, token_rows = True, True
    views_in_rows = crops = True

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.model.get_encoder(modality="image").encoder.layer)

    def patches(self) -> int:
        vision = self.config.vision_config
        (h, w), (p, q) = _pair(vision.image_size), _pair(vision.patch_size)
        return (h // p) * (w // q)

    def side(self) -> int:
        vision = self.config.vision_config
        patches = _pair(vision.image_size)[0] // _pair(vision.patch_size)[0]
        return int(patches * self.config.downsample_ratio)

    def sizes(self) -> dict[str, Any]:
        sizes = super().sizes()
        patches = self.patches() // self.side() ** 2
        return sizes | {"token_width": patches * sizes["vision_width"]}

    def views_in(self, ids: Tensor) -> list[int]:
        """The tokens of each image or frame are between two markers."""
        each = self.side() ** 2
        return [tokens // each for _, tokens in runs(ids, self.image_token_id)]

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        images = self.processor.image_processor
        tile = images.size["height"], images.size["width"]
        across, down = get_optimal_tiled_canvas(size, tile, images.min_patches, images.max_patches)
        return down, across

    def features(self, inputs: Tensors) -> Tensor:
        return self.model.base_model.get_image_features(
            inputs["pixel_values"],
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
        ).pooler_output


def _pair(value: int | Sequence[int]) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else value
