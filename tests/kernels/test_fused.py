"""Fused steps match Hugging Face's decoder on the same tokens and the same cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from support import tiny_families
from support.closeness import apart, close, network
from support.engine.batched import Together, together
from support.engine.driven import Driven
from support.engine.kernels import launches
from support.engine.prompts import shifted, switched
from support.engine.steps import fusable, fused_step, kind_of, step_modules
from support.engine.storage import KVCache
from support.fake_cuda import pretended
from support.models import shared
from support.tiny_models import build_llava, make_image
from vlmfast import VLM
from vlmfast.core.contexts import DecodeContext
from vlmfast.core.protocols import CacheStage
from vlmfast.kernels import few_rows, norm_rope_append

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@dataclass(frozen=True)
class Uneven(CacheStage):
    """Keeps a different number of slots in each head."""

    name: ClassVar[str] = "test-uneven"

    def compress(self, step, layer, kv, stats):
        keep = torch.ones(len(kv.keys), len(kv), dtype=torch.bool, device=kv.keys.device)
        keep[1, ::3] = False
        return kv.select_mask(keep)


RECIPES: dict[str, list[Any]] = {
    "full": [()],
    "ragged heads": [Uneven()],
    "ragged rows": [(), Uneven(), "snapkv:keep=0.7,window=4"],
    "quantized": ["kivi:bits=4,group=4,residual=4"],
    "quantized in two widths, attention counted": ["zipcache:page=4"],
    "biased": ["visionzip:dominant=4,contextual=3,proportional_attention=true"],
    "tracked": ["h2o:0.6"],
    "compact and kept positions": ["pyramiddrop:layers=1,positions=compact", ()],
}


def build_qwen2(**more: Any) -> tuple[Any, Any]:
    """LLaVA with a Qwen2 language model: biases on queries, keys and values."""
    from transformers import Qwen2Config

    llama = shared(build_llava, layers=2).model.config.text_config.to_dict()
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    same += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    same += ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    own = Qwen2Config(**{key: llama[key] for key in same}, **more)
    return build_llava(layers=2, text_config=own)


def build_family(family: str, layers: int, **more: Any) -> tuple[Any, Any]:
    """A model of `tiny_families` with its first ``layers`` decoder layers."""
    model, processor = tiny_families.builders()[family](**more)
    decoder = model.get_decoder()
    del decoder.layers[layers:]
    decoder.config.num_hidden_layers = layers
    if getattr(decoder.config, "layer_types", None) is not None:
        decoder.config.layer_types = decoder.config.layer_types[:layers]
    return model, processor


def build(kind: str, device: torch.device) -> VLM:
    if kind == "gemma3":  # the second layer has a window, which prompts exceed; the third has none
        model, processor = build_family(kind, layers=3, window=24)
    elif kind in ("llama", "qwen2"):
        model, processor = build_llava(layers=2) if kind == "llama" else build_qwen2()
    else:
        model, processor = build_family(kind, layers=2)
    return VLM(model.to(device), processor, decoding="eager")  # every step runs in Python


def decoder_of(vlm: VLM, recipes: list) -> Together:
    """Rows with prompts of different lengths, prefilled by the references."""
    runs = []
    with torch.no_grad(), switched(vlm.model), references():
        for number, recipe in enumerate(recipes):
            images = [make_image(seed=10 * number + i) for i in range(number + 1)]
            run = Driven.of(vlm, recipe, images)
            run.start(8)
            runs.append(run)
        return Together([run.decoder for run in runs])


@contextmanager
def references() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMFAST_KERNELS", "torch")
        yield


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class ForwardPass:
    """The same tokens through either decoder, each with its own cache."""

    def __init__(self, vlm: VLM, decoder: Together, tokens: int = 1, tree: Tensor | None = None):
        self.vlm, self.decoder, self.tree = vlm, decoder, tree
        width = vlm.adapter.config.text_config.hidden_size
        self.embeds = noise(len(decoder.rows), tokens, width, seed=tokens).to(vlm.adapter.device)
        depth = torch.zeros(1, tokens, dtype=torch.int64, device=vlm.adapter.device)
        if tree is not None:
            depth = tree.sum(-1) - 1
        self.position = decoder.position + depth

    def step(self, caches: list[KVCache]) -> DecodeContext:
        for cache in caches:
            cache.reserve(self.embeds.shape[1])
        return DecodeContext(together(caches), self.tree)

    def plain(self, caches: list[KVCache]) -> tuple[Tensor, dict[int, Tensor]]:
        layer_inputs: dict[int, Tensor] = {}
        step, layers = self.step(caches), self.vlm.adapter.decoder.layers
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, index=index: layer_inputs.__setitem__(index, args[0])
            )
            for index, layer in enumerate(layers)
        ]
        with references(), shifted(self.vlm.adapter, step, self.position):
            hidden = self.vlm.adapter.decoder(
                inputs_embeds=self.embeds,
                position_ids=self.position,
                past_key_values=step.cache,
                use_cache=True,
                vlmfast_context=step,
            ).last_hidden_state
        for hook in hooks:
            hook.remove()
        return hidden, layer_inputs

    def fused(self, caches: list[KVCache], later: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        step, aux_hidden_states = self.step(caches), range(self.vlm.adapter.depth)
        return fused_step(
            self.vlm.adapter,
            self.embeds,
            self.position + later,
            step,
            aux_hidden_states,
        )


def written(caches: list[KVCache], tokens: int) -> list[Tensor]:
    """All tensors of the layers, up to the slots that the last forward pass wrote."""
    tensors = []
    for layer in (layer for cache in caches for layer in cache.layers):
        at = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        slots = at < layer.length[..., None] + tokens
        for name in ("keys", "values", "order", "attention_mass", "bias"):
            values = getattr(layer, name)
            if values is not None:
                tensors.append(
                    values.masked_fill(~slots.view(*slots.shape, *(1,) * (values.dim() - 3)), 0)
                )
    return tensors


def compare(forward_pass: ForwardPass) -> None:
    """Compare both forward passes on clones of the decoder's cache, with a control."""
    caches, tokens = forward_pass.decoder.caches, forward_pass.embeds.shape[1]
    ours, theirs, later = ([cache.clone() for cache in caches] for _ in range(3))
    hidden, seen = forward_pass.fused(ours)
    expected, inputs = forward_pass.plain(theirs)
    slots = max(layer.capacity for cache in caches for layer in cache.layers)
    terms = network(forward_pass.vlm.model, slots)
    close(hidden, expected, terms=terms)
    assert seen.keys() == inputs.keys()
    for layer, x in seen.items():
        close(x, inputs[layer], terms=terms)
    for a, b in zip(written(ours, tokens), written(theirs, tokens), strict=True):
        if a.is_floating_point():
            close(a, b, terms=terms)
        else:
            assert torch.equal(a, b)
    assert all(torch.equal(a.length, b.length) for a, b in zip(ours, caches, strict=True))
    # control
    apart(forward_pass.fused(later, later=1)[0], expected, terms=terms)


