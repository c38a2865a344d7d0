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
from transformers.models.llama.modeling_llama import rotate_half

import rope_types
import tiny_families
from closeness import apart, close, network
from reference import answer_logits
from test_families import CASES, TOKENS, make_image, start
from tiny_families import DECODERS, TOWERS, llava_around
from vlmfast import VLM, ModelError, RecipeError, Request
from vlmfast.models._parts import decoder_parts, tower_parts
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
LENGTH = {"max_new_tokens": 5, "min_new_tokens": 5}
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
        if recipe == "tome:1" and tower == "dinov3_vit":
            continue
        assert asked(vlm, MEDIA[1], recipe) == expected[1], recipe
    requests = [Request("what is here ?", **media) for media in MEDIA]
    answers = vlm.ask_many(requests, batch_size=3, **LENGTH)
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize(("tower", "decoder"), [PAIRS[2], ("dinov2", "gemma3_text")])
def test_a_little_less_is_not_identity(tower: str, decoder: str) -> None:
    """Control: the logits change once tokens are dropped before or between layers."""
    vlm = VLM(*llava_around(tower, decoder))
    full = answer_logits(vlm, start(vlm, **MEDIA[1]), TOKENS)
    for recipe in ("hired:0.8", "fastv:0.8", "tome:0.8", "pyramiddrop:0.8"):
        logits = answer_logits(vlm, start(vlm, recipe, **MEDIA[1]), TOKENS)
        apart(full, logits, terms=network(vlm.model, full.shape[1]))


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


@torch.no_grad()
def test_keys_of_each_layer_are_rotated_by_its_own_tables() -> None:
    """Renumbered slots are those of a prompt whose tokens have these ids."""
    torch.manual_seed(0)
    vlm = VLM(*llava_around("dinov2", "gemma3_text"))
    adapter, rotary = vlm.adapter, vlm.adapter.decoder.rotary_emb
    plain = torch.randn(2, 12, adapter.decoder.layers[0].self_attn.head_dim)
    position, delta = torch.arange(12).expand(2, -1), torch.randint(-5, 40, (2, 12))

    def keys(ids: torch.Tensor, kind: str) -> torch.Tensor:
        cos, sin = rotary(plain, ids, kind)
        return plain * cos + rotate_half(plain) * sin

    for layer, kind in enumerate(adapter.kinds):
        other = next(each for each in adapter.kinds if each != kind)
        turned = adapter.rotate(keys(position, kind), delta, layer)
        close(turned, keys(position + delta, kind), terms=4)
        apart(turned, keys(position + delta, other), terms=4)  # control


def test_keys_whose_neighboring_dimensions_are_pairs_are_not_rotated() -> None:
    vlm = VLM(*tiny_families.builders()["aya_vision"]())
    for recipe in ("streamingllm:0.5", "lookm:keep=0.95,rope_aware=true"):
        with pytest.raises(RecipeError, match="changes the rotary ids of cached keys"):
            vlm.ask("what ?", **CASES["one image"], recipe=recipe)


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


@pytest.mark.cases(4)
@pytest.mark.parametrize("decoder", DECODERS)
def test_attention_and_norms_of_a_language_model(decoder: str) -> None:
    """What is found makes the model's own queries and logits."""
    vlm = VLM(*llava_around("dinov2", decoder))
    adapter, seen, normed = vlm.adapter, {}, []
    for layer in range(adapter.depth):
        module = adapter.text_attention(layer)

        def note(module: nn.Module, args: tuple, kwargs: dict, layer: int = layer) -> None:
            seen[layer] = args[0] if args else kwargs["hidden_states"]

        module.register_forward_pre_hook(note, with_kwargs=True)
        adapter.decoder.layers[layer].register_forward_pre_hook(
            lambda module, args, layer=layer: seen.update({f"in {layer}": args[0]})
        )
    adapter.decoder.layers[-1].register_forward_hook(lambda m, args, out: normed.append(out))
    with torch.no_grad():
        out = adapter.decoder(torch.tensor([TOKENS]))
        norm = adapter.norm()
        assert norm is not None
        assert torch.equal(norm(normed[-1]), out.last_hidden_state)
        for layer in range(adapter.depth):
            assert torch.equal(adapter.attention_norm(layer)(seen[f"in {layer}"]), seen[layer])


def test_tower_with_positions_of_all_patches() -> None:
    vlm = VLM(*llava_around("dinov3_vit", "llama"))
    with pytest.raises(RecipeError, match="the blocks of DINOv3ViTModel also take positions of"):
        vlm.ask("what ?", **CASES["one image"], recipe="tome:0.5")
    assert vlm.ask("what ?", **CASES["one image"], recipe="hired:0.5", **LENGTH).token_ids


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
    ],
)
def test_unsupported_language_models(decoder: str, message: str) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(decoder, **{**tiny_families.TEXT, "vocab_size": 261})
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
