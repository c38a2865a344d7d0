"""Qwen3-VL of vLLM with recipes on its images and videos."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from . import qwen


class Info(qwen.Info, Qwen3VLProcessingInfo):
    pass


class Processor(qwen.Processor, Qwen3VLMultiModalProcessor):
    pass


@MULTIMODAL_REGISTRY.register_processor(
    Processor, info=Info, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class ReducedQwen3VL(qwen.Reduced, Qwen3VLForConditionalGeneration):
    """Under ``vlmfast_recipe``; without it, vLLM's own model."""
