"""Every cache method against a dense reference: nothing removed, nothing packed.

The reference knows neither cache nor engine. It keeps the keys and values of every token of the
prompt, in full precision, and *masks* what a method has dropped. What a method merged or quantized
is written over the tokens concerned. While the answer grows, rules written here decide what is
dropped and what is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from support.closeness import apart, close, network
from support.engine.batched import Together
from support.engine.driven import Driven
from support.engine.prompts import Inputs, switched
from support.engine.storage import prompt_storage
from support.reference import Answer, Dense, full_kv
from support.tiny_models import build_llava, make_image
from vlmfast import VLM
from vlmfast.core.kv import KV
from vlmfast.core.recipe import Recipe
from vlmfast.kernels.quantize_kv import quantize

# Norms and rotary tables are float32 in every model.
FLOAT = torch.float32
STEPS = 20  # at least two pages
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


@functools.cache
def dense_of(vlm: VLM, prompt: int) -> Dense:
    question, seeds = PROMPTS[prompt]
    return Dense(vlm, vlm.inputs(question, images=[make_image(seed=seed) for seed in seeds]))


@functools.cache
def whole_of(vlm: VLM, prompt: int) -> list[tuple[Tensor, Tensor]]:
    """Hugging Face's keys and values of a prompt."""
    return full_kv(vlm, dense_of(vlm, prompt).tensors)


def sums(vlm: VLM, prompt: int) -> int:
    """Terms of a logit, over a prompt and `TOKENS`."""
    return network(vlm.model, dense_of(vlm, prompt).size + STEPS)


def run_of(vlm: VLM, recipe: str, prompt: int) -> Driven:
    question, seeds = PROMPTS[prompt]
    tensors = dict(dense_of(vlm, prompt).tensors)
    inputs = Inputs(tensors, [make_image().size[::-1]] * len(seeds), question)
    return Driven(vlm.adapter, inputs, Recipe.of(recipe))


# --- rules while an answer grows -----------------------------------------------------------------

# Called before a token; returns how many tokens may follow until it must be called again.
Rule = Callable[[Answer], int]


def nothing(dense: Answer, stored: list[KV]) -> Rule:
    return lambda dense: STEPS


def h2o(dense: Answer, stored: list[KV]) -> Rule:
    """Drops the slot with the least attention, except among the last half."""
    budget = stored[0].order.shape[1]
    mass = []
    for kv in stored:
        total = torch.zeros(len(kv.keys), dense.count)
        mass.append(total.scatter(1, kv.order, kv.attention_mass))

    def before(dense: Answer) -> int:
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
        return 1

    return before


def cake(dense: Answer, stored: list[KV]) -> Rule:
    """Drops what the newest token attends to least, except among the last four."""
    budgets = [kv.order.shape[1] for kv in stored]

    def before(dense: Answer) -> int:
        for layer, seen in enumerate(dense.seen):
            for head in range(len(seen)):
                there = seen[head].nonzero().flatten()
                if len(there) > budgets[layer]:
                    old = there[there < dense.count - 4]
                    seen[head, old[dense.p[layer][head, old].argmin()]] = False
        return 1

    return before


class SlotRope(Answer):
    """Keys are kept unrotated, and rotated by their position among those seen."""

    def put(self, layer: int, order: Tensor, keys: Tensor, values: Tensor, valid: Tensor) -> None:
        self.seen[layer].scatter_(1, order, True)

    def position(self, layer: int) -> int:
        return int(self.seen[layer][0].sum())

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        by = torch.full(keys.shape[:2], self.keys[layer].shape[1] - self.position(layer))
        super().add(layer, self.turned(keys, by), values)

    def turned(self, keys: Tensor, by: Tensor) -> Tensor:
        cos, sin = self.dense.decoder.rotary_emb(keys, by)
        return keys * cos + rotate_half(keys) * sin

    def slot_keys(self, layer: int) -> Tensor:
        """Every key is stored as if its token were at its own index."""
        keys, seen = self.keys[layer], self.seen[layer]
        rank = seen.cumsum(1) - 1
        return self.turned(keys, rank - torch.arange(keys.shape[1]))


