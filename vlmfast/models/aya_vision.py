"""Aya Vision: crops of an image, followed by the whole image, with text before each view."""

from __future__ import annotations

from .cohere2_vision import Marked
from .internvl import FamilyAdapter as InternVL
from .internvl import canvas


class FamilyAdapter(Marked):
    processors = ("AyaVisionProcessor",)
    views_in_rows = crops = True
    features = InternVL.features

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        return canvas(size, self.processor.image_processor)

    def marker(self) -> int:
        return self.processor.tokenizer.convert_tokens_to_ids(self.processor.start_of_img_token)
