"""Random-weight models of the families other than LLaVA, from transformers' own classes.

As in `tiny_models`, nothing is downloaded, the same arguments give the same weights, and attention
is far from uniform. Each builder returns model and processor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

PATCH = 8
SQUARE = {"height": 4 * PATCH, "width": 4 * PATCH}
EDGE, LARGE = {"longest_edge": 4 * PATCH}, {"longest_edge": 8 * PATCH}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokenizer(*more: str, **named: str) -> Any:
    """One token per byte after ``<pad> <s> </s> <unk>`` and the family's special tokens.

    ``named`` are special tokens that the processor accesses by name.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = tuple(dict.fromkeys(("<pad>", "<s>", "</s>", "<unk>", *named.values(), *more)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*special, *alphabet))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=named,
    )


def template(image: str, video: str = "") -> str:
    """A chat template that writes ``image`` and ``video`` at their positions in the content."""
    return (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ {image!r} }}}}"
        f"{{% elif part['type'] == 'video' %}}{{{{ {video!r} }}}}"
        "{% else %}{{ part['text'] + ' ' }}{% endif %}"
        "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )


def filled(config: transformers.PreTrainedConfig, special: int, seed: int = 0) -> nn.Module:
    """A model with every weight overwritten; the first ``special`` tokens are never generated."""
    name = type(config).__name__.replace("Config", "ForConditionalGeneration")
    model_class = getattr(transformers, name)
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if "timm_model" in name:  # otherwise the image fades out in the convolutions
                wide = weight.dim() == 4
                scale = (len(weight) / weight.numel()) ** 0.5 if wide else 0.1
                weight.copy_(noise * scale + float(not wide and not name.endswith("bias")))
            elif "norm" in name or name.endswith("ln_q.weight"):
                weight.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            else:
                weight.copy_(noise * (1.0 if "embed_tokens" in name or "newline" in name else 0.2))
        head = model.get_output_embeddings().weight
        head.mul_(0.25)  # logits of about unit size, as trained models have
        head[:special] = 0.0
    return model


def ids(tok: Any, *tokens: str) -> list[int]:
    return [tok.convert_tokens_to_ids(token) for token in tokens]


QWEN = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
QWEN_TEMPLATE = template(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}


def _qwen(tokens: Any) -> dict[str, Any]:
    start, end, image, video = ids(tokens, *QWEN.values())
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {**TEXT, "vocab_size": len(tokens), "rope_parameters": rope}
    return {
        "text_config": text,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }


def build_qwen2_5_vl(
    seed: int = 0, patch: int = PATCH, largest: int = 64 * 64, **tower: Any
) -> tuple[nn.Module, Any]:
    """Windows of 2 x 2 tokens, full attention in blocks 1 and 3.

    Parameters
    ----------
    patch, largest : int
        Edge of a patch, and the most pixels of an image.
    tower
        Other values of the vision tower's configuration.
    """
    tokens = tokenizer(**QWEN)
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": patch,
        "window_size": 4 * patch,
        "fullatt_block_indexes": [1, 3],
        "out_hidden_size": 64,
        **tower,
    }
    config = transformers.Qwen2_5_VLConfig(**_qwen(tokens), vision_config=vision)
    size = {"shortest_edge": 16 * 16, "longest_edge": largest}
    sizes = {"patch_size": patch, "size": size}
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=transformers.Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokens,
        chat_template=QWEN_TEMPLATE,
    )
    return filled(config, 8, seed), processor


def build_qwen3_vl(seed: int = 0) -> tuple[nn.Module, Any]:
    """Features of the vision blocks 0 and 2 are added after the first two layers."""
    tokens = tokenizer(**QWEN)
    config = transformers.Qwen3VLConfig(**_qwen(tokens), vision_config=QWEN3_VISION)
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    sizes = {"patch_size": PATCH, "size": size, "merge_size": 2, "temporal_patch_size": 2}
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=transformers.Qwen3VLVideoProcessor(
            **{**sizes, "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 64 * 64 * 6}}
        ),
        tokenizer=tokens,
        chat_template=QWEN_TEMPLATE,
    )
    return filled(config, 8, seed), processor


def open_clip_models(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 4 * PATCH,
        "patch_size": PATCH,
        **more,
    }


def _llava(tokens: Any) -> dict[str, Any]:
    image, video = ids(tokens, "<image>", "<video>")
    return {
        "image_token_id": image,
        "video_token_id": video,
        "image_grid_pinpoints": PINPOINTS,
    }


