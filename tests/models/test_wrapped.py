"""Quantized weights, adapters and offloaded weights, around small models of two families.

Under ``none`` the greedy tokens are those of Hugging Face's ``generate`` on the same wrapped model;
under recipes they are those of the plain model with the same weights.
"""

from __future__ import annotations

import copy
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import accelerate.hooks
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import BitsAndBytesConfig, TorchAoConfig

from support import rope_types, tiny_families, tiny_models
from support.engine.private import loading
from vlmfast import VLM
from vlmfast.api.identity import identity
from vlmfast.errors import ModelError

TOKENS = 6
RECIPES = ("divprune:0.2", "snapkv:0.5")
QUESTION = "what is to the left of the large thing in the lower half of this image ?"
IMAGE = tiny_models.make_image(128, 96)
BUILD = {"llava": tiny_models.build_llava, "qwen2_5_vl": tiny_families.build_qwen2_5_vl}

both = pytest.mark.parametrize("family", BUILD)


@cache
def _built(family: str) -> tuple[nn.Module, Any]:
    return BUILD[family]()


def build(family: str) -> tuple[Any, Any]:
    """A model of its own and the processor."""
    model, processor = _built(family)
    return copy.deepcopy(model), processor


def asked(vlm: VLM, recipe: str | None = None) -> list[int]:
    return vlm.ask(QUESTION, IMAGE, recipe=recipe, max_new_tokens=TOKENS).token_ids


def generated(vlm: VLM) -> list[int]:
    """Greedy tokens of Hugging Face on the wrapped model."""
    inputs = vlm.inputs(QUESTION, images=IMAGE)
    ids = vlm.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


@cache
def original(family: str, recipe: str | None = None) -> list[int]:
    """The tokens of the model as it is built."""
    return asked(_original(family), recipe)


@cache
def _original(family: str) -> VLM:
    return VLM(*build(family))


def check(wrapped: VLM, plain: VLM, full: str | None = None) -> None:
    """``full``: a family of whose tokens some differ, so that the wrapping must have an effect."""
    got = {recipe: asked(wrapped, recipe) for recipe in (None, *RECIPES)}
    assert got[None] == generated(wrapped)
    for recipe in RECIPES:
        assert got[recipe] == asked(plain, recipe)
    if full is not None:
        assert any(tokens != original(full, recipe) for recipe, tokens in got.items())


# --- quantized weights ---------------------------------------------------------------------------


def dequantized(model: Any) -> Any:
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return plain


@pytest.mark.cases(1)
@both
def test_int8_weights_of_torchao(family):
    model, processor = build(family)
    quantize_(model, Int8WeightOnlyConfig())
    vlm, plain = VLM(model, processor), VLM(dequantized(model), processor)
    check(vlm, plain, family)
    for changed in (model.get_decoder().layers[0].mlp.up_proj, model.get_output_embeddings()):
        assert type(changed.weight) is not nn.Parameter
    assert vlm.adapter.vocabulary == plain.adapter.vocabulary  # the head is quantized too
    signatures = zip(vlm.adapter.signature(), plain.adapter.signature(), strict=True)
    assert max(abs(a - b) for a, b in signatures) < 1e-5
    assert len(identity(vlm.adapter)["weights"]) == 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    tiny_models.build_llava(made)
    return made


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.float32,
}
INT8 = {"load_in_8bit": True, "llm_int8_skip_modules": []}  # the head is quantized too


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("llava", INT8, id="int8"),
        pytest.param("llava", NF4, id="nf4"),
        # Blocks of nf4 do not divide the rows of its vision tower.
        pytest.param("qwen2_5_vl", INT8, id="int8-qwen2_5_vl", marks=pytest.mark.slow),
    ],
)
def test_quantization_config_of_bitsandbytes(folder, family, settings, tmp_path):
    if family != "llava":
        folder = tmp_path
        for part in build(family):
            part.save_pretrained(folder)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # of every cast to float16
    config = BitsAndBytesConfig(**settings)
    vlm = VLM.from_pretrained(folder, device="cpu", dtype="float32", quantization_config=config)
    assert asked(vlm) == generated(vlm)
    layer = vlm.adapter.decoder.layers[0].mlp.up_proj
    assert type(layer).__module__.startswith("bitsandbytes")
    first = asked(vlm, "divprune:0.2")
    hits = vlm.prefix_cache.stats().hits
    assert asked(vlm, "divprune:0.2") == first and vlm.prefix_cache.stats().hits > hits
    # A step that reads from the device cannot be captured.
    assert vlm.adapter.capturable is (type(layer).__name__ == "Linear4bit")


