"""Measure size and decode time of compressed caches: ``python benchmarks/kv.py``.

A language model of Qwen2-0.5B's shape with random weights (built by `ask.py`, without the vision
tower) prefills random embeddings, all visual except 60 text tokens, under each recipe and with
Hugging Face's `DynamicCache` and `QuantizedCache`. It then decodes batches of 1, 8, 16 and 32
requests of 2,900 tokens, and one request of 32,768 tokens in a model with fewer layers.

Requests of a batch have the same length and the same prefill: the compressed cache is cloned for
every row, and the rows are joined as in `VLM.ask_many`. Hugging Face's caches receive the keys and
values of one prefill once per row. Attention with random weights is nearly uniform, so `zipvl`
treats almost all tokens as important, and its cache is near its maximum size.

============  ==================================================================================
``held``      bytes of keys and values when decoding starts, with the parameters of quantized
              slots, without free slots
``step``      time of one decode step of the batch; variants are interleaved, so that thermal
              throttling or other load affects all of them
``same``      fraction of tokens that equal those of Hugging Face's `DynamicCache`
============  ==================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ask
import harness
import torch
from shapes import after_tower
from torch import Tensor

from vlmfast import VLM
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.opening import open_sequence
from vlmfast.engine.prefill import Inputs, Prompt
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import spread

RECIPES = ("none", "lookm:0.2", "snapkv:0.2", "zipvl", "zipcache", "kivi")
HF = "hf DynamicCache"
QUANTIZED = {
    "hf QuantizedCache quanto 4 bit": {"backend": "quanto", "nbits": 4},
    "hf QuantizedCache quanto 2 bit": {"backend": "quanto", "nbits": 2},
    "hf QuantizedCache fp8": {"backend": "fp8"},
}
BEFORE, AFTER = 20, 40  # text tokens before and after the image
TOKENS, BATCHES = 2900, [1, 8, 16, 32]  # of a prompt, and requests
LONG, LONG_LAYERS = 32_768, 2  # tokens of one prompt, and layers of its model
WARM = 2  # warm-up steps of each turn


# --- two engines ---------------------------------------------------------------------------------

Step = Callable[[Tensor], Tensor]  # tokens (B, 1) -> logits (B, V)


@dataclass
class Variant:
    """The cache of one prompt, and a function to decode from copies of it.

    Parameters
    ----------
    first : Tensor, (1, 1)
        The token after the prompt.
    start : callable
        ``requests -> (step, held)``, the latter in bytes.
    prefill : float
        Seconds.
    own : bool
        Whether vlmfast decodes, not Hugging Face.
    """

    first: Tensor
    start: Callable[[int], tuple[Step, int]]
    prefill: float
    own: bool = True


def prompt(vlm: VLM, embeds: Tensor, first: int, last: int) -> Prompt:
    """Embeddings (N, D), of which those from ``first`` to before ``last`` are an image's."""
    order = torch.arange(len(embeds), device=embeds.device)
    visual = (order >= first) & (order < last)
    kind = torch.where(visual, int(Kind.IMAGE), int(Kind.TEXT)).to(torch.uint8)
    axes = len(vlm.adapter.positions(text_ids(vlm)))
    layout = TokenLayout.text(order, order.expand(axes, -1)).replace(kind=kind)
    return Prompt(embeds, layout, len(embeds), len(embeds))


def text_ids(vlm: VLM) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=vlm.adapter.device)}


def noise(vlm: VLM, tokens: int) -> Prompt:
    """Random embeddings of text around one long image."""
    width = vlm.model.config.get_text_config().hidden_size
    embeds = 0.02 * torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    embeds = embeds.to(vlm.adapter.device, vlm.adapter.dtype)
    return prompt(vlm, embeds, BEFORE, tokens - AFTER)


def prefilled(vlm: VLM, recipe: Recipe, asked: Prompt, room: int = 256) -> tuple[Sequence, Tensor]:
    """A request after the prefill of a prompt, and its logits (1, V)."""
    begin = clock(vlm.adapter.device)
    sequence = open_sequence(vlm.adapter, Inputs(text_ids(vlm)), recipe, begin=begin)
    sequence.trace.begin(asked.layout.select(asked.layout.visual), vlm.adapter.depth)
    with switched(vlm.model):
        logits = Engine(vlm.adapter).prefiller.prefill(sequence, asked, room)
    return sequence, logits


def vlmfast(vlm: VLM, recipe: str, tokens: int) -> Variant:
    """One prefill under a recipe."""
    sequence, logits = prefilled(vlm, Recipe.parse(recipe), noise(vlm, tokens))

    def start(requests: int) -> tuple[Step, int]:
        batch = Batch(requests)
        for _ in range(requests):
            batch.join(cloned(sequence.group))
        return batch.next, sum(group.cache.held_bytes() for group in batch.groups)

    return Variant(logits.argmax(-1)[:, None], start, sequence.stats.time_prefill_s)


def cloned(group: RowGroup) -> RowGroup:
    """A copy of a group of one row."""
    row = copy.copy(group.rows[0])
    row.notes, row.prompt_slots = copy.deepcopy(row.notes), row.prompt_slots.clone()
    return RowGroup(group.adapter, group.cache.clone(), group.position.clone(), [row])


