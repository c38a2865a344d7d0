"""InternVL of vLLM with recipes on its images; videos are left as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.interns1 import (
    InternS1DummyInputsBuilder,
    InternS1ForConditionalGeneration,
    InternS1MultiModalProcessor,
    InternS1ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlmfast.models import adapter_class

from .llava import Reduced
from .processing import Counted, Informed, own_key
from .recipes import Media
from .reduction import Tiled
from .tiles import Tiles

TILES = own_key("tiles", "image")  # height, width, rows and columns of crops
COUNT = "image_num_patches"  # views of an image


class Info(Informed, InternS1ProcessingInfo):
    family = Tiles


class Processor(Counted, InternS1MultiModalProcessor):
    """Of InternVL's processors."""

    reduced = ("image",)

    def about(self, modality: str, item: Mapping[str, Any]) -> Media:
        return self.info.plans.family.media(tuple(item[TILES].tolist()))

    def items(self, modality: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{TILES: row} for row in data.get(TILES, ())]

    def _text(self, prompt: Sequence[int]) -> list[int]:
        """With the marks around each image, which vLLM writes later."""
        processor, image = self.info.get_hf_processor(), self.token("image")
        marks = processor.start_image_token, processor.end_image_token
        start, end = processor.tokenizer.convert_tokens_to_ids(list(marks))
        marked = ((start, image, end) if token == image else (token,) for token in prompt)
        return super()._text([token for tokens in marked for token in tokens])

    def fields(self, items: Any, data: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        if COUNT not in data:
            return {}
        config, processor = self.info.get_hf_config(), self.info.get_hf_processor(**given)
        adapter, rows = adapter_class(config.model_type).without_weights(config, processor), []
        for i, views in enumerate(data[COUNT].tolist()):
            size = items["image"].get_image_size(i)
            own = size.height, size.width
            rows.append([*own, *(adapter.canvas(own) if views > 1 else (0, 0))])
        return {TILES: torch.tensor(rows)}


@MULTIMODAL_REGISTRY.register_processor(
    Processor, info=Info, dummy_inputs=InternS1DummyInputsBuilder
)
class ReducedInternVL(Reduced, InternS1ForConditionalGeneration):
    """InternVL under ``vlmfast_recipe``; without it, vLLM's own model."""

    family, reducer = Tiles, Tiled

    def _lengths(self, kwargs: Mapping[str, Any]) -> list[int]:
        vision = self.config.vision_config
        return [(vision.image_size[0] // vision.patch_size[0]) ** 2 * n for n in kwargs[COUNT]]

    def _part(self, kwargs: Mapping[str, Any], items: slice) -> dict[str, Any]:
        first, stop = (int(kwargs[COUNT][:end].sum()) for end in (items.start, items.stop))
        self._tiles = kwargs[TILES][items].tolist()
        own = {COUNT: kwargs[COUNT][items], "pixel_values": kwargs["pixel_values"][first:stop]}
        return {key: of for key, of in kwargs.items() if key != TILES} | own

    @staticmethod
    def _of_all_ranks(heads: Tensor) -> Tensor:
        return heads

    def _process_vision_input(self, image_input: Any) -> Any:
        return self._reduced(image_input, super()._process_vision_input)

    def _pixels(self, image_input: Any, index: int, views: slice) -> Tensor:
        return image_input["pixel_values"][views]

    def _views(self, image_input: Any) -> tuple[list[int], list[tuple[int, ...]]]:
        return image_input["num_patches"].tolist(), [tuple(of) for of in self._tiles]

    def _tensors(self, values: Tensor, size: tuple[int, ...]) -> dict[str, Tensor]:
        return {"pixel_values": values}
