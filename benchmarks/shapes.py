"""Models at the sizes of published ones, with random weights that are created on the device.

====================  =============================================================================
llava-1.5-7b          LLaVA-1.5 on Vicuna-7B's shape, 576 visual tokens
llava-next-7b         LLaVA-NeXT on Vicuna-7B's shape, 2,928 visual tokens
qwen2-0.5b            LLaVA-1.5 on Qwen2-0.5B's shape, 576 visual tokens
tiny-shape            a small LLaVA-NeXT: checks a script on any machine
qwen2.5-vl-7b,        the families' own modules, towers included; `QWEN`
qwen3-vl-8b
qwen2.5-vl-3b-ratio   a small Qwen2.5-VL with the ratio of FLOPs of the 3B; `small_qwen`
qwen2-0.5b-shape      a language model of Qwen2-0.5B's shape after one of `TOWERS`; `after_tower`
====================  =============================================================================

Nothing is downloaded. Attention with random weights is nearly uniform, so methods that choose their
number of tokens by it keep almost all. Times only depend on the number of kept tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

TESTS = str(Path(__file__).resolve().parent.parent / "tests")
SHAPED = "qwen2-0.5b-shape"


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model.

    ``tower``: layers, width, heads, image size, patch size. ``canvases``: grid sizes (height,
    width) of LLaVA-NeXT; LLaVA-1.5 has none. ``tied``: whether the output head is the embedding.
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
    tied: bool = False


def canvases(side: int) -> tuple[tuple[int, int], ...]:
    """Canvases of crops: up to 2 x 2, 1 x 3 and 3 x 1 views."""
    grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    return tuple((rows * side, columns * side) for rows, columns in grids)


MODELS = {
    "llava-1.5-7b": Shape("llama", 32, 4096, 11008, 32, 32, 32064, (336, 336)),
    "llava-next-7b": Shape("llama", 32, 4096, 11008, 32, 32, 32064, (672, 672), canvases(336)),
    "qwen2-0.5b": Shape(
        "qwen2", 24, 896, 4864, 14, 2, 151936, (336, 336), tower=(6, 384, 6, 336, 14)
    ),
    "tiny-shape": Shape(
        "llama", 4, 64, 128, 4, 2, 512, (64, 64), ((32, 64), (64, 32), (64, 64)),
        tower=(4, 64, 4, 32, 8),
    ),
}  # fmt: skip


def build(shape: Shape, device: torch.device, dtype: torch.dtype, layers: int = 0) -> Any:
    """Model and processor; random weights are created on the device in their dtype."""
    import transformers as hf
    from transformers.models.clip import CLIPImageProcessor

    with_tests()
    from support import tiny_models

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
        tie_word_embeddings=shape.tied,
    )
    both = {"vision_config": vision, "text_config": text, "tie_word_embeddings": shape.tied}
    both |= {"image_token_id": tiny_models.IMAGE_ID}
    crop = {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    if shape.canvases:
        canvases = [list(size) for size in shape.canvases]
        config = hf.LlavaNextConfig(**both, image_grid_pinpoints=canvases)
        images = hf.LlavaNextImageProcessor(**crop, image_grid_pinpoints=canvases)
        of_processor = hf.LlavaNextProcessor
    else:
        config = hf.LlavaConfig(**both, image_seq_length=(edge // patch) ** 2)
        images = CLIPImageProcessor(**crop)
        of_processor = hf.LlavaProcessor
    model = created(config, device, dtype)
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


def created(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, all of whose answers have the same number of tokens."""
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


# --- other families ------------------------------------------------------------------------------


def with_tests() -> None:
    """Let scripts import the small models of the tests."""
    if TESTS not in sys.path:
        sys.path.append(TESTS)


def family(name: str) -> tuple[Any, Any]:
    """A small model of a family with random weights, and its processor."""
    with_tests()
    from support import tiny_families

    return tiny_families.builders()[name]()


