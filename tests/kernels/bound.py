"""Call launchers without a GPU: Triton binds, specializes and compiles, but does not launch.

Triton's binder, which the interpreter does not use, checks the arguments of a launch (None
pointers, tuples, sizes of 1, types). Run by test_compile.py; prints the kernels that were bound.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vlmfast.kernels import (
    col_stats,
    decode_mixed,
    decode_slots,
    few_rows,
    gather_rows,
    norm_rope_append,
    quantize_kv,
    select,
    swiglu,
    tree_verify,
)


class NoDriver:
    """A driver that reports its target, and nothing else."""

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
for module in (
    col_stats,
    decode_mixed,
    decode_slots,
    few_rows,
    gather_rows,
    norm_rope_append,
    quantize_kv,
    select,
    swiglu,
    tree_verify,
):
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

keys, values = (torch.randn(2, 3, 70, 128).bfloat16() for _ in range(2))
order, lengths = torch.arange(70).expand(2, 3, -1), torch.full((2, 3), 70)
own = {"dtype": torch.float16}
segments = [
    quantize_kv.quantize(keys, values, order, lengths, 4, scaled=True, **own),
    quantize_kv.quantize(keys, values, order, lengths, 2, key_group=32, value_group=32, **own),
]
bits, queries = (2 << torch.arange(9)) - 1, torch.randn(2, 6, 9, 128).bfloat16()
tree = (keys[:, :, :9], values[:, :, 9:18])
tree_verify.tree_verify(queries, keys, values, lengths, *tree, bits, segments=segments)
one = (queries[:, :3, :1], keys[:, :, :0], values[:, :, :0], lengths, tree[0][:, :, :1])
tree_verify.tree_verify(*one, tree[1][:, :, :1], bits[:1], bias=torch.zeros(2, 3, 0))
mask = torch.ones(2, 1, 1, 70, dtype=torch.bool)
decode_mixed.decode_mixed(queries[:, :, :1], segments, keys, values, mask, want_attention_mass=True)

listed = torch.arange(14).expand(2, 3, -1), lengths - 60, lengths - 4, lengths
decode_slots.decode_slots(queries[:, :, :1], keys, values, *listed, 4)
decode_slots.decode_slots(queries[:, :3, :1], keys, values, *listed, 4, bias=torch.zeros(2, 3, 70))

x, table = torch.randn(2, 1, 48).bfloat16(), torch.randn(2, 1, 128).bfloat16()
norm_rope_append.residual_norm(x, x[0, 0], 1e-6)
norm_rope_append.residual_norm(x, x[0, 0], 1e-6, x)
norm_rope_append.residual_norm(x, x[0, 0], 1e-6, x, x[1, 0], unit_offset=True)
heads = (queries[:, :, :1], keys[:, :, :1], values[:, :, :1])
norm_rope_append.rotate_append(*heads, table, table, keys, values, lengths)
head = norm_rope_append.HeadNorm(table[0, 0], table[1, 0], 1e-6)
norm_rope_append.rotate_append(*heads, table, table, keys, values, lengths, head)
swiglu.swiglu(x, x)
swiglu.geglu_tanh(x, x)

few_rows.linears(x, (x[0].repeat(40, 1), x[0]), (None, x[0, 0, :1]))
few_rows.linears(x.repeat(1, 4, 1), (x[0].repeat(40, 1), x[0], x[0]), (None, x[0, 0, :1], None))
few_rows.gated_linear(x[:1], (x[0], x[1]))
few_rows.gated_linear(x, (x[0].repeat(40, 1), x[1].repeat(40, 1)), gelu_tanh=True)
