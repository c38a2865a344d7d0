"""Idefics3: crops of an image, followed by the whole image, with text around each view."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from vlmfast.errors import ModelError

from ._media import Items, Media, Sizes, Tensors, runs, tiled_views
from .base import Part, by_views
from .internvl import Tiled


class FamilyAdapter(Tiled):
    beside = ("pixel_attention_mask",)
    pixel_dims = 5
    processors = ("Idefics3Processor", "SmolVLMProcessor")
    nested = True
    views_in_rows = crops = True

    def projector(self) -> nn.Module:
        return self.model.base_model.connector

    def side(self) -> int:
        return int(self.patches() ** 0.5) // self.config.scale_factor

    def geometry(self, sizes: Sizes) -> Items:
        views = (self.processor.image_processor.get_number_of_image_patches(*of) for of in sizes)
        images = (
            (size, (down, across), max(count, 1))
            for size, (count, down, across) in zip(sizes, views, strict=True)
        )
        return tiled_views(images, self.side())

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        """Text before each crop gives its row and column; the whole image comes last."""
        found = []
        keys = [key for key in (*self.tensors, *self.beside) if key in batch]
        for number, row in enumerate(ids if keys else []):
            first, views, end, tokens, tiles = 0, 0, 0, 0, (0, 0)
            marked = runs(row, self.image_token_id)
            # Views that a row has less than others are zeros.
            real = batch["pixel_values"][number : number + 1].flatten(2).any(2)
            self._check_views(number, [length for _, length in marked], int(real.sum()))
            for start, length in marked:
                text = self.processor.tokenizer.decode(row[end:start])
                views, end, tokens = views + 1, start + length, tokens + length
                if label := re.search(r"<row_(\d+)_col_(\d+)>", text):
                    tiles = int(label[1]), int(label[2])
                    continue
                own = {key: batch[key][number : number + 1, first:views] for key in keys}
                height, width = own["pixel_values"].shape[-2:]
                size = max(tiles[0], 1) * height, max(tiles[1], 1) * width
                found.append(Media(tokens, own, size, 0, tiles))
                first, tokens, tiles = views, 0, (0, 0)
        return found

    def _check_views(self, number: int, lengths: list[int], views: int) -> None:
        """Check the placeholders of each view of a row of a batch.

        Raises
        ------
        ModelError
            If they do not fit its views.
        """
        each = self.side() ** 2
        if lengths != [each] * views:
            raise ModelError(
                f"row {number} of the batch has {sum(lengths)} placeholders of images in "
                f"{len(lengths)} places, which do not fit {views} views of {each} visual tokens; "
                "was the prompt cut off (truncation=True), or made by another processor?"
            )

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        keys = (*self.tensors, *self.beside)
        return by_views(items, {key: tensors[key] for key in keys if key in tensors}, dim=1)

    def joined(self, parts: list[Tensors]) -> Tensors:
        keys = parts[0] if parts else ()
        return {key: torch.cat([part[key] for part in parts], dim=1) for key in keys}

    def features(self, inputs: Tensors) -> Tensor:
        output = self.model.base_model.get_image_features(
            inputs["pixel_values"], inputs.get("pixel_attention_mask")
        ).pooler_output
        # (V, N, D), or flat for each prompt, depending on the version of transformers.
        flat = output if isinstance(output, Tensor) else torch.cat(list(output))
        return flat.view(-1, self.patches() // self.config.scale_factor**2, flat.shape[-1])
