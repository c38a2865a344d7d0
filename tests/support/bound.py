"""Call launchers without a GPU: Triton binds, specializes and compiles, but does not launch.

Triton's binder, which the interpreter does not use, checks the arguments of a launch (None
pointers, tuples, sizes of 1, types). Run by test_compile.py; prints the kernels that were bound.
"""

from __future__ import annotations

import importlib

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vlmfast.kernels import compile
from vlmfast.kernels.calls import Shape
from vlmfast.kernels.catalogue import CASES

# Without those whose host code reads what an earlier launch computed.
FILES = {
    "col_stats", "decode_mixed", "decode_slots", "few_rows", "gather_rows", "norm_rope_append",
    "quantize_kv", "select", "swiglu", "tree_verify",
}  # fmt: skip


def bind(kernel: JITFunction, grid: tuple[int, ...]):
    def launch(*args, **kwargs) -> None:
        assert all(size > 0 for size in grid) and all(size <= 65535 for size in grid[1:])
        kernel.warmup(*args, grid=grid, **kwargs)
        print(kernel.__name__)

    return launch


driver.set_active(compile.NoDevice(90))
JITFunction.__getitem__ = bind
for file in FILES:
    importlib.import_module(f"vlmfast.kernels.{file}").use_triton = lambda *args: True
for case in CASES:
    if case.kernel in FILES and case.checked:
        shared = 4 if "bit" in case.name else 2  # one query head or two, which is another kernel
        case.call(Shape(4, shared, 80, 100, 48, 48, dtype=torch.bfloat16)).run()
