"""vLLM's plug-in of vlmfast: `register` is its entry point.

vLLM calls it in each of its processes, before it loads a model. Nothing heavy is imported until a
model of one of these architectures is loaded.
"""

from __future__ import annotations

ARCHITECTURES = {
    "InternVLForConditionalGeneration": "vlmfast_vllm.internvl:ReducedInternVL",
    "LlavaForConditionalGeneration": "vlmfast_vllm.llava:ReducedLlava",
    "LlavaNextForConditionalGeneration": "vlmfast_vllm.llava_next:ReducedLlavaNext",
    "LlavaOnevisionForConditionalGeneration": "vlmfast_vllm.llava_onevision:ReducedLlavaOnevision",
    "Qwen2VLForConditionalGeneration": "vlmfast_vllm.qwen2_vl:ReducedQwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "vlmfast_vllm.qwen2_5_vl:ReducedQwen2_5VL",
    "Qwen3VLForConditionalGeneration": "vlmfast_vllm.qwen3_vl:ReducedQwen3VL",
}


def register() -> None:
    """Register the models of `ARCHITECTURES`; calling it again changes nothing."""
    from vllm import ModelRegistry

    for architecture, model in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model)
