"""Calls of every public function of `vlmfast.kernels` at awkward sizes.

One row, one slot, sizes just above and below a block, views, empty segments and ragged lengths.
`CASES` maps a name to a function that returns the call's function and its arguments, on the CPU.
`THREE` are calls for huge strides. Names begin with the kernel file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
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
from vlmfast.kernels.compile import files

Call = tuple[Callable[..., Any], dict[str, Any]]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(x: Tensor) -> Tensor:
    """The same values with axes 0 and 1 exchanged in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def sliced(x: Tensor) -> Tensor:
    """The same values in a wider buffer: gaps between the rows."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def indices(rows: int, keep: int, *leading: int) -> Tensor:
    order = noise(*leading, rows, seed=3).argsort(-1)[..., :keep]
    return order.sort(-1).values


def segment(batch: int, heads: int, slots: int, dim: int, **how: Any) -> quantize_kv.Segment:
    """Quantized by the reference; the last head is full, the first may be empty."""
    lengths = torch.arange(batch * heads).view(batch, heads) * 7 % (slots + 1)
    lengths[-1, -1] = slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMFAST_KERNELS", "torch")
        keys, values = (noise(batch, heads, slots, dim, seed=s) for s in (1, 2))
        order = torch.arange(slots).repeat(batch, heads, 1)
        return quantize_kv.quantize(keys, values, order, lengths, dtype=torch.float16, **how)


FOUR, TWO = {"bits": 4, "scaled": True}, {"bits": 2, "key_group": 8, "value_group": 8}


# --- cases ---------------------------------------------------------------------------------------


def _biased(
    rows: int, keys: int, dim: int = 16, view: Callable = turned, b: int = 2, h: int = 2, **more
) -> Call:
    given = {
        "query": view(noise(b, 2 * h, rows, dim)),
        "key": view(noise(b, h, keys, dim, seed=1)),
        "value": view(noise(b, h, keys, dim, seed=2)),
        "bias": noise(b, h, keys, seed=4),
        "lengths": torch.tensor([keys, *[max(keys // 2, 1)] * (b - 1)]),
    }
    return biased_attention.biased_attention, given | more


def _stats(
    keys: int, rows: int | None, dim: int = 16, view: Callable = turned, h: int = 2, **more: Any
) -> Call:
    given = {
        "query": view(noise(2 * h, keys, dim)),
        "key": view(noise(h, keys, dim, seed=1)),
        "rows": None if rows is None else indices(keys, rows),
        "bias": noise(keys, seed=2),
        "threshold": 0.1,
        "want": col_stats.STATISTICS,
    }
    return col_stats.col_stats, given | more


def _mixed(
    rows: int, tail: int, groups: int, parts: dict[int, dict], dim: int = 16, b: int = 2, h: int = 2
) -> Call:
    mask = torch.arange(tail) < torch.tensor([tail, *[tail // 2] * (b - 1)])[:, None, None, None]
    return decode_mixed.decode_mixed, {
        "query": turned(noise(b, h * groups, rows, dim)),
        "segments": [segment(b, h, slots, dim, **how) for slots, how in parts.items()],
        "tail_keys": turned(noise(b, h, tail, dim, seed=5)),
        "tail_values": turned(noise(b, h, tail, dim, seed=6)),
        "tail_mask": mask.repeat(1, h, rows, 1),
        "tail_bias": noise(b, h, tail, seed=7),
        "want_attention_mass": True,
    }


def _tree(
    nodes: int,
    slots: int,
    groups: int,
    parts: dict[int, dict],
    dim: int = 16,
    b: int = 2,
    h: int = 2,
) -> Call:
    ancestors = torch.tensor(
        [[(2 << min(n, 62)) - 1, -1][: 1 + (nodes > 64)] for n in range(nodes)]
    )
    lengths = torch.tensor([0, slots, slots // 2])[torch.arange(b * h) % 3].view(b, h)
    return tree_verify.tree_verify, {
        "query": turned(noise(b, h * groups, nodes, dim)),
        "keys": turned(noise(b, h, slots, dim, seed=1)),
        "values": turned(noise(b, h, slots, dim, seed=2)),
        "lengths": lengths,
        "tree_keys": turned(noise(b, h, nodes, dim, seed=3)),
        "tree_values": turned(noise(b, h, nodes, dim, seed=4)),
        "ancestors": ancestors,
        "segments": [segment(b, h, n, dim, **how) for n, how in parts.items()],
        "bias": noise(b, h, slots, seed=5),
    }


def _slots(
    listed: int, newest: int, groups: int, dim: int = 16, b: int = 2, h: int = 2, total: int = 0
) -> Call:
    """Lists of different lengths; the last head reads all slots, the first one only the newest."""
    total = total or listed + newest + 3
    counts = torch.arange(b * h).view(b, h) * 7 % (listed + 1)
    counts[-1, -1] = listed
    start = torch.full((b, h), total - newest)
    return decode_slots.decode_slots, {
        "query": turned(noise(b, h * groups, 1, dim)),
        "keys": turned(noise(b, h, total, dim, seed=1)),
        "values": turned(noise(b, h, total, dim, seed=2)),
        "slots": indices(total - newest, listed, b, h) if listed else torch.zeros(b, h, 0).long(),
        "counts": counts,
        "start": start,
        "end": start + newest,
        "newest": newest,
        "bias": noise(b, h, total, seed=3),
    }


def _rotate(tokens: int, capacity: int, dim: int = 16, b: int = 2, h: int = 2) -> Call:
    """With one head whose last token is beyond the buffer."""
    length = torch.arange(b * h).view(b, h) % (capacity - tokens + 1)
    length[-1, -1] = capacity - tokens + 1
    return _rotated, {
        "query": turned(noise(b, 2 * h, tokens, dim)),
        "key": turned(noise(b, h, tokens, dim, seed=1)),
        "value": turned(noise(b, h, tokens, dim, seed=2)),
        "cos": noise(b, tokens, dim, seed=3),
        "sin": noise(b, tokens, dim, seed=4),
        "keys": turned(torch.zeros(b, h, capacity, dim)),
        "values": turned(torch.zeros(b, h, capacity, dim)),
        "length": length,
    }


def _rotated(keys: Tensor, values: Tensor, **given: Any) -> list[Tensor]:
    return [norm_rope_append.rotate_append(keys=keys, values=values, **given), keys, values]


def _norm(rows: int, width: int, view: Callable = sliced) -> Call:
    return norm_rope_append.residual_norm, {
        "x": view(noise(rows, width)),
        "weight": noise(width, seed=1),
        "eps": 1e-6,
        "residual": view(noise(rows, width, seed=2)),
    }


def _linears(rows: int, width: int, *sizes: int) -> Call:
    weights = [sliced(noise(size, width, seed=size)) for size in sizes]
    biases = [noise(size, seed=2 * size) if size % 2 else None for size in sizes]
    return few_rows.linears, {
        "x": sliced(noise(rows, width)),
        "weights": weights,
        "biases": biases,
    }


def _gated(rows: int, width: int, size: int) -> Call:
    gate, up = sliced(noise(size, width, seed=1)), noise(size, width, seed=2)
    given = {"x": sliced(noise(rows, width)), "weights": (gate, up)}
    return few_rows.gated_linear, given | {"biases": (None, noise(size, seed=3))}


def _swiglu(rows: int, width: int) -> Call:
    return swiglu.swiglu, {"gate": sliced(noise(rows, width)), "up": noise(rows, width, seed=1)}


def _gather(rows: int, keep: int, counts: Tensor | None) -> Call:
    return _gathered, {
        "index": indices(rows, keep, 3),
        "tensors": [
            sliced(noise(3, rows, 24)),
            turned(noise(3, rows, 5, seed=1)),
            noise(3, rows, seed=2) > 0,
            torch.arange(3 * rows).view(3, rows),
        ],
        "counts": counts,
    }


def _gathered(index: Tensor, tensors: list[Tensor], counts: Tensor | None) -> tuple[Tensor, ...]:
    return gather_rows.gather_rows(index, *tensors, counts=counts)


def _top(rows: int, n: int, k: int) -> Call:
    per_row = torch.arange(rows) % (k + 1)
    given = {"scores": sliced(noise(rows, n)), "first": noise(rows, n, seed=1) > 1}
    return select.top_k, given | {"k": per_row, "width": k}


def _mass(rows: int, n: int) -> Call:
    return select.mass_count, {
        "attention_mass": sliced(noise(rows, n).abs()),
        "target": noise(rows, seed=1).abs(),
    }


def _merge(n: int, keep: int, mode: str, rule: str, dim: int = 16) -> Call:
    return merge.merge_into, {
        "keys": turned(noise(3, n, dim)),
        "values": turned(noise(3, n, dim, seed=1)),
        "keep": indices(n, keep, 3),
        "mode": mode,
        "rule": rule,
        "valid": torch.arange(n) < torch.tensor([[n], [max(n - 3, keep)], [n]]),
        "lengths": torch.tensor([keep, max(keep - 1, 1), keep]),
        "weight": noise(3, n, seed=4).abs() + 1,
    }


def _cells(n: int, cells: int, members: int) -> dict[str, Tensor]:
    table = torch.arange(cells * members).view(cells, members) % n
    valid = noise(cells, members, seed=9) > -1
    valid[:, 0] = True
    return {"table": table, "valid": valid}


def _average(n: int, width: int, cells: int, members: int) -> Call:
    given = {"rows": sliced(noise(n, width)), "weight": noise(n, seed=1).abs() + 1}
    return pool.cell_average, given | _cells(n, cells, members)


def _mix(n: int, width: int, heads: int, cells: int, members: int) -> Call:
    given = {"rows": sliced(noise(n, width)), "score": noise(n, heads, seed=1)}
    return pool.cell_mix, given | _cells(n, cells, members)


def _resample(queries: int, n: int, heads: int = 2, dim: int = 16, width: int = 24) -> Call:
    return pool.resample, {
        "query": turned(noise(queries, heads, dim)),
        "key": turned(noise(n, heads, dim, seed=1)),
        "rows": sliced(noise(n, width, seed=2)),
        "bias": noise(n, seed=3),
        "at": noise(queries, 2, seed=4),
        "place": noise(n, 2, seed=5),
        "pull": noise(heads, seed=6).abs(),
    }


def _quantize(n: int, dim: int, b: int = 2, h: int = 2, **how: Any) -> Call:
    lengths = torch.arange(b * h).view(b, h) * 5 % (n + 1)
    lengths[-1, -1] = n
    return quantize_kv.quantize, {
        "keys": turned(noise(b, h, n, dim)),
        "values": turned(noise(b, h, n, dim, seed=1)),
        "order": torch.arange(n).repeat(b, h, 1),
        "lengths": lengths,
        "dtype": torch.float16,
        **how,
    }


def _matrix(name: str, n: int, k: int, leading: int = 2, **more: Any) -> Call:
    similarity = diversity.cosine(noise(leading, n, 8))
    key = {"max_min": "similarity", "dpp": "kernel", "density_peaks": "distance"}[name]
    matrix = (1 - similarity).clamp(min=0) if name == "density_peaks" else similarity
    return getattr(diversity, name), {key: matrix, "k": k, **more}


def _cover(rows: int, n: int, k: int, weighted: bool = False) -> Call:
    given = {"worth": noise(n, rows).abs().T, "k": k}
    if weighted:
        given |= {"bonus": noise(n, seed=1), "scale": noise(n, seed=2).abs()}
    return coverage.cover, given


# Three entries along every axis that a stride belongs to: the second may be beyond 2^31 elements.
_THREE: dict[str, Callable[[], Call]] = {
    "biased_attention": partial(_biased, 3, 5, b=3, h=3),
    "col_stats": partial(_stats, 5, 3, h=3),
    "coverage": partial(_cover, 3, 3, 2, True),
    "decode_mixed one row": partial(_mixed, 1, 4, 1, {3: FOUR}, b=3, h=3),
    "decode_mixed rows": partial(_mixed, 3, 3, 2, {3: TWO}, b=3, h=3),
    "decode_slots": partial(_slots, 2, 1, 1, b=3, h=3, total=3),
    "tree_verify": partial(_tree, 3, 4, 1, {3: FOUR}, b=3, h=3),
    "few_rows": partial(_linears, 3, 8, 3, 4, 5),
    "few_rows gated": partial(_gated, 3, 8, 3),
    "norm_rope_append": partial(_rotate, 3, 5, b=3, h=3),
    "norm_rope_append norm": partial(_norm, 3, 24),
    "swiglu": partial(_swiglu, 3, 5),
    "gather_rows": partial(_gather, 5, 3, None),
    "select": partial(_top, 3, 7, 3),
    "select mass": partial(_mass, 3, 7),
    "merge": partial(_merge, 7, 3, "weighted", "token"),
    "pool average": partial(_average, 5, 24, 3, 3),
    "pool mix": partial(_mix, 5, 24, 3, 3, 3),
    "pool resample": partial(_resample, 3, 5, 3),
    "quantize_kv": partial(_quantize, 5, 16, 3, 3, **FOUR),
    "diversity max_min": partial(_matrix, "max_min", 4, 2, 3),
    "diversity dpp": partial(_matrix, "dpp", 4, 2, 3),
    "diversity density_peaks": partial(_matrix, "density_peaks", 4, 2, 3, neighbours=2),
}

_CASES: dict[str, Callable[[], Call]] = {
    "biased_attention small": partial(_biased, 3, 5),
    "biased_attention one row, one key": partial(_biased, 1, 1),
    "biased_attention block - 1": partial(_biased, 31, 31, 24),
    "biased_attention block + 1": partial(_biased, 33, 33, view=sliced),
    "biased_attention not causal": partial(_biased, 17, 9, causal=False),
    "col_stats small": partial(_stats, 5, 3),
    "col_stats one key": partial(_stats, 1, 1),
    "col_stats block - 1": partial(_stats, 63, None, 24),
    "col_stats block + 1": partial(_stats, 65, 17, view=sliced),
    "col_stats not causal": partial(_stats, 20, 4, causal=False, start=3),
    "coverage small": partial(_cover, 5, 7, 3),
    "coverage one": partial(_cover, 1, 1, 1),
    "coverage block - 1": partial(_cover, 255, 15, 15),
    "coverage block + 1": partial(_cover, 257, 17, 4, True),
    "decode_mixed small": partial(_mixed, 1, 4, 1, {5: FOUR}),
    "decode_mixed one slot": partial(_mixed, 1, 1, 2, {1: FOUR}),
    "decode_mixed empty segment": partial(_mixed, 1, 5, 2, {0: FOUR, 3: TWO}),
    "decode_mixed empty tail": partial(_mixed, 1, 0, 1, {17: TWO}),
    "decode_mixed block - 1": partial(_mixed, 3, 63, 1, {31: TWO}, 24),
    "decode_mixed block + 1": partial(_mixed, 17, 33, 1, {65: FOUR}),
    "decode_mixed one query head, block + 1": partial(_mixed, 1, 65, 1, {33: TWO}, 24),
    "decode_slots small": partial(_slots, 5, 2, 2),
    "decode_slots newest alone": partial(_slots, 0, 1, 1),
    "decode_slots block - 1": partial(_slots, 60, 3, 1, 24),
    "decode_slots block + 1": partial(_slots, 64, 1, 17),
    "tree_verify small": partial(_tree, 2, 4, 1, {9: FOUR}),
    "tree_verify one node": partial(_tree, 1, 1, 1, {}),
    "tree_verify empty context": partial(_tree, 3, 0, 2, {5: TWO}),
    "tree_verify two words": partial(_tree, 65, 17, 1, {}),
    "tree_verify block + 1": partial(_tree, 17, 33, 1, {33: TWO}, 24),
    "few_rows one row": partial(_linears, 1, 24, 9, 4),
    "few_rows block + 1": partial(_linears, 16, 260, 17, 16, 33),
    "few_rows gated one row": partial(_gated, 1, 516, 9),
    "few_rows gated block + 1": partial(_gated, 5, 24, 33),
    "norm_rope_append small": partial(_rotate, 2, 6),
    "norm_rope_append one token": partial(_rotate, 1, 2, 24),
    "norm_rope_append block + 1": partial(_rotate, 17, 40),
    "norm_rope_append norm small": partial(_norm, 3, 40),
    "norm_rope_append norm one row": partial(_norm, 1, 1),
    "norm_rope_append norm above a block": partial(_norm, 2, 129, turned),
    "swiglu small": partial(_swiglu, 3, 5),
    "swiglu one": partial(_swiglu, 1, 1),
    "swiglu block + 1": partial(_swiglu, 1, 1025),
    "gather_rows small": partial(_gather, 7, 3, None),
    "gather_rows one row": partial(_gather, 1, 1, torch.tensor([0, 1, 1])),
    "gather_rows ragged": partial(_gather, 33, 17, torch.tensor([0, 17, 5])),
    "select small": partial(_top, 3, 7, 3),
    "select one": partial(_top, 1, 1, 1),
    "select block + 1": partial(_top, 2, 65, 33),
    "select mass small": partial(_mass, 3, 7),
    "select mass one": partial(_mass, 1, 1),
    "select mass block + 1": partial(_mass, 2, 33),
    "merge small": partial(_merge, 9, 4, "pivot", "all"),
    "merge one kept": partial(_merge, 5, 1, "avg", "slot"),
    "merge block + 1": partial(_merge, 65, 17, "weighted", "token", 24),
    "pool average small": partial(_average, 9, 24, 3, 4),
    "pool average one": partial(_average, 1, 1, 1, 1),
    "pool average block + 1": partial(_average, 33, 129, 17, 3),
    "pool mix small": partial(_mix, 9, 24, 2, 3, 4),
    "pool mix one": partial(_mix, 1, 2, 1, 1, 1),
    "pool mix block + 1": partial(_mix, 33, 132, 4, 17, 3),
    "pool resample small": partial(_resample, 3, 7),
    "pool resample one": partial(_resample, 1, 1),
    "pool resample block + 1": partial(_resample, 17, 65),
    "quantize_kv small": partial(_quantize, 9, 16, **FOUR),
    "quantize_kv one slot": partial(_quantize, 1, 16, **TWO),
    "quantize_kv 8 bit": partial(_quantize, 5, 24, bits=8),
    "quantize_kv block - 1": partial(_quantize, 31, 24, **TWO),
    "quantize_kv block + 1": partial(_quantize, 65, 16, **FOUR),
    "diversity max_min small": partial(_matrix, "max_min", 7, 3),
    "diversity max_min one": partial(_matrix, "max_min", 1, 1),
    "diversity max_min block + 1": partial(_matrix, "max_min", 33, 4),
    "diversity dpp small": partial(_matrix, "dpp", 7, 3),
    "diversity dpp one": partial(_matrix, "dpp", 1, 1),
    "diversity dpp block + 1": partial(_matrix, "dpp", 33, 4),
    "diversity density_peaks small": partial(_matrix, "density_peaks", 5, 2, neighbours=2),
    "diversity density_peaks one": partial(_matrix, "density_peaks", 1, 1, neighbours=1),
    "diversity density_peaks block + 1": partial(_matrix, "density_peaks", 33, 4, neighbours=5),
}

# Without those of a kernel file that no longer exists.
CASES, THREE = (
    {name: case for name, case in table.items() if name.split()[0] in files()}
    for table in (_CASES, _THREE)
)