def sized(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    vision: dict[str, Any],
    text: dict[str, Any],
    top: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """A family with other values in its configurations; ``top`` is that of the whole model.

    The processor keeps its sizes.
    """
    small, processor = family(name)
    config = small.config
    text = {**text, "max_position_embeddings": 32768}
    layers, rope = text["num_hidden_layers"], text.pop("rope", {})
    if hasattr(config.text_config, "layer_types"):
        text["layer_types"] = ["full_attention"] * layers
    for part, changes in (
        (config, top or {}),
        (config.vision_config, vision),
        (config.text_config, text),
    ):
        for key, value in changes.items():
            setattr(part, key, value)
    config.text_config.rope_parameters |= rope
    return created(config, device, dtype), processor


# Family of `tests/support/tiny_families.py`, and other values of its tower and its language model.
QWEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl-7b": (
        "qwen2_5_vl",
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        {
            "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "rope": {"mrope_section": [16, 24, 24]},
        },
    ),
    "qwen3-vl-8b": (
        "qwen3_vl",
        {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "patch_size": 16, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        {
            "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
            "head_dim": 128, "rope": {"mrope_section": [24, 20, 20]},
        },
    ),
}  # fmt: skip
LARGEST = 12_845_056  # pixels of an image that Qwen's processors accept unscaled


def qwen(
    name: str, device: torch.device, dtype: torch.dtype, small: bool = False, layers: int = 0
) -> tuple[Any, Any]:
    """Model and processor of a shape in `QWEN`; ``small`` those of `family`: checks a script.

    ``layers``: of the language model, 0 for all.
    """
    kind, vision, text = QWEN[name]
    if small:
        model, processor = family(kind)
        model.generation_config.eos_token_id = None
        return model.to(device, dtype).requires_grad_(False), processor
    vision = vision | {"out_hidden_size": text["hidden_size"]}
    text = text | {"num_hidden_layers": layers or text["num_hidden_layers"]}
    model, processor = sized(kind, device, dtype, vision, text)
    _resize(processor.image_processor, size={"shortest_edge": 3136, "longest_edge": LARGEST})
    processor.image_processor.patch_size = vision["patch_size"]
    return model, processor


def _resize(images: Any, size: dict[str, int]) -> None:
    images.size = type(images)(size=size).size


# --- the ratio of Qwen2.5-VL-3B ------------------------------------------------------------------

SMALL_QWEN = "qwen2.5-vl-3b-ratio"
# Tower and language model. In GFLOPs for 1,024 visual tokens, that is 4,096 patches, and 32 others:
#
#              linear layers of blocks    attention    other           sum
# tower        5,161                      381          88            5,629
# of 3B        5,860                      164                        6,024    ratio 0.934
# tower        80.7                       23.8         7.8           112.3
# of small     109.3                      10.3                       119.6    ratio 0.939
#
# All sizes but two are those of the 3B over 4. Attention weighs more in a narrow tower, for which
# the language model has wider MLPs. A map of attention does not shrink with the width: for each
# MFLOP there are 23 entries of the map that `hired` reads in the 3B, and 72 here with one head, 289
# with four. With 22 % of the visual tokens both models need 1/1.65 of the FLOPs: the tower reads
# all patches.
SMALL_SIZES: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "depth": 8, "hidden_size": 320, "intermediate_size": 856, "num_heads": 1,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7],
        "out_hidden_size": 512,
    },
    {
        "num_hidden_layers": 9, "hidden_size": 512, "intermediate_size": 3360,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64,
        "rope": {"mrope_section": [8, 12, 12]},
    },
)  # fmt: skip


def small_qwen(dtype: torch.dtype, image: int, frame: int) -> tuple[Any, Any]:
    """`SMALL_QWEN`, and a processor that keeps the sizes of squares with these sides in pixels."""
    model, processor = sized("qwen2_5_vl", torch.device("cpu"), dtype, *SMALL_SIZES)
    for of, side in ((processor.image_processor, image), (processor.video_processor, frame)):
        _resize(of, {"shortest_edge": 3136, "longest_edge": side * side})
        of.patch_size = 14
    # Tokens that are no text of their own, such as parts of characters, are never generated:
    # servers send them late or not at all.
    tokens, head = processor.tokenizer, model.get_output_embeddings().weight
    for token in range(len(tokens)):
        text = tokens.decode([token], skip_special_tokens=True).strip()
        if not (text and text.isascii()):
            head[token] = 0.0
    return model, processor


