"""A prefill that shortens the sequence layer by layer, without the engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support.driven import Driven
from support.reference import answer_logits, handed
from vlmfast import VLM


def embeds_of(vlm: VLM, tensors: dict) -> Tensor:
    """Input embeddings (S, D) of the prompt, merged by Hugging Face."""
    return handed(vlm.model, tensors)["inputs_embeds"][0]


def ran(vlm: VLM, recipe: str, images: list) -> tuple[Driven, Tensor]:
    """The engine's run, and its logits (V,) after the prompt."""
    run = Driven.of(vlm, recipe, images)
    return run, answer_logits(vlm, run, [])[0]


@torch.no_grad()
def shortened(vlm: VLM, embeds: Tensor, drop: Callable, policy: str) -> tuple[Tensor, Tensor]:
    """Logits (V,) after the prompt, and its rows (S',) that reach the last layer.

    ``drop(layer, attention, hidden, rows)`` is called before every layer, with the attention map
    (H, S, S) of the previous one, if any; it returns hidden states and the indices to keep.
    """
    decoder = vlm.model.get_decoder()
    hidden, rows, attention = embeds, torch.arange(len(embeds)), None
    ids, before = rows, decoder.config._attn_implementation
    decoder.config._attn_implementation = "eager"
    try:
        for index, layer in enumerate(decoder.layers):
            hidden, stays = drop(index, attention, hidden, rows)
            if stays is not None:
                hidden, rows = hidden[stays], rows[stays]
                ids = torch.arange(len(rows)) if policy == "compact" else rows
            n = len(rows)
            mask = torch.zeros(n, n).masked_fill(~torch.ones(n, n).bool().tril(), -torch.inf)
            given = {
                "attention_mask": mask[None, None],
                "position_embeddings": decoder.rotary_emb(hidden[None], ids[None]),
                "position_ids": ids[None],
            }
            attention = layer.self_attn(layer.input_layernorm(hidden[None]), **given)[1][0]
            hidden = layer(hidden[None], **given)[0]
        return vlm.model.get_output_embeddings()(decoder.norm(hidden[-1:]))[0], rows
    finally:
        decoder.config._attn_implementation = before
