"""Measure kvpress on a decoder: ``python benchmarks/presses.py FOLDER``.

Runs in an environment of its own (``make kvpress``), because kvpress needs an older
transformers than vlmfast. `compare_presses.py` runs it and joins its rows with those of vlmfast.

A text is prefilled once. Each press then compresses copies of its keys and values, in the layers
without a sliding window: kvpress compresses no others of Gemma 3. The slots that are kept are
given, since kvpress rounds a compression ratio differently. Part ``cost`` prefills once for each
press instead, as kvpress does, and measures time and memory.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import texts
import torch
import transformers
from texts import Log, Text
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def given_pyramid(share: float, slots: tuple[int, ...]) -> Any:
    """PyramidKV with the budgets ``slots`` of the layers instead of its own."""
    press = kvpress.PyramidKVPress(share)
    press.get_layer_budget = lambda module, length: slots[module.layer_idx]
    return press


@dataclass(frozen=True)
class Method:
    """A press, by the fraction of slots that it drops.

    Parameters
    ----------
    press : callable
        From a compression ratio, or for ``own`` from the slots of each layer.
    eager : bool
        Whether it reads the attention matrix, which only eager attention returns.
    rotated : bool
        Whether it renumbers the kept slots.
    same : str
        Method of vlmfast in `compare_presses.py` whose slots the press must keep, by layer.
    """

    press: Callable[..., Any]
    eager: bool = False
    rotated: bool = False
    same: str = ""


METHODS = {
    "SnapKV": Method(kvpress.SnapKVPress),
    "PyramidKV": Method(kvpress.PyramidKVPress),
    "PyramidKV, budgets of vlmfast": Method(given_pyramid, same=texts.PYRAMID),
    "StreamingLLM": Method(kvpress.StreamingLLMPress),
    "StreamingLLM, rotated": Method(
        lambda ratio: kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(ratio)), rotated=True
    ),
    "ObservedAttention": Method(kvpress.ObservedAttentionPress, eager=True),
    "TOVA": Method(kvpress.TOVAPress),
    "ExpectedAttention": Method(kvpress.ExpectedAttentionPress),
    "Knorm": Method(kvpress.KnormPress),
    "Random": Method(lambda ratio: kvpress.RandomPress(ratio, seed=0)),
}


class Rotary:
    """The rotary embedding of layers without a window, as presses expect it of other models."""

    def __init__(self, of: Any) -> None:
        self.of, self.inv_freq = of, of.full_attention_inv_freq

    def __call__(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.of(x, position, "full_attention")


class Decoder:
    """A Gemma 3 text model whose layers without a window are compressed."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.core = self.model.model
        self.wide = [
            layer.self_attn for layer in self.core.layers if not layer.self_attn.is_sliding
        ]
        for attention in self.wide:
            attention.rotary_emb = Rotary(self.core.rotary_emb)

    def prefill(self, ids: list[int], press: Any = None, *, eager: bool = False) -> Prefilled:
        """Prefill; with a press, its own hook compresses each layer."""
        cache, seen = DynamicCache(config=self.model.config), {}

        def record(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> None:
            layer = cache.layers[module.layer_idx]
            seen[module.layer_idx] = (
                module,
                kwargs["hidden_states"],
                layer.keys,
                layer.values,
                output[1],
                kwargs,
            )

        self.model.set_attn_implementation("eager" if eager else "sdpa")
        with ExitStack() as hooks:
            for attention in self.wide:
                hook = record if press is None else press.forward_hook
                hooks.callback(attention.register_forward_hook(hook, with_kwargs=True).remove)
            out = self.core(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
        self.model.set_attn_implementation("sdpa")
        return Prefilled(cache, self.model.lm_head(out.last_hidden_state[:, -1])[0], seen, len(ids))

    def read(self, cache: DynamicCache, ids: list[int], seen: int, *, rotated: bool) -> Tensor:
        """Final hidden states (T, D) of tokens after ``seen``; the cache stays as it is."""
        twin = copy.copy(cache)
        twin.layers = [copy.copy(layer) for layer in cache.layers]  # updates make new tensors
        position = torch.arange(seen, seen + len(ids))
        with self._causal(twin, len(ids), rotated):
            out = self.core(
                input_ids=torch.tensor([ids]),
                past_key_values=twin,
                position_ids=position[None],
                cache_position=position,
            )
        return out.last_hidden_state[0]

    @contextmanager
    def _causal(self, cache: DynamicCache, tokens: int, rotated: bool) -> Iterator[None]:
        """Inside the block, new tokens see all slots of a compressed layer, and earlier ones.

        The masks of transformers count one slot for each token before them. ``rotated``: the keys
        have the positions of their slots, and the new tokens follow these.
        """

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            held = cache.layers[module.layer_idx].keys.shape[2]
            mask = torch.ones(tokens, held + tokens, dtype=torch.bool).tril(held)
            kwargs["attention_mask"] = mask[None, None]
            if rotated:
                position = torch.arange(held, held + tokens)[None]
                kwargs["position_embeddings"] = module.rotary_emb(kwargs["hidden_states"], position)
            return args, kwargs

        with ExitStack() as hooks:
            for attention in self.wide:
                handle = attention.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
            yield


@dataclass
class Prefilled:
    """The cache of a prefix, the logits (V,) after it, and what presses read of each layer."""

    cache: DynamicCache
    logits: Tensor
    seen: dict[int, tuple[Any, ...]]
    length: int

    def compressed(self, press: Any) -> DynamicCache:
        """A copy of the cache that a press has compressed."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for index, given in self.seen.items() if press is not None else ():
            layer = cache.layers[index]
            layer.keys, layer.values = press.compress(*given)
        return cache


def ratio(kept: int, length: int) -> float:
    """The compression ratio for which kvpress keeps ``kept`` slots of ``length``."""
    found = 1 - (kept + 0.5) / length
    assert kvpress.utils.compute_n_kept(length, found) == kept
    return found


def press_of(method: Method, keep: float, length: int, slots: Any) -> Any:
    """The press that keeps ``int(keep length)`` slots, or as many as ``slots`` gives by layer."""
    share = ratio(int(keep * length), length)
    return method.press(share, slots=tuple(slots)) if method.same else method.press(share)


def slots_of(cache: DynamicCache) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers]


class Run(texts.Run):
    """kvpress' side.

    Parameters
    ----------
    slots : callable
        ``(part, prompt, method, keep)`` to the slots by layer that vlmfast keeps, or ``None``.
    """

    def __init__(self, decoder: Decoder, log: Log, slots: Callable[..., Any]) -> None:
        super().__init__(log)
        self.decoder, self.slots, self.methods = decoder, slots, tuple(METHODS)
        self.known: dict[tuple[str, bool], Prefilled] = {}  # of one text

    def given(self, text: Text, method: str, keep: float) -> Any:
        same = METHODS[method].same
        return self.slots(text.part, text.digest, same, keep) if same else ()

    def ready(self, text: Text, method: str, keep: float) -> bool:
        return method == "none" or self.given(text, method, keep) is not None

    def press(self, text: Text, method: str, keep: float) -> Any:
        if method == "none":
            return None
        given = self.given(text, method, keep)
        return press_of(METHODS[method], keep, text.prefix, given)

    def logits(self, text: Text, method: str, keep: float) -> tuple[list[int], list[Tensor]]:
        eager = method != "none" and METHODS[method].eager
        if (text.digest, eager) not in self.known:
            self.known = {key: of for key, of in self.known.items() if key[0] == text.digest}
            found = self.decoder.prefill(text.ids[: text.prefix], eager=eager)
            self.known[text.digest, eager] = found
        source = self.known[text.digest, eager]
        cache = source.compressed(self.press(text, method, keep))
        rotated = method != "none" and METHODS[method].rotated
        logits = []
        for ids, count in text.chains():
            hidden = self.decoder.read(cache, ids, text.prefix, rotated=rotated)[-count:]
            logits.append(self.decoder.model.lm_head(hidden))
        if not text.questions:
            logits = [torch.cat([source.logits[None], logits[0]])]
        return slots_of(cache), logits

    def prefill(self, text: Text, method: str, keep: float) -> Callable[[], tuple[list[int], int]]:
        press = self.press(text, method, keep)
        eager = method != "none" and METHODS[method].eager

        def run() -> tuple[list[int], int]:
            cache = self.decoder.prefill(text.ids[: text.prefix], press, eager=eager).cache
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            return slots_of(cache), held

        return run


def given_slots(path: Path, *key: Any) -> list[int] | None:
    """Slots that vlmfast keeps by layer, by the part, prompt, method and keep of its log."""
    rows = texts.read_log(path)[1] if path.exists() else []
    names = ("part", "prompt", "method", "keep")
    return next((row["slots"] for row in rows if key == tuple(row[n] for n in names)), None)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    args = texts.parser(__doc__).parse_args(argv)
    torch.set_num_threads(args.threads)
    settings = texts.settings(args, transformers.__version__, kvpress=version("kvpress"))
    log = Log(args.logs / texts.KVPRESS, settings)
    tokens = AutoTokenizer.from_pretrained(args.folder)
    run = Run(Decoder(args.folder), log, partial(given_slots, args.logs / texts.VLMFAST))
    run.over(tokens, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
