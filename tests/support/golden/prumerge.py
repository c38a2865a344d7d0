"""Replays the stored PruMerge cases: attention of one wide head, kept patches, and the rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support.closeness import close
from support.golden.case import Reader, chosen, coarsest, marked, wide
from support.helpers_layout import REQUEST, make_image, stats_of
from vlmfast.compressors.select import best
from vlmfast.compressors.tokens.prumerge import PruMerge, mixture, one_head, outliers
from vlmfast.compressors.tokens.prumerge_plus import PruMergePlus
from vlmfast.core.layout import VisualTokens

HEADS = 4


def case(data: Reader, meta: Reader) -> None:
    names = ("q_layer23", "k_layer23", "features_penultimate", "cls_attn")
    q, k, features, attention = (wide(data[name]) for name in names)
    views, n = q.shape[0], q.shape[1] - 1
    scaled = (q[:, :1] @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    # Logits over the width, rows over the patches; a logit's absolute error is its probability's
    # relative error.
    terms, size = q.shape[-1] + n, float(scaled.abs().max())
    close(scaled.softmax(-1)[:, 0, 1:], data["cls_attn"], terms=terms, scale=size * attention)
    # From the rows of several heads, as the engine has them.
    heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k)]
    rows = heads[0][:, :, :1] @ heads[1].transpose(2, 3) * (q.shape[-1] // HEADS) ** -0.5
    rows = rows.softmax(-1)[:, :, 0, 1:]
    # The inverse takes logarithms of probabilities that were rounded.
    close(one_head(rows), data["cls_attn"], terms=HEADS * terms, scale=size * attention)

    kept = data["topk_index"]
    if data.flag("adaptive"):
        # One ratio for the batch.
        ratio = outliers([attention.flatten()])[0] / attention.numel()
    else:
        ratio = data.number("reduction_ratio")
    count = int(n * ratio)
    plus, adaptive = data.flag("plus"), data.flag("adaptive")
    for view in range(views):
        index = kept[view]
        chosen(
            attention[view][None],
            best(attention[view][None], [count]),
            marked(index[None, :count], n),
            terms,
            coarsest(data, ("q_", "k_")),
        )
        if len(index) == count and plus:
            index = torch.cat([index, grid(index, n, ratio, adaptive)])
        # Patches that are chosen twice occur twice, also as neighbours; the authors' list of
        # the others is then too short by as many, at its beginning.
        gone = torch.ones(n, dtype=torch.bool).index_fill(0, index, False).nonzero()[:, 0]
        gone = gone[len(index) - len(index.unique()) :]
        rows_of = torch.cat([index, gone])
        mix = mixture(attention[view, rows_of], k[view, 1:][rows_of], torch.arange(len(index)))
        ours = mix @ features[view, 1:][rows_of]
        close(ours, data["out"][view], terms=n + k.shape[-1])  # mixtures; their choice by keys
    if views == 1 and (adaptive or not plus):
        keep = None if adaptive else (count + 1) / n
        stage = (PruMergePlus if plus else PruMerge)(keep=keep)
        stage_delivers(data, stage, rows, index)


def grid(kept: Tensor, n: int, ratio: float, adaptive: bool) -> Tensor:
    """Patches that PruMerge+ adds in equal steps; for training with a fixed ratio, some twice."""
    step = int(1 / ratio)
    if not adaptive:
        return torch.arange(step // 2, n - 1, step)
    even = torch.arange(0, n - 1, step // 3)
    return even[~torch.isin(even, kept)]


def stage_delivers(data: Reader, stage: PruMerge, rows: Tensor, kept: Tensor) -> None:
    """The same rows in the order of the prompt; that of dropped tokens represents all of them."""
    n = rows.shape[-1]
    side = math.isqrt(n)
    tokens, geometry = make_image((0, 0), (side, side))
    tokens = VisualTokens(wide(data["features_penultimate"])[0, 1:], tokens.layout)
    keys = wide(data["k_layer23"])
    stats = stats_of((geometry,), {23: rows}, {23: keys[:, 1:]})
    out = stage.reduce(tokens, stats, REQUEST)
    gone = torch.ones(n, dtype=torch.bool).index_fill(0, kept, False).nonzero()[-1]
    order = torch.cat([kept, gone])
    assert torch.equal(out.layout.order, order.sort().values)
    stored = data["out"][0][order.argsort()]
    close(out.features, stored, terms=n + keys.shape[-1])
    assert out.layout.weight.sum() == n
