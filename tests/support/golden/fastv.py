"""Replays the stored FastV cases: the choice from a stored row, and six layers end to end."""

from __future__ import annotations

import torch

from support.closeness import close, network
from support.golden.case import Reader, chosen, marked
from support.golden.decoder import decoder_run, image_layout
from vlmfast.compressors.prefill.fastv import FastV
from vlmfast.compressors.select import best
from vlmfast.core.contexts import PrefillContext


def choice(data: Reader, meta: Reader) -> None:
    row, k = data["attn_last_row"][0], data.count("fastv_k")
    start, n = data.count("image_start"), data.count("image_len")
    layout = image_layout(row.shape[1], start, n)
    context = PrefillContext(depth=32, layout=layout, stats={k - 1: row[:, None]})
    stage = FastV(1 - data.number("fastv_r"), k=k)
    assert stage.layers(32) == (k,)
    kept = stage.select_tokens(context, k)
    stored = data["image_scores"]
    close(row.mean(0)[start : start + n], stored, terms=len(row), scale=stored)  # mean over heads
    shown = slice(start, start + n)
    ours, theirs = (marked(index, row.shape[1]) for index in (kept, data["keep_index"]))
    assert torch.equal(ours | layout.visual, theirs | layout.visual)
    chosen(row.float().mean(0)[shown], ours[shown], theirs[shown], len(row), row.dtype)
    # As many rows follow as are kept, from 0 on.
    assert torch.equal(data["cache_position_after"], torch.arange(len(kept)))
    kept = data["keep_index"]
    assert torch.equal(layout.select(kept).position[0], data["position_ids_after"][0])


def end_to_end(data: Reader, meta: Reader) -> None:
    run, last = decoder_run(data, FastV(0.5, k=3), 35, 576, data["inputs_embeds"][0, :1])
    close(last, data["last_hidden"], terms=network(run.adapter.model, 631))
    kept = (run.trace.depth == 6).nonzero().flatten() + 35
    index = data["keep_index"]
    text = torch.cat([torch.arange(35), torch.arange(35 + 576, 631)])
    assert torch.equal(torch.cat([text, kept]).sort().values, index)
    assert run.cache.lengths() == [631] * 3 + [len(index)] * 3
    # The stored scores are those of the layer before the drop.
    assert torch.equal(best(data["image_scores"][None], [len(kept)])[0].nonzero()[:, 0] + 35, kept)
