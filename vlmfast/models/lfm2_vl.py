"""LFM2-VL: images keep their aspect ratio, one token for 2 x 2 patches.

Most layers of its language model are short convolutions, which hold the last inputs as a state: a
token that was dropped before such a layer never enters it, and the tokens on both sides of the gap
follow each other there.

Images that the processor splits into tiles are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vlmfast.errors import ModelError

from .mistral3 import Shaped


class FamilyAdapter(Shaped):
    tensors = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    processors = ("Lfm2VlProcessor",)
    nested, pixel_dims = True, 3

    def norm(self) -> nn.Module:
        return self.decoder.get_submodule("embedding_norm")

    def attention_norm(self, layer: int) -> nn.Module:
        return self.decoder.layers[layer].get_submodule("operator_norm")

    def merge(self) -> int:
        return self.config.downsample_factor

    def grids(self, tensors: dict[str, Tensor]) -> list[tuple[int, int]]:
        return [(rows, columns) for rows, columns in tensors["spatial_shapes"].tolist()]

    def own(self, tensors: dict[str, Tensor], i: int) -> dict[str, Tensor]:
        rows, columns = tensors["spatial_shapes"][i].tolist()
        own = {key: tensors[key][i : i + 1] for key in self.tensors}
        unpadded = ("pixel_values", "pixel_attention_mask")
        return own | {key: own[key][:, : rows * columns] for key in unpadded}

    def features(self, tensors: dict[str, Tensor]) -> Tensor:
        output = self.model.base_model.get_image_features(*(tensors[key] for key in self.tensors))
        (features,) = output.pooler_output
        return features

    def inputs(
        self, text: str, images: list[Any], frames: Sequence[tuple] = (), times: Any = ()
    ) -> dict[str, Tensor]:
        tensors = super().inputs(text, images, frames, times)
        if images and len(tensors["pixel_values"]) != len(images):
            raise ModelError(
                "the processor split an image into tiles, which is not supported; set "
                "processor.image_processor.do_image_splitting = False"
            )
        return tensors
