"""LLaVA-NeXT of vLLM with recipes between projector and language model."""

from __future__ import annotations

from vllm.model_executor.models.llava import LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from .llava import CropsInfo, CropsProcessor, Reduced


class Info(CropsInfo, LlavaNextProcessingInfo):
    pass


class Processor(CropsProcessor, LlavaNextMultiModalProcessor):
    pass


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=LlavaDummyInputsBuilder)
class ReducedLlavaNext(Reduced, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT under ``vlmfast_recipe``; without it, vLLM's own model."""
