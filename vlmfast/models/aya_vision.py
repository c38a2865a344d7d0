"""Aya Vision: crops of an image, followed by the whole image, with text before each view."""

from __future__ import annotations

from .cohere2_vision import Marked
from .internvl import FamilyAdapter as InternVL


class FamilyAdapter(Marked):
    processors = ("AyaVisionProcessor",)
    views_in_rows = crops = True
    canvas, features = InternVL.canvas, InternVL.features

    def marker(self) -> int:
        return self.processor.tokenizer.convert_tokens_to_ids(self.processor.start_of_img_token)
