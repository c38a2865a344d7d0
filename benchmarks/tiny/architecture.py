"""The architecture of `tiny`, stock transformers classes with about 6M parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, LlavaNextForConditionalGeneration

import vlmfast

# Configuration, tokenizer and processor are those of the shipped model.
SHIPPED = Path(vlmfast.__file__).parent / "weights" / "tiny"


def build_model(seed: int = 0) -> LlavaNextForConditionalGeneration:
    """Build `tiny` with fresh weights, float32.

    The usual initialization suits large models. Here the embeddings of patches (192 values) and
    positions would start too small, so both get a larger variance.
    """
    torch.manual_seed(seed)
    model = LlavaNextForConditionalGeneration(AutoConfig.from_pretrained(SHIPPED)).float()
    embeddings = vision_core(model).embeddings
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        patch = embeddings.patch_embedding.weight
        nn.init.normal_(patch, std=patch[0].numel() ** -0.5)
        nn.init.normal_(embeddings.position_embedding.weight, std=0.15)
        nn.init.normal_(embeddings.class_embedding, std=0.15)
        for linear in (projector.linear_1, projector.linear_2):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)
        # Token embeddings must not be small compared to the output of the first blocks. The tied
        # head would then start with too large logits, so the last norm scales them down.
        language = model.model.language_model
        nn.init.normal_(language.embed_tokens.weight, std=0.7)
        nn.init.normal_(model.model.image_newline, std=0.7)
        language.norm.weight.fill_(0.1)
        for layer in language.layers:  # deep sums start small
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                out.weight.mul_(1 / math.sqrt(12))
    return model


def vision_core(model: LlavaNextForConditionalGeneration) -> Any:
    """Return the module with the vision embeddings and blocks.

    Transformers wraps it in ``vision_model`` in some versions and not in others.
    """
    tower = model.model.vision_tower
    return getattr(tower, "vision_model", tower)
