"""LLaVA-NeXT: a base view, crops stitched to a canvas, a newline after each row of the canvas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.counting import ImageLayout
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.statistics import ItemGeometry

from ._composed import Completed
from ._media import Items, Media, Sizes, Tensors, tiled_views
from .base import Part


class FamilyAdapter(Completed):
    tensors = ("pixel_values", "image_sizes")
    patches_alone = True
    pixel_dims = 5
    host_tensors = ("image_sizes",)
    fixed_tower = views_in_rows = crops = True

    def images(self, inputs: Tensors) -> list[Tensor]:
        return self.image_features(inputs["pixel_values"], inputs["image_sizes"].cpu())

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        sizes = tensors["image_sizes"].cpu()
        return [self.copied(self._layout(i, of, sizes[i : i + 1])) for i, of in enumerate(items)]

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        pixels, sizes = tensors["pixel_values"], tensors["image_sizes"]
        if len(pixels) != len(items) or len(sizes) != len(items):
            return None
        return [
            Part((i,), self._own_views(item, pixels[i : i + 1], sizes[i : i + 1]))
            for i, item in enumerate(items)
        ]

    def _own_views(self, item: ItemGeometry, pixels: Tensor, size: Tensor) -> Tensors:
        """The tensors of one image, without views that only pad it to the largest image."""
        return {"pixel_values": pixels[:, : item.views[1] - item.views[0]], "image_sizes": size}

    def joined(self, parts: list[Tensors]) -> Tensors:
        views = [part["pixel_values"].shape[1] for part in parts if "pixel_values" in part]
        return super().joined([_padded(part, max(views, default=0)) for part in parts])

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        if "image_sizes" not in batch:
            return []
        return [self._image(batch, i) for i in range(len(batch["image_sizes"]))]

    def _image(self, batch: Tensors, i: int) -> Media:
        own = {key: batch[key][i : i + 1] for key in ("pixel_values", "image_sizes")}
        height, width = own["image_sizes"][0].tolist()
        (geometry,) = self.geometry([(height, width)])
        tokens = len(self._layout(0, geometry, own["image_sizes"]))
        return Media(tokens, own, (height, width))

    def geometry(self, sizes: Sizes) -> Items:
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        vision, pinpoints = self.config.vision_config, self.config.image_grid_pinpoints
        tiles = (get_anyres_image_grid_shape(of, pinpoints, vision.image_size) for of in sizes)
        images = (
            (size, (down, across), 1 + down * across)
            for size, (down, across) in zip(sizes, tiles, strict=True)
        )
        return tiled_views(images, vision.image_size // vision.patch_size)

    @staticmethod
    def packing(config: Any) -> Any:
        from transformers import LlavaNextModel

        return Packing(config, LlavaNextModel.pack_image_features)

    def image_layout(self, size: tuple[int, int], *, alone: bool = True) -> ImageLayout:
        """The visual tokens of one image, from its size; without a processor.

        Parameters
        ----------
        size : (int, int)
            Height and width in pixels.
        alone : bool
            Whether it is the only image of its prompt: some families do not crop several.
        """
        geometry = self.geometry([size] if alone else [size, size])[0]
        return ImageLayout.of(geometry, self._layout(0, geometry, torch.tensor([size])))

    def _layout(self, item: int, geometry: ItemGeometry, size: Tensor) -> TokenLayout:
        strategy = self.config.vision_feature_select_strategy
        tile, y, x = self._origins(geometry, size, strategy).long().unbind(1)
        newline = tile < 0
        kind = torch.where(newline, int(Kind.NEWLINE), int(self.kind))
        y = torch.where(newline, newline.cumsum(0) - 1, y)
        return self.view_layout(tile, y, x, kind, item, geometry)

    def _origins(self, geometry: ItemGeometry, size: Tensor, *args: Any, **given: Any) -> Tensor:
        """(tile, y, x) of each packed token by the model's own packing, run on coordinates."""
        counts = (geometry.views[1] - geometry.views[0], *geometry.patches)
        grid = torch.meshgrid(
            *(torch.arange(n, device=size.device, dtype=torch.float32) for n in counts),
            indexing="ij",
        )
        newline = torch.full((3,), -1.0, device=size.device)
        packed, _ = self.model.base_model.pack_image_features(
            [torch.stack(grid, dim=-1).flatten(1, 2)], size, *args, image_newline=newline, **given
        )
        return packed[0]

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        """The base view shows the whole image, resized; a crop shows a part of the canvas on
        which the image is centered with its own aspect ratio."""
        height, width = geometry.size
        down, across = geometry.tiles
        side = self.config.vision_config.image_size
        scale = min(across * side / width, down * side / height)
        shown = torch.tensor([width * scale, height * scale], device=tile.device)
        canvas = torch.tensor([across * side, down * side], device=tile.device)
        crop = torch.stack([(tile - 1) % across, (tile - 1) // across], dim=1) * side
        corner = (crop - (canvas - shown) / 2) / shown
        base = (tile == 0)[:, None]
        return torch.where(base, 0.0, corner), torch.where(base, 1.0, side / shown)


class Packing:
    """The part of a model that arranges the features of an image, without weights."""

    def __init__(self, config: Any, pack: Callable[..., Any]) -> None:
        self.config, self._pack = config, pack

    def pack_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own method, which reads its configuration alone."""
        return self._pack(self, *args, **kwargs)


def _padded(part: Tensors, views: int) -> Tensors:
    """An image with black views up to ``views``, as processors pad them."""
    pixels = part.get("pixel_values")
    if pixels is None or pixels.shape[1] == views:
        return part
    more = pixels.new_zeros(len(pixels), views - pixels.shape[1], *pixels.shape[2:])
    return {**part, "pixel_values": torch.cat([pixels, more], dim=1)}