PINPOINTS = [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]


def build_llava_next_video(seed: int = 0) -> tuple[nn.Module, Any]:
    """A frame costs 2 x 2 tokens."""
    tokens = tokenizer(image_token="<image>", video_token="<video>")
    config = transformers.LlavaNextVideoConfig(
        **_llava(tokens),
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokens)},
        vision_config=open_clip_models(model_type="clip_vision_model", projection_dim=32),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    crop = {"size": {"shortest_edge": 4 * PATCH}, "crop_size": SQUARE}
    processor = transformers.LlavaNextVideoProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            **crop, image_grid_pinpoints=PINPOINTS
        ),
        video_processor=transformers.LlavaNextVideoVideoProcessor(**crop),
        tokenizer=tokens,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>\n", "<video>\n"),
    )
    return filled(config, 6, seed), processor


def build_llava_onevision(seed: int = 0) -> tuple[nn.Module, Any]:
    """A single image costs a base view and crops of at most two views."""
    tokens = tokenizer(image_token="<image>", video_token="<video>")
    config = transformers.LlavaOnevisionConfig(
        **_llava(tokens),
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)},
        vision_config=open_clip_models(model_type="siglip_vision_model", vision_use_head=False),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=SQUARE, image_grid_pinpoints=PINPOINTS
        ),
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=SQUARE),
        tokenizer=tokens,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        chat_template=template("<image>\n", "<video>\n"),
    )
    return filled(config, 6, seed), processor


def build_internvl(seed: int = 0) -> tuple[nn.Module, Any]:
    """Two or three crops and the whole image; a view costs 2 x 2 tokens."""
    tokens = tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)},
        vision_config=open_clip_models(
            model_type="internvl_vision",
            image_size=[4 * PATCH] * 2,
            patch_size=[PATCH] * 2,
            layer_scale_init_value=1.0,
        ),
        image_token_id=ids(tokens, "<IMG_CONTEXT>")[0],
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=3
        ),
        video_processor=transformers.InternVLVideoProcessor(size=SQUARE),
        tokenizer=tokens,
        image_seq_length=4,
        chat_template=template("<IMG_CONTEXT>\n", "<video>\n"),
    )
    return filled(config, 8, seed), processor


_IDEFICS = (
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)


def _idefics(tokens: Any) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(tokens)},
        "image_token_id": ids(tokens, "<image>")[0],
        "scale_factor": 2,
        "pad_token_id": 0,
    }


def build_idefics3(seed: int = 0) -> tuple[nn.Module, Any]:
    """Views of 4 x 4 patches, 2 x 2 tokens; images are split into up to 2 x 2 crops."""
    tokens = tokenizer(*_IDEFICS, image_token="<image>")
    config = transformers.Idefics3Config(
        **_idefics(tokens), vision_config=open_clip_models(model_type="idefics3_vision")
    )
    processor = transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(size=LARGE, max_image_size=EDGE),
        tokenizer=tokens,
        image_seq_len=4,
        chat_template=template("<image>"),
    )
    return filled(config, len(tokens) - 256, seed), processor


def build_smolvlm(seed: int = 0) -> tuple[nn.Module, Any]:
    """As Idefics3, with videos. Its processor needs the package num2words."""
    pytest.importorskip("num2words")
    tokens = tokenizer(*_IDEFICS, image_token="<image>", video_token="<video>")
    config = transformers.SmolVLMConfig(
        **_idefics(tokens), vision_config=open_clip_models(model_type="smolvlm_vision")
    )
    processor = transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(size=LARGE, max_image_size=EDGE),
        video_processor=transformers.SmolVLMVideoProcessor(
            size=EDGE, max_image_size=EDGE, num_frames=8, fps=1, do_sample_frames=False
        ),
        tokenizer=tokens,
        image_seq_len=4,
        chat_template=template("<image>", "<video>"),
    )
    return filled(config, len(tokens) - 256, seed), processor


