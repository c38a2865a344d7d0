"""Idefics3: crops of a picture first, the whole of it behind them, with text around each view."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..stages import ItemGeometry
from .internvl import Tiled


class FamilyAdapter(Tiled):
    processors = ("Idefics3Processor", "SmolVLMProcessor")
    nested = True

    def projector(self) -> nn.Module:
        return self.model.base_model.connector

    def geometry(self, sizes: list[tuple[int, int]]) -> tuple[ItemGeometry, ...]:
        items, start = [], 0
        for height, width in sizes:
            of = self.processor.image_processor
            count, down, across = of.get_number_of_image_patches(height, width)
            items.append(self._item((height, width), (down, across), start, max(count, 1)))
            start = items[-1].views[1]
        return tuple(items)

    def _item(
        self, size: tuple[int, int], tiles: tuple[int, int], start: int, count: int
    ) -> ItemGeometry:
        side = int(self.patches() ** 0.5) // self.config.scale_factor
        return ItemGeometry(size, tiles, (start, start + count), (side, side))

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        output = self.model.base_model.get_image_features(
            inputs["pixel_values"], inputs.get("pixel_attention_mask")
        ).pooler_output
        # (V, N, D), or flat for each prompt, by the version of transformers.
        flat = output if isinstance(output, Tensor) else torch.cat(list(output))
        return flat.view(-1, self.patches() // self.config.scale_factor**2, flat.shape[-1])
