"""A dense reference of decoding: nothing removed, nothing packed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vlmfast import VLM
from vlmfast.core.kv import KV


class Dense:
    """Decoding over explicit keys, values and masks.

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
        self, vlm: VLM, full: list[tuple[Tensor, Tensor]], stored: list[KV] | None
    ) -> None:
        self.decoder, self.embed, self.head = (
            vlm.adapter.decoder,
            vlm.adapter.embed,
            vlm.adapter.logits,
        )
        self.keys = [k.clone() for k, _ in full]
        self.values = [v.clone() for _, v in full]
        self.seen = [torch.ones(k.shape[:2], dtype=torch.bool) for k in self.keys]
        self.p = [k.new_zeros(k.shape[:2]) for k in self.keys]
        for layer, kv in enumerate(stored or []):
            self.seen[layer].fill_(False)
            self._put(layer, kv.order, kv.keys, kv.values, kv.valid)
            for segment in kv.segments:
                keys, values = segment.dequantize(torch.float64)
                self._put(layer, segment.order.long(), keys, values, segment.valid)

    def _put(self, layer: int, order: Tensor, keys: Tensor, values: Tensor, valid: Tensor) -> None:
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
        return self.keys[layer].shape[1]

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Logits (1, V) after ``token``."""
        hidden = self.embed(torch.tensor([[token]]))
        for index, layer in enumerate(self.decoder.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            tables = self.decoder.rotary_emb(hidden, torch.tensor([[self.position(index)]]))
            query, key = apply_rotary_pos_emb(query, key, *tables)
            self.add(index, key[0], value[0])
            keys, values, seen = self.slot_keys(index), self.values[index], self.seen[index]
            groups = query.shape[1] // len(keys)
            logits = query[0].unflatten(0, (-1, groups)) @ keys[:, None].transpose(-1, -2)
            logits = logits * attention.head_dim**-0.5
            p = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
            self.p[index] = p.mean(1)[:, 0]
            output = (p @ values[:, None]).flatten(0, 1).transpose(0, 1).reshape(1, 1, -1)
            hidden = hidden + attention.o_proj(output)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.head(self.decoder.norm(hidden))[:, -1]

    def add(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.keys[layer] = torch.cat([self.keys[layer], key], 1)
        self.values[layer] = torch.cat([self.values[layer], value], 1)
        new = torch.ones(len(key), 1, dtype=torch.bool)
        self.seen[layer] = torch.cat([self.seen[layer], new], 1)


@torch.no_grad()
def everything(vlm: VLM, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Hugging Face's own keys and values of a whole prompt, by layer."""
    cache = vlm.model(**tensors, use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