# --- a small language model after a tower --------------------------------------------------------


class Tower(NamedTuple):
    """The shape of a vision tower.

    Parameters
    ----------
    name : str
    layers, width, heads, mlp, side, patch : int
        ``side`` is that of a view in pixels.
    kind : {"clip", "siglip", "qwen2_5_vl"}
    """

    name: str
    layers: int
    width: int
    heads: int
    mlp: int
    side: int
    patch: int = 14
    kind: str = "clip"


TOWERS = {
    "clip-vit-l-14-336": Tower("CLIP ViT-L/14-336", 24, 1024, 16, 4096, 336),
    "siglip-so400m-14-384": Tower("SigLIP-so400m/14-384", 27, 1152, 16, 4304, 384, kind="siglip"),
    "qwen2.5-vl": Tower("tower of Qwen2.5-VL", 32, 1280, 16, 3420, 448, kind="qwen2_5_vl"),
    "small": Tower("small tower, of no model", 6, 384, 6, 1536, 336),
}
# Qwen2-0.5B.
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope": {"rope_theta": 1e6},
}


def after_tower(
    name: str, layers: int, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """A language model of Qwen2-0.5B's shape after one of `TOWERS`.

    LLaVA-NeXT after CLIP, LLaVA-OneVision after SigLIP, Qwen2.5-VL after its own.
    """
    tower = TOWERS[name]
    if tower.kind == "clip":
        sizes = (tower.layers, tower.width, tower.heads, tower.side, tower.patch)
        side, keys = 2 * tower.side, ("hidden_size", "intermediate_size", "num_attention_heads")
        widths = [TEXT[key] for key in (*keys, "num_key_value_heads", "vocab_size")]
        grids = canvases(tower.side)
        shape = Shape("qwen2", layers, *widths, (side, side), grids, sizes, tied=True)
        return build(shape, device, dtype)
    text = {**TEXT, "num_hidden_layers": layers, "tie_word_embeddings": True}
    vision: dict[str, Any] = {
        "hidden_size": tower.width,
        "intermediate_size": tower.mlp,
        "patch_size": tower.patch,
    }
    top: dict[str, Any] = {"tie_word_embeddings": True}
    if tower.kind == "siglip":
        vision |= {"num_hidden_layers": tower.layers, "num_attention_heads": tower.heads}
        grids = [list(size) for size in canvases(tower.side)]
        most = {"vision_aspect_ratio": "anyres_max_9"}
        top |= {"image_grid_pinpoints": grids, **most}
        model, processor = sized(
            "llava_onevision", device, dtype, vision | {"image_size": tower.side}, text, top
        )
        size = {"height": tower.side, "width": tower.side}
        for images in (processor.image_processor, processor.video_processor):
            _resize(images, size)
        processor.image_processor.image_grid_pinpoints = grids
        processor.num_image_tokens = (tower.side // tower.patch) ** 2
        processor.vision_aspect_ratio = most["vision_aspect_ratio"]
        return model, processor
    depth = tower.layers
    vision |= {"depth": depth, "num_heads": tower.heads, "window_size": 112}
    vision |= {"fullatt_block_indexes": list(range(depth // 4 - 1, depth, depth // 4))}
    vision |= {"out_hidden_size": text["hidden_size"]}
    text["rope"] = {**text["rope"], "mrope_section": [8, 12, 12]}
    model, processor = sized("qwen2_5_vl", device, dtype, vision, text, top)
    _resize(processor.image_processor, {"shortest_edge": 56 * 56, "longest_edge": 1344 * 1344})
    processor.image_processor.patch_size = tower.patch
    processor.video_processor = type(processor.video_processor)(patch_size=tower.patch)
    return model, processor
