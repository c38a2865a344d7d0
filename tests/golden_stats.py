"""Replays the stored column statistics of attention over some query rows."""

from __future__ import annotations

import torch

from closeness import close
from vlmfast.kernels.col_stats import col_stats


def colstats_case(data: dict, meta: dict) -> None:
    """Every statistic per query head and key; counts may differ by one at their threshold."""
    n, dim = data["k"].shape[2:]
    terms = dim + n + data["rows"].numel()  # of a logit, of its row, and of a column
    for b, start in enumerate(data["start"].tolist()):
        ours = col_stats(
            data["q"][b], data["k"][b], data["rows"].long(), threshold=0.01, start=start
        )
        for name in ("sum", "sumsq", "max"):
            stored = data[f"col_{name}"][b]
            close(ours[name].flatten(0, 1), stored, terms=terms, scale=stored)
        assert (ours["count"].flatten(0, 1) - data["col_count"][b]).abs().max() <= 1
        close(ours["entropy"].sum(-1).flatten(), data["entropy_sum"][b], terms=terms + n)
        assert torch.equal(ours["nnz"].int(), data["nnz"][b])
