"""A kernel with a loop over a run-time bound, which not every interpreter supports."""

from __future__ import annotations

from vlmfast.kernels._triton import tl, triton


@triton.jit
def count(out, n):
    for i in range(n):
        tl.store(out, i)
