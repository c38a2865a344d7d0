"""Fused steps: what Hugging Face's decoder makes of the same tokens and the same cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tiny_models
from closeness import apart, close, network
from driven import Driven
from fake_cuda import pretended
from tiny_models import build_llava, picture
from vlmfast import VLM
from vlmfast.core.contexts import DecodeContext
from vlmfast.core.protocols import CacheStage
from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.cache import KVCache
from vlmfast.engine.decode import Decoder
from vlmfast.engine.fused import fusable, fused_step
from vlmfast.engine.prefill import Inputs
from vlmfast.kernels import norm_rope_append, swiglu

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

STEPS = 2


@dataclass(frozen=True)
class Uneven(CacheStage):
    """Keeps another number of slots in each head."""

    name: ClassVar[str] = "test-uneven"

    def compress(self, step, layer, kv, stats):
        keep = torch.ones(len(kv.keys), len(kv), dtype=torch.bool, device=kv.keys.device)
        keep[1, ::3] = False
        return kv.select_mask(keep)


RECIPES: dict[str, list[Any]] = {
    "full": [()],
    "ragged heads": [Uneven()],
    "ragged rows": [(), Uneven(), "snapkv:share=0.7,window=4"],
    "quantised": ["kivi:bits=4,group=4,residual=4"],
    "quantised in two widths, counted": ["zipcache:page=4"],
    "biased": ["visionzip:dominant=4,contextual=3,repair=true"],
    "tracked": ["h2o:0.6"],
    "renumbered, and not": ["pyramiddrop:layers=1,positions=compact", ()],
}


def build_qwen2(monkeypatch, **more: Any) -> tuple[Any, Any]:
    """LLaVA on a language model of Qwen2's kind: biases on queries, keys and values."""
    from transformers import Qwen2Config

    made = tiny_models._configs

    def configs(layers: int, kv_heads: int) -> dict[str, Any]:
        given = made(layers, kv_heads)
        llama = given["text_config"].to_dict()
        same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        same += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        same += ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
        return given | {"text_config": Qwen2Config(**{key: llama[key] for key in same}, **more)}

    with monkeypatch.context() as patch:
        patch.setattr(tiny_models, "_configs", configs)
        return build_llava(layers=2)


def build(kind: str, monkeypatch, device: torch.device) -> VLM:
    model, processor = build_llava(layers=2) if kind == "llama" else build_qwen2(monkeypatch)
    return VLM(model.to(device), processor)


def decoder_of(vlm: VLM, recipes: list) -> Decoder:
    """Rows with prompts of different lengths, read by the references."""
    runs = []
    with torch.no_grad(), switched(vlm.model), references():
        for number, recipe in enumerate(recipes):
            pictures = [picture(seed=10 * number + i) for i in range(number + 1)]
            tensors = vlm.inputs("what is here ?", images=pictures)
            inputs = Inputs(tensors, [(p.height, p.width) for p in pictures], "what ?")
            run = Driven(vlm.adapter, inputs, Recipe.of(recipe), time.perf_counter())
            run.start(8)
            runs.append(run)
        return Decoder.join([run.decoder for run in runs])


@contextmanager
def references() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMFAST_KERNELS", "torch")
        yield


