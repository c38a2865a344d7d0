"""Measure kvpress on a decoder: ``python benchmarks/presses.py FOLDER``.

Runs in an environment of its own (``make kvpress``), because kvpress needs an older
transformers than vlmfast. `compare_presses.py` runs it and joins its rows with those of vlmfast.

Each press compresses the layers without a sliding window: kvpress compresses no others of Gemma 3.
The slots that are kept are given, since kvpress rounds a compression ratio differently.
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

    def prefill(self, ids: list[int], press: Any, *, eager: bool) -> tuple[DynamicCache, Tensor]:
        """The cache after a prefill in which a press may compress, and the logits (1, V)."""
        cache = DynamicCache(config=self.model.config)
        self.model.set_attn_implementation("eager" if eager else "sdpa")
        with ExitStack() as hooks:
            for attention in self.wide if press is not None else ():
                handle = attention.register_forward_hook(press.forward_hook, with_kwargs=True)
                hooks.callback(handle.remove)
            out = self.core(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
        self.model.set_attn_implementation("sdpa")
        return cache, self.model.lm_head(out.last_hidden_state[:, -1])

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


def ratio(kept: int, length: int) -> float:
    """The compression ratio for which kvpress keeps ``kept`` slots of ``length``."""
    found = 1 - (kept + 0.5) / length
    assert kvpress.utils.compute_n_kept(length, found) == kept
    return found


def press_of(method: Method, keep: float, length: int, slots: Any) -> Any:
    """The press that keeps ``int(keep length)`` slots, or as many as ``slots`` gives by layer."""
    share = ratio(int(keep * length), length)
    return method.press(share, slots=tuple(slots)) if method.same else method.press(share)


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

    def given(self, text: Text, method: str, keep: float) -> Any:
        same = METHODS[method].same
        return self.slots(text.part, text.digest, same, keep) if same else ()

    def ready(self, text: Text, method: str, keep: float) -> bool:
        return method == "none" or self.given(text, method, keep) is not None

    def prefill(self, text: Text, method: str, keep: float) -> tuple[DynamicCache, Tensor, bool]:
        """The cache, the logits after it, and whether its slots are renumbered."""
        ids = text.ids[: text.prefix]
        if method == "none":
            return *self.decoder.prefill(ids, None, eager=False), False
        of, given = METHODS[method], self.given(text, method, keep)
        press = press_of(of, keep, text.prefix, given)
        return *self.decoder.prefill(ids, press, eager=of.eager), of.rotated

    def size(self, cache: tuple[DynamicCache, Tensor, bool]) -> tuple[list[int], int]:
        layers = cache[0].layers
        slots = [layer.keys.shape[2] for layer in layers]
        return slots, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def logits(self, text: Text, cache: tuple[DynamicCache, Tensor, bool]) -> list[Tensor]:
        (held, before, rotated), logits = cache, []
        for ids, count in text.chains():
            hidden = self.decoder.read(held, ids, text.prefix, rotated=rotated)[-count:]
            logits.append(self.decoder.model.lm_head(hidden))
        return logits if text.questions else [torch.cat([before, logits[0]])]


def given_slots(path: Path, *key: Any) -> list[int] | None:
    """Slots that vlmfast keeps by layer, by the part, prompt, method and keep of its log."""
    rows = texts.read_log(path)[1] if path.exists() else []
    names = ("part", "prompt", "method", "keep")
    return next((row["slots"] for row in rows if key == tuple(row[n] for n in names)), None)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    args = texts.parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    settings = texts.settings(args, transformers.__version__, kvpress=version("kvpress"))
    log = Log(args.logs / texts.KVPRESS, settings)
    tokens = AutoTokenizer.from_pretrained(args.folder)
    run = Run(Decoder(args.folder), log, partial(given_slots, args.logs / texts.VLMFAST))
    run.over(tokens, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
