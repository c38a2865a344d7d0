"""Models at the sizes of published ones, with random weights that are created on the device.

====================  =============================================================================
llava-1.5-7b          LLaVA-1.5 on Vicuna-7B's shape, 576 visual tokens
llava-next-7b         LLaVA-NeXT on Vicuna-7B's shape, 2,928 visual tokens
qwen2.5-vl-7b-shape   a language model of Qwen2.5-VL-7B's shape with 8,192 prompt tokens; vision
                      tower and projector are LLaVA-NeXT's
tiny-shape            a small LLaVA-NeXT: checks a script on any machine
qwen2.5-vl-7b,        the families' own modules, towers included; `QWEN`
qwen3-vl-8b
====================  =============================================================================

Nothing is downloaded. Attention with random weights is nearly uniform, so methods that choose their
number of tokens by it keep almost all. Times only depend on the number of kept tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TESTS = str(Path(__file__).resolve().parent.parent / "tests")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model.

    ``tower``: layers, width, heads, image size, patch size. ``canvases``: grid sizes (height,
    width) of LLaVA-NeXT; LLaVA-1.5 has none. ``prompt``: minimum prompt length in tokens; the
    question is padded to it.
    """

    language: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    image: tuple[int, int]
    canvases: tuple[tuple[int, int], ...] = ()
    tower: tuple[int, int, int, int, int] = (24, 1024, 16, 336, 14)
    prompt: int = 0


CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
MODELS = {
    "llava-1.5-7b": Shape("llama", 32, 4096, 11008, 32, 32, 32064, (336, 336)),
    "llava-next-7b": Shape("llama", 32, 4096, 11008, 32, 32, 32064, (672, 672), CANVASES),
    "qwen2.5-vl-7b-shape": Shape(
        "qwen2", 28, 3584, 18944, 28, 4, 152064, (1344, 1008), ((1344, 1008),), prompt=8192
    ),
    "tiny-shape": Shape(
        "llama", 4, 64, 128, 4, 2, 512, (64, 64), ((32, 64), (64, 32), (64, 64)),
        tower=(4, 64, 4, 32, 8), prompt=160,
    ),
}  # fmt: skip


def build(shape: Shape, device: torch.device, dtype: torch.dtype, layers: int = 0) -> Any:
    """Model and processor; random weights are created on the device in their dtype."""
    import transformers as hf
    from transformers.models.clip import CLIPImageProcessor

    _with_tests()
    import tiny_models

    depth, width, heads, edge, patch = shape.tower
    vision = hf.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=edge,
        patch_size=patch,
        projection_dim=width,
    )
    of_text, theta = {"llama": (hf.LlamaConfig, 1e4), "qwen2": (hf.Qwen2Config, 1e6)}[
        shape.language
    ]
    text = of_text(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )
    both = {"vision_config": vision, "text_config": text, "tie_word_embeddings": False}
    both |= {"image_token_id": tiny_models.IMAGE_ID}
    crop = {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    if shape.canvases:
        canvases = [list(size) for size in shape.canvases]
        config = hf.LlavaNextConfig(**both, image_grid_pinpoints=canvases)
        images = hf.LlavaNextImageProcessor(**crop, image_grid_pinpoints=canvases)
        of_model, of_processor = hf.LlavaNextForConditionalGeneration, hf.LlavaNextProcessor
    else:
        config = hf.LlavaConfig(**both, image_seq_length=(edge // patch) ** 2)
        images = CLIPImageProcessor(**crop)
        of_model, of_processor = hf.LlavaForConditionalGeneration, hf.LlavaProcessor
    torch.manual_seed(0)
    with torch.device(device), _default(dtype):
        model = of_model(config)
    model.eval().requires_grad_(False)
    # Every variant decodes the same number of tokens.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tiny_models.PAD_ID
    processor = of_processor(
        image_processor=images,
        tokenizer=tiny_models.build_tokenizer(),
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    return model, processor


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- Qwen's own modules --------------------------------------------------------------------------


@dataclass(frozen=True)
class Qwen:
    """Changes to the configuration of a small model of ``family`` (`tests/tiny_families.py`)."""

    family: str
    vision: dict[str, Any]
    text: dict[str, Any]


QWEN = {
    "qwen2.5-vl-7b": Qwen(
        "qwen2_5_vl",
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        {
            "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "mrope_section": [16, 24, 24],
        },
    ),
    "qwen3-vl-8b": Qwen(
        "qwen3_vl",
        {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "patch_size": 16, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        {
            "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
            "head_dim": 128, "mrope_section": [24, 20, 20],
        },
    ),
}  # fmt: skip
LARGEST = 12_845_056  # pixels of an image that Qwen's processors accept unscaled


def family(name: str) -> tuple[Any, Any]:
    """A small model of a family with random weights, and its processor."""
    _with_tests()
    import tiny_families

    return tiny_families.builders()[name]()


def qwen(
    name: str, device: torch.device, dtype: torch.dtype, small: bool = False, layers: int = 0
) -> tuple[Any, Any]:
    """Model and processor of a shape in `QWEN`.

    Parameters
    ----------
    small : bool
        Those of `family`: checks a script.
    layers : int
        Of the language model, all by default.
    """
    shape = QWEN[name]
    model, processor = family(shape.family)
    if not small:
        config, text = model.config, dict(shape.text)
        sections = {"mrope_section": text.pop("mrope_section")}
        text["num_hidden_layers"] = layers or text["num_hidden_layers"]
        vision = shape.vision | {"out_hidden_size": text["hidden_size"]}
        for part, changes in ((config.vision_config, vision), (config.text_config, text)):
            for key, value in changes.items():
                setattr(part, key, value)
        config.text_config.rope_parameters |= sections
        if hasattr(config.text_config, "layer_types"):
            kinds = ["full_attention"] * text["num_hidden_layers"]
            config.text_config.layer_types = kinds
        with torch.device(device), _default(dtype):
            model = type(model)(config)
        images = processor.image_processor
        images.patch_size = shape.vision["patch_size"]
        images.size = type(images)(size={"shortest_edge": 3136, "longest_edge": LARGEST}).size
    # Every variant decodes the same number of tokens.
    model.generation_config.eos_token_id = None
    return model.to(device, dtype).eval().requires_grad_(False), processor


def _with_tests() -> None:
    if TESTS not in sys.path:
        sys.path.append(TESTS)
