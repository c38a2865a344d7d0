"""Replays the stored ToMe cases: merge targets, means and sizes, twice in a row."""

from __future__ import annotations

import torch
from torch.nn.functional import one_hot

from support.closeness import close
from support.golden.case import Reader
from vlmfast.compressors.encoder.tome import bipartite, merge


def case(data: Reader, meta: Reader) -> None:
    r, cls = data.count("r"), data.flag("class_token")
    x = data["x"]
    size = torch.ones(x.shape[:2])
    source = bipartite(data["metric"], r, cls)
    stored = data["source"].long().argmax(1)  # (V, M, N): the output row of each input row
    assert torch.equal(data["source"].sum(1), torch.ones_like(stored, dtype=torch.uint8))
    out, total = merge(x, size, source)
    assert torch.equal(total, data["size"][..., 0])
    # The authors leave the kept rows of A in their order too: the same rows, row by row.
    assert torch.equal(source, stored)
    close(out, data["out"], terms=x.shape[1])  # the mean of at most all rows
    spread = out.gather(1, source[..., None].expand(-1, -1, x.shape[2]))
    close(spread, data["unmerged"], terms=x.shape[1])
    source2 = bipartite(data["metric2"], r, cls)
    out2, total2 = merge(out, total, source2)
    close(out2, data["out2"], terms=2 * x.shape[1])
    assert torch.equal(total2, data["size2"][..., 0])


def sized_case(data: Reader, meta: Reader) -> None:
    """One merge of rows that represent several patches each."""
    size = data["size"][..., 0]
    source = bipartite(data["metric"], meta.count("r"), meta.flag("class_token"))
    # Without CLS, the authors leave the kept rows of A in no order.
    theirs = data["source"].argmax(1)
    assert torch.equal(data["source"], one_hot(theirs).transpose(1, 2).to(data["source"].dtype))
    place = torch.zeros_like(total_of(theirs)).scatter(1, theirs, source)
    assert torch.equal(place.gather(1, theirs), source)
    out, total = merge(data["x"], size, source)
    out = out.gather(1, place[..., None].expand(-1, -1, out.shape[2]))
    close(out, data["y"], terms=size.shape[1])
    assert torch.equal(total.gather(1, place), data["size_out"][..., 0])  # sums of whole numbers


def total_of(source: torch.Tensor) -> torch.Tensor:
    """As many columns as ``source`` (V, N) has output rows."""
    return source[:, : int(source.max()) + 1]