def test_vocabulary_of_a_packed_head(folder):
    config = BitsAndBytesConfig(**NF4, llm_int8_skip_modules=[])
    vlm = VLM.from_pretrained(folder, device="cpu", dtype="float32", quantization_config=config)
    assert vlm.model.get_output_embeddings().weight.shape[1] == 1
    assert vlm.adapter.vocabulary == tiny_models.VOCAB_SIZE


@pytest.mark.slow
def test_quantization_config_of_torchao(folder):
    config = TorchAoConfig(Int8WeightOnlyConfig())
    vlm = VLM.from_pretrained(folder, device="cpu", dtype="float32", quantization_config=config)
    quantized = copy.deepcopy(vlm.model)
    check(vlm, VLM(dequantized(quantized), vlm.processor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_stages_recognize_a_quantized_projector(dtype):
    config = TorchAoConfig(Int8WeightOnlyConfig())
    plain = VLM.from_pretrained("tiny", device="cpu")
    vlm = VLM.from_pretrained("tiny", device="cpu", dtype=dtype, quantization_config=config)
    own, other = plain.adapter.signature(), vlm.adapter.signature()
    assert own != other  # a percent of each number is not enough for small ones
    assert any(abs(a - b) > 0.01 * max(abs(a), abs(b)) for a, b in zip(own, other, strict=True))
    stage = vlm.recipe("elastic")[0]
    assert vlm.adapter.ships(stage)
    *_, projector = (x for x in vlm.adapter.projector().modules() if isinstance(x, nn.Linear))
    projector.weight = nn.Parameter(projector.weight.dequantize().flip(0), requires_grad=False)
    vlm.adapter.modules.clear()
    assert not vlm.adapter.ships(stage)


def test_changed_scales_are_noticed():
    model, processor = build("llava")
    quantize_(model, Int8WeightOnlyConfig())
    vlm = VLM(model, processor)
    before = asked(vlm)
    model.model.multi_modal_projector.linear_1.weight.scale.mul_(-3)
    assert asked(vlm) != before == asked(VLM(*build_quantized("llava")))


def build_quantized(family: str) -> tuple[Any, Any]:
    model, processor = build(family)
    quantize_(model, Int8WeightOnlyConfig())
    return model, processor


# --- adapters ------------------------------------------------------------------------------------

# In the language model, its embedding and head, the vision tower and the projector.
LORA = r".*(q_proj|v_proj|up_proj|qkv|linear_1|embed_tokens|lm_head|merger\.mlp\.0)"


def with_lora(model: Any, targets: str = LORA) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config).eval()


@pytest.mark.cases(1)
@both
def test_lora(family):
    model, processor = build(family)
    wrapped = with_lora(model)
    vlm = VLM(wrapped, processor)
    assert vlm.model is wrapped
    check(vlm, VLM(copy.deepcopy(wrapped).merge_and_unload(), processor), family)
    with wrapped.disable_adapter():
        assert asked(vlm) == original(family)


def test_lora_added_later():
    """The engine uses the layers that PEFT has put in their place since, the head too."""
    model, processor = build("llava")
    vlm = VLM(model, processor)
    before = asked(vlm)
    wrapped = with_lora(model, r".*(up_proj|lm_head|embed_tokens)")
    merged = VLM(copy.deepcopy(wrapped).merge_and_unload(), processor)
    assert asked(vlm) == asked(merged) != before


@pytest.mark.slow
def test_lora_on_int8_weights():
    model, processor = build_quantized("llava")
    plain = with_lora(dequantized(model), r".*language_model.*\.(q_proj|up_proj)")
    vlm = VLM(with_lora(model, r".*language_model.*\.(q_proj|up_proj)"), processor)
    check(vlm, VLM(plain.merge_and_unload(), processor))


def test_attach_to_an_adapter():
    import vlmfast

    model, processor = build("llava")
    wrapped = with_lora(model)
    vlm = VLM(wrapped, processor)
    expected = asked(vlm, "divprune:0.2")
    with vlmfast.attach(wrapped, processor, "divprune:0.2"):
        assert generated(vlm) == expected
    assert generated(vlm) == asked(vlm)


def test_adapters_of_the_prompt_are_refused():
    model, processor = build("llava")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=4, token_dim=64,
        num_attention_heads=4, num_transformer_submodules=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match="PROMPT_TUNING that depends on the prompt"):
        VLM(peft.get_peft_model(model, config), processor)