# Qwen2 differs in the biases of its projections, whatever the cache contains.
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("llama", case) for case in RECIPES),
        *(
            pytest.param(
                "qwen2", case, marks=[] if case in ("full", "biased") else pytest.mark.slow
            )
            for case in RECIPES
        ),
    ],
)
@torch.no_grad()
def test_fused_step_matches_decoder(kind: str, case: str, triton, device) -> None:
    vlm = build(kind, device)
    decoder = decoder_of(vlm, RECIPES[case])
    if case == "compact and kept positions":
        assert together(decoder.caches).offsets
    assert fusable(vlm.adapter)
    with switched(vlm.model):
        ForwardPass(vlm, decoder).plain(decoder.caches)
        for cache in decoder.caches:
            cache.advance()
            cache.position.add_(1)
        compare(ForwardPass(vlm, decoder))


@pytest.mark.parametrize(
    "case",
    ["full", *(pytest.param(c, marks=pytest.mark.slow) for c in ("ragged rows", "quantized"))],
)
@torch.no_grad()
def test_fused_tree_matches_decoder(case: str, triton, device) -> None:
    vlm = build("llama", device)
    decoder = decoder_of(vlm, RECIPES[case])
    parents, seen = (-1, 0, 0, 1, 1, 2), torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        seen[node] |= seen[parent]
    with switched(vlm.model):
        compare(ForwardPass(vlm, decoder, 6, seen.repeat(len(RECIPES[case]), 1, 1).to(device)))


