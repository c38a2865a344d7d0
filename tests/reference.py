"""A dense reference of a prefill with drops: nothing is removed, dropped keys are masked.

Written without the engine: a plain loop over the decoder's layers on the full sequence (prompt and
generated tokens in one pass), one additive mask per layer.
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
        Per layer, which rows exist there (others are keys of nobody).
    """
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = "eager"
    try:
        hidden, s = embeds[None], embeds.shape[0]
        causal = torch.ones(s, s, dtype=torch.bool).tril()
        for layer, rows, ids in zip(decoder.layers, alive, position, strict=True):
            # A row that is gone still sees itself, so that its softmax stays finite.
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
    """Rotary ids (P, S) after the rows that are gone have closed up; 0 for those.

    With one axis the rows are counted. With three, each axis of an image or video loses the ids
    that no row has any more, each with its step to the next one; what follows moves up by what the
    rows or columns have shrunk, whichever were more.

    Parameters
    ----------
    position : Tensor, int64, (P, S)
        Those of the full prompt.
    kind : Tensor, int64, (S,)
        The placeholder's id for visual tokens, -1 for text.
    rows : Tensor, bool, (S,)
        What is left.
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
            place, at = {}, start
            for value, following in pairwise([*known, known[-1] + 1]):
                if value in present:
                    place[value] = at
                    at += following - value
            for i in left:
                new[axis, i] = place[ids[i]]
            if axis > 0 and place:
                width = max(width, max(place.values()) + 1 - start)
        start += width
    return new
