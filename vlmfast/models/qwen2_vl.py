"""Qwen2-VL: like Qwen2.5-VL; every block of the tower attends to the whole image.

The times of a video count its steps, whatever the seconds between them.
"""

from __future__ import annotations

from typing import Any

from .qwen2_5_vl import FamilyAdapter as Qwen


class FamilyAdapter(Qwen):
    processors = ("Qwen2VLProcessor",)
    beside = ("mm_token_type_ids",)

    def sizes(self) -> dict[str, Any]:
        # `hidden_size` of its tower is the width of the language model.
        return super().sizes() | {"vision_width": self.config.vision_config.embed_dim}
