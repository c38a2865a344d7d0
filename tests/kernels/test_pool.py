"""`pool`: the kernels against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close
from vlmfast.compressors.tokens.elastic.module import anchors
from vlmfast.kernels import pool as module
from vlmfast.kernels.pool import (
    cell_average,
    cell_average_ref,
    cell_mix,
    cell_mix_ref,
    resample,
    resample_ref,
)

pytestmark = pytest.mark.usefixtures("triton")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def noise(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def check(got: Tensor, expected: Tensor, terms: int) -> None:
    """Sums are in float32; the result is rounded."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    close(got, expected, terms=terms if got.dtype == torch.float32 else 1)


# --- cells ---------------------------------------------------------------------------------------


def cells(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Partition of ``n`` rows into cells of 1 to ``m`` rows; padding points to row 0."""
    generator = torch.Generator().manual_seed(n * m)
    order, rows = torch.randperm(n, generator=generator).tolist(), []
    while order:
        size = int(torch.randint(1, m + 1, (), generator=generator))
        rows.append(sorted(order[:size]))
        order = order[size:]
    rows[0] += [0] * (m - len(rows[0]))  # one cell is as long as the table is wide
    table = torch.tensor([row + [0] * (m - len(row)) for row in rows])
    there = torch.arange(m) < torch.tensor([len(set(row)) for row in rows])[:, None]
    return table.to(device), there.to(device)


@pytest.mark.cases(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 1, 8), (40, 4, 300), (50, 9, 72), (60, 40, 24)])
def test_cell_average_matches_reference(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    n, m, d = sizes
    rows, (table, there) = noise(n, d, device=device).to(dtype), cells(n, m, device)
    weight = noise(n, device=device, seed=1).abs() * 9 + 0.1
    rows_ = rows.clone()
    got = cell_average(rows, weight, table, there)
    check(got, cell_average_ref(rows_, weight, table, there), m)
    if m > 1 and dtype == torch.float32:  # control: weights matter; a mean changes little
        apart(got, cell_average_ref(rows, weight.flip(0), table, there), terms=m)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 8, 1), (30, 4, 64, 8), (25, 9, 600, 2), (60, 40, 24, 3), (12, 17, 72, 1)]
)
def test_cell_mix_matches_reference(sizes: tuple[int, ...], device: torch.device) -> None:
    n, m, d, heads = sizes
    table, there = cells(n, m, device)
    rows, score = noise(n, d, device=device), 3 * noise(n, heads, device=device, seed=1)
    got, share = cell_mix(rows, score, table, there)
    expected, shares = cell_mix_ref(rows, score, table, there)
    check(got, expected, m)
    check(share, shares, m)
    assert not share[~there].any()
    if m > 1 and heads > 1:  # control: each head has its own weights
        apart(got, cell_mix_ref(rows, score.flip(1), table, there)[0], terms=m)


def test_cell_mix_with_large_scores(device: torch.device) -> None:
    table, there = torch.arange(4, device=device)[None], torch.ones(1, 4, dtype=torch.bool)
    score = torch.tensor([[-3e4], [2e4], [-1e3], [2e4]], device=device)
    rows = noise(4, 8, device=device)
    got, share = cell_mix(rows, score, table, there.to(device))
    assert share[0, :, 0].tolist() == [0.0, 0.5, 0.0, 0.5]
    check(got[0], (rows[1] + rows[3]) / 2, 4)


def test_padding_is_not_read(device: torch.device) -> None:
    """A row that only padding points to may hold NaN."""
    rows, score = noise(5, 8, device=device), noise(5, 2, device=device, seed=1)
    table = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 0, 0]], device=device)
    there = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool, device=device)
    expected = cell_mix_ref(rows, score, table, there)
    averages = cell_average_ref(rows, score[:, 0].exp(), table, there)
    rows[0] = score[0] = torch.nan
    for ours, theirs in zip(cell_mix(rows, score, table, there), expected, strict=True):
        check(ours, theirs, 3)
    check(cell_average(rows, score[:, 0].exp(), table, there), averages, 3)


# --- resampling ----------------------------------------------------------------------------------


def resample_inputs(
    count: int, n: int, heads: int, d: int, width: int, device: torch.device
) -> list[Tensor]:
    return [
        noise(count, heads, d, device=device),
        noise(n, heads, d, device=device, seed=1),
        noise(n, width, device=device, seed=2),
        torch.rand(n, generator=torch.Generator().manual_seed(3)).add(0.1).log().to(device),
        anchors(count).to(device),
        torch.rand(n, 2, generator=torch.Generator().manual_seed(4)).to(device),
        torch.linspace(1, 40, heads, device=device),
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1),
        (3, 70, 2, 16, 16),
        (17, 100, 8, 16, 72),
        (2, 5, 1, 24, 300),
        (1, 64, 2, 8, 8),
    ],
)
def test_resample_matches_reference(sizes: tuple[int, ...], device: torch.device) -> None:
    inputs = resample_inputs(*sizes, device=device)
    expected, terms = resample_ref(*inputs), sizes[1] + sizes[3]  # a logit, then a mean
    for ours, theirs in zip(resample(*inputs), expected, strict=True):
        check(ours, theirs, terms)
    if sizes[1] > 1:
        for changed in (0, 3, 5, 6):  # control: queries, bias, positions and pull all matter
            other = list(inputs)
            other[changed] = other[changed].roll(1, 0) if changed != 6 else other[6] * 2
            if sizes[0] > 1 or changed:
                apart(expected[0], resample_ref(*other)[0], terms=terms)


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_use_references(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_launch_average", "_launch_mix", "_launch_resample"):
        monkeypatch.delattr(module, name)
    table, there = cells(9, 3, device)
    rows, score = noise(9, 8, device=device).requires_grad_(), noise(9, 2, device=device)
    cell_average(rows, score[:, 0].exp(), table, there).sum().backward()
    cell_mix(rows, score, table, there)[0].sum().backward()
    inputs = resample_inputs(2, 5, 1, 8, 8, device)
    resample(inputs[0].requires_grad_(), *inputs[1:])[0].sum().backward()
    assert rows.grad is not None and inputs[0].grad is not None
    with torch.no_grad(), pytest.raises(NameError):
        cell_mix(rows, score, table, there)