def build_gemma3(seed: int = 0, window: int = 256) -> tuple[nn.Module, Any]:
    """Three layers with a window and one without; 4 x 4 tokens per image."""
    tokens = tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    boi, eoi, image = ids(tokens, "<start_of_image>", "<end_of_image>", "<image_soft_token>")
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": len(tokens),
            "query_pre_attn_scalar": 16,
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        },
        vision_config=open_clip_models(
            model_type="siglip_vision_model", vision_use_head=False, image_size=8 * PATCH
        ),
        mm_tokens_per_image=16,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_id=image,
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(
            size={"height": 8 * PATCH, "width": 8 * PATCH}
        ),
        tokenizer=tokens,
        image_seq_length=16,
        chat_template=template("<start_of_image>"),
    )
    return filled(config, 7, seed), processor


def build_fast_vlm(seed: int = 0) -> tuple[nn.Module, Any]:
    """A square of 256 pixels costs 4 x 4 tokens."""
    tokens = tokenizer(image_token="<image>")
    config = transformers.FastVlmConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)},
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "do_pooling": False,
            "hidden_size": 64,
            "model_args": {"layers": [1] * 5, "embed_dims": [8, 8, 16, 32, 32]},
        },
        image_token_id=ids(tokens, "<image>")[0],
        image_seq_length=16,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 256}, crop_size={"height": 256, "width": 256}
        ),
        tokenizer=tokens,
        patch_size=64,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=template("<image>\n"),
    )
    return filled(config, 5, seed), processor


def build_qwen2_vl(seed: int = 0) -> tuple[nn.Module, Any]:
    """As Qwen2.5-VL; all blocks attend to the whole image."""
    tokens = tokenizer(**QWEN)
    vision = {
        "depth": 4,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": PATCH,
    }
    config = transformers.Qwen2VLConfig(**_qwen(tokens), vision_config=vision)
    sizes = {"patch_size": PATCH, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=transformers.Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokens,
        chat_template=QWEN_TEMPLATE,
    )
    return filled(config, 8, seed), processor


def build_qwen3_vl_moe(seed: int = 0) -> tuple[nn.Module, Any]:
    """As Qwen3-VL; each token takes two of four experts."""
    _, processor = build_qwen3_vl(seed)
    given = _qwen(processor.tokenizer)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    given["text_config"] |= experts
    config = transformers.Qwen3VLMoeConfig(**given, vision_config=QWEN3_VISION)
    return filled(config, 8, seed), processor


GLM = {
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}


def _glm(kind: str, seed: int, sections: list[int], **text: Any) -> tuple[nn.Module, Any]:
    tokens = tokenizer(**GLM)
    named = {
        f"{name}_id": token for name, token in zip(GLM, ids(tokens, *GLM.values()), strict=True)
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "vocab_size": len(tokens), "rope_parameters": rope, **text},
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "image_size": 4 * PATCH,
            "patch_size": PATCH,
            "out_hidden_size": 64,
        },
        **named,
    )
    sizes = {
        "patch_size": PATCH,
        "size": {"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64 * 2},
    }
    processor = transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(**sizes),
        video_processor=transformers.Glm4vVideoProcessor(
            **{**sizes, "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 64 * 64 * 6}}
        ),
        tokenizer=tokens,
        chat_template=template(
            "<|begin_of_image|><|image|><|end_of_image|>",
            "<|begin_of_video|><|video|><|end_of_video|>",
        ),
    )
    return filled(config, 10, seed), processor


def build_glm4v(seed: int = 0) -> tuple[nn.Module, Any]:
    """2 x 2 patches per token; images and videos have the same placeholder."""
    return _glm("Glm4v", seed, [2, 3, 3])


def build_glm4v_moe(seed: int = 0) -> tuple[nn.Module, Any]:
    """As GLM-4.1V; layers after the first have experts, half of a head is rotated."""
    return _glm(
        "Glm4vMoe",
        seed,
        [1, 1, 2],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )


def build_mistral3(seed: int = 0) -> tuple[nn.Module, Any]:
    """Pixtral's tower; 2 x 2 patches per token, a token of text after each row."""
    tokens = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = transformers.Mistral3Config(
        text_config={
            **TEXT,
            "model_type": "mistral",
            "vocab_size": len(tokens),
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": 8 * PATCH,
            "patch_size": PATCH,
        },
        image_token_index=ids(tokens, "[IMG]")[0],
        spatial_merge_size=2,
    )
    processor = transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size=LARGE, patch_size={"height": PATCH, "width": PATCH}
        ),
        tokenizer=tokens,
        patch_size=PATCH,
        spatial_merge_size=2,
        chat_template=template("[IMG]"),
    )
    return filled(config, 7, seed), processor


