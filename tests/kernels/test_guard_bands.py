"""Kernels match their references and access nothing beside their tensors, at awkward sizes.

In Triton's interpreter each address is checked (the fixture `triton`, in all kernel tests). Here
all buffers also have guard bands, on any device: the result may not depend on those of the inputs,
and those of the outputs may not change.
"""

from __future__ import annotations

import pytest
import torch

from support.engine.kernels import INTERPRETED, tl, triton
from support.kernel_memory import banded, guarded, results
from vlmfast.check.closeness import deviation
from vlmfast.kernels.calls import Shape, tensors
from vlmfast.kernels.catalogue import CASES, Case

CHECKS_ADDRESSES = True
pytestmark = pytest.mark.usefixtures("triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="addresses are not observable")

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
    if not INTERPRETED:  # there the addresses are checked
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


@triton.jit
def _copy(x, out, first, last, N):
    """Copies entries ``first`` to ``last``, which may be outside of both tensors."""
    i = tl.arange(0, 16)
    m_i = (i >= first) & (i < last)
    value = tl.load(x + i, mask=m_i, other=0.0)
    tl.store(out + tl.minimum(i, N), value, mask=m_i & (i < N))


@interpreted
def test_read_outside_that_does_not_reach_the_result_is_caught() -> None:
    x, out = banded(torch.ones(8)), banded(torch.zeros(8))
    _copy[(1,)](x, out, 0, 8, 8)
    assert out.tolist() == [1.0] * 8
    with pytest.raises(Exception, match=r"read outside the tensors: byte 32 of torch.float32 \(8,"):
        _copy[(1,)](x, out, 0, 9, 8)
