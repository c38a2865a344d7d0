"""Replays the stored column statistics of attention over some query rows."""

from __future__ import annotations

import torch

from vlmfast.kernels.col_stats import col_stats


def colstats_case(data: dict, meta: dict) -> None:
    """Every statistic per query head and key; counts may differ by one at their threshold."""
    for b, start in enumerate(data["start"].tolist()):
        ours = col_stats(
            data["q"][b], data["k"][b], data["rows"].long(), threshold=0.01, start=start
        )
        for name in ("sum", "sumsq", "max"):
            torch.testing.assert_close(
                ours[name].flatten(0, 1), data[f"col_{name}"][b], rtol=1e-5, atol=1e-6
            )
        assert (ours["count"].flatten(0, 1) - data["col_count"][b]).abs().max() <= 1
        torch.testing.assert_close(
            ours["entropy"].sum(-1).flatten(), data["entropy_sum"][b], rtol=1e-5, atol=1e-5
        )
        assert torch.equal(ours["nnz"].int(), data["nnz"][b])
