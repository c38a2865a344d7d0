"""LLaVA-NeXT of vLLM with a recipe between projector and language model."""

from __future__ import annotations

from vllm.model_executor.models.llava import LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from .llava import Counted, Reduced


class Info(Counted, LlavaNextProcessingInfo):
    pass


@MULTIMODAL_REGISTRY.register_processor(
    LlavaNextMultiModalProcessor,
    info=Info,
    dummy_inputs=LlavaDummyInputsBuilder,
)
class ReducedLlavaNext(Reduced, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT under ``vlmfast_recipe``; without one, vLLM's own model."""
