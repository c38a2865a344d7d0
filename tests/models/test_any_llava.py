"""A LLaVA of any vision tower and language model of Transformers.

The parts are found by what they do. Every tower and every language model of the tables in
`tiny_families` runs here; all pairs of them, with the checks of a family, run among the slow tests.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from support import rope_types, tiny_families
from support.closeness import apart, close
from support.engine.private import decoder_parts, tower_parts
from support.families import CASES, make_image, start
from support.look import looked
from support.tiny_families import DECODERS, TOWERS, llava_around
from vlmfast import VLM, ModelError, RecipeError, Request, VLMFastError
from vlmfast.core.layout import Kind
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.testing import check_family

FAMILIES = ("llava", "llava_next", "llava_onevision")
# Rows before the patches. More than one have no place on the canvas of the other two families.
SPECIALS = {
    "clip_vision_model": 1,
    "siglip_vision_model": 0,
    "dinov2": 1,
    "dinov2_with_registers": 5,
    "vit": 1,
    "dinov3_vit": 4,
    "deit": 2,
    "beit": 1,
}
# Towers whose blocks take positions of all patches, or add a bias to each pair of them.
POSITIONS = {"dinov3_vit": "DINOv3ViTModel", "beit": "BeitModel"}
LENGTH = {"max_new_tokens": 4, "min_new_tokens": 4}
KEEPING = ("hired:1", "tome:1", "fastv:keep=1", "pyramiddrop:1", "snapkv:1")
# Each tower and each language model once.
PAIRS = [
    (tower, list(DECODERS)[(3 * number) % len(DECODERS)]) for number, tower in enumerate(TOWERS)
]
PAIRS += [("dinov2", name) for name in DECODERS if name not in {decoder for _, decoder in PAIRS}]
MEDIA = [
    {"images": [make_image(0)]},
    {"images": [make_image(1, 30, 70), make_image(2, 90, 33)]},
    {},
]


def generated(vlm: VLM, media: dict[str, Any]) -> list[int]:
    """The tokens of Hugging Face's ``generate``."""
    tensors = start(vlm, **media).inputs.tensors
    with torch.no_grad():
        out = vlm.model.generate(**tensors, **LENGTH, do_sample=False)
    return out[0, tensors["input_ids"].shape[1] :].tolist()


def asked(vlm: VLM, media: dict[str, Any], recipe: str) -> list[int]:
    return vlm.ask("what is here ?", **media, recipe=recipe, **LENGTH).token_ids


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("tower", "decoder", "family"),
    [
        *((*pair, "llava") for pair in PAIRS),
        ("dinov2", "gemma3_text", "llava_next"),
        ("vit", "phi", "llava_next"),
        ("siglip_vision_model", "gpt_neox", "llava_onevision"),
        ("dinov2", "mistral", "llava_onevision"),
    ],
)
def test_equals_hugging_face(tower: str, decoder: str, family: str) -> None:
    """Without a recipe, under recipes that keep everything, and in a ragged batch."""
    vlm = VLM(*llava_around(tower, decoder, family))
    expected = [generated(vlm, media) for media in MEDIA]
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert [asked(vlm, media, "none") for media in MEDIA] == expected
    for recipe in KEEPING:
        if recipe == "tome:1" and tower in POSITIONS:
            continue
        assert asked(vlm, MEDIA[1], recipe) == expected[1], recipe
    requests = [Request("what is here ?", **media) for media in MEDIA]
    answers = vlm.ask_many(requests, batch_size=3, **LENGTH)
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tower", "decoder", "family"),
    [
        (tower, decoder, family)
        for tower, decoder, family in product(TOWERS, DECODERS, FAMILIES)
        if family == "llava" or SPECIALS[tower] < 2
    ],
)
def test_the_checks_of_a_family(tower: str, decoder: str, family: str) -> None:
    report = check_family(*llava_around(tower, decoder, family, text=wide(decoder)))
    assert not report.names(ran=False)


def wide(decoder: str) -> dict[str, int]:
    """Windows that the kit's prompts fit into; it masks keys of a forward pass without windows."""
    return {"sliding_window": 512} if decoder == "gemma3_text" else {}


def test_windows_of_a_language_model() -> None:
    model, processor = llava_around("dinov2", "gemma3_text")
    assert check_family(model, processor).names(ran=False) == {
        "drops: three images",
        "drops: a video",
    }
    vlm = VLM(model, processor)
    window = model.config.get_text_config().sliding_window
    assert vlm.adapter.windows == (window, window, None, window)
    for recipe in ("hired:0.5", "tome:0.5", "pyramiddrop", "zipvl", "streamingllm:0.5"):
        assert vlm.ask("what ?", **CASES["one image"], recipe=recipe, max_new_tokens=4).token_ids


