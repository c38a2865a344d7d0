"""LLaVA-OneVision of vLLM with recipes on its images; videos are left as they are."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from .llava import CropsInfo, CropsProcessor, Reduced


class Info(CropsInfo, LlavaOnevisionProcessingInfo):
    pass


class Processor(CropsProcessor, LlavaOnevisionMultiModalProcessor):
    pass


@MULTIMODAL_REGISTRY.register_processor(
    Processor, info=Info, dummy_inputs=LlavaOnevisionDummyInputsBuilder
)
class ReducedLlavaOnevision(Reduced, LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision under ``vlmfast_recipe``; without it, vLLM's own model."""

    def _tensors(self, values: Tensor, size: tuple[int, ...]) -> dict[str, Tensor]:
        return {
            **super()._tensors(values, size),
            "batch_num_images": torch.ones(1, dtype=torch.int64),
        }