# What differs between families: positions on three axes, norms of queries and keys, norms of
# branches, other rotary tables and windows by layer.
FAMILIES = {
    "qwen2_5_vl": [(), "pyramiddrop:layers=1,ratios=0.1,positions=compact"],
    "qwen3_vl": [(), Uneven()],
    "gemma3": ["pyramiddrop:layers=1,ratios=0.3,positions=compact", Uneven()],
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("qwen2_5_vl", 1),
        pytest.param("qwen2_5_vl", 3, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", 1, marks=pytest.mark.slow),
        ("qwen3_vl", 3),
        ("gemma3", 1),
        ("gemma3", 3),
    ],
)
@torch.no_grad()
def test_fused_step_of_families_matches_decoder(family: str, tokens: int, triton, device) -> None:
    """Single tokens, and a draft of three."""
    vlm = build(family, device)
    decoder = decoder_of(vlm, FAMILIES[family])
    assert fusable(vlm.adapter)
    offsets = together(decoder.caches).offsets
    assert bool(offsets) == any("compact" in str(recipe) for recipe in FAMILIES[family])
    tree = None
    if tokens > 1:
        path = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        tree = path.repeat(len(decoder.rows), 1, 1)
    with switched(vlm.model):
        compare(ForwardPass(vlm, decoder, tokens, tree))


@pytest.mark.cases(6)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", *FAMILIES, "internvl", "idefics3"])
@torch.no_grad()
def test_references_round_as_modules(family: str, tokens: int) -> None:
    """In bfloat16, bit by bit."""
    vlm = build(family, torch.device("cpu"))
    vlm.model.to(torch.bfloat16)
    decoder = decoder_of(vlm, FAMILIES.get(family, [()]))
    path = torch.ones(tokens, tokens, dtype=torch.bool).tril().repeat(len(decoder.rows), 1, 1)
    forward_pass = ForwardPass(vlm, decoder, tokens, None if tokens == 1 else path)
    forward_pass.embeds = forward_pass.embeds.bfloat16()
    ours, theirs, later = ([cache.clone() for cache in decoder.caches] for _ in range(3))
    with switched(vlm.model), references():
        hidden, seen = forward_pass.fused(ours)
        expected, inputs = forward_pass.plain(theirs)
        control, _ = forward_pass.fused(later, later=1)
    assert torch.equal(hidden, expected) and not torch.equal(control, expected)
    assert all(torch.equal(x, inputs[layer]) for layer, x in seen.items())
    assert all(map(torch.equal, written(ours, tokens), written(theirs, tokens)))


