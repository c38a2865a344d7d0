"""Inputs for every kernel: shapes, dtypes, head sizes, ragged lengths, masks.

Slots that a kernel must not read contain NaN. Everything is drawn from fixed seeds on the CPU, so
that all machines check the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmfast.kernels import (
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
from vlmfast.kernels.quantize_kv import Segment

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A call of a kernel, and the same call of its reference.

    Parameters
    ----------
    kernel : str
        File in `vlmfast.kernels`.
    about : str
    run, reference : callable
        Without arguments; each call gives a new result, or one in buffers of its own.
    terms : int
        As in `closeness.deviation`.
    dtype : torch.dtype
    bytes : int
        Bytes that the task must move; 0 if that does not bound its time.
    """

    kernel: str
    about: str
    run: Callable[[], Any]
    reference: Callable[[], Any]
    terms: int
    dtype: torch.dtype
    bytes: int = 0


@dataclass(frozen=True)
class Shape:
    """A small language model and its prompt, and where its tensors are.

    Parameters
    ----------
    heads, kv_heads, dim : int
    length : int
        Tokens of the prompt.
    width : int
        Of the residual stream.
    dtype : torch.dtype
    device : torch.device
    large : bool
        Only kernels that are bounded by their bytes, with references that fit into memory.
    """

    heads: int
    kv_heads: int
    dim: int
    length: int
    width: int
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    large: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}, {self.length} tokens, {dtype}"


