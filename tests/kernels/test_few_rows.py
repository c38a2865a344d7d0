"""`linears` and `gated_linear`: products of a few rows against PyTorch's linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.closeness import apart, close
from support.engine.kernels import Launch, launches
from vlmfast.kernels import few_rows
from vlmfast.kernels.few_rows import (
    MOST,
    gated_linear,
    gated_linear_ref,
    linears,
    linears_ref,
)

pytestmark = pytest.mark.usefixtures("triton")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def noise(*shape: int, device: torch.device, dtype=torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.fixture
def launched(monkeypatch) -> list[Launch]:
    """What has been launched."""
    return launches(monkeypatch, few_rows)


@pytest.mark.cases(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1,), (1, 1), (5,), (2, 8)])
@pytest.mark.parametrize("sizes", [(48,), (17, 9), (64, 16, 33)])
@pytest.mark.parametrize("width", [8, 264, 1032])
def test_linears_match_linear_layers(
    width: int, sizes: tuple[int, ...], rows: tuple[int, ...], dtype, device, launched
) -> None:
    x = noise(*rows, width, device=device, dtype=dtype)
    weights = [noise(n, width, device=device, dtype=dtype, seed=n) for n in sizes]
    biases = [noise(n, device=device, dtype=dtype) if n % 2 else None for n in sizes]
    found = linears(x, weights, biases)
    assert launched and [of.shape for of in found] == [(*rows, n) for n in sizes]
    for ours, weight, bias in zip(found, weights, biases, strict=True):
        assert ours.dtype == dtype
        wanted = torch.nn.functional.linear(x, weight, bias)
        terms = width if dtype == torch.float32 else 1  # sums are float32, and rounded once
        close(ours, wanted, terms=terms)
        if dtype != torch.bfloat16:  # control, for which the steps of bfloat16 are too coarse
            apart(ours, wanted.roll(1, -1), terms=terms)


@pytest.mark.cases(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, MOST])
@pytest.mark.parametrize("gelu_tanh", [False, True])
@pytest.mark.parametrize(("width", "size"), [(64, 40), (520, 19)])
def test_gated_linear_matches_modules(
    width: int, size: int, gelu_tanh: bool, rows: int, dtype, device, launched
) -> None:
    x = noise(rows, width, device=device, dtype=dtype)
    gate, up = (noise(size, width, device=device, seed=n) / width**0.5 for n in (1, 2))
    weights, biases = (gate.to(dtype), up.to(dtype)), (None, noise(size, device=device).to(dtype))
    got = gated_linear(x, weights, biases, gelu_tanh=gelu_tanh)
    wanted = gated_linear_ref(x, weights, biases, gelu_tanh=gelu_tanh)
    assert (
        [of.kernel for of in launched] == ["_gated"]
        and got.dtype == dtype
        and got.shape == wanted.shape
    )
    # Both factors have rounding errors of their own.
    terms = 4 + (width if dtype == torch.float32 else 0)
    close(got, wanted, terms=terms)
    if dtype == torch.float32:  # controls, for which the steps of half precision are too coarse
        apart(got, gated_linear_ref(x, weights[::-1], biases, gelu_tanh=gelu_tanh), terms=terms)
        apart(got, gated_linear_ref(x, weights, biases, gelu_tanh=not gelu_tanh), terms=terms)


def test_rows_and_weights_with_gaps(device, launched) -> None:
    x, weight = noise(3, 48, device=device)[:, ::2], noise(20, 48, device=device)[:, :24]
    assert weight.stride(0) == 48 and x.stride(1) == 2
    (got,) = linears(x, [weight], [None])
    close(got, x @ weight.T, terms=24, scale=x.abs() @ weight.abs().T)
    assert launched


@pytest.mark.parametrize(("rows", "width"), [(MOST + 1, 64), (0, 64), (2, 6)])
def test_other_sizes_take_the_reference(rows: int, width: int, device, launched) -> None:
    x, weight = noise(rows, width, device=device), noise(5, width, device=device)
    (got,) = linears(x, [weight], [None])
    assert torch.equal(got, linears_ref(x, [weight], [None])[0]) and not launched


def test_weights_of_other_layouts_take_the_reference(device, launched) -> None:
    x, weight = noise(2, 16, device=device), noise(16, 8, device=device).T
    (got,) = linears(x, [weight], [None])
    assert torch.equal(got, nn.functional.linear(x, weight)) and not launched
