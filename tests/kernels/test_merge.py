"""Merging evicted slots into kept ones: the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close
from vlmfast.kernels.merge import MODES, RULES, merge_into, merge_into_ref

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("triton")

# Heads, slots, kept slots, head dimension.
SHAPES = {
    "minimal": (1, 2, 1, 8),
    "partial blocks": (2, 90, 12, 24),
    "several blocks": (1, 150, 70, 16),
    "few kept": (2, 140, 3, 128),
    "few evicted": (1, 70, 69, 80),
    "wide": (1, 40, 9, 256),
    "odd": (2, 75, 11, 72),
}


def inputs(
    shape: tuple[int, int, int, int], device: torch.device, dtype=torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    h, n, s, d = shape
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, h, n, d, generator=generator)
    keep = [torch.randperm(n, generator=generator)[:s].sort().values for _ in range(h)]
    return keys.to(device, dtype), values.to(device, dtype), torch.stack(keep).to(device)


def check(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], keys: Tensor) -> None:
    """Means over the slots of ``keys``, in float32; half-precision results are rounded."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        close(ours, theirs, terms=sum(keys.shape[1:]) if ours.dtype == torch.float32 else 1)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_matches_reference(name: str, mode: str, device: torch.device) -> None:
    args = inputs(SHAPES[name], device)
    got = merge_into(*args, mode)
    check(got, merge_into_ref(*args, mode), args[0])
    # Control: other slots give another result.
    other = merge_into_ref(*inputs(SHAPES[name], device, seed=1)[:2], args[2], mode)
    for ours, theirs in zip(got[:2], other, strict=False):
        apart(ours, theirs, terms=sum(args[0].shape[1:]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_rules_match_reference_in_all_dtypes(
    rule: str, dtype: torch.dtype, device: torch.device
) -> None:
    args = inputs((3, 70, 15, 64), device, dtype)
    weight = torch.rand(3, 70, generator=torch.Generator().manual_seed(0)).to(device) + 0.5
    got = merge_into(*args, "weighted", rule=rule, weight=weight)
    check(got, merge_into_ref(*args, "weighted", rule=rule, weight=weight), args[0])
    if rule != "all":  # control, on the weights, which are always float32
        apart(got[2], merge_into_ref(*args, "weighted", weight=weight)[2], terms=70 + 64)


@pytest.mark.cases(1)
@pytest.mark.parametrize("rule", RULES)
def test_ragged_heads_match_reference(rule: str, device: torch.device) -> None:
    """Padding is NaN, and one head keeps all of its slots."""
    lengths, counts = (80, 9, 40), (30, 9, 1)
    keys, values, _ = inputs((3, 80, 30, 16), device)
    valid = torch.arange(80) < torch.tensor(lengths)[:, None]
    keys[~valid], values[~valid] = torch.nan, torch.nan
    keep = torch.zeros(3, 30, dtype=torch.int64)
    for head, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        generator = torch.Generator().manual_seed(head)
        keep[head, :count] = torch.randperm(n, generator=generator)[:count].sort().values
    how = {"rule": rule, "valid": valid.to(device), "lengths": torch.tensor(counts, device=device)}
    args = keys, values, keep.to(device), "avg"
    got, expected = merge_into(*args, **how), merge_into_ref(*args, **how)
    for head, count in enumerate(counts):
        mine, theirs = (tuple(x[head, :count] for x in of) for of in (got, expected))
        assert all(bool(x.isfinite().all()) for x in mine)
        check(mine, theirs, keys)
    assert torch.equal(got[0][1, :9], keys[1, keep[1, :9].to(device)])
    assert got[2][1, :9].tolist() == [1.0] * 9


def test_keeping_all_slots_is_identity(device: torch.device) -> None:
    keys, values, keep = inputs((2, 9, 9, 8), device)
    k, v, weight = merge_into(keys, values, keep)
    assert torch.equal(k, keys) and torch.equal(v, values)
    assert torch.equal(weight, torch.ones_like(weight))


def test_ties_take_first_pivot_and_zero_keys_are_finite(device: torch.device) -> None:
    """The first of equally near pivots takes a slot, also across blocks of pivots."""
    keys = torch.zeros(1, 140, 8, device=device)
    keys[0, :, 0] = 1.0
    keys[0, 135] = 0.0
    values = torch.arange(140.0, device=device)[None, :, None].expand(1, 140, 8)
    k, v, weight = merge_into(keys, values, torch.arange(130, device=device)[None], "avg")
    assert weight[0].tolist() == [11.0] + [1.0] * 129
    close(v[0, 0, 0], sum(range(130, 140)) / 11, terms=11)
    assert bool(k.isfinite().all())