def test_keys_whose_neighboring_dimensions_are_pairs_are_not_rotated() -> None:
    vlm = VLM(*tiny_families.builders()["aya_vision"]())
    for recipe in ("streamingllm:0.5", "lookm:keep=0.95,rope_aware=true"):
        with pytest.raises(RecipeError, match="changes the rotary ids of cached keys"):
            vlm.ask("what ?", **CASES["one image"], recipe=recipe)


# Language models whose layers rotate their keys in other ways, or not at all.
ROTATIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "exaone4": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "gemma3_text": {},  # with tables of their own in local layers
}


@torch.no_grad()
@pytest.mark.parametrize("decoder", ROTATIONS)
def test_keys_are_rotated_as_by_the_language_model(decoder: str) -> None:
    """Keys of a prompt at later positions; layers without a rotary embedding keep theirs."""
    model, processor = llava_around("dinov2", decoder, text=ROTATIONS[decoder])
    adapter = VLM(model, processor).adapter
    rows = torch.randn(1, 6, model.config.get_text_config().hidden_size)
    position = torch.arange(6)[None]

    def keys(at: torch.Tensor) -> list[torch.Tensor]:
        cache = DynamicCache()
        adapter.decoder(
            inputs_embeds=rows, position_ids=at, use_cache=True, **{adapter.cache_name: cache}
        )
        return [layer.keys[0] for layer in cache.layers]

    changed = []
    for layer, (first, later) in enumerate(zip(keys(position), keys(position + 9), strict=True)):
        delta = torch.full(first.shape[:2], 9)
        close(adapter.rotate(first, delta, layer), later, terms=256)
        if (later - first).abs().max() > 0.01:
            apart(adapter.rotate(first, delta - 1, layer), later, terms=256)  # control
            changed.append(layer)
    every = {"smollm3": [0, 2], "exaone4": [0, 1, 2]}
    assert changed == every.get(decoder, [0, 1, 2, 3])


@pytest.mark.parametrize("decoder", [*DECODERS, "smollm3"])
def test_keys_in_half_precision_are_rotated(decoder: str) -> None:
    """The comparison with the model's own rotation allows for the rounding of its dtype."""
    model, processor = llava_around("dinov2", decoder, text=ROTATIONS.get(decoder))
    vlm = VLM(model.to(torch.bfloat16), processor)
    assert asked(vlm, CASES["one image"], "streamingllm:0.5")


@pytest.mark.parametrize("decoder", ["glm", "ernie4_5", "hunyuan_v1_dense"])
def test_keys_that_are_rotated_in_another_way_are_refused(decoder: str) -> None:
    vlm = VLM(*llava_around("dinov2", decoder))
    for recipe in ("streamingllm:0.5", "lookm:keep=0.95,rope_aware=true"):
        with pytest.raises(RecipeError, match="rotates the keys of layer 0 otherwise"):
            vlm.ask("what ?", **MEDIA[0], recipe=recipe, **LENGTH)
    assert asked(vlm, MEDIA[0], "h2o:0.5")
    assert asked(vlm, MEDIA[0], "none") == generated(vlm, MEDIA[0])


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (
            "qwen2_moe",  # its config has a window of 0 for none
            {
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
    ],
)
def test_windows_of_a_config_that_no_layer_uses(decoder: str, text: dict[str, Any]) -> None:
    vlm = VLM(*llava_around("dinov2", decoder, text=text))
    assert vlm.adapter.window is None and not any(vlm.adapter.windows)
    assert asked(vlm, MEDIA[1], "none") == generated(vlm, MEDIA[1])


def test_windows_that_contradict_the_kinds_of_layers_bound_the_prompt() -> None:
    text = {"sliding_window": 30, "layer_types": ["sliding_attention", "full_attention"] * 2}
    vlm = VLM(*llava_around("dinov2", "mistral", text=text))
    assert vlm.adapter.window == 30 and not any(vlm.adapter.windows)
    with pytest.raises(VLMFastError, match="sliding window of 30"):
        vlm.ask("what is here ?", **MEDIA[1], **LENGTH)


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize(("tower", "specials"), SPECIALS.items())
def test_blocks_attention_and_special_rows(tower: str, specials: int) -> None:
    vlm = VLM(*llava_around(tower, "llama"))
    adapter, attending = vlm.adapter, []
    blocks, rows = adapter.vision_blocks(), []
    assert len(blocks) == 4 and adapter.specials() == specials
    assert adapter.sources() == (("cls",) if specials else ()) + ("received", "norm")
    for block in blocks:
        block.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
        adapter.vision_attention(block).register_forward_hook(
            lambda module, args, output: attending.append(module)
        )
    pixels = start(vlm, **MEDIA[0]).inputs.tensors["pixel_values"]
    with torch.no_grad():
        adapter.tower()(pixels)
    assert attending == [adapter.vision_attention(block) for block in blocks]
    assert rows == [adapter.patches() + specials] * 4
    # All special rows but the first are projected.
    answer = vlm.ask("what ?", **MEDIA[0], max_new_tokens=1)
    assert answer.stats.visual_tokens_in == adapter.patches() + max(specials - 1, 0)


