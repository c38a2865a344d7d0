"""Random models of all families, with head sizes that vLLM's attention on a CPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support import tiny_families, tiny_models

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
    tiny_families.filled(type(model.config)(**config), 6).save_pretrained(folder)
    processor.save_pretrained(folder)


def build_internvl(folder: Path) -> None:
    """Up to three crops and the whole image; a view costs 2 x 2 tokens."""
    model, processor = tiny_families.build_internvl()
    config = model.config.to_dict()
    config["text_config"] |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "hidden_size": 2 * HEAD,
    }
    config["vision_config"] |= {"num_attention_heads": 2, "hidden_size": 2 * HEAD}
    tiny_families.filled(type(model.config)(**config), 8).save_pretrained(folder)
    processor.save_pretrained(folder)


def build_qwen(name: str, folder: Path) -> None:
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL, with images of up to 128 x 128 pixels."""
    model, processor = tiny_families.builders()[name]()
    config = model.config.to_dict()
    text, vision = config["text_config"], config["vision_config"]
    text |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "hidden_size": 2 * HEAD,
    }
    # 32 pairs of each head, divided among time, rows and columns.
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [8, 12, 12]}
    vision |= {"num_heads": 2, "hidden_size": 2 * HEAD}
    if name == "qwen2_vl":
        vision["embed_dim"] = 2 * HEAD
    else:
        vision["out_hidden_size"] = 2 * HEAD
    if name == "qwen3_vl":
        text["rope_parameters"]["mrope_interleaved"] = True
    tiny_families.filled(type(model.config)(**config), 8).save_pretrained(folder)
    processor.image_processor.size = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    processor.save_pretrained(folder)


def _widened(configs: dict[str, Any]) -> dict[str, Any]:
    text, vision = configs["text_config"], configs["vision_config"]
    text.num_attention_heads = text.num_key_value_heads = 2
    text.head_dim, text.hidden_size = HEAD, 2 * HEAD
    vision.num_attention_heads, vision.hidden_size = 2, 2 * HEAD
    return configs