def streaming(dense: Answer, stored: list[KV]) -> Rule:
    budget = stored[0].order.shape[1]

    def before(dense: Answer) -> int:
        for seen in dense.seen:
            for head in range(len(seen)):
                there = seen[head].nonzero().flatten()
                if len(there) + 1 > budget:  # leave a slot for the next token
                    seen[head, there[4]] = False
        return 1

    return before


def paged(page: int, **how) -> Callable[[Answer, list[KV]], Rule]:
    """Each full page of ``page`` tokens is rounded."""

    def make(dense: Answer, stored: list[KV]) -> Rule:
        rounded = []
        for seen, kv in zip(dense.seen, stored, strict=True):
            rounded.append(seen.scatter(1, kv.order, False))

        def before(dense: Answer) -> int:
            left = []  # tokens until the next page of each layer
            for layer, kv in enumerate(stored):
                seen, keys, values = dense.seen[layer], dense.keys[layer], dense.values[layer]
                done = torch.zeros_like(seen)
                done[:, : rounded[layer].shape[1]] = rounded[layer]
                rounded[layer] = done
                waiting = [row.nonzero().flatten() for row in seen & ~done]
                count = min(map(len, waiting))
                left.append(max(1, (page if count < page else 2 * page) - count))
                if count < page:
                    continue
                at = torch.stack([row[:page] for row in waiting])
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
            return min(left)

        return before

    return make


KIVI = {"bits": 2, "key_group": 4, "value_group": 4}
# Recipe, reference, rule while the answer grows, whether the prompt's own attention is
# the model's.
METHODS: dict[str, tuple[str, type[Answer], Callable, bool]] = {
    "snapkv": ("snapkv:keep=0.8,window=4", Answer, nothing, True),
    "pyramidkv": ("pyramidkv:keep=0.8,window=3", Answer, nothing, True),
    "vlcache": ("vlcache:0.6", Answer, nothing, True),
    "lookm": ("lookm:keep=0.8,recent=0.2", Answer, nothing, True),
    "lookm averaged": ("lookm:keep=0.8,recent=0.2,merge=avg", Answer, nothing, True),
    "lookm weighted": ("lookm:keep=0.8,merge=weighted,text_prior=false", Answer, nothing, True),
    "lookm without merging": ("lookm:keep=0.8,merge=none", Answer, nothing, True),
    "quickprefill": ("quickprefill:0.4", Answer, nothing, True),
    "fastkv": ("fastkv:keep=0.7,tsp=0.9,window=3", Answer, nothing, False),
    "mustdrop": (
        "mustdrop:window=1,layers=1/3,global_thr=0.05,individual_thr=0.3",
        Answer,
        nothing,
        False,
    ),
    "h2o": ("h2o:0.7", Answer, h2o, True),
    "cake": ("cake:keep=0.7,window=4", Answer, cake, True),
    "streamingllm": ("streamingllm:0.6", SlotRope, streaming, True),
    "kivi": ("kivi:bits=2,group=4,residual=8", Answer, paged(8, **KIVI), True),
    "zipcache": ("zipcache:page=8", Answer, paged(8, bits=4, key_group=8), True),
    "zipvl": ("zipvl:tau=0.9,page=8", Answer, paged(8, bits=4, key_group=8), False),
    "zipvl dropping": ("zipvl:tau=0.9,kv=drop,rows=all", Answer, nothing, False),
    "snapkv and kivi": (
        "snapkv:keep=0.8,window=4+kivi:bits=2,group=4,residual=8",
        Answer,
        paged(8, **KIVI),
        True,
    ),
}


@functools.cache
def reference(vlm: VLM, method: str, prompt: int) -> Tensor:
    """Logits (STEPS, V) after each of `TOKENS`."""
    recipe, kind, rule, own = METHODS[method]
    stored, full = prompt_storage(run_of(vlm, recipe, prompt)), whole_of(vlm, prompt)
    if own and "lookm" not in method and kind is Answer:
        for kv, (keys, _) in zip(stored, full, strict=True):  # what is kept equals Hugging Face's
            at = kv.order[..., None].expand_as(kv.keys)
            close(kv.keys, keys.gather(1, at), FLOAT, sums(vlm, prompt))
    dense = kind(dense_of(vlm, prompt), full, stored)
    before, rows, at = rule(dense, stored), [], 0
    while at < STEPS:
        tokens = TOKENS[at : at + before(dense)]
        rows.append(dense.feed(tokens))
        at += len(tokens)
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
