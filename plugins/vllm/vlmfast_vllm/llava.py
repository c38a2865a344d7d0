"""LLaVA-1.5 of vLLM with a recipe between projector and language model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaProcessingInfo,
    _build_llava_or_pixtral_hf_info,
    _build_llava_or_pixtral_hf_processor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from .recipes import Plan
from .reduction import Reduction


class Counted:
    """Of processing infos: images take as many places as the recipe keeps tokens."""

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        if not hasattr(self, "_plan"):
            self._plan = Plan.of(self.get_hf_config())
        if self._plan is None:
            return super().get_num_image_tokens(image_width=image_width, image_height=image_height)
        return self._plan.count((image_height, image_width))


class Reduced:
    """Of models: images become the tokens that the recipe keeps."""

    reduction: Reduction | None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        plan = Plan.of(vllm_config.model_config.hf_config)  # before any weights are allocated
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.reduction = plan and Reduction(
            plan,
            self.vision_tower,
            self.multi_modal_projector,
            get_tensor_model_parallel_world_size(),
        )

    def _process_image_input(self, image_input: Any) -> Any:
        if self.reduction is None or image_input["type"] == "image_embeds":
            return super()._process_image_input(image_input)
        with self.reduction.watching() as seen:
            features = super()._process_image_input(image_input)
        values = image_input["pixel_values"]
        views, sizes = self._views(image_input)
        return self.reduction.reduced(
            features, seen, views, sizes, lambda index: self._tensors(values[index], sizes[index])
        )

    def _views(self, image_input: Any) -> tuple[list[int], list[tuple[int, int]]]:
        """Rows of the tower, and the size in pixels, of each image."""
        sizes = [(int(height), int(width)) for height, width in image_input["image_sizes"]]
        return [len(values) for values in image_input["pixel_values"]], sizes

    def _tensors(self, values: torch.Tensor, size: tuple[int, int]) -> dict[str, torch.Tensor]:
        """One image as vlmfast's processor output."""
        return {"pixel_values": values[None], "image_sizes": torch.tensor([size])}


class Info(Counted, LlavaProcessingInfo):
    pass


def build_info(ctx: Any) -> Any:
    """vLLM's own choice, counted; Pixtral shares the architecture and is left alone."""
    info = _build_llava_or_pixtral_hf_info(ctx)
    if type(info) is LlavaProcessingInfo:
        return Info(ctx)
    Plan.of(info.get_hf_config())  # raises where a recipe is named
    return info


@MULTIMODAL_REGISTRY.register_processor(
    _build_llava_or_pixtral_hf_processor,
    info=build_info,
    dummy_inputs=LlavaDummyInputsBuilder,
)
class ReducedLlava(Reduced, LlavaForConditionalGeneration):
    """LLaVA-1.5 under ``vlmfast_recipe``; without one, vLLM's own model."""

    def _views(self, image_input: Any) -> tuple[list[int], list[tuple[int, int]]]:
        # Every image has one view, whatever its size.
        side, count = self.config.vision_config.image_size, len(image_input["pixel_values"])
        return [1] * count, [(side, side)] * count

    def _tensors(self, values: torch.Tensor, size: tuple[int, int]) -> dict[str, torch.Tensor]:
        return {"pixel_values": values[None]}
