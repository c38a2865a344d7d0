"""Qwen2.5-VL of vLLM with recipes on its images and videos."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from . import qwen


class Info(qwen.Info, Qwen2_5_VLProcessingInfo):
    pass


class Processor(qwen.Processor, Qwen2_5_VLMultiModalProcessor):
    pass


@MULTIMODAL_REGISTRY.register_processor(
    Processor, info=Info, dummy_inputs=Qwen2_5_VLDummyInputsBuilder
)
class ReducedQwen2_5VL(qwen.Reduced, Qwen2_5_VLForConditionalGeneration):
    """Under ``vlmfast_recipe``; without it, vLLM's own model."""
