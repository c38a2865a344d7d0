"""The calls of every kernel that are checked and timed.

``vlmfast check``, the tests of the kernels and ``benchmarks/kernels.py`` read `CASES`: each makes a
call for any `Shape`. Slots that a kernel must not read contain NaN. Inputs follow from the name of
the case; those of small shapes are drawn on the CPU, so that all machines check the same values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import (
    biased_attention,
    col_stats,
    coverage,
    decode_mixed,
    decode_slots,
    diversity,
    few_rows,
    gather_rows,
    merge,
    norm_rope_append,
    pool,
    quantize_kv,
    select,
    swiglu,
    tree_verify,
)
from .calls import Call, Draws, Shape, nbytes, within

# One layer of A: LLaVA-1.5-7B, B: LLaVA-NeXT-7B, C: the same with Mistral's KV heads, D:
# Qwen2.5-7B's language model, E: the same with a longer prompt.
SHAPES = {
    name: Shape(*sizes, batch=1, dtype=torch.bfloat16, large=True)
    for name, sizes in {
        "A": (32, 32, 128, 640, 4096, 11008),
        "B": (32, 32, 128, 2944, 4096, 11008),
        "C": (32, 8, 128, 2944, 4096, 14336),
        "D": (28, 4, 128, 8192, 3584, 18944),
        "E": (28, 4, 128, 32768, 3584, 18944),
    }.items()
}


# --- attention -----------------------------------------------------------------------------------

Parts = tuple[tuple[float, dict[str, int]], ...]  # shares of a prompt, and how they are stored


def _decode_mixed(
    s: Shape,
    draw: Draws,
    parts: Parts = (),
    batch: int = 0,
    rows: int = 1,
    tail: int | None = None,
    masked: bool = False,
) -> Call:
    """Parts of the prompt are quantized; of a large one, the tail is the rest."""
    batch, slots = batch or s.batch, s.length
    if s.large and parts:
        tail = min(32, s.length // 2)
        slots -= tail
    segments = [draw.segment(batch, int(share * slots), **how) for share, how in parts]
    keys, values, seen = draw.cache(batch, s.length if tail is None else tail)
    bias = draw.uniform(*keys.shape[:3]) if masked else None
    if masked:
        seen = within(keys.shape[2], seen)[:, :, None].repeat(1, 1, rows, 1)
    query = draw.normal(batch, s.heads, rows, s.dim)
    return Call(
        decode_mixed.decode_mixed,
        (query, segments, keys, values, seen, None, bias, masked),
        terms=(3 if parts else 1) * (s.dim + s.length),
        flop=4 * batch * s.heads * s.dim * s.length,
    )


def _tree_verify(
    s: Shape,
    draw: Draws,
    nodes: int,
    how: dict[str, int] | None = None,
    context: int | None = None,
    biased: bool = False,
) -> Call:
    """A binary tree; the context of a large shape is quantized or not, else it is there twice."""
    segments = [] if how is None else [draw.segment(s.batch, s.length, **how)]
    if context is None:
        context = 0 if s.large and segments else s.length
    query = draw.normal(s.batch, s.heads, nodes, s.dim)
    cache = draw.cache(s.batch, context)
    own = [draw.normal(s.batch, s.kv_heads, nodes, s.dim) for _ in "kv"]
    seen: list[int] = []
    for node in range(nodes):
        seen.append((seen[(node - 1) // 2] if node else 0) | 1 << node)
    words = b"".join(bits.to_bytes(-(-nodes // 64) * 8, "little") for bits in seen)
    ancestors = torch.frombuffer(bytearray(words), dtype=torch.int64).view(nodes, -1).to(s.device)
    bias = draw.uniform(s.batch, s.kv_heads, context) if biased else None
    pairs = nodes * s.length + sum(bits.bit_count() for bits in seen)
    return Call(
        tree_verify.tree_verify,
        (query, *cache, *own, ancestors, None, segments, bias),
        terms=(2 if segments else 1) * (s.dim + s.length),
        flop=4 * s.batch * s.heads * s.dim * pairs,
    )


def _decode_slots(
    s: Shape, draw: Draws, share: float, batch: int = 0, ragged: bool = False
) -> Call:
    """A share of the slots, listed, and the newest ones."""
    batch, newest = batch or s.batch, min(32, s.length // 2) if s.large else min(2, s.length)
    start = s.length - newest
    count = max(int(share * start), 1) if start else 0
    query = draw.normal(batch, s.heads, 1, s.dim)
    keys, values = (draw.normal(batch, s.kv_heads, s.length, s.dim) for _ in "kv")
    slots = draw.indices(start, count, batch, s.kv_heads)
    counts = torch.full((batch, s.kv_heads), count, device=s.device)
    first, end = torch.full_like(counts, start), torch.full_like(counts, s.length)
    bias = draw.uniform(*keys.shape[:3]) if ragged else None
    if ragged:
        counts = draw.lengths(count, batch, s.kv_heads)
        end = first + counts % (newest + 1)
    read = 2 * batch * s.kv_heads * (count + newest) * s.dim * s.dtype.itemsize
    return Call(
        decode_slots.decode_slots,
        (query, keys, values, slots, counts, first, end, newest, None, bias),
        terms=s.dim + count + newest,
        bytes=read + slots.nbytes + 2 * query.nbytes,
        flop=4 * batch * s.heads * s.dim * (count + newest),
    )


def _attention(s: Shape, draw: Draws, biased: bool = False, ragged: bool = False) -> Call:
    """Causal, over the whole prompt; ragged, the last rows over all keys."""
    n, how = s.length, dict[str, Any]()
    query = draw.normal(s.batch, s.heads, min(n, 3) if ragged else n, s.dim)
    key, value = (draw.normal(s.batch, s.kv_heads, n, s.dim) for _ in "kv")
    if ragged:
        how = {"causal": False, "lengths": draw.lengths(n, s.batch)}
        for x in (key, value):
            x.masked_fill_(~within(n, how["lengths"])[:, None, :, None], torch.nan)
    bias = draw.uniform(*((s.batch, s.kv_heads, n) if ragged else (n,))) if biased else None
    flop = 2 * s.heads * s.dim * n * (n + 1)
    args = query, key, value, bias
    return Call(biased_attention.biased_attention, args, how, terms=s.dim + n, flop=flop)


# --- statistics and selection --------------------------------------------------------------------


def _col_stats(
    s: Shape,
    draw: Draws,
    of: str = "col_stats",
    rows: int | None = None,
    biased: bool = False,
    **how: Any,
) -> Call:
    """The last rows, as in methods with an observation window; or all."""
    n, sums = s.length, of == "col_stats"
    asked = n if rows is None else min(rows, max(n // 2, 1))
    at = None if rows is None else torch.arange(n - asked, n, device=s.device)
    query, key = draw.normal(s.heads, n, s.dim), draw.normal(s.kv_heads, n, s.dim)
    if sums:
        how = {"want": ("sum",), "threshold": 0.1, **how}
    if biased:
        how |= {"bias": draw.uniform(n), "start": min(3, n - 1)}
    seen = n * (n + 1) // 2 if at is None else int((at + 1).sum())
    read = s.dtype.itemsize * s.dim * (s.heads * asked + s.kv_heads * n)
    return Call(
        getattr(col_stats, of),
        (query, key, at),
        how,
        terms=s.dim + n,
        bytes=read + 4 * s.heads * (n if sums else 2 * asked),
        # For sums first the normalizers: the products are computed twice.
        flop=2 * (1 + sums) * s.heads * s.dim * seen,
    )


def _top_k(s: Shape, draw: Draws, ties: bool = False, ragged: bool = False) -> Call:
    scores = draw.normal(s.heads, s.length, dtype=torch.float32)
    first = draw.uniform(s.heads, s.length) < 0.1 if ties else None
    if ties:
        scores[:, ::7] = scores[:, :1]
    if ragged:
        args = scores, draw.lengths(s.length, s.heads), first
        return Call(select.top_k, args, {"width": s.length})
    return Call(select.top_k, (scores, s.fifth, first))


def _mass_count(s: Shape, draw: Draws) -> Call:
    mass = draw.sixteenths(s.heads, s.length)
    return Call(select.mass_count, (mass, 0.9 * mass.sum(-1)))


def _gather_rows(s: Shape, draw: Draws, per_head: bool = False, ragged: bool = False) -> Call:
    """States with their tables, or keys and values, whose heads have indices of their own."""
    n, how = s.length, dict[str, Any]()
    if per_head:
        index = draw.indices(n, s.fifth, s.kv_heads)
        rows = [draw.normal(s.kv_heads, n, s.dim) for _ in "kv"]
        if ragged:
            how["counts"] = draw.lengths(s.fifth, s.kv_heads)
            rows += [draw.uniform(s.kv_heads, n) < 0.5, draw.integers(0, 9, s.kv_heads, n)]
    else:
        index, how["dim"] = draw.indices(n, s.fifth), 1
        rows = [draw.normal(1, n, size) for size in (s.width, s.dim, s.dim)]
    moved = index.nbytes + 2 * nbytes(rows) * s.fifth // n
    return Call(gather_rows.gather_rows, (index, *rows), how, bytes=moved)


def _merge(
    s: Shape, draw: Draws, mode: str = "pivot", rule: str = "all", ragged: bool = False
) -> Call:
    n, heads = s.length, s.kv_heads
    keys, values = (draw.normal(heads, n, s.dim) for _ in "kv")
    keep, how = draw.indices(n, s.fifth, heads), dict[str, Any](rule=rule)
    if ragged:
        how["valid"] = within(n, draw.lengths(n, heads).clamp(min=s.fifth))
        how["lengths"] = draw.lengths(s.fifth, heads)
        how["weight"] = draw.uniform(heads, n) + 1
    flop = 2 * heads * (n - s.fifth) * s.fifth * s.dim
    # The nearest pivot may depend on the order of summation.
    args = keys, values, keep, mode
    return Call(merge.merge_into, args, how, terms=s.dim + n, flop=flop, allow=2e-3)


def _similar(s: Shape, draw: Draws) -> tuple[Tensor, int]:
    """Cosine similarities of an image's tokens, and how many tokens are selected."""
    n, wide = (576, 1024) if s.large else (min(s.length, 40), 32)
    return diversity.cosine(draw.normal(s.batch, n, wide, dtype=torch.float32)), max(n // 6, 1)


def _max_min(s: Shape, draw: Draws) -> Call:
    matrix, k = _similar(s, draw)
    return Call(diversity.max_min, (matrix, k), bytes=4 * k * matrix.shape[1])


def _dpp(s: Shape, draw: Draws) -> Call:
    matrix, k = _similar(s, draw)
    return Call(diversity.dpp, (matrix, k), bytes=4 * (k + k * k // 2) * matrix.shape[1])


def _density_peaks(s: Shape, draw: Draws) -> Call:
    matrix, k = _similar(s, draw)
    args = (1 - matrix).clamp(min=0), k, min(5, matrix.shape[1])
    return Call(diversity.density_peaks, args, bytes=2 * matrix.nbytes)


def _cover(
    s: Shape, draw: Draws, rows: int = 576, share: float = 1 / 6, weight: str = "scale"
) -> Call:
    size = (rows, rows) if s.large else (4 * s.length, min(s.length, 20))
    worth, k = draw.sixteenths(*size), max(round(share * size[1]), 1)
    how = {weight: draw.sixteenths(size[1])}
    return Call(coverage.cover, (worth, k), how, bytes=k * worth.nbytes)


# --- quantization --------------------------------------------------------------------------------


def _quantize(
    s: Shape, draw: Draws, bits: int, group: int = 0, scaled: bool = False, slots: int = 0
) -> Call:
    """The whole prompt, or a page. No entry is between two codes, but for scaled values."""
    n = min(slots or s.length, s.length)
    size, channels = (s.batch, s.kv_heads, n, s.dim), math.gcd(group, s.dim)
    keys = draw.codes(bits, group or n, 2, *size)
    values = draw.codes(bits, channels, 3, *size)
    order = torch.arange(n, device=s.device).expand(size[:3])
    how = {"key_group": group, "value_group": channels, "scaled": scaled, "dtype": torch.float16}
    args = keys, values, order, draw.lengths(n, *size[:2]), bits
    terms, allow = (2, 2e-3) if scaled else (0, 0.0)
    return Call(quantize_kv.quantize, args, how, terms=terms, allow=allow)


def _channel_scale(s: Shape, draw: Draws) -> Call:
    x, valid = draw.normal(s.kv_heads, s.length, s.dim), draw.uniform(s.kv_heads, s.length) < 0.7
    args = x.masked_fill(~valid[..., None], torch.nan), valid
    return Call(quantize_kv.channel_scale, args, {"dtype": torch.float32}, terms=2)


# --- decode step ---------------------------------------------------------------------------------


def _residual_norm(s: Shape, draw: Draws, tokens: int | None = None, branch: bool = False) -> Call:
    size = s.length if tokens is None else tokens, s.width
    x, residual, weight = draw.normal(*size), draw.normal(*size), draw.normal(s.width)
    more = (draw.normal(s.width), True) if branch else ()
    args = x, weight, 1e-6, residual, *more
    return Call(norm_rope_append.residual_norm, args, terms=(1 + branch) * s.width)


def _rotate_append(
    s: Shape, draw: Draws, batch: int = 0, new: int = 1, norm: bool = False, beyond: int = 0
) -> Call:
    """``beyond``: tokens of one head for which the buffer has no room."""
    batch, capacity = batch or s.batch, min(s.length, 1024) + new
    query = draw.normal(batch, s.heads, new, s.dim)
    key, value = (draw.normal(batch, s.kv_heads, new, s.dim) for _ in "kv")
    angle = 6.3 * draw.uniform(batch, new, s.dim // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(s.dtype), angle.sin().to(s.dtype)
    buffers = [draw.normal(batch, s.kv_heads, capacity, s.dim) for _ in "kv"]
    length = draw.integers(0, capacity - new + 1, batch, s.kv_heads)
    length[-1, -1] = capacity - new + beyond
    head = norm_rope_append.HeadNorm(draw.normal(s.dim), draw.normal(s.dim), 1e-6)
    return Call(
        norm_rope_append.rotate_append,
        (query, key, value, cos, sin, *buffers, length, head if norm else None),
        terms=s.dim if norm else 2,
        bytes=2 * nbytes((query, key, value, cos)),
        written=(5, 6),
    )


def _swiglu(s: Shape, draw: Draws, of: str = "swiglu", tokens: int | None = None) -> Call:
    size = s.length if tokens is None else tokens, s.hidden
    return Call(getattr(swiglu, of), (draw.normal(*size), draw.normal(*size)), terms=1)


def _linears(s: Shape, draw: Draws, tokens: int, part: str = "odd") -> Call:
    """Linear layers of a decode step; odd ones with biases."""
    width = s.width // 8 * 8  # rows of 16 bytes
    sizes = {
        "qkv": (s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim),
        "out": (s.width,),
        "odd": (s.hidden, 17, 9),
    }[part]
    weights = [draw.normal(size, width, scale=width**-0.5) for size in sizes]
    biases = [draw.normal(size) if part == "odd" and size % 2 else None for size in sizes]
    args = draw.normal(tokens, width), weights, biases
    return Call(few_rows.linears, args, terms=width, flop=2 * tokens * width * sum(sizes))


def _gated(s: Shape, draw: Draws, tokens: int, odd: bool = False) -> Call:
    """The first half of an MLP, with SwiGLU; an odd one with GELU and a bias."""
    width = s.width // 8 * 8
    weights = [draw.normal(s.hidden, width, scale=width**-0.5) for _ in "gu"]
    args = draw.normal(tokens, width), weights, (None, draw.normal(s.hidden) if odd else None)
    flop = 4 * tokens * width * s.hidden
    return Call(few_rows.gated_linear, args, {"gelu_tanh": odd}, terms=width, flop=flop)


# --- pooling -------------------------------------------------------------------------------------


def _cells(s: Shape, draw: Draws) -> tuple[Tensor, Tensor]:
    """Cells of four rows each, some with fewer valid rows."""
    cells = max(s.length // 4, 1)
    table = torch.arange(4 * cells, device=s.device).view(cells, 4) % s.length
    valid = draw.uniform(cells, 4) < 0.9
    valid[:, 0] = True
    return table, valid


def _cell_average(s: Shape, draw: Draws) -> Call:
    args = draw.normal(s.length, s.width), draw.uniform(s.length) + 0.5, *_cells(s, draw)
    return Call(pool.cell_average, args, terms=4)


def _cell_mix(s: Shape, draw: Draws) -> Call:
    sizes, wide = (s.width, math.gcd(s.width, 8)), torch.float32
    rows, score = (draw.normal(s.length, size, dtype=wide) for size in sizes)
    return Call(pool.cell_mix, (rows, score, *_cells(s, draw)), terms=4)


def _resample(s: Shape, draw: Draws) -> Call:
    n, (queries, heads, dim) = s.length, (80, 8, 64) if s.large else (5, math.gcd(s.width, 4), 16)
    sizes = (queries, heads, dim), (n, heads, dim), (n, s.width)
    inputs = (draw.normal(*size, dtype=torch.float32) for size in sizes)
    places = (draw.uniform(*size) for size in ((n,), (queries, 2), (n, 2), (heads,)))
    # Without `flop`, which is compared with the rate of half precision: this is float32.
    return Call(pool.resample, (*inputs, *places), terms=dim + n)


# --- the catalogue -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call that is made for many shapes.

    Parameters
    ----------
    kernel : str
        File in `vlmfast.kernels`.
    name : str
    make : callable
        ``make(shape, draws) -> Call``.
    timed : str
        `SHAPES` at which the benchmark times it.
    checked : bool
        Whether ``vlmfast check`` compares it: not if it repeats others, or has no reference.
    streams : bool
        Whether its bytes bound its time at any size: ``vlmfast check`` times it.
    """

    kernel: str
    name: str
    make: Callable[[Shape, Draws], Call]
    timed: str
    checked: bool
    streams: bool

    def call(self, shape: Shape) -> Call:
        """The call for a shape, with the same values each time."""
        return self.make(shape, Draws(shape, zlib.crc32(self.name.encode())))


def _case(
    name: str,
    make: Callable[..., Call],
    timed: str = "",
    checked: bool = True,
    streams: bool = False,
    **options: Any,
) -> Callable[[str], Case]:
    """A case of a kernel file that is given later."""
    return lambda kernel: Case(kernel, name, partial(make, **options), timed, checked, streams)


_STATISTICS = tuple(name for name in col_stats.STATISTICS if name != "count")  # which has ties
_FOUR, _TWO, _GROUPS = {"bits": 4}, {"bits": 2}, {"bits": 2, "group": 32}
_ALL_FOUR, _ALL_GROUPS = ((1.0, _FOUR),), ((1.0, _GROUPS),)
_MIXED = ((0.6, _FOUR), (0.4, _TWO))

_BY_KERNEL: dict[str, list[Callable[[str], Case]]] = {
    "col_stats": [
        _case("col_stats, 64 rows", _col_stats, "ABCDE", rows=64),
        _case("col_stats, all rows", _col_stats, "ABCD"),
        _case("row_lse, 64 rows", _col_stats, "ABCDE", of="row_lse", rows=64),
        _case("col_stats, with a bias", _col_stats, rows=9, want=_STATISTICS, biased=True),
        _case("col_stats, not causal", _col_stats, want=_STATISTICS, causal=False),
        _case("col_stats, counts", _col_stats, checked=False, rows=9, want=col_stats.STATISTICS),
    ],
    "select": [
        _case("top_k, a fifth", _top_k, "ABCD"),
        _case("top_k, ties", _top_k, ties=True),
        _case("top_k, ragged", _top_k, ties=True, ragged=True),
        _case("mass_count, 90 %", _mass_count, "ABCD"),
    ],
    "gather_rows": [
        _case("gather_rows, states", _gather_rows, "ABCDE", streams=True),
        _case("gather_rows, KV", _gather_rows, "ABCDE", per_head=True),
        _case("gather_rows, ragged", _gather_rows, per_head=True, ragged=True),
    ],
    "merge": [
        _case("merge, keep a fifth", _merge, "ABCDE"),
        _case("merge, weighted", _merge, mode="weighted", ragged=True),
        _case("merge, by token", _merge, mode="weighted", rule="token", ragged=True),
        _case("merge, by slot", _merge, mode="avg", rule="slot", ragged=True),
    ],
    "quantize_kv": [
        _case("quantize, 4 bit", _quantize, "ABCDE", bits=4, scaled=True),
        _case("quantize, 2 bit groups", _quantize, "ABCDE", streams=True, bits=2, group=32),
        _case("quantize, 2 bit, a page", _quantize, "AD", False, bits=2, group=32, slots=128),
        _case("quantize, 8 bit", _quantize, streams=True, bits=8),
        _case("channel_scale", _channel_scale),
    ],
    "decode_mixed": [
        _case("decode, bf16", _decode_mixed, "ABCDE", streams=True),
        _case("decode, 4 bit", _decode_mixed, "ABCDE", parts=_ALL_FOUR),
        _case("decode, 4 and 2 bit", _decode_mixed, "ABCDE", parts=_MIXED),
        _case("decode, 2 bit groups", _decode_mixed, "ABCDE", parts=_ALL_GROUPS),
        _case("decode, bf16, 16 at once", _decode_mixed, "BCD", checked=False, batch=16),
        _case(
            "decode, 4 bit, 16 at once", _decode_mixed, "BCD",
            checked=False, parts=_ALL_FOUR, batch=16,
        ),
        _case("decode, masses", _decode_mixed, parts=(*_ALL_FOUR, *_ALL_GROUPS), masked=True),
        _case("decode, 3 rows", _decode_mixed, parts=_ALL_GROUPS, rows=3, masked=True),
        _case("decode, empty segment", _decode_mixed, parts=((0.0, _FOUR), *_ALL_GROUPS)),
        _case("decode, empty tail", _decode_mixed, parts=((1.0, _TWO),), tail=0),
    ],
    "decode_slots": [
        _case("decode, a tenth", _decode_slots, "ABCDE", streams=True, share=0.1),
        _case(
            "decode, a tenth, 16 at once", _decode_slots, "BCD",
            checked=False, share=0.1, batch=16,
        ),
        _case("decode, ragged lists", _decode_slots, share=1.0, ragged=True),
    ],
    "tree_verify": [
        _case("tree of 26, bf16", _tree_verify, "ABCDE", streams=True, nodes=26),
        _case("tree of 60, bf16", _tree_verify, "ABCDE", checked=False, nodes=60),
        _case("tree of 26, 4 bit", _tree_verify, "BCDE", nodes=26, how=_FOUR),
        _case("tree of 60, 4 bit", _tree_verify, "BCDE", checked=False, nodes=60, how=_FOUR),
        _case("tree of 3, groups", _tree_verify, nodes=3, how=_GROUPS, biased=True),
        _case("tree of 3, no context", _tree_verify, nodes=3, how=_TWO, context=0),
        _case("tree of 65", _tree_verify, checked=False, nodes=65),
    ],
    "norm_rope_append": [
        _case("residual_norm, 1 token", _residual_norm, "AD", tokens=1),
        _case("residual_norm, 32 tokens", _residual_norm, "AD", checked=False, tokens=32),
        _case("residual_norm, prompt", _residual_norm, streams=True),
        _case("residual_norm, of a branch", _residual_norm, tokens=3, branch=True),
        _case("rotate_append, 1 row", _rotate_append, "ACD", batch=1),
        _case("rotate_append, 32 rows", _rotate_append, "ACD", checked=False, batch=32),
        _case("rotate_append, 3 tokens", _rotate_append, new=3),
        _case("rotate_append, norms", _rotate_append, new=2, norm=True),
        _case("rotate_append, no room", _rotate_append, checked=False, new=3, beyond=1),
    ],
    "swiglu": [
        _case("swiglu, 1 token", _swiglu, "AD", tokens=1),
        _case("swiglu, 32 tokens", _swiglu, "AD", checked=False, tokens=32),
        _case("swiglu, prompt", _swiglu, "ABCD", streams=True),
        _case("geglu_tanh", _swiglu, of="geglu_tanh", tokens=3),
    ],
    "few_rows": [
        *(
            _case(
                f"{part}, {n} tokens", make, "AD",
                checked=n < 16, streams=n == 1, tokens=n, **options,
            )
            for part, make, options in (
                ("qkv", _linears, {"part": "qkv"}),
                ("out", _linears, {"part": "out"}),
                ("gated", _gated, {}),
            )
            for n in (1, 4, 16)
        ),
        _case("linears, biases", _linears, tokens=5),
        _case("gated, GELU", _gated, tokens=5, odd=True),
    ],
    "biased_attention": [
        _case("attention, causal", _attention, "ABCD"),
        _case("attention, with bias", _attention, "ABCD", biased=True),
        _case("attention, ragged", _attention, biased=True, ragged=True),
    ],
    "pool": [
        _case("cell_average, 4 to 1", _cell_average, "BD"),
        _case("cell_mix, 4 to 1", _cell_mix, "BD"),
        _case("resample, 80 queries", _resample, "BD"),
    ],
    "coverage": [
        _case("cover, a sixth of 576", _cover, "A"),
        _case("cover, 644 of 1464", _cover, "B", checked=False, rows=1464, share=0.44),
        _case("cover, bonus", _cover, weight="bonus"),
    ],
    "diversity": [
        _case("max_min, a sixth of 576", _max_min, "A"),
        _case("dpp, a sixth of 576", _dpp, "A"),
        _case("density_peaks, 576", _density_peaks, "A"),
    ],
}  # fmt: skip

KERNELS = tuple(sorted(_BY_KERNEL))
CASES = [make(kernel) for kernel, cases in _BY_KERNEL.items() for make in cases]