def _cohere(tokens: Any) -> dict[str, Any]:
    text = {**TEXT, "model_type": "cohere2", "vocab_size": len(tokens), "sliding_window": 256}
    return {
        "text_config": text,
        "vision_config": open_clip_models(model_type="siglip_vision_model", vision_use_head=False),
        "downsample_factor": 2,
    }


def build_cohere2_vision(seed: int = 0) -> tuple[nn.Module, Any]:
    """Up to three crops and the whole image; a view costs 2 x 2 tokens."""
    tokens = tokenizer(
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        image_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    config = transformers.Cohere2VisionConfig(
        **_cohere(tokens),
        alignment_intermediate_size=64,
        image_token_id=ids(tokens, "<|IMG_PATCH|>")[0],
    )
    processor = transformers.Cohere2VisionProcessor(
        # Its `patch_size` is the number of tokens in a row of a view.
        image_processor=transformers.Cohere2VisionImageProcessor(
            size=SQUARE, max_patches=3, patch_size=2
        ),
        tokenizer=tokens,
        chat_template=template("<|IMG_PATCH|>"),
    )
    return filled(config, 8, seed), processor


def build_aya_vision(seed: int = 0) -> tuple[nn.Module, Any]:
    """Two or three crops and the whole image; a view costs 2 x 2 tokens."""
    marks = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>")
    tokens = tokenizer("<image>", *marks, *(f"TILE_{i}" for i in (1, 2, 3)), "TILE_GLOBAL")
    config = transformers.AyaVisionConfig(
        **_cohere(tokens),
        alignment_intermediate_size=64,
        image_token_index=ids(tokens, "<|IMG_PATCH|>")[0],
    )
    processor = transformers.AyaVisionProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=3
        ),
        tokenizer=tokens,
        patch_size=PATCH,
        img_size=4 * PATCH,
        downsample_factor=2,
        chat_template=template("<image>"),
    )
    return filled(config, len(tokens) - 256, seed), processor


def build_ovis2(seed: int = 0) -> tuple[nn.Module, Any]:
    """The whole image and two or three crops; a view costs 2 x 2 tokens."""
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    tokens = tokenizer("<image>", "<IMG_ATOM>", *marks)
    config = transformers.Ovis2Config(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)},
        vision_config=open_clip_models(vocab_size=64, hidden_stride=2),
        image_token_id=ids(tokens, "<IMG_ATOM>")[0],
        visual_indicator_token_ids=ids(tokens, *marks),
        vocab_size=len(tokens),
        hidden_size=64,
    )
    processor = transformers.Ovis2Processor(
        image_processor=transformers.Ovis2ImageProcessor(
            size=SQUARE, crop_to_patches=True, max_patches=3
        ),
        tokenizer=tokens,
        image_seq_length=4,
        chat_template=template("<image>"),
    )
    return filled(config, 11, seed), processor


def build_paligemma(seed: int = 0) -> tuple[nn.Module, Any]:
    """4 x 4 tokens per image; the whole prompt attends to itself."""
    tokens = tokenizer(image_token="<image>")
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma", "vocab_size": len(tokens)},
        vision_config=open_clip_models(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=ids(tokens, "<image>")[0],
        vocab_size=len(tokens),
        projection_dim=64,
        hidden_size=64,
    )
    images = transformers.SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(
        image_processor=images, tokenizer=tokens, chat_template=template("<image>")
    )
    return filled(config, 5, seed), processor