def huggingface(vlm: VLM, tokens: int) -> dict[str, Variant]:
    """Hugging Face's caches after one prefill, those that run here."""
    from transformers import DynamicCache, QuantizedCache

    begin, read = clock(vlm.adapter.device), DynamicCache()
    embeds = noise(vlm, tokens).embeds[None]
    hidden = vlm.adapter.decoder(inputs_embeds=embeds, past_key_values=read, use_cache=True)
    first = vlm.adapter.logits(hidden.last_hidden_state[:, -1]).argmax(-1)[:, None]
    prefill = clock(vlm.adapter.device) - begin
    config = vlm.model.config.text_config
    quantized = {n: partial(QuantizedCache, config=config, **of) for n, of in QUANTIZED.items()}
    found: dict[str, Variant] = {}
    for name, make in {HF: DynamicCache, **quantized}.items():
        variant = Variant(first, partial(_refill, vlm, read, make), prefill, own=False)
        try:
            variant.start(1)[0](first)
        except Exception as error:  # a library is missing, or does not support this device
            print(f"not run: {name}: {harness.line(error)}", file=sys.stderr)
        else:
            found[name] = variant
    return found


def _refill(vlm: VLM, read: Any, make: Callable[[], Any], requests: int) -> tuple[Step, int]:
    cache, seen = make(), read.get_seq_length()
    for index, layer in enumerate(read.layers):
        keys, values = (part.repeat(requests, 1, 1, 1) for part in (layer.keys, layer.values))
        cache.update(keys, values, index)
    size = _size([vars(layer) for layer in cache.layers])

    def step(ids: Tensor) -> Tensor:
        nonlocal seen
        position = torch.full((1, 1), seen, device=ids.device)
        seen += 1
        hidden = vlm.adapter.decoder(
            inputs_embeds=vlm.adapter.embed(ids),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return vlm.adapter.logits(hidden[:, -1])

    return step, size


def _size(value: Any) -> int:
    """Bytes of all tensors in lists and dicts."""
    if isinstance(value, Tensor):
        parts = [part for part in vars(value).values() if isinstance(part, Tensor)]
        return sum(map(_size, parts)) if parts else value.nbytes  # a quantized tensor has parts
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


# --- the benchmark -------------------------------------------------------------------------------


@torch.no_grad()
def turn(vlm: VLM, variant: Variant, requests: int, count: int) -> dict[str, Any]:
    """Decode ``count`` tokens for every request from fresh copies of the cache."""
    device = vlm.adapter.device
    with switched(vlm.model) if variant.own else contextlib.nullcontext():
        step, held = variant.start(requests)
        ids, steps, tokens = variant.first.repeat(requests, 1), [], []
        for _ in range(WARM + count):
            begin = clock(device)
            ids = step(ids).argmax(-1)[:, None]
            steps.append(clock(device) - begin)
            tokens += ids[:, 0].tolist()
    return {"held": held, "steps": steps[WARM:], "tokens": tokens}


@torch.no_grad()
def bench(
    vlm: VLM, tokens: int, batches: list[int], args: argparse.Namespace
) -> dict[int, dict[str, dict[str, Any]]]:
    """Rows of all variants for one prompt length, by batch size."""
    variants = huggingface(vlm, tokens)
    for recipe in args.recipes:
        variants[recipe] = vlmfast(vlm, recipe, tokens)
        print(f"{tokens} tokens: {recipe} prefilled", file=sys.stderr)
    found = {}
    for requests in batches:
        turns = {n: partial(turn, vlm, v, requests, args.new_tokens) for n, v in variants.items()}
        samples = harness.interleaved(turns, args.repeats)
        full = requests * tokens * vlm.adapter.bytes_per_token()
        found[requests] = numbers(samples, {n: v.prefill for n, v in variants.items()}, full)
        print(f"{tokens} tokens: batch of {requests} done", file=sys.stderr)
    return found


def numbers(
    samples: dict[str, list[dict[str, Any]]], prefill: dict[str, float], full: int
) -> dict[str, dict[str, Any]]:
    """JSON values; ``full`` are the bytes of the full cache."""
    found: dict[str, dict[str, Any]] = {}
    reference = samples[HF][-1]["tokens"]
    for name, own in samples.items():
        last = own[-1]
        step = spread([second for sample in own for second in sample["steps"]])
        same = sum(a == b for a, b in zip(last["tokens"], reference, strict=True))
        found[name] = {
            "held": last["held"],
            "share": last["held"] / full,
            "prefill": prefill[name],
            "step": step,
            "same": same / len(reference),
        }
        found[name]["ratio"] = found[HF]["step"]["median"] / step["median"]
    return found


def load(args: argparse.Namespace, layers: int) -> VLM:
    made = after_tower("small", layers, torch.device(args.device), getattr(torch, args.dtype))
    return VLM(*made, prefix_cache_bytes=0)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, recipe=None, layers=24, new_tokens=8, repeats=3, dtype="bfloat16",
        device=harness.DEVICE, threads=0, out=None,
    )  # fmt: skip
    args = parser.parse_args(argv, argparse.Namespace(tower="small"))
    args.recipes = args.recipes or list(RECIPES)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    report = ask.heading("kv.py", argv, args) | {
        "threads": torch.get_num_threads(),
        "new_tokens": args.new_tokens,
        "cases": [],
    }
    long = LONG, [1], min(args.layers, LONG_LAYERS)
    for tokens, batches, layers in ((TOKENS, BATCHES, args.layers), long):
        vlm = load(args, layers)
        found = bench(vlm, tokens, batches, args)
        for requests, rows in found.items():
            about = {"tokens": tokens, "requests": requests, "layers": layers}
            about["full"] = requests * tokens * vlm.adapter.bytes_per_token()
            report["cases"].append({**about, "rows": rows})
            title = f"{requests} x {tokens:,} tokens, {layers} layers, {args.dtype}"
            print(f"\n{title}\n")
            print(harness.shown(rows, "held", "share", "step", "ratio", "same", "prefill"))
        del vlm, found
        gc.collect()
    harness.written(harness.path_of(args, "kv", args.device, args.dtype), report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
