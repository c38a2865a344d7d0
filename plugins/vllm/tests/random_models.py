"""Random models of the three families, with head sizes that vLLM's attention on a CPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiny_families
import tiny_models

HEAD = 64


def build_llava(folder: Path) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip import CLIPImageProcessor

    side = tiny_models.IMAGE_SIZE
    config = LlavaConfig(**_widened(tiny_models._configs(3, 2)), image_seq_length=16)
    images = CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    kinds = LlavaForConditionalGeneration, config, LlavaProcessor, images
    tiny_models._finish(*kinds, torch.float32, 0, folder)


def build_onevision(folder: Path) -> None:
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    model, processor = tiny_families.build_llava_onevision()
    config = model.config.to_dict()
    config["vision_aspect_ratio"] = processor.vision_aspect_ratio = "anyres_max_9"
    config["text_config"] |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "hidden_size": 2 * HEAD,
    }
    config["vision_config"] |= {"num_attention_heads": 2, "hidden_size": 2 * HEAD}
    new = LlavaOnevisionConfig(**config)
    tiny_families.filled(LlavaOnevisionForConditionalGeneration, new, 6, 0).save_pretrained(folder)
    processor.save_pretrained(folder)


def _widened(configs: dict[str, Any]) -> dict[str, Any]:
    text, vision = configs["text_config"], configs["vision_config"]
    text.num_attention_heads = text.num_key_value_heads = 2
    text.head_dim, text.hidden_size = HEAD, 2 * HEAD
    vision.num_attention_heads, vision.hidden_size = 2, 2 * HEAD
    return configs
