"""Calls launchers on a machine without a GPU: Triton binds, specialises and compiles, and stops.

What a launch passes (pointers that are None, tuples, sizes of 1, types) is looked at by Triton's
binder, which the interpreter does not have. Run by test_compile.py; prints the kernels it bound.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vlmfast.kernels import col_stats, gather_rows, select


class NoDriver:
    """A GPU that answers what it is, and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def bind(kernel: JITFunction, grid: tuple[int, ...]):
    def launch(*args, **kwargs) -> None:
        assert all(size > 0 for size in grid) and all(size <= 65535 for size in grid[1:])
        kernel.warmup(*args, grid=grid, **kwargs)
        print(kernel.__name__)

    return launch


driver.set_active(NoDriver())
JITFunction.__getitem__ = bind
for module in (col_stats, gather_rows, select):
    module.use_triton = lambda *args: True

query = torch.randn(4, 100, 80).bfloat16()
key = query[:2].clone()
col_stats.col_stats(query, key)
rows, bias = torch.arange(8), torch.zeros(100)
col_stats.col_stats(query, key, rows, threshold=0.1, bias=bias, causal=False, want=("count",))

scores = torch.randn(3, 100)
select.top_k(scores, 5)
select.top_k(scores, torch.ones(3, dtype=torch.int64), scores[0] > 0, width=9)
select.mass_count(scores.abs(), 0.3)

shared, own = torch.arange(7), torch.arange(14).view(2, 7)
gather_rows.gather_rows(shared, query[:1], torch.randn(1, 100, 16), dim=1)
gather_rows.gather_rows(own, key, key[..., 0] > 0, torch.ones(2, 100), counts=shared[3:5])
gather_rows.gather_rows(own, key, counts=torch.tensor(3))
