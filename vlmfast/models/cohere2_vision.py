"""Command A Vision: crops of an image, followed by the whole image, with a token after each view.

Three of four layers of its language model attend within a window; the others have no rotary
embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._media import runs
from .internvl import Cropped


class Marked(Cropped):
    """Families with one run of placeholders per view, and a marker before the first of an image."""

    fixed = True

    def marker(self) -> int:
        """Id of the token before an image."""
        raise NotImplementedError(f"{type(self).__name__}.marker")

    def why_no_crops(self) -> str:
        return f"{self.config.model_type} needs all views again after its vision tower"

    def views_in(self, ids: Tensor) -> list[int]:
        image = (ids == self.marker()).cumsum(0)
        first = [start for start, _ in runs(ids, self.image_token_id)]
        return torch.unique_consecutive(image[first], return_counts=True)[1].tolist()

    def side(self) -> int:
        vision = self.config.vision_config
        return vision.image_size // vision.patch_size // self.config.downsample_factor


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
