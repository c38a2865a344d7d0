"""Check and time every kernel at its shapes: ``python benchmarks/kernels.py``.

Shapes are one layer of A: LLaVA-1.5-7B at 640 tokens, B: LLaVA-NeXT-7B at 2,944, C: the same with
Mistral's 8 KV heads, D: Qwen2.5-7B's language model at 8,192, E: the same at 32,768; bfloat16.

For each case and shape the kernel's result is first compared with that of its PyTorch reference
(``VLMFAST_KERNELS=torch``). If they differ, the row has no time. Otherwise the kernel is timed as
the replay of a CUDA graph, with the L2 cache flushed before every replay.
The reference and equivalent PyTorch functions, whose results are compared too, are timed in the
same way. Bytes are the minimum that the task moves, and operations are those of its matrix
products. Both are compared with the bandwidth of a large copy and the rate of a large matrix
product, measured in the same process.

============  =====================================================================================
``time``      median of the replays, on the device
``floor``     the larger of bytes over copy bandwidth and operations over matrix rate; the table
              shows the fraction of it that is reached
============  =====================================================================================

The rows run in another process, which is replaced after a case that fails, crashes or hangs. Rows
are written immediately, and ``--missing`` runs those that are not in the result file. It needs a
GPU; ``vlmfast check`` compares kernels with their references without one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from typing import Any
from unittest import mock

import gpu_limits
import harness
import torch
from torch import Tensor
from torch.nn import functional

from vlmfast.eval.results import write_json

HALF = torch.bfloat16
START_S = 120.0  # seconds in which a process must start
# Allowed relative error of a row, by the dtype of a result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """One layer of a language model over a prompt: heads, KV heads, head dimension, tokens ..."""

    hq: int
    hk: int
    d: int
    length: int
    width: int
    ffn: int
    small: bool = False


SHAPES = {
    "A": Shape(32, 32, 128, 640, 4096, 11008),
    "B": Shape(32, 32, 128, 2944, 4096, 11008),
    "C": Shape(32, 8, 128, 2944, 4096, 14336),
    "D": Shape(28, 4, 128, 8192, 3584, 18944),
    "E": Shape(28, 4, 128, 32768, 3584, 18944),
}
# These check the cases.
SMALL_SHAPES = {
    "small": Shape(4, 2, 16, 48, 64, 96, small=True),
    "odd": Shape(2, 2, 24, 37, 40, 72, small=True),
}


@dataclass
class Other:
    """A PyTorch function that does the same work.

    ``same``: compare its result with the reference; otherwise it uses another storage format of
    the same values.
    """

    run: Callable[[], Any]
    same: bool = True


@dataclass
class Work:
    """One measurement.

    Parameters
    ----------
    run : callable
        Calls the public function; the reference is the same call under ``VLMFAST_KERNELS=torch``.
    bytes, flop : int
        Minimum number of bytes moved, and operations of the matrix products.
    others : dict of str to Other
    prepare : callable, optional
        Initializes the buffers that ``run`` writes to before a comparison.
    tolerance : float, optional
        Relative error of a row of floats; by default `TOLERANCE` of its dtype.
    allow : float
        Fraction of rows, or of integers, that may exceed the tolerance because of near ties.
    off : int
        Maximum difference of integers.
    """

    run: Callable[[], Any]
    bytes: int
    flop: int = 0
    others: dict[str, Other] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    tolerance: float | None = None
    allow: float = 0.0
    off: int = 0


# --- inputs of each kernel -----------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=_device()).to(dtype)


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, device=_device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_indices(total: int, keep: int, *leading: int) -> Tensor:
    """``keep`` of ``total`` indices, ascending, for each leading entry."""
    order = uniform(*leading, total).argsort(-1)[..., :keep]
    return order.sort(-1).values


def fifth(s: Shape) -> int:
    return s.length // 5


def pairs(s: Shape, rows: Tensor | None = None) -> int:
    """Number of pairs of a query row and a visible key."""
    n = s.length
    return n * (n + 1) // 2 if rows is None else int((rows + 1).sum())


def col_stats(s: Shape, rows: int | None, name: str = "col_stats") -> Work:
    """The last ``rows`` rows, as in methods with an observation window; or all."""
    from vlmfast.kernels import col_stats as kernel

    query, key = randn(s.hq, s.length, s.d), randn(s.hk, s.length, s.d)
    at = None
    if rows is not None:
        rows = min(rows, s.length // 2)
        at = torch.arange(s.length - rows, s.length, device=query.device)
    seen, asked = pairs(s, at), s.length if rows is None else rows
    moved = 2 * s.d * (s.hq * asked + s.hk * s.length)
    if name == "row_lse":
        run = partial(kernel.row_lse, query, key, at)
        return Work(run, moved + 8 * s.hq * asked, 2 * s.hq * s.d * seen)
    run = partial(kernel.col_stats, query, key, at, want=("sum",))
    # First the normalizers, then the sums: the products are computed twice.
    return Work(run, moved + 4 * s.hq * s.length, 2 * 2 * s.hq * s.d * seen)


def top_k(s: Shape) -> Work:
    from vlmfast.kernels import select

    scores, k = randn(s.hq, s.length, dtype=torch.float32), fifth(s)
    others = {"topk, sort": Other(lambda: scores.topk(k).indices.sort(-1).values)}
    return Work(lambda: select.top_k(scores, k), scores.nbytes + 8 * s.hq * k, others=others)


def mass_count(s: Shape) -> Work:
    from vlmfast.kernels import select

    mass = uniform(s.hq, s.length)
    target = 0.9 * mass.sum(-1)
    return Work(lambda: select.mass_count(mass, target), mass.nbytes, off=1)


def gather_states(s: Shape) -> Work:
    from vlmfast.kernels.gather_rows import gather_rows

    index = random_indices(s.length, fifth(s))
    states = randn(1, s.length, s.width)
    tables = [randn(1, s.length, s.d) for _ in range(2)]
    moved = 2 * 2 * len(index) * (s.width + 2 * s.d) + index.nbytes
    return Work(lambda: gather_rows(index, states, *tables, dim=1), moved)


def gather_kv(s: Shape) -> Work:
    from vlmfast.kernels.gather_rows import gather_rows

    index = random_indices(s.length, fifth(s), s.hk)
    keys, values = randn(s.hk, s.length, s.d), randn(s.hk, s.length, s.d)
    moved = 2 * 2 * 2 * index.numel() * s.d + index.nbytes
    return Work(lambda: gather_rows(index, keys, values), moved)


def merge(s: Shape) -> Work:
    from vlmfast.kernels.merge import merge_into

    keep = random_indices(s.length, fifth(s), s.hk)
    keys, values = randn(s.hk, s.length, s.d), randn(s.hk, s.length, s.d)
    kept, merged = keep.shape[1], s.length - keep.shape[1]
    moved = 2 * 2 * s.hk * s.d * (s.length + kept) + keep.nbytes
    # The nearest pivot may depend on the order of summation.
    return Work(
        lambda: merge_into(keys, values, keep), moved, 2 * s.hk * merged * kept * s.d, allow=2e-3
    )


KIVI = {"bits": 2, "key_group": 32, "value_group": 32}
ZIP4, ZIP2 = {"bits": 4, "scaled": True}, {"bits": 2, "scaled": True}


def segment(keys: Tensor, values: Tensor, bits: int, value_group: int | None = None, **more) -> Any:
    """Quantized keys and values (..., N, D)."""
    from vlmfast.kernels.quantize_kv import quantize

    n, d = keys.shape[-2:]
    order = torch.arange(n, device=keys.device).expand(keys.shape[:-1])
    lengths = torch.full(keys.shape[:-2], n, device=keys.device)
    group = None if value_group is None else math.gcd(value_group, d)
    more |= {"value_group": group, "dtype": torch.float16}
    return quantize(keys, values, order, lengths, bits, **more)


def read_bytes(part: Any) -> int:
    """Bytes that attention reads of a segment."""
    return sum(t.nbytes for t in part.tensors() if t is not part.order)


def quantize(s: Shape, how: dict[str, Any], slots: int | None = None) -> Work:
    """The whole prompt, or a page of ``slots`` slots."""
    slots = s.length if slots is None else min(slots, s.length)
    keys, values = randn(s.hk, slots, s.d), randn(s.hk, slots, s.d)
    made = segment(keys, values, **how)
    moved = keys.nbytes + values.nbytes + sum(t.nbytes for t in made.tensors())
    return Work(lambda: segment(keys, values, **how), moved, allow=1e-3)


def fused_attention(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's attention with a backend that does not store the attention map."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ways = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel([*ways, SDPBackend.EFFICIENT_ATTENTION]):
        return functional.scaled_dot_product_attention(*args, **kwargs)


def decode_mixed(s: Shape, parts: tuple[tuple[float, dict], ...], batch: int = 1) -> Work:
    """One token over the whole prompt; parts of it are quantized, at least 32 tokens are not."""
    from vlmfast.kernels.decode_mixed import decode_mixed as kernel

    query = randn(batch, s.hq, 1, s.d)
    keys, values = (randn(batch, s.hk, s.length, s.d) for _ in range(2))
    segments, at, coded = [], 0, s.length - min(32, s.length // 2)
    with references():
        for share, how in parts:
            n = int(share * coded)
            rows = slice(at, at + n)
            segments.append(segment(keys[:, :, rows], values[:, :, rows], **how))
            at += n
    tail = keys[:, :, at:].contiguous(), values[:, :, at:].contiguous()
    lengths = torch.full((batch, s.hk), s.length - at, device=query.device)
    moved = sum(map(read_bytes, segments)) + 2 * tail[0].nbytes + 2 * query.nbytes
    flop = 4 * batch * s.hq * s.d * s.length
    same = not segments
    sdpa = Other(lambda: fused_attention(query, keys, values, enable_gqa=s.hq != s.hk), same=same)
    return Work(
        lambda: kernel(query, segments, *tail, lengths)[0], moved, flop, {"SDPA in bf16": sdpa}
    )


def decode_slots(s: Shape, share: float, batch: int = 1) -> Work:
    """One token over a share of the prompt's slots, listed per KV head, and 32 newest ones."""
    from vlmfast.kernels.decode_slots import decode_slots as kernel

    newest = min(32, s.length // 2)
    start = s.length - newest
    count = max(int(share * start), 1)
    query = randn(batch, s.hq, 1, s.d)
    keys, values = (randn(batch, s.hk, s.length, s.d) for _ in range(2))
    order = torch.rand(batch, s.hk, start, device=query.device).argsort(-1)
    slots = order[..., :count].sort(-1).values
    counts = torch.full((batch, s.hk), count, device=query.device)
    first, end = torch.full_like(counts, start), torch.full_like(counts, s.length)
    new = torch.arange(start, s.length, device=query.device).expand(batch, s.hk, -1)
    index = torch.cat([slots, new], 2)[..., None].expand(-1, -1, -1, s.d)

    def gathered() -> Tensor:
        tail = keys.gather(2, index), values.gather(2, index)
        return fused_attention(query, *tail, enable_gqa=s.hq != s.hk)

    read = 2 * batch * s.hk * (count + newest) * s.d * keys.element_size()
    return Work(
        lambda: kernel(query, keys, values, slots, counts, first, end, newest)[0],
        read + slots.nbytes + 2 * query.nbytes,
        4 * batch * s.hq * s.d * (count + newest),
        {"gather, SDPA in bf16": Other(gathered)},
    )


def drafted(nodes: int) -> tuple[Tensor, Tensor]:
    """A binary tree: bits of the ancestors (T, 1), and the same as bool (T, T)."""
    rows: list[int] = []
    for node in range(nodes):
        rows.append((rows[(node - 1) // 2] if node else 0) | 1 << node)
    bits = torch.tensor(rows, device=_device())[:, None]
    return bits, (bits >> torch.arange(nodes, device=bits.device)) & 1 != 0


def tree_verify(s: Shape, nodes: int, how: dict[str, Any] | None = None) -> Work:
    """A drafted tree over the whole prompt, quantized or not."""
    from vlmfast.kernels.tree_verify import tree_verify as kernel

    bits, seen = drafted(nodes)
    query = randn(1, s.hq, nodes, s.d)
    keys, values = (randn(1, s.hk, s.length + nodes, s.d) for _ in range(2))
    own = keys[:, :, s.length :].contiguous(), values[:, :, s.length :].contiguous()
    context = keys[:, :, : s.length].contiguous(), values[:, :, : s.length].contiguous()
    lengths, segments = torch.full((1, s.hk), s.length, device=query.device), []
    if how is not None:
        with references():
            segments = [segment(*context, **how)]
        context, lengths = (context[0][:, :, :0], context[1][:, :, :0]), torch.zeros_like(lengths)
    moved = sum(map(read_bytes, segments)) + 2 * (context[0].nbytes + own[0].nbytes)
    pairs = nodes * s.length + int(seen.sum())
    # The query heads of a KV head as rows, so that no key is repeated.
    rows = query.reshape(1, s.hk, -1, s.d)
    mask = torch.cat([seen.new_ones(nodes, s.length), seen], 1).repeat(s.hq // s.hk, 1)
    sdpa = Other(
        lambda: fused_attention(rows, keys, values, mask).view(query.shape), same=how is None
    )
    return Work(
        lambda: kernel(query, *context, lengths, *own, bits, segments=segments)[0],
        moved + 2 * query.nbytes,
        4 * s.hq * s.d * pairs,
        {"SDPA with a mask in bf16": sdpa},
    )


def residual_norm(s: Shape, tokens: int) -> Work:
    from vlmfast.kernels.norm_rope_append import residual_norm as kernel

    x, residual, weight = randn(tokens, s.width), randn(tokens, s.width), randn(s.width)

    def unfused() -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, 1e-6), total

    moved = 4 * x.nbytes + weight.nbytes
    run = partial(kernel, x, weight, 1e-6, residual)
    return Work(run, moved, others={"add, rms_norm": Other(unfused)})


def rotate_append(s: Shape, batch: int) -> Work:
    from vlmfast.kernels.norm_rope_append import rotate_append as kernel

    capacity = min(s.length, 1024)
    query = randn(batch, s.hq, 1, s.d)
    key, value = randn(batch, s.hk, 1, s.d), randn(batch, s.hk, 1, s.d)
    keys, values = (
        torch.empty(batch, s.hk, capacity, s.d, dtype=HALF, device=key.device) for _ in "kv"
    )
    angle = 6.3 * uniform(batch, 1, s.d // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(HALF), angle.sin().to(HALF)
    length = torch.randint(0, capacity, (batch, s.hk), device=key.device)

    def prepare() -> None:
        keys.fill_(-7), values.fill_(-7)

    def run() -> tuple[Tensor, ...]:
        return kernel(query, key, value, cos, sin, keys, values, length), keys, values

    moved = 2 * (query.nbytes + key.nbytes + value.nbytes) + 2 * cos.nbytes
    return Work(run, moved, prepare=prepare)


def swiglu(s: Shape, tokens: int | None) -> Work:
    from vlmfast.kernels.swiglu import swiglu as kernel

    tokens = s.length if tokens is None else tokens
    gate, up = randn(tokens, s.ffn), randn(tokens, s.ffn)
    return Work(lambda: kernel(gate, up), 3 * gate.nbytes)


def linears(s: Shape, tokens: int, part: str) -> Work:
    """Linear layers of a decode step: ``qkv``, ``out``, or ``gated``, the first half of the MLP."""
    from vlmfast.kernels import few_rows

    x = randn(tokens, s.width)
    sizes = {
        "qkv": (s.hq * s.d, s.hk * s.d, s.hk * s.d),
        "out": (s.width,),
        "gated": (s.ffn, s.ffn),
    }[part]
    weights = [randn(size, s.width) / s.width**0.5 for size in sizes]
    moved = sum(weight.nbytes for weight in weights)
    flop = 2 * tokens * s.width * sum(sizes)

    def products() -> tuple[Tensor, ...]:
        return tuple(functional.linear(x, weight) for weight in weights)

    if part == "gated":

        def gated() -> Tensor:
            gate, up = products()
            return functional.silu(gate) * up

        return Work(
            lambda: few_rows.gated_linear(x, (weights[0], weights[1])),
            moved,
            flop,
            {"modules": Other(gated)},
        )
    biases = [None] * len(weights)
    return Work(
        lambda: few_rows.linears(x, weights, biases), moved, flop, {"modules": Other(products)}
    )


def attention(s: Shape, biased: bool) -> Work:
    """Causal, over the whole prompt."""
    from vlmfast.kernels.biased_attention import biased_attention as kernel

    n, grouped = s.length, s.hq != s.hk
    query = randn(1, s.hq, n, s.d)
    key, value = randn(1, s.hk, n, s.d), randn(1, s.hk, n, s.d)
    bias = torch.log(1 + 8 * uniform(n)) if biased else None
    if bias is None:
        others = {
            "SDPA": Other(
                lambda: fused_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            )
        }
    else:
        others = {}
        later = torch.ones(n, n, dtype=torch.bool, device=key.device).triu(1)
        added = bias.to(HALF).expand(n, n).masked_fill(later, -torch.inf)[None, None]
        # In half precision the mask rounds the bias, so the result is not comparable.
        others["SDPA with a map"] = Other(
            lambda: fused_attention(query, key, value, added, enable_gqa=grouped), same=False
        )
        if query.is_cuda and n >= 2048:
            others["FlexAttention"] = Other(_flex(query, key, value, bias, grouped))
    moved = 2 * query.nbytes + 2 * key.nbytes + (0 if bias is None else bias.nbytes)
    flop = 4 * s.hq * s.d * pairs(s)
    return Work(lambda: kernel(query, key, value, bias), moved, flop, others)


def _flex(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grouped: bool) -> Callable:
    """FlexAttention; compiled at the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = query.shape[2]
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device=query.device)

    def scored(score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return score + bias[k]

    return lambda: compiled(
        query, key, value, score_mod=scored, block_mask=mask, enable_gqa=grouped
    )


def cells(s: Shape) -> tuple[Tensor, Tensor]:
    """Cells of four rows each, some with fewer valid rows."""
    table = torch.arange(s.length // 4 * 4, device=_device()).view(-1, 4)
    valid = uniform(*table.shape) < 0.9
    valid[:, 0] = True
    return table, valid


def cell_average(s: Shape) -> Work:
    from vlmfast.kernels.pool import cell_average as kernel

    rows, weight, (table, valid) = randn(s.length, s.width), uniform(s.length) + 0.5, cells(s)
    moved = rows.nbytes + len(table) * s.width * 2 + table.nbytes + valid.nbytes
    return Work(lambda: kernel(rows, weight, table, valid), moved)


def cell_mix(s: Shape) -> Work:
    from vlmfast.kernels.pool import cell_mix as kernel

    rows, (table, valid) = randn(s.length, s.width, dtype=torch.float32), cells(s)
    score = randn(s.length, 8, dtype=torch.float32)
    moved = rows.nbytes + score.nbytes + len(table) * s.width * 4 + table.nbytes + valid.nbytes
    return Work(lambda: kernel(rows, score, table, valid), moved)


def resample(s: Shape) -> Work:
    from vlmfast.kernels.pool import resample as kernel

    queries, heads, dim = (5, 2, 16) if s.small else (80, 8, 64)
    query = randn(queries, heads, dim, dtype=torch.float32)
    key = randn(s.length, heads, dim, dtype=torch.float32)
    rows = randn(s.length, s.width, dtype=torch.float32)
    bias, at, position = uniform(s.length), uniform(queries, 2), uniform(s.length, 2)
    pull = uniform(heads)
    moved = rows.nbytes + key.nbytes + 4 * queries * (s.width + s.length)
    # Without `flop`, which is compared with the rate of half precision: this is float32.
    return Work(lambda: kernel(query, key, rows, bias, at, position, pull), moved)


def similar(s: Shape) -> tuple[Tensor, int]:
    """Cosine similarities of an image's tokens, and how many tokens are selected."""
    from vlmfast.kernels.diversity import cosine

    n = 24 if s.small else 576
    return cosine(randn(1, n, 32 if s.small else 1024, dtype=torch.float32)), n // 6


def max_min(s: Shape) -> Work:
    from vlmfast.kernels.diversity import max_min as kernel

    matrix, k = similar(s)
    return Work(lambda: kernel(matrix, k), 4 * k * len(matrix[0]))


def cover(s: Shape, rows: int = 576, share: float = 1 / 6) -> Work:
    from vlmfast.kernels.coverage import cover as kernel
    from vlmfast.kernels.diversity import cosine

    n = 24 if s.small else rows
    alike = cosine(randn(n, 32 if s.small else 1024, dtype=torch.float32)).clamp(min=0)
    # Multiples of a sixteenth: sums in any order are exact, so that the check has one result.
    alike, weight = ((16 * x).round() / 16 for x in (alike, uniform(n)))
    k = round(share * n)
    return Work(lambda: kernel(alike, k, scale=weight), k * alike.nbytes)


def dpp(s: Shape) -> Work:
    from vlmfast.kernels.diversity import dpp as kernel

    matrix, k = similar(s)
    return Work(lambda: kernel(matrix, k), 4 * (k + k * k // 2) * len(matrix[0]))


def density_peaks(s: Shape) -> Work:
    from vlmfast.kernels.diversity import density_peaks as kernel

    matrix, k = similar(s)
    distance = (1 - matrix).clamp(min=0)
    return Work(lambda: kernel(distance, k, 5), 2 * matrix.nbytes)


# --- the table of cases --------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One case: the kernel's file, its name, the shapes, and the function that builds `Work`."""

    file: str
    name: str
    shapes: str
    make: Callable[[Shape], Work]


# Parts of a prompt's tokens, and how they are stored.
FLOAT = ()
FOUR = ((1.0, ZIP4),)
MIXED = ((0.6, ZIP4), (0.4, ZIP2))
TWO = ((1.0, KIVI),)

CASES = [
    Case("col_stats", "col_stats, 64 rows", "ABCDE", partial(col_stats, rows=64)),
    Case("col_stats", "col_stats, all rows", "ABCD", partial(col_stats, rows=None)),
    Case("col_stats", "row_lse, 64 rows", "ABCDE", partial(col_stats, rows=64, name="row_lse")),
    Case("select", "top_k, a fifth", "ABCD", top_k),
    Case("select", "mass_count, 90 %", "ABCD", mass_count),
    Case("gather_rows", "gather_rows, states", "ABCDE", gather_states),
    Case("gather_rows", "gather_rows, KV", "ABCDE", gather_kv),
    Case("merge", "merge, keep a fifth", "ABCDE", merge),
    Case("quantize_kv", "quantize, 4 bit", "ABCDE", partial(quantize, how=ZIP4)),
    Case("quantize_kv", "quantize, 2 bit groups", "ABCDE", partial(quantize, how=KIVI)),
    Case("quantize_kv", "quantize, 2 bit, a page", "AD", partial(quantize, how=KIVI, slots=128)),
    Case("decode_mixed", "decode, bf16", "ABCDE", partial(decode_mixed, parts=FLOAT)),
    Case("decode_mixed", "decode, 4 bit", "ABCDE", partial(decode_mixed, parts=FOUR)),
    Case("decode_mixed", "decode, 4 and 2 bit", "ABCDE", partial(decode_mixed, parts=MIXED)),
    Case("decode_mixed", "decode, 2 bit groups", "ABCDE", partial(decode_mixed, parts=TWO)),
    Case(
        "decode_mixed", "decode, bf16, 16 at once", "BCD",
        partial(decode_mixed, parts=FLOAT, batch=16),
    ),
    Case(
        "decode_mixed", "decode, 4 bit, 16 at once", "BCD",
        partial(decode_mixed, parts=FOUR, batch=16),
    ),
    Case("decode_slots", "decode, a tenth", "ABCDE", partial(decode_slots, share=0.1)),
    Case(
        "decode_slots", "decode, a tenth, 16 at once", "BCD",
        partial(decode_slots, share=0.1, batch=16),
    ),
    Case("tree_verify", "tree of 26, bf16", "ABCDE", partial(tree_verify, nodes=26)),
    Case("tree_verify", "tree of 60, bf16", "ABCDE", partial(tree_verify, nodes=60)),
    Case("tree_verify", "tree of 26, 4 bit", "BCDE", partial(tree_verify, nodes=26, how=ZIP4)),
    Case("tree_verify", "tree of 60, 4 bit", "BCDE", partial(tree_verify, nodes=60, how=ZIP4)),
    Case("norm_rope_append", "residual_norm, 1 token", "AD", partial(residual_norm, tokens=1)),
    Case("norm_rope_append", "residual_norm, 32 tokens", "AD", partial(residual_norm, tokens=32)),
    Case("norm_rope_append", "rotate_append, 1 row", "ACD", partial(rotate_append, batch=1)),
    Case("norm_rope_append", "rotate_append, 32 rows", "ACD", partial(rotate_append, batch=32)),
    Case("swiglu", "swiglu, 1 token", "AD", partial(swiglu, tokens=1)),
    Case("swiglu", "swiglu, 32 tokens", "AD", partial(swiglu, tokens=32)),
    Case("swiglu", "swiglu, prompt", "ABCD", partial(swiglu, tokens=None)),
    *(
        Case("few_rows", f"{part}, {n} tokens", "AD", partial(linears, tokens=n, part=part))
        for part in ("qkv", "out", "gated")
        for n in (1, 4, 16)
    ),
    Case("biased_attention", "attention, causal", "ABCD", partial(attention, biased=False)),
    Case("biased_attention", "attention, with bias", "ABCD", partial(attention, biased=True)),
    Case("pool", "cell_average, 4 to 1", "BD", cell_average),
    Case("pool", "cell_mix, 4 to 1", "BD", cell_mix),
    Case("pool", "resample, 80 queries", "BD", resample),
    Case("coverage", "cover, a sixth of 576", "A", cover),
    Case("coverage", "cover, 644 of 1464", "B", partial(cover, rows=1464, share=0.44)),
    Case("diversity", "max_min, a sixth of 576", "A", max_min),
    Case("diversity", "dpp, a sixth of 576", "A", dpp),
    Case("diversity", "density_peaks, 576", "A", density_peaks),
]  # fmt: skip


# --- comparing -----------------------------------------------------------------------------------


def references() -> Any:
    """Inside the block, the PyTorch references run."""
    return mock.patch.dict(os.environ, VLMFAST_KERNELS="torch")


def tensors(of: Any) -> Iterator[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, dict):
        for key in sorted(of):
            yield from tensors(of[key])
    elif isinstance(of, list | tuple):
        for part in of:
            yield from tensors(part)
    elif is_dataclass(of):
        for f in fields(of):
            yield from tensors(getattr(of, f.name))


def compared(got: Any, wanted: Any, work: Work) -> dict[str, Any]:
    """``passed``, the largest relative ``error`` of a tensor, and ``why`` if it failed."""
    pairs = list(zip_longest(tensors(got), tensors(wanted)))
    kinds = [[None if t is None else (*t.shape, t.dtype) for t in pair] for pair in pairs]
    if not pairs or any(a != b for a, b in kinds):
        return {"passed": False, "why": f"other tensors than the reference: {kinds}"}
    worst = 0.0
    for number, (a, b) in enumerate(pairs):
        error, far = difference(a, b, work)
        worst = max(worst, error)
        if not far <= work.allow:
            why = f"tensor {number}: {far:.2%} of it differs, relative error {error:.1e}"
            return {"passed": False, "error": error, "why": why}
    return {"passed": True, "error": worst}


def difference(a: Tensor, b: Tensor, work: Work) -> tuple[float, float]:
    """Relative error of the whole tensor, and the fraction of rows beyond the tolerance."""
    if not a.numel():
        return 0.0, 0.0
    if not a.dtype.is_floating_point:
        far = ((a.long() - b.long()).abs() > work.off).double().mean().item()
        return far, far
    tolerance = TOLERANCE[b.dtype] if work.tolerance is None else work.tolerance
    a, b = (x.double().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (a, b))
    if not bool(a.isfinite().all()):
        return math.inf, 1.0
    size, off = b.norm(dim=1), (a - b).norm(dim=1)
    far = (off > tolerance * size.clamp(min=size.mean())).double().mean().item()
    return (off.norm() / size.norm().clamp(min=1e-300)).item(), far


def checked(work: Work) -> dict[str, Any]:
    """Compare the kernel, and the other functions with ``same``, with the reference."""

    def result(run: Callable[[], Any]) -> list[Tensor]:
        if work.prepare is not None:
            work.prepare()
        return [t.clone() for t in tensors(run())]

    got = result(work.run)
    with references():
        wanted = result(work.run)
    found = compared(got, wanted, work)
    found["others"] = {}
    for name, other in work.others.items():
        if not other.same:
            found["others"][name] = "works on other storage, not compared"
            continue
        try:
            match = compared([t.clone() for t in tensors(other.run())], wanted, work)
        except Exception as error:  # not supported by this device or version
            found["others"][name] = harness.line(error, 160)
        else:
            found["others"][name] = "same" if match["passed"] else match["why"]
    return found


# --- timing --------------------------------------------------------------------------------------


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture ``run`` in a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Callable[[], Any]) -> dict[str, Any]:
    """Median and quartiles of the replays, or of eager calls if a call is slow or not captured."""
    from triton.testing import do_bench

    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"captured": False}
    if time.perf_counter() - begin < 0.2:  # launches are negligible for slower calls
        try:
            run = captured(run)
            found["captured"] = True
        except Exception as error:  # it synchronizes
            found["not captured"] = harness.line(error)
            torch.cuda.synchronize()
    quantiles = do_bench(run, rep=200, quantiles=[0.5, 0.25, 0.75])
    found["time"], *found["spread"] = (ms / 1e3 for ms in quantiles)
    return found


def machine(n: int = 8192) -> dict[str, float]:
    """Bytes per second of a copy (reads plus writes), operations per second of a matrix product.

    ``least``: seconds of an almost empty graph.
    """
    x = torch.randn(1 << 28, device="cuda")
    y, one = torch.empty_like(x), torch.zeros(1, device="cuda")
    a, b = randn(n, n), randn(n, n)
    return {
        "copy": 2 * x.nbytes / timed(lambda: y.copy_(x))["time"],
        "matrix": 2 * n**3 / timed(lambda: a @ b)["time"],
        "least": timed(lambda: one.add_(1))["time"],
    }


def measured(case: Case, shape: str, rates: dict[str, float]) -> dict[str, Any]:
    """One row: the comparison, and times if it passed."""
    torch.manual_seed(0)
    work = case.make(SHAPES[shape])
    row = {"file": case.file, "bytes": work.bytes, "flop": work.flop, "check": checked(work)}
    if not row["check"]["passed"]:
        return row
    row |= timed(work.run)
    row["bandwidth"] = work.bytes / row["time"]
    row["rate"] = work.flop / row["time"]
    row["floor"] = max(work.bytes / rates["copy"], work.flop / rates["matrix"])
    row["machine"] = rates
    row["others"] = {}
    for name, other in work.others.items():
        # Do not time functions with a different result.
        if row["check"]["others"][name] in ("same", "works on other storage, not compared"):
            row["others"][name] = timed(other.run)
    with references():
        row["reference"] = timed(work.run)
    return row


# --- the benchmark -------------------------------------------------------------------------------


Pair = tuple[str, str]  # of a case's name and a shape


def row_of(pair: Pair, rates: dict[str, float]) -> dict[str, Any]:
    """`measured`; for an exception, a row with the error."""
    case = next(case for case in CASES if case.name == pair[0])
    begin = time.perf_counter()
    try:
        row = measured(case, pair[1], rates)
    except Exception as error:
        row = {"file": case.file, "error": harness.line(error, 400)}
    return row | {"took": time.perf_counter() - begin}


def child(pairs: Any) -> None:
    """Answer each pair that comes with its row."""
    rates = machine()
    for pair in iter(pairs.recv, None):
        pairs.send(row_of(pair, rates))
        gc.collect()
        torch.cuda.empty_cache()


def spawned(
    pairs: list[Pair], seconds: float, target: Callable[..., None] = child
) -> Iterator[tuple[Pair, dict]]:
    """Yield rows from another process, which is replaced if a case fails, crashes or hangs.

    ``seconds``: time limit of a row.
    """
    context, process = get_context("spawn"), None
    try:
        for pair in pairs:
            begins = 0.0
            if process is None:
                begins = START_S
                own, theirs = context.Pipe()
                process = context.Process(target=target, args=(theirs,))
                process.start()
                theirs.close()
            own.send(pair)
            try:
                row = {"error": f"no row after {seconds:.0f} s"}
                if own.poll(seconds + begins):
                    row = own.recv()
            except EOFError:
                process.join()
                row = {"error": f"its process exited with {process.exitcode}"}
            if "error" in row:
                process.kill()
                process = None
            yield pair, row
    finally:
        if process is not None:
            process.kill()


def micro(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:,.1f} us" if us < 1000 else f"{us / 1000:,.2f} ms"


def verdict(row: dict[str, Any]) -> str:
    """Status of a row: the error, or the times; a ratio above 1 means that the kernel is faster."""
    if "error" in row:
        return f"BROKEN  {row['error']}"
    if not row["check"]["passed"]:
        return f"WRONG   {row['check']['why']}; not timed"
    now = row["time"]
    others = [f"{name} {of['time'] / now:.2f}x" for name, of in row["others"].items()]
    reference = f"reference {row['reference']['time'] / now:.2f}x"
    floor = f"{row['floor'] / now:.0%} of the floor"
    return f"ok      {', '.join([micro(now), floor, reference, *others])}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__, minutes=9.0, out=None)
    add = parser.add_argument
    add(
        "--kernel", action="append", help="a kernel's file or part of a case's name; all by default"
    )
    add("--shapes", help="comma-separated; all of a case by default")
    add("--missing", action="store_true", help="run only rows that are not in the result file")
    add("--row-seconds", type=float, default=120.0, help="time limit of a row (%(default)s)")
    return parser.parse_args(argv, argparse.Namespace(device=harness.DEVICE))


def chosen(args: argparse.Namespace) -> list[Pair]:
    wanted = None if args.shapes is None else args.shapes.split(",")
    return [
        (case.name, shape)
        for case in CASES
        if not args.kernel or any(k == case.file or k in case.name for k in args.kernel)
        for shape in case.shapes
        if wanted is None or shape in wanted
    ]


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("no GPU; `vlmfast check` compares kernels without one", file=sys.stderr)
        return 2
    os.environ["VLMFAST_KERNELS"] = "triton"
    about = harness.begin("kernels.py", argv, args)
    out = harness.path_of(args, "kernels", about["device"])
    report: dict[str, Any] = {"rows": {}}
    if out.is_file():
        report = json.loads(out.read_text(encoding="utf-8"))
    report |= about
    have = report["rows"] if args.missing else {}
    todo = [pair for pair in chosen(args) if "time" not in have.get(" | ".join(pair), {})]
    rows, end = spawned(todo, args.row_seconds), time.perf_counter() + 60 * args.minutes
    fresh: dict[str, dict[str, Any]] = {}
    for pair, row in rows:
        key = " | ".join(pair)
        fresh[key] = report["rows"][key] = row | {"date": report["date"]}
        print(f"{key:42} {verdict(row)}", file=sys.stderr)
        write_json(out, report)
        if time.perf_counter() > end:
            break
    rows.close()
    late = len(todo) - len(fresh)
    for limit in gpu_limits.LIMITS:
        if limit.row in fresh:
            print(limit.row, *gpu_limits.verdict(limit, report["rows"]))
    for rates in [row["machine"] for row in fresh.values() if "machine" in row][:1]:
        print(
            f"\n{about['device']}: copy {rates['copy'] / 1e12:.2f} TB/s, bf16 product "
            f"{rates['matrix'] / 1e12:.0f} TFLOP/s, an empty graph {micro(rates['least'])}"
        )
    bad = [key for key, row in fresh.items() if "error" in row or not row["check"]["passed"]]
    print(f"{len(fresh) - len(bad)} of {len(fresh)} agree", *bad, sep="\n  ")
    if late:
        print(f"{late} rows were left for another run with --missing", file=sys.stderr)
    return 1 if bad or late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
