"""Replays the stored SparseVLM cases: raters, scores and kept tokens; groups and their means."""

from __future__ import annotations

import torch

from support.closeness import close
from support.golden.case import Reader
from support.golden.decoder import image_layout
from vlmfast.compressors.prefill.sparsevlm import PUBLISHED, SparseVLM, clusters, raters
from vlmfast.compressors.select import top
from vlmfast.core.contexts import PrefillContext

START, TEXT = 35, 20


def choice(data: Reader, meta: Reader) -> None:
    attention, hidden = data["attn_text_rows"][0], data["hidden_states_layer_input"][0]
    total = attention.shape[-1]
    n = total - START - TEXT
    rate, score = raters(hidden[START : START + n], hidden[START + n :])
    stored = data["rater_score"][0]
    # Logits over the width, rows over the text, columns over the image. A logit's error
    # grows with it: these are not divided by the root of the width.
    size = float((hidden[START : START + n] @ hidden[START + n :].T).abs().max())
    close(score, stored, terms=hidden.shape[1] + TEXT + n, scale=size * stored)
    assert torch.equal(rate.nonzero()[:, 0], data["rater_index_in_text"])

    layout = image_layout(total, START, n)
    ours = attention[:, rate].mean((0, 1))
    stored = data["visual_score"][0]
    close(ours[START : START + n], stored, terms=len(attention) + TEXT, scale=stored)
    number = (2, 6, 15).index(data.count("layer"))
    retain = str(data.count("retain"))
    kept = data.choice("retain", PUBLISHED)[number]
    mask = data["keep_mask"][0].bool()
    assert torch.equal(top(ours, layout.visual, min(kept, n - 1))[START : START + n], mask)

    # The stage, without recycling: these very tokens.
    (_, drop) = SparseVLM(published=retain, recycle=False).expand()
    layer = drop.layers(32)[number]
    notes = {"sparsevlm": {"raters": rate, "all": 576}}
    context = PrefillContext(depth=32, layout=layout, stats={layer - 1: attention}, notes=notes)
    rows = drop.select_tokens(context, layer)
    assert torch.equal(
        rows, (~layout.visual).index_fill(0, START + mask.nonzero()[:, 0], True).nonzero()[:, 0]
    )


def cluster(data: Reader, meta: Reader) -> None:
    means, _, _ = clusters(data["x"][0], data.count("cluster_num"))
    close(means, data["out"][0], terms=data["x"].shape[1])
