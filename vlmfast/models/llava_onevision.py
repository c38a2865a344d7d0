"""LLaVA-OneVision: a single image in crops, several as one view each, videos in pooled frames."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.statistics import ItemGeometry

from ._composed import Composed
from ._media import Items, Media, Sizes, Tensors, square_views
from .base import Part
from .llava_next import Packing
from .llava_next_video import FamilyAdapter as LlavaNextVideo

if TYPE_CHECKING:
    from .base import Model


class FamilyAdapter(LlavaNextVideo):
    beside = ("batch_num_images",)
    processors = ("LlavaOnevisionProcessor",)
    nested = True  # several images are not cropped
    blocks = False  # the tokens of an image depend on the number of images

    def __init__(self, model: Model, processor: Any) -> None:
        Composed.__init__(self, model, processor)

    @staticmethod
    def packing(config: Any) -> Any:
        from transformers import LlavaOnevisionModel

        return Packing(config, LlavaOnevisionModel.pack_image_features)

    def pooled(self) -> int:
        vision = self.config.vision_config
        return -(-(vision.image_size // vision.patch_size) // 2)

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        images = super().images_in(batch, ids)
        # Images per prompt; given one flat list, a processor crops all of them.
        each = torch.ones(len(images), dtype=torch.int64)
        counts = batch.get("batch_num_images", each).tolist()
        alone = [n == 1 for n in counts for _ in range(n)]
        found = []
        for one, crops in zip(images, alone, strict=True):
            tokens = one.tokens if crops else self.patches() + 1
            count = torch.tensor([int(crops)])
            own = {**one.tensors, "batch_num_images": count}
            found.append(replace(one, tokens=tokens, tensors=own))
        return found

    def _own_views(self, item: ItemGeometry, pixels: Tensor, size: Tensor) -> Tensors:
        own = super()._own_views(item, pixels, size)
        return {**own, "batch_num_images": torch.ones(1, dtype=torch.int64, device=size.device)}

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        found = super().parts(tensors, items)
        counts = tensors.get("batch_num_images")
        if found is None or counts is None or bool((counts == 1).all()):
            return found
        # A model that gets one of several images alone expects its crops: they stay together.
        images = [part for part in found if "image_sizes" in part.tensors]
        keys = (*self.tensors, *self.beside)
        own = tuple(i for part in images for i in part.items)
        whole = {key: tensors[key] for key in keys}
        # Without views that only pad them to a larger image of the same batch.
        views = max(items[i].views[1] - items[i].views[0] for i in own)
        whole["pixel_values"] = whole["pixel_values"][:, :views]
        return [Part(own, whole), *(part for part in found if part not in images)]

    def joined(self, parts: list[Tensors]) -> Tensors:
        tensors = super().joined(parts)
        counts = tensors.get("batch_num_images")
        if counts is not None and not bool(counts.all()):
            tensors["batch_num_images"] = torch.tensor([len(counts)])
        return tensors

    def views_of(self, tensors: Tensors, sizes: Sizes) -> Items:
        if bool((tensors.get("batch_num_images", torch.zeros(1)) == 1).all()):
            return super().geometry(sizes)
        return self.geometry(sizes)

    def geometry(self, sizes: Sizes) -> Items:
        if len(sizes) == 1:
            return super().geometry(sizes)
        vision = self.config.vision_config
        return square_views(sizes, vision.image_size // vision.patch_size)

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        top_left, size = super().view_box(geometry, tile)
        if geometry.tiles != (0, 0) or geometry.patches[0] == self.pooled():
            return top_left, size
        height, width = geometry.size  # one of several images: padded to a square
        longer = max(height, width)
        size = torch.tensor([longer / width, longer / height], device=tile.device).expand_as(size)
        return (1 - size) / 2, size

    def images(self, inputs: Tensors) -> list[Tensor]:
        return self.image_features(
            inputs["pixel_values"],
            inputs["image_sizes"],
            vision_aspect_ratio=self.config.vision_aspect_ratio,
            batch_num_images=inputs["batch_num_images"],
        )

    def frame_tokens(self, item: ItemGeometry) -> int:
        index, total = item.frame
        return super().frame_tokens(item) + (index + 1 == total)  # a newline after the last

    def frames(self, inputs: Tensors) -> list[Tensor]:
        frames = super().frames(inputs)
        total, newline = inputs["pixel_values_videos"].shape[1], self.model.base_model.image_newline
        for last in range(total - 1, len(frames), total):
            frames[last] = torch.cat([frames[last], newline[None].to(frames[last])])
        return frames

    def _layout(self, item: int, geometry: ItemGeometry, size: Tensor) -> TokenLayout:
        if geometry.tiles == (0, 0):
            return self._frame(item, geometry, self.patches() + 1)
        ratio = self.config.vision_aspect_ratio
        origins = self._origins(geometry, size, vision_aspect_ratio=ratio)
        whole = self._origins(geometry, size, vision_aspect_ratio=f"anyres_max_{10**6}")
        kind = torch.where(origins[:, 0] < 0, int(Kind.NEWLINE), int(self.kind))
        if len(origins) < len(whole):  # too large: the canvas of crops is scaled down
            origins = self._scaled(origins, whole, geometry)
        tile, y, x = origins.long().unbind(1)
        newline = kind == Kind.NEWLINE
        y = torch.where(newline, newline.cumsum(0) - 1, y)
        return self.view_layout(tile, y, x, kind, item, geometry)

    def _scaled(self, origins: Tensor, whole: Tensor, geometry: ItemGeometry) -> Tensor:
        """The patch of the unscaled canvas at the center of each scaled token."""
        base = geometry.patches[0] * geometry.patches[1]

        def shape(of: Tensor) -> tuple[int, int]:
            rows = int((of[base:, 0] < 0).sum())
            return rows, len(of[base:]) // rows

        (h, w), (rows, columns) = shape(origins), shape(whole)
        y = ((torch.arange(h, device=origins.device) + 0.5) * rows / h).long()
        x = ((torch.arange(w - 1, device=origins.device) + 0.5) * (columns - 1) / (w - 1)).long()
        x = torch.cat([x, x.new_tensor([columns - 1])])  # the newline
        canvas = whole[base:].view(rows, columns, 3)[y][:, x]
        return torch.cat([whole[:base], canvas.flatten(0, 1)])
