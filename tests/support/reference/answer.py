"""An answer after keys and values of which a method has dropped, merged or rounded some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from support.reference.dense import Dense
from vlmfast.core.kv import KV


@torch.no_grad()
def full_kv(vlm: Any, tensors: dict) -> list[tuple[Tensor, Tensor]]:
    """Hugging Face's own keys and values (H, S, D) of a whole prompt, by layer."""
    cache = vlm.model(**tensors, use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


class Answer:
    """An answer after a prompt of which a method has stored a part.

    Keeps the keys and values of every token; what the method merged or rounded is written over the
    tokens concerned, and what it dropped is not seen.

    Parameters
    ----------
    dense : Dense
    full : list of (Tensor, Tensor)
        Keys and values of the whole prompt, by layer, as `full_kv` gives them.
    stored : list of KV, optional
        What the method has stored of it; all by default.

    Attributes
    ----------
    keys, values : list of Tensor, (H, N, D)
        Of every token so far, by layer; keys rotated.
    seen : list of Tensor, bool, (H, N)
        Which of them the next token attends to.
    p : list of Tensor, (H, N)
        Attention of the last token, mean over the query heads of each KV head.
    """

    def __init__(
        self,
        dense: Dense,
        full: list[tuple[Tensor, Tensor]],
        stored: Sequence[KV] = (),
    ) -> None:
        self.dense = dense
        self.keys = [k.clone() for k, _ in full]
        self.values = [v.clone() for _, v in full]
        self.seen = [torch.ones(k.shape[:2], dtype=torch.bool) for k in self.keys]
        self.p = [k.new_zeros(k.shape[:2]) for k in self.keys]
        for layer, kv in enumerate(stored):
            self.seen[layer].fill_(False)
            self.put(layer, kv.order, kv.keys, kv.values, kv.valid)
            for segment in kv.segments:
                keys, values = segment.dequantize(torch.float64)
                self.put(layer, segment.order.long(), keys, values, segment.valid)

    def put(self, layer: int, order: Tensor, keys: Tensor, values: Tensor, valid: Tensor) -> None:
        """Write what was stored of a layer over the tokens in ``order``."""
        for head in range(len(order)):
            at = order[head][valid[head]]
            self.keys[layer][head, at] = keys[head][valid[head]].to(self.keys[layer])
            self.values[layer][head, at] = values[head][valid[head]].to(self.keys[layer])
            self.seen[layer][head, at] = True

    @property
    def count(self) -> int:
        return self.keys[0].shape[1]

    def slot_keys(self, layer: int) -> Tensor:
        return self.keys[layer]

    def position(self, layer: int) -> int:
        """Rotary id of the next token."""
        return self.count

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Logits (T, V) after each of ``tokens``."""
        order, layers = torch.arange(self.count), range(len(self.keys))
        past = [
            (self.slot_keys(i), self.values[i], order.expand_as(self.seen[i]), self.seen[i], 0.0)
            for i in layers
        ]
        logits = self.dense.feed(tokens, past, [self.position(i) for i in layers])
        for layer, attended in enumerate(self.dense.attended):
            self.p[layer] = attended.weights[:, -1].unflatten(0, (len(attended.key), -1)).mean(1)
            self.add(layer, attended.key[:, -len(tokens) :], attended.value[:, -len(tokens) :])
        return logits

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """The keys (H, T, D) and values of new tokens."""
        self.keys[layer] = torch.cat([self.keys[layer], keys], 1)
        self.values[layer] = torch.cat([self.values[layer], values], 1)
        self.seen[layer] = torch.nn.functional.pad(self.seen[layer], (0, keys.shape[1]), value=True)