@pytest.mark.cases(6)
@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("tower", SPECIALS)
def test_layout_from_a_size_is_that_of_an_answer(tower: str, strategy: str) -> None:
    if strategy == "default" and not SPECIALS[tower]:
        pytest.skip("it would cut off a patch")
    model, processor = llava_around(tower, "llama")
    model.config.vision_feature_select_strategy = strategy
    vlm = VLM(model, processor)
    wanted = vlm.ask("what ?", **MEDIA[0], max_new_tokens=1).trace.layout
    size = MEDIA[0]["images"][0].shape[:2]
    bare = type(vlm.adapter).without_weights(model.config, processor)
    for found in (vlm.image_layout(size), bare.image_layout(size)):
        assert len(found) == len(wanted)
        for name in ("kind", "tile", "grid", "view"):
            assert torch.equal(getattr(found.layout, name), getattr(wanted, name)), name


@pytest.mark.parametrize(("tower", "name"), POSITIONS.items())
def test_tower_with_positions_of_all_patches(tower: str, name: str) -> None:
    vlm = VLM(*llava_around(tower, "llama"))
    with pytest.raises(RecipeError, match=f"the blocks of {name} also take positions of"):
        vlm.ask("what ?", **CASES["one image"], recipe="tome:0.5")
    assert vlm.ask("what ?", **CASES["one image"], recipe="hired:0.5", **LENGTH).token_ids


@torch.no_grad()
@pytest.mark.parametrize("tower", ["dinov2", "beit"])
@pytest.mark.parametrize("source", ["cls", "received"])
def test_saliency_is_the_towers_own_attention(tower: str, source: str) -> None:
    """That of its eager implementation, with the bias that BEiT adds to its logits."""
    vlm = VLM(*llava_around(tower, "llama"))
    asked = [SaliencyRequest(block, source) for block in ("first", "last")]
    _, stats = looked(vlm, asked=tuple(asked), **MEDIA[0])
    got = [stats.salient(request, stats.items[0]).rows for request in asked]
    pixels = start(vlm, **MEDIA[0]).inputs.tensors["pixel_values"]
    vlm.adapter.tower().set_attn_implementation("eager")
    maps = vlm.adapter.tower()(pixels, output_attentions=True).attentions
    first, last = (
        (of[:, :, 0] if source == "cls" else of[:, :, 1:].mean(2))[..., 1:]
        for of in (maps[0], maps[-1])
    )
    close(got[0], first, terms=256)
    close(got[1], last, terms=256)
    apart(got[1], first, terms=256)  # control


# --- views of another size than in the config of the tower ----------------------------------------


def resized(tower: str, family: str, config: int, made: int) -> tuple[nn.Module, Any]:
    """A model whose config has one size in pixels, and whose processor makes another one."""
    model, processor = llava_around(tower, "llama", family, vision={"image_size": config})
    edge = {"height": made, "width": made}
    images = processor.image_processor
    images.size = edge if family == "llava_onevision" else {"shortest_edge": made}
    if family != "llava_onevision":
        images.crop_size = edge
    return model, processor


