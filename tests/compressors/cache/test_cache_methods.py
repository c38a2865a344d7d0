"""Every cache method against a dense reference: nothing removed, nothing packed.

The reference knows neither cache nor engine. It keeps the keys and values of every token of the
prompt, in full precision, runs the decoder's layers one by one with a plain softmax, and *masks*
what a method has dropped. What a method merged or quantized is written over the tokens concerned.
While the answer grows, rules written here decide what is dropped and what is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from support.batched import Together
from support.closeness import apart, close, network
from support.decoding import Dense, everything
from support.driven import Driven
from support.tiny_models import build_llava, make_image
from vlmfast import VLM
from vlmfast.core.kv import KV
from vlmfast.engine.attention import switched
from vlmfast.engine.cache import KVCache
from vlmfast.engine.prefill import prefill, prepare
from vlmfast.engine.stats import Stats, Trace
from vlmfast.kernels.quantize_kv import quantize

# Norms and rotary tables are float32 in every model.
FLOAT = torch.float32
STEPS = 32
TOKENS = torch.randint(5, 250, (STEPS,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [
    ("what is here ?", [0]),
    ("and how many things are there in these two , please ?", [1, 2]),
    ("a", [3]),
    ("name all colours that you see", [4, 5, 6]),
]
MODELS = {"heads of their own": 4, "grouped queries": 2}


@pytest.fixture(scope="module", params=MODELS)
def vlm(request) -> VLM:
    # In float64, because rounding to two bits amplifies small differences: a float32 rounding error
    # can decide between two codes.
    return VLM(*build_llava(layers=4, kv_heads=MODELS[request.param], dtype=torch.float64))


def tensors_of(vlm: VLM, prompt: int) -> dict[str, Tensor]:
    question, seeds = PROMPTS[prompt]
    return vlm.inputs(question, images=[make_image(seed=seed) for seed in seeds])


def sums(vlm: VLM, prompt: int) -> int:
    """Terms of a logit, over a prompt and `TOKENS`."""
    return network(vlm.model, tensors_of(vlm, prompt)["input_ids"].shape[1] + STEPS)


def run_of(vlm: VLM, recipe: str, prompt: int) -> Driven:
    question, seeds = PROMPTS[prompt]
    return Driven.of(vlm, recipe, [make_image(seed=seed) for seed in seeds], question)


def prompt_kv(vlm: VLM, recipe: str, prompt: int) -> tuple[list[KV], dict]:
    """The KV of each layer after the prefill alone; and the notes."""
    run = run_of(vlm, recipe, prompt)
    stats, trace = Stats(), Trace()
    with torch.no_grad(), switched(vlm.model):
        merged = prepare(vlm.adapter, run.inputs, run.recipe, stats, trace)
        cache = KVCache(vlm.adapter.depth)
        prefill(vlm.adapter, merged, run.recipe, cache, stats, trace)
    return [layer.kv for layer in cache.layers], merged.notes


# --- rules while an answer grows -----------------------------------------------------------------

Rule = Callable[[Dense], None]


def nothing(dense: Dense, stored: list[KV], notes: dict) -> Rule:
    return lambda dense: None


def h2o(dense: Dense, stored: list[KV], notes: dict) -> Rule:
    """Drops the slot with the least attention, except among the last half."""
    budget = stored[0].order.shape[1]
    mass = []
    for kv in stored:
        total = torch.zeros(len(kv.keys), dense.count)
        mass.append(total.scatter(1, kv.order, kv.attention_mass))

    def before(dense: Dense) -> None:
        for layer, seen in enumerate(dense.seen):
            new = dense.p[layer]
            mass[layer] = torch.nn.functional.pad(
                mass[layer], (0, new.shape[1] - mass[layer].shape[1])
            )
            mass[layer] = mass[layer] + new
            for head in range(len(seen)):
                there = seen[head].nonzero().flatten()
                if len(there) > budget:
                    old = there[: len(there) - int(0.5 * budget)]
                    seen[head, old[mass[layer][head, old].argmin()]] = False

    return before


def cake(dense: Dense, stored: list[KV], notes: dict) -> Rule:
    """Drops what the newest token attends to least, except among the last four."""
    budgets = [kv.order.shape[1] for kv in stored]

    def before(dense: Dense) -> None:
        for layer, seen in enumerate(dense.seen):
            for head in range(len(seen)):
                there = seen[head].nonzero().flatten()
                if len(there) > budgets[layer]:
                    old = there[there < dense.count - 4]
                    seen[head, old[dense.p[layer][head, old].argmin()]] = False

    return before


class SlotRope(Dense):
    """Keys are kept unrotated, and rotated by their position among those seen."""

    def _put(self, layer: int, order: Tensor, keys: Tensor, values: Tensor, valid: Tensor) -> None:
        self.seen[layer].scatter_(1, order, True)

    def position(self, layer: int) -> int:
        return int(self.seen[layer][0].sum())

    def add(self, layer: int, key: Tensor, value: Tensor) -> None:
        place = self.position(layer)
        super().add(
            layer,
            self.turned(key, torch.full(key.shape[:2], self.keys[layer].shape[1] - place)),
            value,
        )

    def turned(self, keys: Tensor, by: Tensor) -> Tensor:
        cos, sin = self.decoder.rotary_emb(keys, by)
        return keys * cos + rotate_half(keys) * sin

    def slot_keys(self, layer: int) -> Tensor:
        """Every key is stored as if its token were at its own index."""
        keys, seen = self.keys[layer], self.seen[layer]
        rank = seen.cumsum(1) - 1
        return self.turned(keys, rank - torch.arange(keys.shape[1]))


def streaming(dense: Dense, stored: list[KV], notes: dict) -> Rule:
    budget = stored[0].order.shape[1]

    def before(dense: Dense) -> None:
        for seen in dense.seen:
            for head in range(len(seen)):
                there = seen[head].nonzero().flatten()
                if len(there) + 1 > budget:  # leave a slot for the next token
                    seen[head, there[4]] = False

    return before


def paged(page: int, **how) -> Callable[[Dense, list[KV], dict], Rule]:
    """Each full page of ``page`` tokens is rounded."""

    def make(dense: Dense, stored: list[KV], notes: dict) -> Rule:
        rounded = []
        for seen, kv in zip(dense.seen, stored, strict=True):
            rounded.append(seen.scatter(1, kv.order, False))

        def before(dense: Dense) -> None:
            for layer, kv in enumerate(stored):
                seen, keys, values = dense.seen[layer], dense.keys[layer], dense.values[layer]
                done = torch.zeros_like(seen)
                done[:, : rounded[layer].shape[1]] = rounded[layer]
                rounded[layer] = done
                waiting = [row.nonzero().flatten()[:page] for row in seen & ~done]
                if min(map(len, waiting)) < page:
                    continue
                at = torch.stack(waiting)
                wide = at[..., None].expand(-1, -1, keys.shape[2])
                scaled = kv.segments[0].value_scale
                segment = quantize(
                    keys.gather(1, wide),
                    values.gather(1, wide),
                    at,
                    torch.full((len(keys),), page),
                    scaled=False if scaled is None else scaled,
                    **how,
                )
                for of, new in zip((keys, values), segment.dequantize(torch.float64), strict=True):
                    of.scatter_(1, wide, new)
                done.scatter_(1, at, True)

        return before

    return make


KIVI = {"bits": 2, "key_group": 4, "value_group": 4}
# Recipe, reference, rule while the answer grows, whether the prompt's own attention is
# the model's.
METHODS: dict[str, tuple[str, type[Dense], Callable, bool]] = {
    "snapkv": ("snapkv:keep=0.8,window=4", Dense, nothing, True),
    "pyramidkv": ("pyramidkv:keep=0.8,window=3", Dense, nothing, True),
    "vlcache": ("vlcache:0.6", Dense, nothing, True),
    "lookm": ("lookm:keep=0.8,recent=0.2", Dense, nothing, True),
    "lookm averaged": ("lookm:keep=0.8,recent=0.2,merge=avg", Dense, nothing, True),
    "lookm weighted": ("lookm:keep=0.8,merge=weighted,text_prior=false", Dense, nothing, True),
    "lookm without merging": ("lookm:keep=0.8,merge=none", Dense, nothing, True),
    "quickprefill": ("quickprefill:0.4", Dense, nothing, True),
    "fastkv": ("fastkv:keep=0.7,tsp=0.9,window=3", Dense, nothing, False),
    "mustdrop": (
        "mustdrop:window=1,layers=1/3,global_thr=0.05,individual_thr=0.3",
        Dense,
        nothing,
        False,
    ),
    "h2o": ("h2o:0.7", Dense, h2o, True),
    "cake": ("cake:keep=0.7,window=4", Dense, cake, True),
    "streamingllm": ("streamingllm:0.6", SlotRope, streaming, True),
    "kivi": ("kivi:bits=2,group=4,residual=8", Dense, paged(8, **KIVI), True),
    "zipcache": ("zipcache:page=8", Dense, paged(8, bits=4, key_group=8), True),
    "zipvl": ("zipvl:tau=0.9,page=8", Dense, paged(8, bits=4, key_group=8), False),
    "zipvl dropping": ("zipvl:tau=0.9,kv=drop,rows=all", Dense, nothing, False),
    "snapkv and kivi": (
        "snapkv:keep=0.8,window=4+kivi:bits=2,group=4,residual=8",
        Dense,
        paged(8, **KIVI),
        True,
    ),
}


@functools.cache
def reference(vlm: VLM, method: str, prompt: int) -> Tensor:
    """Logits (STEPS, V) after each of `TOKENS`."""
    recipe, kind, rule, own = METHODS[method]
    stored, notes = prompt_kv(vlm, recipe, prompt)
    full = everything(vlm, tensors_of(vlm, prompt))
    if own and "lookm" not in method and kind is Dense:
        for kv, (keys, _) in zip(stored, full, strict=True):  # what is kept equals Hugging Face's
            at = kv.order[..., None].expand_as(kv.keys)
            close(kv.keys, keys.gather(1, at), FLOAT, sums(vlm, prompt))
    dense = kind(vlm, full, stored)
    before = rule(dense, stored, notes)
    rows = []
    for token in TOKENS:
        before(dense)
        rows.append(dense.step(token))
    return torch.cat(rows)


def decoded(vlm: VLM, runs: list[Driven]) -> list[Tensor]:
    """The engine's logits (STEPS, V) of each run, all decoded together."""
    with torch.no_grad(), switched(vlm.model):
        for run in runs:
            run.start(STEPS)
        decoder = Together([run.decoder for run in runs])
        rows = [decoder.next(torch.full((len(runs), 1), token)) for token in TOKENS]
    return list(torch.stack(rows, 1))


