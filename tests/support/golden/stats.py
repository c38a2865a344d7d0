"""Replays the stored column statistics of attention over some query rows."""

from __future__ import annotations

import torch

from support.closeness import close
from support.golden.case import Reader
from vlmfast.kernels.col_stats import col_stats, row_lse


def colstats_case(data: Reader, meta: Reader) -> None:
    """Every statistic per query head and key; counts may differ by one at their threshold."""
    n, dim = data["k"].shape[2:]
    if meta["kind"] == "all":  # other kinds name how the stored rows were chosen
        assert torch.equal(data["rows"].long(), torch.arange(n))
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
        rows = row_lse(data["q"][b], data["k"][b], data["rows"].long(), start=start)
        for mine, name in zip(rows, ("lse", "rowmax_logit"), strict=True):
            close(mine, data[name][b], terms=terms)