@pytest.mark.parametrize(("config", "made"), [(64, 32), (32, 64), (32, 36)])
@pytest.mark.parametrize("tower", ["dinov2", "dinov2_with_registers"])
def test_views_are_those_of_the_processor(tower: str, config: int, made: int) -> None:
    """These towers interpolate their positions, as checkpoints of 518 pixels do at 224."""
    model, processor = resized(tower, "llava", config, made)
    vlm, patches = VLM(model, processor), (made // 8) ** 2
    assert asked(vlm, MEDIA[1], "none") == generated(vlm, MEDIA[1])
    layout = vlm.ask("what ?", **MEDIA[0], **LENGTH).trace.layout
    own = layout.grid[layout.kind == int(Kind.IMAGE)]
    assert len(own) == patches == vlm.adapter.patches()
    assert own[:, 1].unique().tolist() == list(range(made // 8))
    bare = type(vlm.adapter).without_weights(model.config, processor)
    for found in (vlm.image_layout((44, 60)), bare.image_layout((44, 60))):
        assert torch.equal(found.layout.grid, layout.grid)
    kept = vlm.ask("what ?", **MEDIA[0], recipe="hired:0.25", **LENGTH).stats.visual_tokens_kept
    assert kept == {"hired": patches // 4}
    for recipe in ("tome:0.25", "mustdrop"):
        assert asked(vlm, MEDIA[0], recipe)


@pytest.mark.parametrize(
    ("tower", "family", "message"),
    [
        (
            "clip_vision_model",
            "llava",
            "32x32 pixels, and the config of the vision tower has 64x64",
        ),
        ("siglip_vision_model", "llava", "set the size in the processor"),
        ("dinov2", "llava_next", "llava_next packs the patches of its config"),
        ("dinov2", "llava_onevision", "llava_onevision packs the patches of its config"),
    ],
)
def test_views_that_do_not_fit_are_refused(tower: str, family: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        VLM(*resized(tower, family, 64, 32))
    assert "\n" not in str(raised.value)


def test_views_that_are_no_squares_are_refused() -> None:
    model, processor = llava_around("dinov2", "llama")
    processor.image_processor.crop_size = {"height": 32, "width": 48}
    with pytest.raises(ModelError, match="32x48 pixels, and llava takes squares"):
        VLM(model, processor)
    processor.image_processor.do_center_crop = False  # each image has another shape
    with pytest.raises(ModelError, match="set the size in the processor"):
        VLM(model, processor).ask("what ?", **MEDIA[0])


@pytest.mark.parametrize("layers", [-6, 5, 0, [-1, 7]])
def test_layers_that_the_tower_lacks_are_refused(layers: Any) -> None:
    model, processor = llava_around("dinov2", "llama")
    model.config.vision_feature_layer = layers
    with pytest.raises(ModelError, match=r"must be from -5 to 4 and not 0"):
        VLM(model, processor)
    model.config.vision_feature_layer = -5
    assert VLM(model, processor).ask("what ?", **MEDIA[0], **LENGTH).token_ids


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "yarn"])
def test_language_model_with_tables_by_length(rope_type: str) -> None:
    model, processor = rope_types.build(rope_type, layers=2, kv_heads=2)
    adapter = VLM(model, processor).adapter
    assert adapter.attention_norm(1) is model.get_decoder().layers[1].input_layernorm


def test_the_users_config_is_not_changed() -> None:
    model, processor = llava_around("vit", "gpt_neox")
    before = model.config.to_dict(), model.config.text_config._attn_implementation
    VLM(model, processor)
    assert (model.config.to_dict(), model.config.text_config._attn_implementation) == before


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tower", "vision", "message"),
    [
        ("siglip2_vision_model", {"num_patches": 16}, "missing 2 required positional arguments"),
        ("pixtral", {}, "each image needs one row for each patch"),
        ("convnext", {}, "ConvNextModel as vision tower is not supported"),
        ("vit", {"image_size": [32, 64]}, r"a square raster needs one int each"),
    ],
)
def test_unsupported_towers(tower: str, vision: dict, message: str) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(tower, **{**tiny_families.open_clip_models(), **vision})
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with pytest.raises(ModelError, match=message) as raised:
        tower_parts(type(model).__name__, config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("gpt2", "GPT2Model as language model is not supported: it lacks a list of layers named"),
        ("stablelm", "it lacks layers that pass arguments on"),
        ("mamba", "no list of blocks that attend by Transformers' attention interface"),
        ("doge", "it lacks attention without a mask of its own"),
        ("gpt_oss", "it lacks attention without sinks"),
        ("gemma3_text", "it lacks attention that is causal"),
    ],
)
def test_unsupported_language_models(decoder: str, message: str) -> None:
    from transformers import AutoConfig, AutoModel

    more = {"use_bidirectional_attention": True} if decoder == "gemma3_text" else {}
    words = {**tiny_families.TEXT, "vocab_size": 261, **more}
    config = AutoConfig.for_model(decoder, **words)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with pytest.raises(ModelError, match=message) as raised:
        decoder_parts(model, config)
    assert "\n" not in str(raised.value)


def test_a_strategy_that_cuts_off_a_patch_is_refused() -> None:
    model, processor = llava_around("siglip_vision_model", "llama")
    model.config.vision_feature_select_strategy = "default"
    with pytest.raises(ModelError, match="a patch of SiglipVisionModel; set 'full' in the config"):
        VLM(model, processor)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_rows_without_a_place_on_a_canvas_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match=r"5 rows before its patches and .*'default' cuts off 1"):
        VLM(*llava_around("dinov2_with_registers", "llama", family))
