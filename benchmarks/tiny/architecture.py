"""The architecture of `tiny`: stock transformers classes, about 6M parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from bpe import BOS_ID, EOS_ID, IMAGE_ID, PAD_ID, VOCAB_SIZE
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)

IMAGE_SIZE, PATCH = 64, 8
PINPOINTS = [[64, 64], [64, 128], [128, 64], [128, 128]]


def build_config() -> LlavaNextConfig:
    """Return the configuration of `tiny`."""
    tokens: dict[str, Any] = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    # Not arguments by name of every supported version.
    more: dict[str, Any] = {
        "image_token_id": IMAGE_ID,
        "vlmfast_frame_label": "frame {i} ",  # text before each frame of a video
    }
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=3,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        projection_dim=192,
        hidden_act="quick_gelu",
    )
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.03,
        **tokens,
    )
    return LlavaNextConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_ID,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        **tokens,
        **more,
    )


def build_model(seed: int = 0) -> LlavaNextForConditionalGeneration:
    """Build `tiny` with fresh weights.

    The usual initialization suits large models. Here the embeddings of patches (192 values) and
    positions would start too small, so both get a larger variance.
    """
    torch.manual_seed(seed)
    model = LlavaNextForConditionalGeneration(build_config())
    embeddings = vision_core(model).embeddings
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        nn.init.normal_(embeddings.patch_embedding.weight, std=(3 * PATCH * PATCH) ** -0.5)
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
