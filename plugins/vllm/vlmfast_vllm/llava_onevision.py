"""LLaVA-OneVision of vLLM with a recipe on its images; videos are left as they are."""

from __future__ import annotations

import torch
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from .llava import Counted, Reduced


class Info(Counted, LlavaOnevisionProcessingInfo):
    pass


@MULTIMODAL_REGISTRY.register_processor(
    LlavaOnevisionMultiModalProcessor,
    info=Info,
    dummy_inputs=LlavaOnevisionDummyInputsBuilder,
)
class ReducedLlavaOnevision(Reduced, LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision under ``vlmfast_recipe``; without one, vLLM's own model."""

    def _tensors(self, values: torch.Tensor, size: tuple[int, int]) -> dict[str, torch.Tensor]:
        return {
            **super()._tensors(values, size),
            "batch_num_images": torch.ones(1, dtype=torch.int64),
        }
