"""Replays the stored ToMe cases: who merges into whom, means and sizes, twice in a row."""

from __future__ import annotations

import torch

from vlmfast.compressors.tome import bipartite, merge

EXACT = {"rtol": 1e-5, "atol": 1e-5}


def case(data: dict, meta: dict) -> None:
    r, cls = int(data["r"]), bool(int(data["class_token"]))
    x = data["x"]
    size = torch.ones(x.shape[:2])
    source = bipartite(data["metric"], r, cls)
    stored = data["source"].long().argmax(1)  # (V, M, N): the row that each belongs to
    assert torch.equal(data["source"].sum(1), torch.ones_like(stored, dtype=torch.uint8))
    out, total = merge(x, size, source)
    assert torch.equal(total, data["size"][..., 0])
    # The authors leave the rows of A that stay in their order too: the same rows, row by row.
    assert torch.equal(source, stored)
    torch.testing.assert_close(out, data["out"], **EXACT)
    spread = out.gather(1, source[..., None].expand(-1, -1, x.shape[2]))
    torch.testing.assert_close(spread, data["unmerged"], **EXACT)
    source2 = bipartite(data["metric2"], r, cls)
    out2, total2 = merge(out, total, source2)
    torch.testing.assert_close(out2, data["out2"], **EXACT)
    assert torch.equal(total2, data["size2"][..., 0])


def sized_case(data: dict, meta: dict) -> None:
    """One merge of rows that stand for several patches each."""
    size = data["size"][..., 0]
    source = bipartite(data["metric"], int(meta["r"]), meta["class_token"] == "True")
    # Where there is no CLS, the authors leave the rows of A that stay in no order.
    theirs = data["source"].argmax(1)
    place = torch.zeros_like(total_of(theirs)).scatter(1, theirs, source)
    assert torch.equal(place.gather(1, theirs), source)
    out, total = merge(data["x"], size, source)
    out = out.gather(1, place[..., None].expand(-1, -1, out.shape[2]))
    torch.testing.assert_close(out, data["y"], **EXACT)
    torch.testing.assert_close(total.gather(1, place), data["size_out"][..., 0], **EXACT)


def total_of(source: torch.Tensor) -> torch.Tensor:
    """As many columns as there are rows in what ``source`` (V, N) makes."""
    return source[:, : int(source.max()) + 1]