class Draws:
    """Random inputs of one case."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(size, generator=self.generator)
        return x.to(self.shape.device, dtype or self.shape.dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator).to(self.shape.device)

    def integers(self, low: int, high: int, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        x = torch.randint(low, high, size, generator=self.generator, dtype=dtype)
        return x.to(self.shape.device)

    def indices(self, total: int, count: int, *leading: int) -> Tensor:
        """``count`` of ``total`` indices, ascending, for each leading entry."""
        return self.uniform(*leading, total).argsort(-1)[..., :count].sort(-1).values

    def cache(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, Hk, N, D) with ragged lengths (B, Hk), and NaN beyond them."""
        s = self.shape
        keys, values = (self.normal(batch, s.kv_heads, s.length, s.dim) for _ in "kv")
        lengths = self.integers(s.length // 2, s.length + 1, batch, s.kv_heads)
        beyond = torch.arange(s.length, device=s.device) >= lengths[..., None]
        for x in (keys, values):
            x.masked_fill_(beyond[..., None], torch.nan)
        return keys, values, lengths

    def segment(self, batch: int, slots: int, bits: int, group: int = 0) -> Segment:
        """Random codes: not those of `quantize_kv`, whose errors must not show up here."""
        s, top = self.shape, 2**bits - 1
        leading = batch, s.kv_heads
        groups, parts = (-(-slots // group), 2) if group else (1, 1)

        def steps(*size: int) -> Tensor:
            return ((0.5 + self.uniform(*leading, *size)) * 3 / top).half()

        def codes() -> Tensor:
            return self.integers(0, 256, *leading, slots, s.dim * bits // 8, dtype=torch.uint8)

        return Segment(
            bits,
            group,
            key_codes=codes(),
            key_step=steps(groups, s.dim),
            key_min=-self.uniform(*leading, groups, s.dim).half() - 1,
            value_codes=codes(),
            value_step=steps(slots, parts),
            value_min=-self.uniform(*leading, slots, parts).half() - 1,
            value_scale=None if group else self.uniform(*leading, s.dim).half() + 0.5,
            lengths=self.integers(max(slots // 2, 1), slots + 1, *leading),
            order=torch.arange(slots, dtype=torch.int32, device=s.device).expand(*leading, slots),
        )


Build = Callable[[Shape, Draws], Iterator[Case]]


def _case(
    s: Shape,
    module: Any,
    name: str,
    args: tuple,
    terms: int,
    about: str = "",
    moved: int = 0,
    **kw: Any,
) -> Case:
    """A function of a kernel file and the function of the same name with ``_ref``."""
    pair = (getattr(module, name), getattr(module, f"{name}_ref"))
    run, reference = (partial(function, *args, **kw) for function in pair)
    kernel = module.__name__.rpartition(".")[2]
    about = ", ".join(part for part in (name if name != kernel else "", about, str(s)) if part)
    return Case(kernel, about, run, reference, terms, s.dtype, moved)


def _nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


# --- attention -----------------------------------------------------------------------------------


def _decode_mixed(s: Shape, draw: Draws) -> Iterator[Case]:
    batch = 1 if s.large else 2
    query = draw.normal(batch, s.heads, 1, s.dim)
    keys, values, lengths = draw.cache(batch)
    mask = (torch.arange(s.length, device=s.device) < lengths[..., None])[:, :, None]
    moved = _nbytes(keys, values) + 2 * query.nbytes
    terms = s.dim + s.length
    args: tuple[Any, ...] = query, [], keys, values, lengths  # as a plain decode step
    yield _case(s, decode_mixed, "decode_mixed", args, terms, "plain", moved)
    if s.large:
        return
    args = query, [], keys, values, mask
    yield _case(s, decode_mixed, "decode_mixed", args, terms, "mask")
    bias = draw.uniform(batch, s.kv_heads, s.length)
    segments = [draw.segment(batch, s.length, 4), draw.segment(batch, s.length - 5, 2, group=32)]
    args, kw = (query, segments, keys, values, mask), {"want_attention_mass": True}
    about = "4 and 2 bits"
    yield _case(s, decode_mixed, "decode_mixed", args, 3 * terms, about, tail_bias=bias, **kw)


def _tree_verify(s: Shape, draw: Draws) -> Iterator[Case]:
    nodes, batch = 7, 1
    query = draw.normal(batch, s.heads, nodes, s.dim)
    keys, values, lengths = draw.cache(batch)
    own = [draw.normal(batch, s.kv_heads, nodes, s.dim) for _ in "kv"]
    bits: list[int] = []
    for node in range(nodes):  # a binary tree
        bits.append((bits[(node - 1) // 2] if node else 0) | 1 << node)
    ancestors = torch.tensor(bits, device=s.device)[:, None]
    args = query, keys, values, lengths, *own, ancestors
    moved, terms = _nbytes(keys, values, *own, query, query), s.dim + s.length
    yield _case(s, tree_verify, "tree_verify", args, terms, f"{nodes} nodes", moved)
    if not s.large:
        segments = [draw.segment(batch, s.length, 4)]
        yield _case(s, tree_verify, "tree_verify", args, 2 * terms, "4 bits", segments=segments)


def _decode_slots(s: Shape, draw: Draws) -> Iterator[Case]:
    """A tenth of the slots, and the newest ones; of the smaller shapes ragged lists and a bias."""
    batch = 1 if s.large else 2
    query = draw.normal(batch, s.heads, 1, s.dim)
    keys, values = (draw.normal(batch, s.kv_heads, s.length, s.dim) for _ in "kv")
    count, start = max(s.length // 10, 1), s.length - 5
    slots = draw.indices(start, count, batch, s.kv_heads)
    counts = torch.full((batch, s.kv_heads), count, device=s.device)
    first, end = torch.full_like(counts, start), torch.full_like(counts, s.length - 2)
    read, terms = count + 3, s.dim + count + 3
    moved = 2 * batch * s.kv_heads * read * s.dim * keys.element_size() + slots.nbytes
    args = query, keys, values, slots, counts, first, end, 3
    about = f"{read} slots"
    yield _case(s, decode_slots, "decode_slots", args, terms, about, moved)
    if not s.large:
        counts = draw.integers(0, count + 1, batch, s.kv_heads)
        args = query, keys, values, slots, counts, first, first + counts % 4, 3
        bias = draw.uniform(batch, s.kv_heads, s.length)
        yield _case(s, decode_slots, "decode_slots", args, terms, "ragged", bias=bias)


def _biased_attention(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    batch = 2
    query = draw.normal(batch, s.heads, s.length, s.dim)
    keys, values = (draw.normal(batch, s.kv_heads, s.length, s.dim) for _ in "kv")
    bias = draw.uniform(s.length)
    lengths = torch.tensor([s.length, s.length // 2], device=s.device)
    terms, name = s.dim + s.length, "biased_attention"
    yield _case(s, biased_attention, name, (query, keys, values, bias), terms, "causal")
    keys[1, :, s.length // 2 :] = torch.nan
    kw: dict[str, Any] = {"causal": False, "lengths": lengths}
    yield _case(s, biased_attention, name, (query[:, :, -3:], keys, values), terms, "ragged", **kw)


# --- statistics and selection --------------------------------------------------------------------


def _col_stats(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    query, key = draw.normal(s.heads, s.length, s.dim), draw.normal(s.kv_heads, s.length, s.dim)
    window = torch.arange(s.length - 9, s.length, device=s.device)
    bias, terms = draw.uniform(s.length), s.dim + s.length
    want = ("sum", "sumsq", "max", "entropy")
    yield _case(s, col_stats, "row_lse", (query, key), terms, "all rows")
    args = query, key, window
    kw: dict[str, Any] = {"bias": bias, "start": 3, "want": want}
    yield _case(s, col_stats, "col_stats", args, terms, "last 9 rows, bias", **kw)
    yield _case(s, col_stats, "col_stats", (query, key), terms, "all rows", want=want)


def _select(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    scores, first = draw.normal(s.heads, s.length), draw.uniform(s.heads, s.length) < 0.1
    scores[:, ::7] = scores[:, :1]  # ties
    counts = draw.integers(1, s.length, s.heads)
    yield _case(s, select, "top_k", (scores, s.length // 5, first), 0, "ties, preferred entries")
    yield _case(s, select, "top_k", (scores, counts), 0, "ragged", width=s.length)
    masses = draw.uniform(s.heads, s.length)
    yield _case(s, select, "mass_count", (masses, 0.7 * masses.sum(-1)), 0)


def _gather_rows(s: Shape, draw: Draws) -> Iterator[Case]:
    fifth = s.length // 5
    index, table = draw.indices(s.length, fifth), draw.normal(1, s.length, s.dim)
    states = draw.normal(1, s.length, s.width)
    args, moved = (index, states, table), index.nbytes + 2 * _nbytes(states, table) // 5
    yield _case(s, gather_rows, "gather_rows", args, 0, "states", moved, dim=1)
    if s.large:
        return
    keys, values, lengths = draw.cache(1)
    index = draw.indices(int(lengths.min()), fifth, s.kv_heads)
    counts = draw.integers(0, fifth + 1, s.kv_heads)
    args = index, keys[0], values[0]
    yield _case(s, gather_rows, "gather_rows", args, 0, "per head, ragged", counts=counts)


def _merge(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    keys, values = (draw.normal(s.kv_heads, s.length, s.dim) for _ in "kv")
    keep, weight = (
        draw.indices(s.length, s.length // 4, s.kv_heads),
        draw.uniform(s.kv_heads, s.length),
    )
    for mode in ("pivot", "weighted"):
        args = keys, values, keep, mode
        yield _case(s, merge, "merge_into", args, s.dim + s.length, mode, weight=weight)


def _diversity(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    matrix = diversity.cosine(draw.normal(2, 24, 32, dtype=torch.float32))
    yield _case(s, diversity, "max_min", (matrix, 7), 0)
    yield _case(s, diversity, "dpp", (matrix, 7), 0)
    yield _case(s, diversity, "density_peaks", ((1 - matrix).clamp(min=0), 5, 4), 0)


def _coverage(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    # Multiples of a sixteenth: sums in any order are exact, and many gains are equal.
    worth, bonus, scale = (
        draw.integers(0, 17, *size).float() / 16 for size in ((40, 24), (24,), (24,))
    )
    yield _case(s, coverage, "cover", (worth, 7), 0)
    yield _case(s, coverage, "cover", (worth, 7, bonus, scale), 0, "bonus and scale")


# --- quantization --------------------------------------------------------------------------------


def _quantize_kv(s: Shape, draw: Draws) -> Iterator[Case]:
    for bits, group in ((4, 0), (2, 32), (8, 0)):
        top, size = 2**bits - 1, (s.kv_heads, s.length, s.dim)
        # Multiples of a step that is a power of two: no entry is between two codes. The first
        # slots and channels of every group reach both ends.
        codes = draw.integers(0, top + 1, *size)
        every = group or s.length
        codes[:, ::every], codes[:, 1::every] = 0, top
        x = (codes / 4 - 2).to(s.dtype)
        dtype, about = torch.float16, f"{bits} bits"
        moved = x.nbytes + s.kv_heads * s.length * s.dim * bits // 8
        args = x, bits, group
        yield _case(s, quantize_kv, "quantize_keys", args, 2, about, moved, dtype=dtype)
        codes = draw.integers(0, top + 1, *size)
        codes[..., 0], codes[..., 1] = 0, top
        x = (codes / 4 - 2).to(s.dtype)
        args = x, bits, s.dim
        yield _case(s, quantize_kv, "quantize_values", args, 2, about, moved, dtype=dtype)
    valid = draw.uniform(s.kv_heads, s.length) < 0.7
    x = draw.normal(s.kv_heads, s.length, s.dim).masked_fill(~valid[..., None], torch.nan)
    yield _case(s, quantize_kv, "channel_scale", (x, valid), 2, dtype=torch.float32)


# --- decode step ---------------------------------------------------------------------------------


def _norm_rope_append(s: Shape, draw: Draws) -> Iterator[Case]:
    tokens = s.length if s.large else 3
    x, residual, weight = (
        draw.normal(tokens, s.width),
        draw.normal(tokens, s.width),
        draw.normal(s.width),
    )
    args = x, weight, 1e-6, residual
    yield _case(
        s, norm_rope_append, "residual_norm", args, s.width, f"{tokens} tokens", 4 * x.nbytes
    )
    if s.large:
        return
    kw: dict[str, Any] = {"branch_weight": draw.normal(s.width), "unit_offset": True}
    yield _case(s, norm_rope_append, "residual_norm", args, 2 * s.width, "norm of a branch", **kw)
    batch, new, capacity = 2, 2, s.length + 2
    query = draw.normal(batch, s.heads, new, s.dim)
    key, value = (draw.normal(batch, s.kv_heads, new, s.dim) for _ in "kv")
    angle = 6.3 * draw.uniform(batch, new, s.dim // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(s.dtype), angle.sin().to(s.dtype)
    lengths = draw.integers(0, s.length, batch, s.kv_heads)

    weights = draw.normal(s.dim), draw.normal(s.dim)

    def appended(function: Callable[..., Tensor], norm: Any) -> tuple[Tensor, ...]:
        keys, values = (key.new_zeros(batch, s.kv_heads, capacity, s.dim) for _ in "kv")
        rotated = function(query, key, value, cos, sin, keys, values, lengths, norm)
        return rotated, keys, values

    pair = norm_rope_append.rotate_append, norm_rope_append.rotate_append_ref
    for about, norm in (
        ("ragged", None),
        ("norms of heads", norm_rope_append.HeadNorm(*weights, 1e-6)),
    ):
        terms = 2 if norm is None else s.dim
        case = _case(s, norm_rope_append, "rotate_append", (), terms, about)
        run, reference = (partial(appended, of, norm) for of in pair)
        yield replace(case, run=run, reference=reference)


def _swiglu(s: Shape, draw: Draws) -> Iterator[Case]:
    tokens = s.length // 4 if s.large else 3
    gate, up = (draw.normal(tokens, 3 * s.width) for _ in "gu")
    for name in ("swiglu", "geglu_tanh"):
        yield _case(s, swiglu, name, (gate, up), 1, f"{tokens} tokens", 3 * gate.nbytes)


def _few_rows(s: Shape, draw: Draws) -> Iterator[Case]:
    width = s.width // 8 * 8  # rows of 16 bytes
    sizes = (3 * s.width, s.width, s.width) if s.large else (s.width, 17, 9)
    weights = [draw.normal(size, width) for size in sizes]
    biases = [None, draw.normal(sizes[1]), None]
    for rows in (1, 5):
        args = draw.normal(rows, width), weights, biases
        yield _case(s, few_rows, "linears", args, width, f"{rows} rows", _nbytes(*weights))
        pair = weights[0], draw.normal(sizes[0], width)
        for gelu_tanh in (False, True):
            about = f"{rows} rows{', GELU' if gelu_tanh else ''}"
            given = args[0] / width**0.5, pair
            case = _case(s, few_rows, "gated_linear", given, width, about, gelu_tanh=gelu_tanh)
            yield case


# --- pooling -------------------------------------------------------------------------------------


def _pool(s: Shape, draw: Draws) -> Iterator[Case]:
    if s.large:
        return
    wide = torch.float32
    rows, table = draw.normal(s.length, s.width, dtype=wide), draw.integers(0, s.length, 9, 4)
    valid = draw.uniform(9, 4) < 0.7
    valid[:, 0] = True
    args = rows.to(s.dtype), draw.uniform(s.length) + 0.5, table, valid
    yield _case(s, pool, "cell_average", args, 4)
    args = rows, draw.normal(s.length, 4, dtype=wide), table, valid
    yield _case(s, pool, "cell_mix", args, 4)
    query, key = draw.normal(5, 4, 16, dtype=wide), draw.normal(s.length, 4, 16, dtype=wide)
    places = draw.uniform(s.length), draw.uniform(5, 2), draw.uniform(s.length, 2), draw.uniform(4)
    yield _case(s, pool, "resample", (query, key, rows, *places), 16 + s.length)


# Whether a kernel is checked in every dtype, and its cases.
CASES: dict[str, tuple[bool, Build]] = {
    "biased_attention": (True, _biased_attention),
    "col_stats": (True, _col_stats),
    "coverage": (False, _coverage),
    "decode_mixed": (True, _decode_mixed),
    "decode_slots": (True, _decode_slots),
    "diversity": (False, _diversity),
    "few_rows": (True, _few_rows),
    "gather_rows": (True, _gather_rows),
    "merge": (True, _merge),
    "norm_rope_append": (True, _norm_rope_append),
    "pool": (False, _pool),
    "quantize_kv": (True, _quantize_kv),
    "select": (False, _select),
    "swiglu": (True, _swiglu),
    "tree_verify": (True, _tree_verify),
}

SMALL = (Shape(4, 2, 16, 48, 64), Shape(2, 2, 24, 37, 40))
MIDDLE = (Shape(8, 2, 64, 333, 512), Shape(4, 1, 80, 129, 320), Shape(4, 4, 128, 200, 512))
WIDEST = Shape(2, 1, 256, 130, 512)
LARGE = Shape(32, 8, 128, 16384, 4096, large=True)


def shapes(device: torch.device, quick: bool) -> list[Shape]:
    """The grid of shapes and dtypes for a device: small ones for the interpreter."""
    if device.type == "cuda":
        dtypes = [torch.bfloat16, torch.float32, torch.float16]
        grid = [*MIDDLE[:2], LARGE] if quick else [*MIDDLE, WIDEST, LARGE]
    else:
        # The interpreter truncates instead of rounding to bfloat16.
        dtypes, grid = [torch.float32, torch.float16], list(SMALL)
    found = [
        replace(shape, dtype=dtype, device=device)
        for number, shape in enumerate(grid)
        # Quick checks take one dtype for each shape.
        for dtype in (dtypes if not quick else dtypes[number % 2 :][:1])
    ]
    return [shape for shape in found if not shape.large or shape.dtype == torch.bfloat16]


def cases_of(kernel: str, grid: list[Shape]) -> Iterator[Case]:
    """The cases of a kernel on a grid of shapes."""
    every_dtype, build = CASES[kernel]
    seen = set()
    for number, shape in enumerate(grid):
        if not every_dtype:
            shape = replace(shape, dtype=torch.float32)
        if shape not in seen:
            seen.add(shape)
            yield from build(shape, Draws(shape, number))
