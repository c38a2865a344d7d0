"""Command A Vision: crops of an image, followed by the whole image, with a token after each view.

Three of four layers of its language model attend within a window; the others have no rotary
embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.core.statistics import ItemGeometry

from ._media import Media, runs, tiling, without_placeholders
from .internvl import Tiled


class Marked(Tiled):
    """Families with one run of placeholders per view, and a marker before the first of an image."""

    fixed = True

    def marker(self) -> int:
        """Id of the token before an image."""
        raise NotImplementedError(f"{type(self).__name__}.marker")

    def why_no_crops(self) -> str:
        return f"{self.config.model_type} needs all views again after its vision tower"

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the crops of an image that has crops."""
        raise NotImplementedError(f"{type(self).__name__}.canvas")

    def tiling(self, views: Tensor) -> tuple[int, int]:
        """Rows and columns of the crops of an image, from all of its views."""
        return tiling(views)

    def views_in(self, ids: Tensor) -> list[int]:
        """Views of each image of a prompt, ids (S,)."""
        image = (ids == self.marker()).cumsum(0)
        first = [start for start, _ in runs(ids, self.image_token_id)]
        return torch.unique_consecutive(image[first], return_counts=True)[1].tolist()

    def side(self) -> int:
        vision = self.config.vision_config
        return vision.image_size // vision.patch_size // self.config.downsample_factor

    def images_in(self, batch: dict[str, Tensor], ids: list[Tensor]) -> list[Media]:
        found, view, pixels = [], 0, batch.get("pixel_values")
        for count in [count for row in ids for count in self.views_in(row)]:
            if pixels is None or view + count > len(pixels):
                break
            own = pixels[view : view + count]
            down, across = self.tiling(own) if count > 1 else (0, 0)
            size = max(down, 1) * pixels.shape[-2], max(across, 1) * pixels.shape[-1]
            tokens = count * self.side() ** 2
            found.append(Media(tokens, {"pixel_values": own}, size, 0, (down, across)))
            view += count
        return found + without_placeholders(pixels, view)

    def views_of(
        self, tensors: dict[str, Tensor], sizes: list[tuple[int, int]]
    ) -> tuple[ItemGeometry, ...]:
        side, items, view = self.side(), [], 0
        counts = self.views_in(tensors["input_ids"][0]) if sizes else []
        for size, count in zip(sizes, counts, strict=True):
            tiles = self.canvas(size) if count > 1 else (0, 0)
            items.append(ItemGeometry(size, tiles, (view, view + count), (side, side)))
            view += count
        return tuple(items)


class FamilyAdapter(Marked):
    processors = ("Cohere2VisionProcessor",)

    def marker(self) -> int:
        return self.processor.tokenizer.convert_tokens_to_ids(self.processor.boi_token)

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        from transformers.models.cohere2_vision import image_processing_cohere2_vision as own

        images = self.processor.image_processor
        tile = images.size["height"], images.size["width"]
        across, down = own.get_optimal_tiled_canvas(
            size, tile, images.min_patches, images.max_patches
        )
        return down, across
