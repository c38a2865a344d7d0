"""Kernels match their references and access nothing beside their tensors, at awkward sizes.

In Triton's interpreter each address is checked (the fixture `triton`, in all kernel tests). Here
all buffers also have guard bands, on any device: the result may not depend on those of the inputs,
and those of the outputs may not change.
"""

from __future__ import annotations

import pytest
import torch

from kernel_memory import Guarded, banded, checked, guarded, results
from vlmfast.check.closeness import deviation
from vlmfast.kernels import _triton
from vlmfast.kernels.calls import Shape, tensors
from vlmfast.kernels.catalogue import CASES, Case

CHECKS_ADDRESSES = True
pytestmark = pytest.mark.usefixtures("triton")
tl, triton_jit = _triton.tl, _triton.triton.jit
interpreted = pytest.mark.skipif(not _triton.INTERPRETED, reason="addresses are not observable")

# One slot, a few, and more than a block; head dimensions that are padded; views.
SHAPES = {
    "one": Shape(2, 1, 8, 1, 8, 9, views=True),
    "small": Shape(2, 2, 72, 5, 40, 21, views=True),
    "half": Shape(2, 1, 80, 20, 24, 24, dtype=torch.float16, views=True),
    "bfloat16": Shape(2, 2, 256, 9, 24, 24, dtype=torch.bfloat16),
    "above a block": Shape(4, 2, 16, 67, 264, 1025, views=True),
}
SLOW = ("above a block", "tree of 65")  # in the interpreter
PAIRS = [
    pytest.param(
        case,
        shape,
        marks=[pytest.mark.slow] * (of in SLOW or case.name in SLOW),
        id=f"{case.name} {of}",
    )
    for case in CASES
    for of, shape in SHAPES.items()
    if case.checked or not case.timed
]


@pytest.mark.cases(8)
@pytest.mark.parametrize(("case", "shape"), PAIRS)
def test_kernels_match_their_references_and_stay_within_their_buffers(
    case: Case, shape: Shape, device: torch.device
) -> None:
    call = case.call(shape)
    with guarded() as buffers:
        got = results(call, lambda x: banded(x.to(device)))
        assert buffers.check(), "no output was allocated with guard bands"
    assert got and all(not x.is_floating_point() or not x.isnan().any() for x in got)
    if case.checked:  # the others have no reference
        wanted = list(tensors(call.reference()))
        assert deviation([x.cpu() for x in got], wanted, call) <= 1
    if not _triton.INTERPRETED:  # there the addresses are checked
        plain = results(call, lambda x: x.to(device, copy=True))
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name)
        for case in CASES
        if case.checked and not case.name.startswith("rotate_append")  # which refuses such buffers
    ],
)
def test_gaps_within_rows_do_not_change_the_result(case: Case, device: torch.device) -> None:
    call = case.call(SHAPES["small"])

    def spread(x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        return x if x.dim() < 2 else torch.stack([x, torch.zeros_like(x)], -1)[..., 0]

    got = results(call, spread)
    plain = results(call, lambda x: x.to(device, copy=True))
    assert deviation([x.cpu() for x in got], [x.cpu() for x in plain], call) <= 1


# --- controls ------------------------------------------------------------------------------------


@triton_jit
def _copy(x, out, first, last, N):
    """Copies entries ``first`` to ``last``, which may be outside of both tensors."""
    i = tl.arange(0, 16)
    m_i = (i >= first) & (i < last)
    value = tl.load(x + i, mask=m_i, other=0.0)
    tl.store(out + tl.minimum(i, N), value, mask=m_i & (i < N))


@triton_jit
def _copy_unguarded(x, out, last):
    i = tl.arange(0, 16)
    tl.store(out + i, tl.load(x + i, mask=i < 8, other=0.0), mask=i < last)


@triton_jit
def _copy_rows(x, out, stride, ROW: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(out + i, tl.load(x + stride + i, mask=i < ROW, other=0.0), mask=i < 8)


@interpreted
def test_read_outside_that_does_not_reach_the_result_is_caught() -> None:
    x, out = banded(torch.ones(8)), banded(torch.zeros(8))
    _copy[(1,)](x, out, 0, 8, 8)
    assert out.tolist() == [1.0] * 8
    with pytest.raises(Exception, match=r"read outside the tensors: byte 32 of torch.float32 \(8,"):
        _copy[(1,)](x, out, 0, 9, 8)


@interpreted
def test_read_in_the_gap_of_a_view_is_caught() -> None:
    x, out = torch.ones(2, 8)[:, :6], torch.zeros(8)
    _copy_rows[(1,)](x, out, 8, ROW=6)
    assert out.tolist() == [1.0] * 6 + [0.0] * 2
    with pytest.raises(Exception, match=r"_copy_rows: tl.store\(out \+ i, tl.load\(x \+ stride"):
        _copy_rows[(1,)](x, out, 8, ROW=7)


@interpreted
def test_write_outside_is_caught() -> None:
    x = torch.ones(8)
    with guarded():
        out = torch.empty(8)
        _copy_unguarded[(1,)](x, out, 8)
        with pytest.raises(Exception, match="write outside the tensors: byte 32"):
            _copy_unguarded[(1,)](x, out, 9)


def test_guard_bands_show_reads_and_writes(device: torch.device) -> None:
    """What the bands show alone, as on a GPU, where addresses are not observable."""
    x = banded(torch.ones(8, device=device))
    beside = x.as_strided((10,), (1,), x.storage_offset() - 1)
    assert beside[1:9].eq(1).all() and beside[[0, 9]].isnan().all()
    for offset in (0, 7, -1, 8):
        buffers = Guarded()
        out = buffers.around(torch.empty(8, device=device))
        out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(3.0)
        if 0 <= offset < 8:
            assert buffers.check() == 1
            continue
        with pytest.raises(AssertionError, match="written beside"):
            buffers.check()


@interpreted
def test_nothing_is_checked_outside_of_the_context() -> None:
    """The check leaves Triton as it was."""
    from triton.runtime import interpreter

    before = interpreter._interpreter, interpreter.GridExecutor.__call__
    with checked():
        assert interpreter._interpreter is not before[0]
    assert (interpreter._interpreter, interpreter.GridExecutor.__call__) == before
