"""Replays the stored DART cases: pivots by their keys, and the tokens that each of them takes."""

from __future__ import annotations

import torch

from support.golden.case import Reader
from vlmfast.compressors.prefill.dart import retained
from vlmfast.compressors.select import top


def choice(data: Reader, meta: Reader) -> None:
    hidden, keys = data["hidden_after_final_norm"][0], data["key_states"][0]
    start, n = data.count("image_start"), data.count("image_len")
    rows = torch.arange(len(hidden))
    visual = (rows >= start) & (rows < start + n)
    norm = keys.abs().sum((0, 2))
    first = top(norm, visual, data.count("pivot_image"))
    text = top(norm, rows >= start + n, data.count("pivot_text"))
    # The authors iterate over a set of small numbers.
    pivots = list(set((first | text).nonzero()[:, 0].tolist()))
    t = int(n * (1 - data.number("reduction_ratio")) / len(pivots))
    taken = retained(hidden, visual & ~first, pivots, [t] * len(pivots))
    assert torch.equal((first | taken).nonzero()[:, 0], data["kept_sorted"])
