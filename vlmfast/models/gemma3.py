"""Gemma 3: an image is one square view with pooled patches; its tokens attend bidirectionally.

Most layers of the language model attend within a window: a row attends to itself, to rows at the
``window - 1`` positions before its own, and to later rows of its own image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmfast.core.layout import TokenLayout
from vlmfast.errors import ModelError

from ._media import Tensors
from .internvl import Tiled


class FamilyAdapter(Tiled):
    processors = ("Gemma3Processor",)
    nested, fixed = True, True
    views_in_rows = True

    def mask_rule(self, layout: TokenLayout) -> Tensor:
        """Attention mask, bool (S, S): each row attends to rows before it and to its own image."""
        row = torch.arange(len(layout), device=layout.device)
        before = row[:, None] >= row
        return before | ((layout.item[:, None] == layout.item) & layout.visual[:, None])

    def image_token(self) -> str:
        return self.processor.boi_token

    def side(self) -> int:
        return int(self.config.mm_tokens_per_image**0.5)

    def inputs(self, text: str, images: list[Any], frames: Any = (), times: Any = ()) -> Tensors:
        tensors = super().inputs(text, images, frames, times)
        if images and len(tensors["pixel_values"]) != len(images):
            raise ModelError(
                "the processor cut images into crops (do_pan_and_scan), which is not supported; "
                "set processor.image_processor.do_pan_and_scan = False"
            )
        return tensors
