"""Tiny random-weight models from transformers' own classes, which run in milliseconds.

Nothing is downloaded and no global random state is used: the same arguments give the same weights
in every process. The weights are large enough that attention is far from uniform, so dropping
tokens changes the result.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

IMAGE_SIZE, PATCH = 32, 8
PINPOINTS = [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID, IMAGE_ID = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

# As in the llava-hf checkpoints, with images at their positions in the content, so that "frame 1"
# may precede the first frame of a video.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def build_llava(
    folder: str | Path | None = None,
    *,
    layers: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    text_config: Any = None,
) -> tuple[nn.Module, Any]:
    """LLaVA-1.5: CLIP tower with CLS, 16 visual tokens per image, grouped-query Llama.

    Parameters
    ----------
    folder : str or Path, optional
        Model and processor are also saved here, for ``from_pretrained``.
    layers, kv_heads : int
        Layers and KV heads (of 4 heads) of the language model.
    dtype : torch.dtype
        dtype to which the float32 weights are rounded.
    seed : int
    text_config : transformers.PretrainedConfig, optional
        Of another language model.

    Returns
    -------
    model : transformers.LlavaForConditionalGeneration
        In evaluation mode.
    processor : transformers.LlavaProcessor
    """
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip import CLIPImageProcessor

    given = _configs(layers, kv_heads)
    if text_config is not None:
        given["text_config"] = text_config
    config = LlavaConfig(**given, image_seq_length=(IMAGE_SIZE // PATCH) ** 2)
    images = CLIPImageProcessor(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    )
    return _finish(
        LlavaForConditionalGeneration, config, LlavaProcessor, images, dtype, seed, folder
    )


def build_llava_next(
    folder: str | Path | None = None,
    *,
    layers: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[nn.Module, Any]:
    """LLaVA-NeXT: base view and up to 2x2 (or 1x3) crops, a newline after each row of the canvas.

    A square image costs 16 + 64 + 8 visual tokens. Parameters and result as in `build_llava`.
    """
    from transformers import (
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
    )

    config = LlavaNextConfig(**_configs(layers, kv_heads), image_grid_pinpoints=PINPOINTS)
    images = LlavaNextImageProcessor(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_grid_pinpoints=PINPOINTS,
    )
    return _finish(
        LlavaNextForConditionalGeneration,
        config,
        LlavaNextProcessor,
        images,
        dtype,
        seed,
        folder,
    )


def build_text_only(folder: str | Path, *, seed: int = 0) -> nn.Module:
    """A plain Llama with its tokenizer, saved into ``folder``, as users may load by mistake."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(_configs(2, 2)["text_config"]).eval()
    _fill(model, seed)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


def make_image(width: int = 64, height: int = 64, seed: int = 0) -> Image.Image:
    """Coloured noise on several scales: all patches differ."""
    rng = np.random.default_rng(seed)
    canvas = np.zeros((height, width, 3))
    for cells in (2, 5, 11):
        noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        canvas += np.asarray(
            Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST)
        )
    return Image.fromarray((canvas / 3).astype(np.uint8))


@cache
def _backend_tokenizer() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer.to_str()


def build_tokenizer() -> Any:
    """One token per byte, so that any text can be encoded, with ``<s>`` prepended."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    names = dict(zip(("pad", "bos", "eos", "unk"), SPECIAL_TOKENS, strict=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend_tokenizer()),
        **{f"{key}_token": value for key, value in names.items()},
        extra_special_tokens={"image_token": "<image>"},
    )


def _configs(layers: int, kv_heads: int) -> dict[str, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig

    tokens = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return {
        "vision_config": CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=IMAGE_SIZE,
            patch_size=PATCH,
            projection_dim=64,
        ),
        "text_config": LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            **tokens,
        ),
        "image_token_id": IMAGE_ID,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        **tokens,
    }


def _fill(model: nn.Module, seed: int) -> None:
    """Overwrite every weight; special tokens get no logit, so they are never generated."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            else:
                weight.copy_(noise * (1.0 if "embed" in name or "newline" in name else 0.2))
        head = model.get_output_embeddings().weight
        head.mul_(0.5)  # logits of about unit size, as trained models have
        head[: len(SPECIAL_TOKENS)] = 0.0


def _finish(
    model_class: type,
    config: Any,
    processor_class: type,
    images: Any,
    dtype: torch.dtype,
    seed: int,
    folder: str | Path | None,
) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng(devices=[]):
        model = model_class(config).eval()
    _fill(model, seed)
    model.to(dtype)
    processor = processor_class(
        image_processor=images,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )
    if folder is not None:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return model, processor