@functools.cache
def plain(vlm: VLM, prompt: int) -> Tensor:
    """The same without a method."""
    return decoded(vlm, [run_of(vlm, "none", prompt)])[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", METHODS)
def test_decoding_equals_a_dense_reference(vlm: VLM, method: str) -> None:
    recipe = METHODS[method][0]
    wanted = reference(vlm, method, 1)
    (got,) = decoded(vlm, [run_of(vlm, recipe, 1)])
    terms = sums(vlm, 1)
    close(got, wanted, FLOAT, terms)
    # Control: the method has an effect, at the beginning and at the end.
    full = plain(vlm, 1)
    apart(full[0], wanted[0], FLOAT, terms)
    apart(full[-1], wanted[-1], FLOAT, terms)


@pytest.mark.parametrize("method", METHODS)
def test_a_ragged_batch_equals_a_dense_reference(vlm: VLM, method: str) -> None:
    """Four prompts of different lengths, one of them under another recipe."""
    recipe = METHODS[method][0]
    runs = [run_of(vlm, recipe, p) for p in (0, 1, 3)] + [run_of(vlm, "none", 2)]
    got = decoded(vlm, runs)
    for prompt, rows in zip((0, 1, 3), got, strict=False):
        close(rows, reference(vlm, method, prompt), FLOAT, sums(vlm, prompt))
    close(got[3], plain(vlm, 2), FLOAT, sums(vlm, 2))
    apart(got[0], got[1], FLOAT, sums(vlm, 1))
