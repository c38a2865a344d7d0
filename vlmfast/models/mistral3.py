"""Mistral Small 3.1 and 3.2, with the tower of Pixtral: images keep their aspect ratio.

A visual token consists of 2 x 2 patches; a token of text stands between the rows of an image. The
tower attends within each image, and images pass through it one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vlmfast.core.contexts import VisionContext
from vlmfast.core.statistics import ItemGeometry, VisionStats

from ._media import Media
from .base import Adapter, Encoded, Part


class FamilyAdapter(Adapter):
    tensors = ("pixel_values", "image_sizes")
    processors = ("PixtralProcessor",)
    attention = "attention"
    blocks, one_by_one = False, True

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.model.get_encoder(modality="image").transformer.layers)

    def specials(self) -> int:
        return 0

    def patches(self) -> int:
        return 0  # depends on the image

    def cells(self, item: ItemGeometry) -> None:
        return None

    def why_no_cells(self, item: ItemGeometry) -> str:
        return "the rotary tables of its vision tower belong to whole images"

    def block_stats(self, context: VisionContext, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        return [(rows[:, :, 0], keys) for rows, keys in context.chunks[layer]]

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        return [call[None] for call in calls]

    def to_tokens(self, patches: Tensor, item: ItemGeometry) -> Tensor:
        rows, columns = item.patches
        m = self.config.spatial_merge_size
        return patches.unflatten(-1, (rows, m, columns, m)).mean((-3, -1)).flatten(-2)

    def views_of(
        self, tensors: dict[str, Tensor], sizes: list[tuple[int, int]]
    ) -> tuple[ItemGeometry, ...]:
        grids = (tensors["image_sizes"] // self._side()).tolist() if sizes else []
        return tuple(
            ItemGeometry(size, (0, 0), (i, i + 1), tuple(grid))
            for i, (size, grid) in enumerate(zip(sizes, grids, strict=True))
        )

    def _side(self) -> int:
        """Height and width of a visual token in pixels."""
        return self.config.vision_config.patch_size * self.config.spatial_merge_size

    def images_in(self, batch: dict[str, Tensor], ids: list[Tensor]) -> list[Media]:
        found, side = [], self._side()
        for i, (height, width) in enumerate(batch.get("image_sizes", torch.empty(0, 2)).tolist()):
            own = self._own(batch, i)
            found.append(Media((height // side) * (width // side), own, (height, width)))
        return found

    def _own(self, tensors: dict[str, Tensor], i: int) -> dict[str, Tensor]:
        """The tensors of one image, without the rows and columns that pad it to others."""
        sizes = tensors["image_sizes"][i : i + 1]
        height, width = sizes[0].tolist()
        pixels = tensors["pixel_values"][i : i + 1, :, :height, :width]
        return {"pixel_values": pixels, "image_sizes": sizes}

    def parts(
        self, tensors: dict[str, Tensor], items: tuple[ItemGeometry, ...]
    ) -> list[Part] | None:
        if len(tensors["image_sizes"]) != len(items):
            return None
        return [Part((i,), self._own(tensors, i)) for i in range(len(items))]

    def joined(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        pixels = [part["pixel_values"] for part in parts]
        height, width = (max((x.shape[dim] for x in pixels), default=0) for dim in (-2, -1))
        return super().joined(
            [
                {**part, "pixel_values": pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]))}
                for part, x in zip(parts, pixels, strict=True)
            ]
        )

    def encode(self, inputs: dict[str, Tensor], context: VisionContext) -> Encoded:
        features, layouts = [], []
        for i, geometry in enumerate(context.items):
            own = self._own(inputs, i)
            output = self.model.base_model.get_image_features(
                own["pixel_values"], image_sizes=own["image_sizes"]
            )
            features.append(torch.cat(list(output.pooler_output)))
            raster = torch.arange(len(features[-1]), device=self.device)
            none, columns = torch.zeros_like(raster), geometry.patches[1]
            kind = torch.full_like(raster, int(self.kind))
            layouts.append(
                self.view_layout(none, raster // columns, raster % columns, kind, i, geometry)
            )
        stats = VisionStats(context.items, {})
        return Encoded(features, layouts, stats, [()] * len(features))
