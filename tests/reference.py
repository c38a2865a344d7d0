"""A dense reference of a prefill with drops: dropped keys are masked instead of removed.

Written without the engine: a plain loop over the decoder's layers on the full sequence (prompt and
generated tokens in one forward pass), one additive mask per layer.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor


@torch.no_grad()
def dense_logits(model, embeds: Tensor, position: list[Tensor], alive: list[Tensor]) -> Tensor:
    """Logits (S, V) of every row.

    Parameters
    ----------
    embeds : Tensor, (S, D)
    position : list of Tensor, (S,)
        Per layer, the rotary id of each row.
    alive : list of Tensor, bool, (S,)
        Per layer, which rows exist (the keys of others are masked).
    """
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = "eager"
    try:
        hidden, s = embeds[None], embeds.shape[0]
        causal = torch.ones(s, s, dtype=torch.bool).tril()
        for layer, rows, ids in zip(decoder.layers, alive, position, strict=True):
            # A dropped row still attends to itself, so that its softmax is finite.
            visible = (causal & rows[None, :]) | torch.eye(s, dtype=torch.bool)
            mask = torch.zeros(s, s, dtype=embeds.dtype).masked_fill(~visible, -torch.inf)
            hidden = layer(
                hidden,
                attention_mask=mask[None, None],
                position_embeddings=decoder.rotary_emb(hidden, ids[None]),
                position_ids=ids[None],
            )
        return model.get_output_embeddings()(decoder.norm(hidden))[0]
    finally:
        decoder.config._attn_implementation = before


def answer_logits(vlm, run, tokens: list[int]) -> Tensor:
    """The engine's logits (1 + len(tokens), V): after the prompt, then after each given token."""
    from vlmfast.engine.attention import switched

    with torch.no_grad(), switched(vlm.model):
        rows = [run.start(len(tokens))]
        rows += [run.next(torch.tensor([[token]])) for token in tokens]
    return torch.cat(rows)


def closed(position: Tensor, kind: Tensor, rows: Tensor) -> Tensor:
    """Rotary ids (P, S) after compaction; 0 for dropped rows.

    With one axis, the remaining rows are counted. With three, the ids that no row of an image or
    video has any longer are removed from each axis, and later rows move up by the shrinkage of the
    larger of rows and columns.

    Parameters
    ----------
    position : Tensor, int64, (P, S)
        Rotary ids of the full prompt.
    kind : Tensor, int64, (S,)
        Placeholder id for visual tokens, -1 for text.
    rows : Tensor, bool, (S,)
        Remaining rows.
    """
    new = torch.zeros_like(position)
    if len(position) == 1:
        new[0, rows] = torch.arange(int(rows.sum()))
        return new
    start = int(position[0, 0])
    for _, run in groupby(range(len(kind)), key=kind.tolist().__getitem__):
        run = list(run)
        left, width = [i for i in run if rows[i]], 0
        for axis, ids in enumerate(position.tolist()):
            known, present = sorted({ids[i] for i in run}), {ids[i] for i in left}
            new_ids, at = {}, start
            for value, following in pairwise([*known, known[-1] + 1]):
                if value in present:
                    new_ids[value] = at
                    at += following - value
            for i in left:
                new[axis, i] = new_ids[ids[i]]
            if axis > 0 and new_ids:
                width = max(width, max(new_ids.values()) + 1 - start)
        start += width
    return new
