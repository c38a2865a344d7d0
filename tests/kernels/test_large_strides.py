"""Offsets beyond 2^31 elements are computed in 64 bits.

Two checks in Triton's interpreter. Tensors are views with a huge stride over mapped memory, of
which only the touched pages exist: an offset in 32 bits is outside of the tensor. And a product of
an index and a size or stride in 32 bits may not reach an address; this also covers contiguous
outputs that are too large to allocate.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engine.kernels import INTERPRETED, interpreted_in_place
from support.kernel_memory import narrow_products, results
from vlmfast.kernels.calls import Call, Shape, tensors
from vlmfast.kernels.catalogue import CASES, Case

CHECKS_ADDRESSES = True
pytestmark = [
    pytest.mark.usefixtures("triton"),
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
]

# At least three entries along every axis that a stride belongs to.
SHAPE = Shape(3, 3, 16, 12, 24, 8, batch=3)
NAMES = (
    "attention, ragged", "col_stats, with a bias", "cover, bonus", "decode, masses",
    "decode, 3 rows", "decode, ragged lists", "tree of 3, groups", "linears, biases", "gated, GELU",
    "rotate_append, 3 tokens", "residual_norm, of a branch", "geglu_tanh", "gather_rows, ragged",
    "top_k, ragged", "mass_count, 90 %", "merge, by token", "cell_average, 4 to 1",
    "cell_mix, 4 to 1", "resample, 80 queries", "quantize, 4 bit", "max_min, a sixth of 576",
    "dpp, a sixth of 576", "density_peaks, 576",
)  # fmt: skip
CHOSEN = [pytest.param(case, id=case.name) for case in CASES if case.name in NAMES]

# Axes whose offsets are in 32 bits: those of slots within one head of one request, less than 2^31
# elements apart (524,288 tokens of 32 heads of 128 channels), and heads side by side in a row.
BOUNDED = {
    "decode_mixed": {2},
    "tree_verify": {2},
    "quantize_kv": {2},
}
# Functions with products of that kind, or of a head and its columns.
WITHIN_ONE_HEAD = {
    "decode_mixed": {"attend_row", "attend_rows"},
    "decode_slots": {"_attend_list"},
    "tree_verify": {"attend_row", "attend_rows"},
    "quantize_kv": {"_extent", "_pack", "_value_parameters"},
    "pool": {"_mix", "_read", "_share"},
}


def mapped(size: int) -> Tensor:
    """Zeros, uint8, of which only the touched pages take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        pytest.skip(f"this platform refuses {size >> 30} GiB of address space: {error}")


def spread(x: Tensor, axis: int) -> Tensor:
    """A copy of ``x`` whose last index along ``axis`` is 2^31 elements or more away."""
    strides = list(torch.empty(x.shape, device="meta").stride())
    # A multiple of 64, and itself in 32 bits.
    strides[axis] = min((2**31 // (x.shape[axis] - 1) // 64 + 1) * 64, 2**31 - 64)
    size = (x.shape[axis] - 1) * strides[axis] + x.numel()
    assert size > 2**31
    return mapped(size * x.element_size()).view(x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted_in_place(monkeypatch)  # copying arguments back would touch every page


@functools.cache
def contiguous(case: Case) -> tuple[list[Tensor], set[str]]:
    """Results of a case as it is, and its products in 32 bits."""
    with narrow_products() as products:
        return results(case.call(SHAPE), Tensor.clone), products


def placeable(case: Case, call: Call) -> list[Tensor]:
    """Its buffers: bits of ancestors are T words, none of the cache."""
    ancestors = call.args[6] if case.kernel == "tree_verify" else None
    return [x for x in tensors((call.args, call.kwargs)) if x is not ancestors]


def pairs() -> Iterator[Any]:
    """Cases with each axis but the last, which is contiguous."""
    for case in (case for case in CASES if case.name in NAMES):
        shapes = [x.shape[:-1] for x in placeable(case, case.call(SHAPE))]
        axes = {axis for shape in shapes for axis, n in enumerate(shape) if n > 2}
        for axis in sorted(axes - BOUNDED.get(case.kernel, set())):
            slow = case.kernel == "tree_verify" or case.name == "decode, 3 rows"
            marks = [pytest.mark.slow] * (slow and axis > 0)
            yield pytest.param(case, axis, marks=marks, id=f"{case.name} {axis}")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("case", "axis"), pairs())
@pytest.mark.usefixtures("in_place")
def test_huge_strides_do_not_change_the_result(case: Case, axis: int) -> None:
    call, placed = case.call(SHAPE), []
    buffers = {id(x) for x in placeable(case, call)}

    def place(x: Tensor) -> Tensor:
        fits = axis < x.dim() - 1 and x.shape[axis] > 2 and id(x) in buffers
        placed.append(fits)
        return spread(x, axis) if fits else x.clone()

    got = results(call, place)
    assert any(placed) and all(
        torch.equal(a, b) for a, b in zip(got, contiguous(case)[0], strict=True)
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CHOSEN)
def test_products_in_32_bits_stay_within_one_head(case: Case) -> None:
    allowed = WITHIN_ONE_HEAD.get(case.kernel, set())
    assert not {line for line in contiguous(case)[1] if line.partition(":")[0] not in allowed}
