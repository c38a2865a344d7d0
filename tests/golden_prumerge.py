"""Replays the stored PruMerge cases: attention of one wide head, kept patches, and the rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from closeness import close
from helpers_layout import REQUEST, make_image, stats_of
from vlmfast.compressors.select import best
from vlmfast.compressors.tokens.prumerge import PruMerge, mixture, one_head, outliers
from vlmfast.core.layout import VisualTokens

HEADS = 4


def case(data: dict, meta: dict) -> None:
    q, k, features = data["q_layer23"], data["k_layer23"], data["features_penultimate"]
    views, n = q.shape[0], q.shape[1] - 1
    attention = data["cls_attn"]
    scaled = (q[:, :1] @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    # Logits over the width, rows over the patches; a logit's absolute error is its probability's
    # relative error.
    terms, size = q.shape[-1] + n, float(scaled.abs().max())
    close(scaled.softmax(-1)[:, 0, 1:], attention, terms=terms, scale=size * attention)
    # From the rows of several heads, as the engine has them.
    heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k)]
    rows = heads[0][:, :, :1] @ heads[1].transpose(2, 3) * (q.shape[-1] // HEADS) ** -0.5
    rows = rows.softmax(-1)[:, :, 0, 1:]
    # The inverse takes logarithms of probabilities that were rounded.
    close(one_head(rows), attention, terms=HEADS * terms, scale=size * attention)

    kept = data["topk_index"]
    if int(data["adaptive"]):
        # One ratio for the batch.
        k_all = outliers(attention.flatten()) / attention.numel()
        assert int(n * k_all) == kept.shape[1]
    else:
        assert int(n * float(data["reduction_ratio"])) == kept.shape[1]
    for view in range(views):
        chosen = best(attention[view][None], [kept.shape[1]])[0].nonzero()[:, 0]
        assert torch.equal(chosen, kept[view].sort().values)
        index = kept[view]
        if int(data["plus"]):
            step = int(1 / float(data["reduction_ratio"]))
            index = torch.cat([index, torch.arange(step // 2, n - 1, step)])
        # Patches that are chosen twice occur twice, also as neighbours; the authors' list of
        # the others is then too short by as many, at its beginning.
        gone = torch.ones(n, dtype=torch.bool).index_fill(0, index, False).nonzero()[:, 0]
        gone = gone[len(index) - len(index.unique()) :]
        rows_of = torch.cat([index, gone])
        mix = mixture(attention[view, rows_of], k[view, 1:][rows_of], torch.arange(len(index)))
        ours = mix @ features[view, 1:][rows_of]
        close(ours, data["out"][view], terms=n + k.shape[-1])  # mixtures; their choice by keys
    if views == 1 and not int(data["plus"]):
        stage_delivers(data, rows, n)


def stage_delivers(data: dict, rows: Tensor, n: int) -> None:
    """The same rows in the order of the prompt; that of dropped tokens represents all of them."""
    side = math.isqrt(n)
    tokens, geometry = make_image((0, 0), (side, side))
    tokens = VisualTokens(data["features_penultimate"][0, 1:], tokens.layout)
    stats = stats_of((geometry,), {23: rows}, {23: data["k_layer23"][:, 1:]})
    out = PruMerge().reduce(tokens, stats, REQUEST)
    kept = data["topk_index"][0]
    gone = torch.ones(n, dtype=torch.bool).index_fill(0, kept, False).nonzero()[-1]
    order = torch.cat([kept, gone])
    assert torch.equal(out.layout.order, order.sort().values)
    stored = data["out"][0][order.argsort()]
    close(out.features, stored, terms=n + data["k_layer23"].shape[-1])
    assert out.layout.weight.sum() == n
