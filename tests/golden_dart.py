"""Replays the stored DART cases: pivots by their keys, and the tokens that each of them takes."""

from __future__ import annotations

import torch

from vlmfast.compressors.prefill.dart import retained
from vlmfast.compressors.select import top


def choice(data: dict, meta: dict) -> None:
    hidden, keys = data["hidden_after_final_norm"][0], data["key_states"][0]
    start, n = int(data["image_start"]), int(data["image_len"])
    rows = torch.arange(len(hidden))
    visual = (rows >= start) & (rows < start + n)
    norm = keys.abs().sum((0, 2))
    first = top(norm, visual, int(data["pivot_image"]))
    text = top(norm, rows >= start + n, int(data["pivot_text"]))
    # The authors iterate over a set of small numbers.
    pivots = list(set((first | text).nonzero()[:, 0].tolist()))
    t = int(n * (1 - float(data["reduction_ratio"])) / len(pivots))
    taken = retained(hidden, visual & ~first, pivots, [t] * len(pivots))
    assert torch.equal((first | taken).nonzero()[:, 0], data["kept_sorted"])