@torch.no_grad()
def test_fused_step_launches_kernels(triton, device, monkeypatch) -> None:
    vlm = build("llama", device)
    decoder = decoder_of(vlm, RECIPES["full"])
    launched = [launches(monkeypatch, module) for module in (norm_rope_append, few_rows)]
    with switched(vlm.model):
        ForwardPass(vlm, decoder).fused(decoder.caches)
    depth = vlm.adapter.depth
    norm, linear = (Counter(of.kernel for of in each) for each in launched)
    assert norm == {"_norm": 2 * depth + 1, "_rotate": depth}
    assert linear == {"_linears": 3 * depth, "_gated": depth}


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", ["hook", "class", "weight"])
@torch.no_grad()
def test_changed_linear_layers_are_called(change: str, triton, device, monkeypatch) -> None:
    """By `few_rows` only layers are multiplied that do nothing else."""
    vlm = build("llama", device)
    decoder, called = decoder_of(vlm, RECIPES["full"]), []

    class Linear(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            called.append(x)
            return super().forward(x)

    class Weight(torch.nn.Parameter):
        pass

    launched = launches(monkeypatch, few_rows)
    for layer in vlm.adapter.decoder.layers:
        out = layer.self_attn.o_proj
        if change == "hook":
            out.register_forward_hook(lambda module, args, result: called.append(args[0]))
        elif change == "class":
            out.__class__ = Linear
        elif change == "weight":
            out.weight = Weight(out.weight.data)
    depth = vlm.adapter.depth
    with switched(vlm.model):
        ForwardPass(vlm, decoder).fused(decoder.caches)
    # Queries, keys and values together, and the second half of the MLP.
    weights = [of.args[1:4] for of in launched if of.kernel == "_linears"]
    assert [sum(each is not None for each in of) for of in weights] == [3, 1] * depth
    assert len(called) == (0 if change == "weight" else depth)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("llama", case) for case in ("full", "ragged rows", "quantized", "tracked")),
        *((family, "ragged heads") for family in FAMILIES),
    ],
)
def test_fused_step_does_not_synchronize(kind: str, case: str, monkeypatch) -> None:
    """On fake tensors, with the references instead of kernels."""
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    vlm = build(kind, torch.device("cpu"))
    decoder = decoder_of(vlm, RECIPES[case])
    width = vlm.adapter.config.text_config.hidden_size
    with torch.no_grad(), switched(vlm.model), pretended(vlm, decoder) as watch:
        embeds = torch.zeros(len(decoder.rows), 1, width, device="cuda")
        with watch:
            cache = together(decoder.caches)
            fused_step(vlm.adapter, embeds, decoder.position, DecodeContext(cache))
    assert watch.trace and not watch.complaints


# --- fusable layers -------------------------------------------------------------------------------


def test_not_fusable_on_cpu_by_default(monkeypatch) -> None:
    vlm = build("llama", torch.device("cpu"))
    for choice in ("torch", ""):
        monkeypatch.setenv("VLMFAST_KERNELS", choice)
        assert not fusable(vlm.adapter)
    assert step_modules(vlm.adapter).kind


def known(model: Any) -> bool:
    vlm = VLM(model, build_llava(layers=1)[1])
    return step_modules(vlm.adapter).kind is not None


def test_fusable_detects_supported_layers(monkeypatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    model, _ = build_llava(layers=2)
    assert known(model)
    layers = model.get_decoder().layers
    hook = layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not known(model)
    hook.remove()
    assert known(model)
    layers[0].self_attn.forward = layers[0].self_attn.forward  # a user's wrapper
    assert not known(model)
    del layers[0].self_attn.forward

    class Scaled(type(layers[1])):
        """A layer with the same attributes and another forward."""

        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    layers[1].__class__ = Scaled
    assert not known(model)
    assert not known(build_qwen2(hidden_act="gelu")[0])
    assert known(build_qwen2()[0])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "idefics3"])
def test_fusable_detects_families(family: str) -> None:
    model, processor = build_family(family, layers=2)

    def matches() -> bool:
        return kind_of(VLM(model, processor).adapter.decoder) is not None

    assert matches()
    layer = model.get_decoder().layers[1]
    norms = [layer.post_attention_layernorm, layer.mlp.act_fn]
    if family in ("qwen3_vl", "gemma3"):
        norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    for part in norms:
        hook = part.register_forward_hook(lambda *_: None)
        assert not matches()
        hook.remove()
    assert matches()
    eps = "eps" if family == "gemma3" else "variance_epsilon"
    setattr(layer.input_layernorm, eps, 0.5)  # one of them is used for all norms
    assert not matches()
