"""vLLM's plug-in of vlmfast: `register` is its entry point.

vLLM calls it in each of its processes, before it loads a model. Nothing heavy is imported until a
model of one of these architectures is loaded.
"""

from __future__ import annotations

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "vlmfast_vllm.llava:ReducedLlava",
    "LlavaNextForConditionalGeneration": "vlmfast_vllm.llava_next:ReducedLlavaNext",
    "LlavaOnevisionForConditionalGeneration": "vlmfast_vllm.llava_onevision:ReducedLlavaOnevision",
}


def register() -> None:
    """Register the models of `ARCHITECTURES`; calling it again changes nothing."""
    from vllm import ModelRegistry

    for architecture, model in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model)
