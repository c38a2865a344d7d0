"""Qwen2-VL of vLLM with recipes on its images and videos."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from . import qwen


class Info(qwen.Info, Qwen2VLProcessingInfo):
    pass


class Processor(qwen.Processor, Qwen2VLMultiModalProcessor):
    pass


@MULTIMODAL_REGISTRY.register_processor(
    Processor, info=Info, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class ReducedQwen2VL(qwen.Reduced, Qwen2VLForConditionalGeneration):
    """Under ``vlmfast_recipe``; without it, vLLM's own model."""
