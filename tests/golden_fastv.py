"""Replays the stored FastV cases: the choice from a stored row, and six layers end to end."""

from __future__ import annotations

import torch

from closeness import close, network
from golden_decoder import decoder_run, image_layout
from vlmfast.compressors.prefill.fastv import FastV
from vlmfast.core.contexts import PrefillContext


def choice(data: dict, meta: dict) -> None:
    row, k = data["attn_last_row"][0], int(data["fastv_k"])
    start, n = int(data["image_start"]), int(data["image_len"])
    layout = image_layout(row.shape[1], start, n)
    context = PrefillContext(depth=32, layout=layout, stats={k - 1: row[:, None]})
    stage = FastV(1 - float(data["fastv_r"]), k=k)
    assert stage.layers(32) == (k,)
    kept = stage.select_tokens(context, k)
    stored = data["image_scores"]
    close(row.mean(0)[start : start + n], stored, terms=len(row), scale=stored)  # mean over heads
    assert torch.equal(kept, data["keep_index"])
    assert torch.equal(layout.select(kept).position[0], data["position_ids_after"][0])


def end_to_end(data: dict, meta: dict) -> None:
    run, last = decoder_run(data, FastV(0.5, k=3), 35, 576, data["inputs_embeds"][0, :1])
    close(last[0], data["last_hidden"][0, -1], terms=network(run.adapter.model, 631))
    kept = (run.trace.depth == 6).nonzero().flatten() + 35
    index = data["keep_index"]
    assert torch.equal(kept, index[(index >= 35) & (index < 35 + 576)])
    assert run.cache.lengths() == [631] * 3 + [len(index)] * 3