def build_qwen3_5(seed: int = 0) -> tuple[nn.Module, Any]:
    """The first and the last layer have linear attention."""
    _, processor = build_qwen3_vl(seed)
    given = _qwen(processor.tokenizer)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    given["text_config"] |= {
        "layer_types": ["linear_attention", *["full_attention"] * 2, "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {**rope, "partial_rotary_factor": 0.5},
    }
    vision = {key: value for key, value in QWEN3_VISION.items() if "deepstack" not in key}
    config = transformers.Qwen3_5Config(**given, vision_config=vision)
    return filled(config, 8, seed), processor


def build_lfm2_vl(seed: int = 0, *, splits: bool = False) -> tuple[nn.Module, Any]:
    """The first and the last layer are short convolutions; 2 x 2 patches per token.

    ``splits``: large images become up to six tiles of 4 x 4 tokens.
    """
    tokens = tokenizer(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    kinds = ["conv", "full_attention", "full_attention", "conv"]
    text = {"layer_types": kinds, "block_auto_adjust_ff_dim": False}
    vision = {key: v for key, v in open_clip_models().items() if key != "image_size"}
    config = transformers.Lfm2VlConfig(
        text_config={**TEXT, **text, "model_type": "lfm2", "vocab_size": len(tokens)},
        vision_config={
            **vision,
            "model_type": "siglip2_vision_model",
            "num_patches": 64,
            "vision_use_head": False,
        },
        image_token_id=ids(tokens, "<image>")[0],
        projector_hidden_size=64,
    )
    processor = transformers.Lfm2VlProcessor(
        image_processor=transformers.Lfm2VlImageProcessor(
            encoder_patch_size=PATCH,
            tile_size=8 * PATCH,
            min_image_tokens=4,
            max_image_tokens=16,
            do_image_splitting=splits,
            max_tiles=6,
        ),
        tokenizer=tokens,
        chat_template="<s>" + template("<image>"),  # its tokenizer adds none
    )
    return filled(config, 8, seed), processor


# Towers and language models that Transformers puts into a LLaVA, and where they differ from the
# others in what their config takes.
TOWERS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {},
    "siglip_vision_model": {},
    "dinov2": {"mlp_ratio": 2},
    "dinov2_with_registers": {"mlp_ratio": 2},
    "vit": {},
    "dinov3_vit": {"num_register_tokens": 3},  # rotary positions
    "deit": {},  # a second special row
    "beit": {"use_relative_position_bias": True},
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gpt_neox": {},
    "olmo2": {},  # norms after attention alone
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    },
}


def llava_around(
    tower: str,
    decoder: str,
    family: str = "llava",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> tuple[nn.Module, Any]:
    """A LLaVA of any tower and language model, by their ``model_type``.

    ``family`` is ``llava``, ``llava_next`` or ``llava_onevision``; ``text`` and ``vision`` are
    added to the configs. A tower without special rows projects all of its rows, others all but the
    first.
    """
    tokens = tokenizer(image_token="<image>", video_token="<video>")
    words = {"model_type": decoder, "vocab_size": len(tokens)}
    views = {"model_type": tower, **open_clip_models(), **TOWERS.get(tower, {})}
    strategy = "full" if tower == "siglip_vision_model" else "default"
    how = {"vision_feature_select_strategy": strategy}
    name = {"llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[
        family
    ]
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **words, **DECODERS.get(decoder, {}), **(text or {})},
        vision_config={**views, **(vision or {})},
        vision_feature_layer=-1,
        **{
            key: value
            for key, value in _llava(tokens).items()
            if family != "llava" or "grid" not in key
        },
        **how,
    )
    crop = {"size": {"shortest_edge": 4 * PATCH}, "crop_size": SQUARE}
    if family == "llava":
        images = transformers.CLIPImageProcessor(**crop)
        more: dict[str, Any] = {"patch_size": PATCH}
    elif family == "llava_next":
        images = transformers.LlavaNextImageProcessor(**crop, image_grid_pinpoints=PINPOINTS)
        more = {"patch_size": PATCH}
    else:
        images = transformers.LlavaOnevisionImageProcessor(
            size=SQUARE, image_grid_pinpoints=PINPOINTS
        )
        videos = transformers.LlavaOnevisionVideoProcessor(size=SQUARE)
        more = {"video_processor": videos, "num_image_tokens": 16 + int(strategy == "default")}
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=images,
        tokenizer=tokens,
        chat_template=template("<image>", "<video>"),
        **more,
        **how,
    )
    return filled(config, 6, seed), processor


# Families with code of their own for the most part. Others share it with one of these: the kit and
# the tables check all of them, other tests over families only these.
FIRST = (
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "idefics3",
    "smolvlm",
    "gemma3",
    "fast_vlm",
)
STATES = ("lfm2_vl", "qwen3_5")  # some layers hold a state


def first(*more: str) -> dict[str, Any]:
    """Builders of `FIRST` and of ``more`` families."""
    found = builders()
    return {name: found[name] for name in (*FIRST, *more)}


def builders() -> dict[str, Any]:
    """Builders of all families by name, including LLaVA and LLaVA-NeXT."""
    from support import tiny_models

    found = {
        name.removeprefix("build_"): build
        for name, build in globals().items()
        if name.startswith("build_")
    }
    return found | {"llava": tiny_models.build_llava, "llava_next": tiny_models.build_llava_next}
