"""Replays the stored ZipVL cases: how many tokens are important, and which."""

from __future__ import annotations

import torch

from support.closeness import close
from support.golden.case import Reader
from vlmfast.compressors.prefill.zipvl import important
from vlmfast.kernels.col_stats import col_stats
from vlmfast.kernels.select import mass_count


def tau_case(data: Reader, meta: Reader) -> None:
    q, k, rows, tau = data["q"][0], data["k"][0], data["rows"].long(), meta.number("tau")
    stats = col_stats(q, k, rows)
    mass = stats["sum"].mean((0, 1))
    _, n, dim = k.shape
    terms = dim + n + len(rows) + len(q)  # of a logit, of its row, of a column, of all heads
    close(mass, data["mass"], terms=terms, scale=data["mass"])
    assert torch.equal(stats["nnz"], data["nnz"].long())
    seen = stats["nnz"].clamp(min=1)
    close(mass / seen, data["norm"], terms=terms, scale=data["norm"])
    assert int(mass_count(mass, tau * len(rows))) == int(data["budget"])
    assert torch.equal(important(q, k, rows, tau), data["important"])
