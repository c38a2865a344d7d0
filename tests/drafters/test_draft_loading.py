"""Published drafters: every key layout loads, and weights that do not fit are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from support.closeness import apart
from support.eagle import TERMS, VOCABULARY, WIDTH, layout_of, read_of, target
from support.engine.draws import load_published, published
from support.golden.eagle import outputs, vispec_outputs
from vlmfast.core.drafting import Budget
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.weights import StageWeights, load_weights
from vlmfast.drafters.draft_eagle import DraftEagle
from vlmfast.drafters.draft_eagle.module import EagleModule
from vlmfast.drafters.draft_vispec import DraftVispec
from vlmfast.drafters.draft_vispec.module import VispecModule
from vlmfast.errors import RecipeError

State = dict[str, Tensor]
TARGET = {"family": "llava", "width": WIDTH, "depth": 12, "heads": 2}
LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
}
OURS = {
    "width": WIDTH,
    "hidden": 24,
    "heads": 2,
    "kv_heads": 1,
    "eps": 1e-5,
    "theta": 5000.0,
    "input_norm": False,
}
FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}
DRAFTED = 25


def filled(module: EagleModule) -> EagleModule:
    """Random numbers in every weight, and an own vocabulary."""
    torch.manual_seed(0)
    module = module.float().eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(std=0.5)
    if module.kind == "eagle3" and len(module.d2t) < VOCABULARY:
        module.restrict(torch.randperm(VOCABULARY)[: len(module.d2t)].sort().values)
    return module


def published_state(module: EagleModule, prefix: str) -> State:
    state = module.state_dict()
    return {
        prefix + key.removeprefix("layer.") if key.startswith("layer.") else key: value.clone()
        for key, value in state.items()
    }


def eagle(**own: Any) -> tuple[DrafterStage, EagleModule, dict, State]:
    module = filled(EagleModule(OURS | own))
    return DraftEagle(), module, LLAMA, published_state(module, "layers.0.")


def eagle_with_embedding() -> tuple:
    stage, module, config, state = eagle()
    inverse = torch.ones(1)
    more = {
        "embed_tokens.weight": torch.randn(VOCABULARY - 3, WIDTH),  # its model was padded later
        "layers.0.self_attn.rotary_emb.inv_freq": inverse,
    }
    return stage, module, config, state | more


def eagle_of_qwen() -> tuple:
    stage, module, config, state = eagle(qkv_bias=True, bias=False)
    return stage, module, config | {"qkv_bias": True, "bias": False}, state


def specvlm() -> tuple:
    return eagle(input_norm=True)


def msd() -> tuple:
    _, module, config, state = eagle(kind="msd")
    return DraftEagle(kind="msd"), module, config | {"model_type": "llava"}, state


def eagle3(prefix: str = "midlayer.", drafted: int = DRAFTED, **own: Any) -> tuple:
    module = filled(EagleModule(OURS | {"kind": "eagle3", "draft_vocabulary": drafted} | own))
    state = published_state(module, prefix)
    state["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
    state["t2d"][module.vocabulary()] = True
    return DraftEagle(kind="eagle3"), module, LLAMA | {"draft_vocab_size": drafted} | own, state


def eagle3_full_vocabulary() -> tuple:
    stage, module, config, state = eagle3(drafted=VOCABULARY)
    for key in ("t2d", "d2t"):
        del state[key]
    return stage, module, config, state


EVERY = list(range(VOCABULARY))


def eagle3_unset_maps() -> tuple:
    """Of the full vocabulary, with the two maps never filled."""
    stage, module, config, state = eagle3(drafted=VOCABULARY)
    return stage, module, config, state | {"t2d": torch.zeros_like(state["t2d"])}


def speculators() -> tuple:
    stage, module, config, state = eagle3("layers.0.", **FLAGS)
    layer = {key: config.pop(key) for key in list(LLAMA)}
    more = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    }
    state["embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH)
    return stage, module, config | more, state


def specforge() -> tuple:
    stage, module, config, state = eagle3(norm_output=True)
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
    return stage, module, config | rope | {"architectures": ["LlamaForCausalLMEagle3"]}, state


def vispec(queries: int = 3) -> tuple:
    own = {"kv_heads": 2, "queries": queries, "qkv_bias": True}
    module = filled(VispecModule(OURS | own))
    state = published_state(module, "layers.0.")
    return DraftVispec(), module, LLAMA | {"num_key_value_heads": 2, "qkv_bias": True}, state


LAYOUTS: dict[str, Callable[[], tuple]] = {
    "eagle": eagle,
    "eagle-with-embedding": eagle_with_embedding,
    "eagle-of-qwen": eagle_of_qwen,
    "specvlm": specvlm,
    "msd": msd,
    "eagle3": eagle3,
    "eagle3-full-vocabulary": eagle3_full_vocabulary,
    "eagle3-unset-maps": eagle3_unset_maps,
    "speculators": speculators,
    "specforge": specforge,
    "vispec": vispec,
}


def write(folder: Path, config: dict, state: State, binary: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(
            {key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors"
        )
    return folder


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_computes_with_its_weights(tmp_path: Path, name: str, binary: bool) -> None:
    stage, module, config, state = LAYOUTS[name]()
    folder = write(tmp_path / "drafter", config, state, binary)
    assert published(folder)
    loaded = load_published(stage, folder, TARGET)
    assert loaded.kind == module.kind and not loaded.training
    assert loaded.state_dict().keys() == module.state_dict().keys()
    torch.manual_seed(1)
    embeds = torch.randn(1, 6, WIDTH)
    features = torch.randn(1, 6, module.feature_width)
    image = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    at = torch.arange(6)[None]
    if isinstance(module, VispecModule):
        given = embeds[0], features[0], at[0], image[0]
        out, own = (vispec_outputs(m, *given)[None] for m in (loaded, module))
    else:
        out, own = (outputs(m, embeds, features, at, image) for m in (loaded, module))
    assert torch.equal(out, own)
    head = torch.randn(VOCABULARY, WIDTH)
    logits = [m.output(out, lambda x: x @ head.T) for m in (loaded, module)]
    assert torch.equal(*logits)
    drafter = stage.open(target(loaded))
    read = read_of(layout_of(5), aux_hidden_states=module.kind == "eagle3")
    drafter.prefill(read)
    assert len(drafter.propose(3, Budget(9, 3))) == 9


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_missing_extra_or_misshapen_keys_are_refused(tmp_path: Path, name: str) -> None:
    """Each key of each layout, so that none is loaded loosely."""
    stage, _, config, state = LAYOUTS[name]()
    optional = ("embed_tokens.weight", "t2d", "layers.0.self_attn.rotary_emb.inv_freq")
    telling = ("hidden_norm.weight", "imadpt.q")  # without these it is another method's
    for key in state:
        rest = {k: v for k, v in state.items() if k != key}
        folder = write(tmp_path, config, rest)
        if key in optional:
            load_published(stage, folder, TARGET)
            continue
        if name == "specvlm" and key == "layers.0.input_layernorm.weight":
            assert load_published(stage, folder, TARGET).layer.input_layernorm is None
            continue
        if name == "eagle3-unset-maps" and key == "d2t":
            assert load_published(stage, folder, TARGET).vocabulary().tolist() == EVERY
            continue
        if key == "fc.bias":  # may be absent where the config does not announce it
            assert load_published(stage, folder, TARGET).fc.bias is None
            folder = write(tmp_path, config | {"bias": True}, rest)
        with pytest.raises(RecipeError) as error:
            load_published(stage, folder, TARGET)
        ours = key.replace("layers.0.", "layer.").replace("midlayer.", "layer.")
        expected = "; use draft-" if key.endswith(telling) else ours
        assert expected in str(error.value), error.value
        if key != "imadpt.q":  # its rows are the number of queries
            wrong = state | {key: torch.cat([state[key], state[key]])}
            with pytest.raises(RecipeError, match=f"wrong shape: {ours}"):
                load_published(stage, write(tmp_path, config, wrong), TARGET)
    for extra in ("layers.1.mlp.up_proj.weight", "fc2.weight", "img_adaptor.query"):
        more = state | {extra: torch.zeros(2, 2)}
        with pytest.raises(RecipeError, match=f"unexpected: {extra}"):
            load_published(stage, write(tmp_path, config, more), TARGET)


def test_number_of_queries_comes_from_the_weights(tmp_path: Path) -> None:
    for queries in (2, 5):
        stage, module, config, state = vispec(queries)
        loaded = load_published(stage, write(tmp_path, config, state), TARGET)
        assert loaded.imadpt.q.shape[0] == queries
        assert torch.equal(loaded.imadpt.q, module.imadpt.q)


def test_config_flags_change_the_computation(tmp_path: Path) -> None:
    """A config flag changes the computation, at the top level or next to the layers' names."""
    torch.manual_seed(1)
    embeds, features = torch.randn(1, 6, WIDTH), torch.randn(1, 6, 3 * WIDTH)
    stage, _, config, state = eagle3()

    def result(own: dict) -> Tensor:
        loaded = load_published(stage, write(tmp_path, config | own, state), TARGET)
        return outputs(loaded, embeds, features, torch.arange(6)[None])

    plain = result({})
    for flag in ("norm_output", "norm_before_residual"):
        changed = result({flag: True})
        apart(changed, plain, terms=TERMS)
        assert torch.equal(result({"eagle_config": {flag: True}}), changed)
    apart(result({"rope_theta": 50.0}), plain, terms=TERMS)
    assert torch.equal(result({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), plain)
    linear = result({"rope_scaling": {"type": "linear", "factor": 2.0}})
    apart(linear, plain, terms=TERMS)
    later = {key: value for key, value in config.items() if key != "rope_theta"}
    config = later | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    assert torch.equal(result({}), plain)


def test_other_models_and_methods_are_refused(tmp_path: Path) -> None:
    stage, _, config, state = eagle()

    def refused(match: str, *, by: DrafterStage = stage, **own: Any) -> None:
        with pytest.raises(RecipeError, match=match):
            load_published(by, write(tmp_path, config | own, state), TARGET)

    refused("for models of width 16, this one has 8", hidden_size=16)
    refused("gelu; only silu", hidden_act="gelu")
    refused("2 layers; only one is supported", num_hidden_layers=2)
    refused("scales its rotary ids by 'llama3'", rope_scaling={"rope_type": "llama3"})
    refused("drafters with embeddings of their own are not supported", target_hidden_size=16)
    refused("lacks num_attention_heads", num_attention_heads=None)
    refused("of kind eagle or msd; use draft-eagle", by=DraftVispec())
    refused("of kind eagle or msd; use draft-eagle", by=DraftEagle(kind="eagle3"))
    _, _, config, state = vispec()
    refused("of kind vispec; use draft-vispec")
    _, _, config, state = eagle3()
    refused("of kind eagle3; use draft-eagle:kind=eagle3")
    marks = state["t2d"]
    for wrong in (~marks, torch.zeros_like(marks)):
        state["t2d"] = wrong
        refused("t2d and d2t select different tokens", by=DraftEagle(kind="eagle3"))
    stage, _, config, state = eagle()
    state["embed_tokens.weight"] = torch.zeros(VOCABULARY, 16)
    refused("embed_tokens.weight has shape")


def test_other_vocabularies_and_layers_are_refused(tmp_path: Path) -> None:
    stage, _, config, state = eagle()
    loaded = load_published(stage, write(tmp_path, config, state), TARGET)
    for rows in (VOCABULARY, VOCABULARY + 64):
        stage.open(target(loaded, vocabulary=rows))
    for rows in (VOCABULARY - 1, VOCABULARY + 1024):
        with pytest.raises(RecipeError, match=f"vocabulary of {VOCABULARY}, this model has {rows}"):
            stage.open(target(loaded, vocabulary=rows))
    stage, _, config, state = speculators()
    loaded = load_published(stage, write(tmp_path, config, state), TARGET)
    stage.open(target(loaded))
    with pytest.raises(RecipeError, match=r"read layers \(2, 6, 9\); in a model of 32 layers"):
        stage.open(target(loaded, depth=32))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    stage, _, config, _ = eagle()
    assert not published(tmp_path)
    with pytest.raises(RecipeError, match=r"config\.json cannot be read"):
        load_published(stage, tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RecipeError, match="not a JSON object"):
        load_published(stage, tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_published(stage, tmp_path, TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(RecipeError, match=r"pytorch_model\.bin cannot be read"):
        load_published(stage, tmp_path, TARGET)
    torch.save({"fc.weight": [1, 2]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(RecipeError, match="is not a dict of tensors"):
        load_published(stage, tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RecipeError, match=r"model\.safetensors cannot be read"):
        load_published(stage, tmp_path, TARGET)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "vispec"])
def test_own_weights_round_trip(tmp_path: Path, kind: str) -> None:
    more = {"compressor": {"hidden": 8, "queries": 4}} if kind == "eagle" else {}
    more |= {"kind": "eagle3", "draft_vocabulary": DRAFTED} if kind == "eagle3" else {}
    config, signature = TARGET | OURS | more, [0.5, -0.25]
    made = filled(VispecModule(config) if kind == "vispec" else EagleModule(config))
    stage = DraftVispec if kind == "vispec" else DraftEagle
    folder = tmp_path / "run" / "weights"
    weights = StageWeights(stage.name, config, signature, {"steps": 1}, made.state_dict())
    weights.save_pretrained(folder)
    for place in (folder, tmp_path / "run"):  # other files in the folder are ignored
        (place / "config.json").write_text("{}")
        assert not published(place)
    options = {"kind": "eagle3"} if kind == "eagle3" else {}
    sizes = {**TARGET, **{key: config[key] for key in TARGET}}
    loaded = load_weights(stage(weights=str(folder), **options), sizes, signature)
    for key, value in made.state_dict().items():
        stored = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(loaded.state_dict()[key], stored), key
    assert stage(**options).open(target(loaded, torch.float32))
