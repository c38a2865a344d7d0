"""Replays the stored SparseVLM cases: raters, scores and what stays; groups and their means."""

from __future__ import annotations

import torch

from golden_decoder import image_layout
from vlmfast.compressors._select import top
from vlmfast.compressors.sparsevlm import PUBLISHED, SparseVLM, clusters, raters
from vlmfast.stages import Phase, Step

START, TEXT = 35, 20


def choice(data: dict, meta: dict) -> None:
    attention, hidden = data["attn_text_rows"][0], data["hidden_states_layer_input"][0]
    total = attention.shape[-1]
    n = total - START - TEXT
    rate, score = raters(hidden[START : START + n], hidden[START + n :])
    torch.testing.assert_close(score, data["rater_score"][0], rtol=1e-4, atol=1e-7)
    assert torch.equal(rate.nonzero()[:, 0], data["rater_index_in_text"])

    layout = image_layout(total, START, n)
    ours = attention[:, rate].mean((0, 1))
    torch.testing.assert_close(
        ours[START : START + n], data["visual_score"][0], rtol=1e-5, atol=1e-8
    )
    number = (2, 6, 15).index(int(data["layer"]))
    kept = PUBLISHED[str(int(data["retain"]))][number]
    mask = data["keep_mask"][0].bool()
    assert torch.equal(top(ours, layout.visual, min(kept, n - 1))[START : START + n], mask)

    # The stage, without recycling: these very tokens.
    (_, drop) = SparseVLM(published=str(int(data["retain"])), recycle=False).expand()
    layer = drop.layers(32)[number]
    notes = {"sparsevlm": {"raters": rate, "all": 576}}
    step = Step(Phase.PREFILL, depth=32, layout=layout, stats={layer - 1: attention}, notes=notes)
    rows = drop.keep(step, layer)
    assert torch.equal(
        rows, (~layout.visual).index_fill(0, START + mask.nonzero()[:, 0], True).nonzero()[:, 0]
    )


def cluster(data: dict, meta: dict) -> None:
    means, _, _ = clusters(data["x"][0], int(data["cluster_num"]))
    torch.testing.assert_close(means, data["out"][0], rtol=1e-5, atol=1e-5)