# --- code in the checkpoint ----------------------------------------------------------------------


def test_remote_code_is_left_to_the_user(tmp_path):
    model, _ = tiny_models.build_llava(tmp_path)
    # Not renamed as in checkpoints of Transformers' own class.
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "modeling_own.py").write_text(
        "from transformers.models.llava import modeling_llava as theirs\n"
        "class LlavaForConditionalGeneration(theirs.LlavaForConditionalGeneration):\n    pass\n"
    )
    file = tmp_path / "config.json"
    about = json.loads(file.read_text())
    about["auto_map"] = {
        "AutoModelForImageTextToText": "modeling_own.LlavaForConditionalGeneration"
    }
    file.write_text(json.dumps(about))
    own = VLM.from_pretrained(tmp_path, device="cpu", trust_remote_code=True)
    assert type(own.model).__module__.endswith("modeling_own")
    plain = VLM.from_pretrained(tmp_path, device="cpu")
    assert type(plain.model).__module__.startswith("transformers.models.llava")
    assert asked(own) == asked(plain)


def test_checkpoint_that_needs_code_is_refused_without_a_question(tmp_path, monkeypatch):
    def asked(*prompt: object) -> str:
        raise AssertionError("the terminal was asked")

    monkeypatch.setattr("builtins.input", asked)
    about = {"model_type": "my_own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "own.py").write_text("raise SystemExit('code ran')")
    message = r"needs code of its own, which runs only with trust_remote_code=True$"
    with pytest.raises(ModelError, match=message):
        VLM.from_pretrained(tmp_path, device="cpu")


# --- offloaded weights ---------------------------------------------------------------------------

TOWER = {
    "llava": ("model.vision_tower", "model.multi_modal_projector"),
    "qwen2_5_vl": ("model.visual",),
}


@pytest.fixture(scope="module", params=BUILD)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a family, a folder with a checkpoint, and the model on one device."""
    made = tmp_path_factory.mktemp(request.param)
    model, processor = build(request.param)
    model.save_pretrained(made)
    processor.save_pretrained(made)
    return request.param, made, VLM(model, processor)


def on_meta(vlm: VLM) -> int:
    return sum(weight.device.type == "meta" for weight in vlm.model.parameters())


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("tower", "max_memory")]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", ["layers", "auto", *SLOW])
def test_device_map(saved, case, tmp_path):
    """Real dispatch; without a GPU, weights can be offloaded to the disk alone."""
    family, folder, plain = saved
    text = "model.language_model"
    layers = {f"{text}.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)}
    parts = {
        **dict.fromkeys((*TOWER[family], f"{text}.norm", f"{text}.rotary_emb"), "cpu"),
        **layers,
        **dict.fromkeys((f"{text}.embed_tokens", "lm_head"), "disk"),
    }
    whole = {**dict.fromkeys(TOWER[family], "disk"), text: "cpu", "lm_head": "cpu"}
    given: dict[str, Any] = {
        "layers": {"device_map": parts},
        "tower": {"device_map": whole},
        "max_memory": {"device_map": "auto", "max_memory": {"cpu": 900_000}},
        "auto": {"device_map": "auto"},
    }[case]
    vlm = VLM.from_pretrained(folder, offload_folder=tmp_path, **given)
    assert (on_meta(vlm) == 0) is (case == "auto")
    check(vlm, plain)
    assert vlm.adapter.capturable is (case == "auto")
    # Requests share images and prefixes as on one device.
    assert vlm.prefix_cache.stats().hits > 0
    assert identity(vlm.adapter) == identity(plain.adapter)
    assert vlm.adapter.signature() == plain.adapter.signature()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "llava_next"]
)
def test_cpu_offload(family):
    """The model's own weights are loaded too: the newline of LLaVA-NeXT."""
    if family == "llava_next":
        model, processor = tiny_models.build_llava_next()
        plain = VLM(copy.deepcopy(model), processor)
    else:
        model, processor = build(family)
        plain = VLM(*build(family))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    vlm = VLM(model, processor)
    assert on_meta(vlm) == len(list(model.parameters()))
    recipes = [None, "fastv:keep=0.5"]
    if family == "llava_next":  # whose newline Hugging Face's own forward leaves on meta
        recipes += RECIPES
    else:
        check(vlm, plain)
    if family == "llava":
        recipes.append("tome:0.5")
    for recipe in recipes:
        assert asked(vlm, recipe) == asked(plain, recipe)
    assert on_meta(vlm) == len(list(model.parameters()))


@pytest.mark.parametrize("rope_type", ["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
def test_rotary_tables_by_length(rope_type):
    model, processor = rope_types.build(rope_type, layers=2, kv_heads=2)
    plain = VLM(copy.deepcopy(model), processor)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert asked(VLM(model, processor)) == asked(plain)


def test_change_of_an_offloaded_weight_is_noticed():
    model, processor = build("llava")
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), state_dict=state)
    vlm = VLM(model, processor)
    before = asked(vlm)
    state["model.multi_modal_projector.linear_1.weight"].mul_(-3)
    assert asked(vlm) != before


@pytest.mark.slow
def test_lora_and_offloading():
    model, processor = build("llava")
    wrapped = with_lora(model, r".*(up_proj|q_proj)")
    plain = VLM(copy.deepcopy(wrapped).merge_and_unload(), processor)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    check(VLM(wrapped, processor), plain, "llava")


# --- bad input -----------------------------------------------------------------------------------


def test_model_on_meta_is_refused():
    model, processor = build("llava")
    with pytest.raises(ModelError, match="the model is on the meta device; load its weights first"):
        VLM(model.to("meta"), processor)


def offload(module: nn.Module, device: str) -> None:
    """As accelerate does with a module whose weights are on the host and that runs elsewhere."""
    hook = accelerate.hooks.AlignDevicesHook(execution_device=device, offload=True)
    accelerate.hooks.add_hook_to_module(module, hook)


def test_tower_and_projector_on_two_devices_are_refused():
    model, processor = build("llava")
    offload(model.model.multi_modal_projector.linear_1, "cuda:1")
    with pytest.raises(ModelError, match="tower runs on cpu and its projector on cuda:1"):
        VLM(model, processor)


def test_hooks_of_whole_models_are_refused():
    model, processor = build("llava")
    model, _ = accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    with pytest.raises(ModelError, match="the model has a CpuOffload of accelerate"):
        VLM(model, processor)


def test_device_map_needs_accelerate(saved, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="device_map needs the package accelerate"):
        VLM.from_pretrained(saved[1], device_map="auto")
    with pytest.raises(ModelError, match="a quantized model needs the package accelerate"):
        VLM.from_pretrained(saved[1], quantization_config=BitsAndBytesConfig(load_in_8bit=True))
