"""Replays the stored DivPrune cases: the choice and its order."""

from __future__ import annotations

import torch

from support.golden.case import Reader
from support.helpers_layout import REQUEST, make_image
from vlmfast.compressors.select import count
from vlmfast.compressors.tokens.divprune import DivPrune
from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.diversity import cosine, max_min


def choice(data: Reader, meta: Reader) -> None:
    features, rate = data["visual_tokens"], data.number("ratio")
    n = len(features)
    k = count(rate, n)
    order = data["selected_in_order"]
    assert k == len(order)
    if features.dtype == torch.float32:
        similarity = cosine(features)
    else:  # distances in the precision of the features, as in the authors' code
        units = features / features.norm(dim=-1, keepdim=True)
        similarity = 1 - (1.0 - units @ units.T).float()
    assert torch.equal(max_min(similarity, k), order)
    assert torch.equal(order.sort().values, data["kept_sorted"])

    if features.dtype == torch.float32:
        tokens, geometry = make_image((0, 0), (1, n))
        tokens = VisualTokens(features, tokens.layout)
        kept = DivPrune(rate).reduce(tokens, VisionStats((geometry,), {}), REQUEST)
        assert torch.equal(kept.layout.order, data["kept_sorted"])