def offsets(decoder: Decoder) -> dict[int, Tensor]:
    return {layer: decoder._offsets[shift] for layer, shift in decoder._shifts.items()}


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Pass:
    """The same tokens through either decoder, each on a cache of its own."""

    def __init__(self, vlm: VLM, decoder: Decoder, tokens: int = 1, tree: Tensor | None = None):
        self.vlm, self.decoder, self.tree = vlm, decoder, tree
        width = vlm.adapter.config.text_config.hidden_size
        self.embeds = noise(len(decoder.rows), tokens, width, seed=tokens).to(vlm.adapter.device)
        depth = torch.zeros(1, tokens, dtype=torch.int64, device=vlm.adapter.device)
        if tree is not None:
            depth = tree.sum(-1) - 1
        self.position = decoder.position + depth

    def step(self, cache: KVCache) -> DecodeContext:
        cache.reserve(self.embeds.shape[1])
        return DecodeContext(cache, self.tree)

    def plain(self, cache: KVCache) -> tuple[Tensor, dict[int, Tensor]]:
        seen: dict[int, Tensor] = {}
        step, layers = self.step(cache), self.vlm.adapter.decoder.layers
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, at=at: seen.__setitem__(at, args[0])
            )
            for at, layer in enumerate(layers)
        ]
        with references(), self.decoder.shifted(step, self.position):
            hidden = self.vlm.adapter.decoder(
                inputs_embeds=self.embeds,
                position_ids=self.position,
                past_key_values=cache,
                use_cache=True,
                vlmfast_context=step,
            ).last_hidden_state
        for hook in hooks:
            hook.remove()
        return hidden, seen

    def fused(self, cache: KVCache, later: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        step, taps = self.step(cache), range(self.vlm.adapter.depth)
        return fused_step(
            self.vlm.adapter,
            self.embeds,
            self.position + later,
            cache,
            step,
            offsets(self.decoder),
            taps,
        )


def written(cache: KVCache, tokens: int) -> list[Tensor]:
    """Everything that a layer holds, up to what the last pass wrote."""
    found = []
    for layer in cache.layers:
        at = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        slots = at < layer.length[..., None] + tokens
        for name in ("keys", "values", "order", "mass", "bias"):
            of = getattr(layer, name)
            if of is not None:
                found.append(of.masked_fill(~slots.view(*slots.shape, *(1,) * (of.dim() - 3)), 0))
    return found


def compare(of: Pass) -> None:
    """Both passes, on clones of the decoder's cache, and a control."""
    cache, tokens = of.decoder.cache, of.embeds.shape[1]
    ours, theirs, later = cache.clone(), cache.clone(), cache.clone()
    hidden, seen = of.fused(ours)
    expected, inputs = of.plain(theirs)
    terms = network(of.vlm.model, max(layer.keys.shape[2] for layer in cache.layers))
    close(hidden, expected, terms=terms)
    assert seen.keys() == inputs.keys()
    for layer, x in seen.items():
        close(x, inputs[layer], terms=terms)
    for a, b in zip(written(ours, tokens), written(theirs, tokens), strict=True):
        if a.is_floating_point():
            close(a, b, terms=terms)
        else:
            assert torch.equal(a, b)
    assert torch.equal(ours.length, cache.length)
    apart(of.fused(later, later=1)[0], expected, terms=terms)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("case", RECIPES)
@torch.no_grad()
def test_a_step_is_the_decoder_s(kind: str, case: str, triton, device, monkeypatch) -> None:
    vlm = build(kind, monkeypatch, device)
    decoder = decoder_of(vlm, RECIPES[case])
    if case == "renumbered, and not":
        assert offsets(decoder)
    assert fusable(vlm.adapter)
    with switched(vlm.model):
        for _ in range(STEPS):
            of = Pass(vlm, decoder)
            compare(of)
            of.plain(decoder.cache)
            decoder.cache.advance()
            decoder.position.add_(1)


@pytest.mark.parametrize("case", ["full", "ragged rows", "quantised"])
@torch.no_grad()
def test_a_tree_is_the_decoder_s(case: str, triton, device, monkeypatch) -> None:
    vlm = build("llama", monkeypatch, device)
    decoder = decoder_of(vlm, RECIPES[case])
    parents, seen = (-1, 0, 0, 1, 1, 2), torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        seen[node] |= seen[parent]
    with switched(vlm.model):
        compare(Pass(vlm, decoder, 6, seen.repeat(len(RECIPES[case]), 1, 1).to(device)))


@torch.no_grad()
def test_the_kernels_are_what_runs(triton, device, monkeypatch) -> None:
    vlm = build("llama", monkeypatch, device)
    decoder = decoder_of(vlm, RECIPES["full"])
    counts: dict[str, int] = {}

    def count(module: Any, name: str) -> None:
        launch = getattr(module, name)

        def noted(*args):
            counts[name] = counts.get(name, 0) + 1
            return launch(*args)

        monkeypatch.setattr(module, name, noted)

    count(norm_rope_append, "_launch_norm")
    count(norm_rope_append, "_launch_rotate")
    count(swiglu, "_launch")
    with switched(vlm.model):
        Pass(vlm, decoder).fused(decoder.cache)
    depth = vlm.adapter.depth
    assert counts == {"_launch_norm": 2 * depth + 1, "_launch_rotate": depth, "_launch": depth}


@pytest.mark.parametrize("case", ["full", "ragged rows", "quantised", "tracked"])
def test_nothing_waits_for_the_device(case: str, monkeypatch) -> None:
    """On fake tensors, where kernels are their references."""
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    vlm = build("llama", monkeypatch, torch.device("cpu"))
    decoder = decoder_of(vlm, RECIPES[case])
    width = vlm.adapter.config.text_config.hidden_size
    with torch.no_grad(), switched(vlm.model), pretended(vlm, decoder) as watch:
        embeds = torch.zeros(len(decoder.rows), 1, width, device="cuda")
        with watch:
            fused_step(vlm.adapter, embeds, decoder.position, decoder.cache, decoder.context)
    assert watch.trace and not watch.complaints


# --- what is fused -------------------------------------------------------------------------------


def test_not_on_a_cpu_unless_asked(monkeypatch) -> None:
    vlm = build("llama", monkeypatch, torch.device("cpu"))
    for choice in ("torch", ""):
        monkeypatch.setenv("VLMFAST_KERNELS", choice)
        assert not fusable(vlm.adapter)
    assert vlm.adapter.kept["fusable"]


def known(model: Any) -> bool:
    vlm = VLM(model, build_llava(layers=1)[1])
    fusable(vlm.adapter)
    return vlm.adapter.kept["fusable"]


def test_kinds_of_layers(monkeypatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    model, _ = build_llava(layers=2)
    assert known(model)
    layers = model.get_decoder().layers
    hook = layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not known(model)
    hook.remove()
    assert known(model)
    layers[0].self_attn.forward = layers[0].self_attn.forward  # somebody's wrapper
    assert not known(model)
    del layers[0].self_attn.forward

    class Scaled(type(layers[1])):
        """A layer that does something else under the same names."""

        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    layers[1].__class__ = Scaled
    assert not known(model)
    assert not known(build_qwen2(monkeypatch, hidden_act="gelu")[0])
    assert known(build_qwen2(monkeypatch)[0])
