"""A kernel with a loop over a run-time bound, which not every interpreter supports."""

from __future__ import annotations

from typing import no_type_check

from vlmfast.kernels._triton import tl, triton


@triton.jit
@no_type_check
def count(out, n):
    for i in range(n):
        tl.store(out, i)
