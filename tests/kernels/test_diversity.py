"""`diversity`: the kernels against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from support.closeness import close
from support.engine.kernels import launches, rows_of_one_program
from vlmfast.kernels import diversity as module
from vlmfast.kernels.diversity import (
    cosine,
    density_peaks,
    density_peaks_ref,
    dpp,
    dpp_ref,
    max_min,
    max_min_ref,
)

pytestmark = pytest.mark.usefixtures("triton")


def features(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def grid(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Symmetric matrices of few values, for ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 4, (*shape, shape[-1]), generator=generator).float() / 4
    x = torch.maximum(x, x.transpose(-1, -2))
    return x.diagonal_scatter(torch.ones(shape), dim1=-2, dim2=-1).to(device)


@pytest.fixture(params=[False, True], ids=["one program", "several programs"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether matrices are treated as if they were too large for one program."""
    if request.param:
        rows_of_one_program(monkeypatch, 0)
    return request.param


# --- max-min -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 2), (9, 4), (40, 40), (130, 12)])
def test_max_min_matches_reference(n: int, k: int, device: torch.device) -> None:
    for similarity in (cosine(features(n, 16, device=device)), grid(n, device=device)):
        expected = max_min_ref(similarity, k)
        assert torch.equal(max_min(similarity, k), expected)
    if 1 < k < n:  # control: the order is not that of the rows
        assert expected.tolist() != sorted(expected.tolist())


@pytest.mark.cases(1)
def test_max_min_skips_duplicates(several: bool, device: torch.device) -> None:
    x = features(12, 8, device=device).repeat(2, 1)
    chosen = (max_min(cosine(x), 12) % 12).tolist()
    assert sorted(chosen) == list(range(12))


# --- determinants --------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 1), (20, 20), (70, 18), (130, 9)])
def test_dpp_matches_reference(n: int, k: int, device: torch.device) -> None:
    for seed in range(2):
        x = features(n, n + 5, device=device, seed=seed)
        worth = features(n, device=device, seed=9).abs() + 0.5
        kernel = worth[:, None] * cosine(x) * worth
        assert torch.equal(dpp(kernel, k), dpp_ref(kernel, k))


def test_dpp_without_gain_takes_lowest_indices(several: bool, device: torch.device) -> None:
    """Three directions, each four times, then the lowest indices."""
    kernel = torch.eye(3, device=device).repeat(4, 4)
    kernel[5, 5] = 1.5
    for run in (dpp, dpp_ref):
        chosen = run(kernel, 8).tolist()
        assert chosen[:3] == [5, 0, 1] and chosen[3:] == [2, 3, 4, 6, 7]
    assert dpp(torch.zeros(4, 4, device=device), 3).tolist() == [0, 1, 2]


# --- density peaks -------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 9, 2), (30, 12, 3), (129, 4, 129)], ids=str)
def test_density_peaks_matches_reference(sizes: tuple[int, int, int], device: torch.device) -> None:
    n, k, neighbours = sizes
    points = features(n, 6, device=device)
    distance = torch.cdist(points, points)
    for matrix in (distance, 1 - grid(n, device=device)) if n < 100 else (distance,):
        got, expected = (run(matrix, k, neighbours) for run in (density_peaks, density_peaks_ref))
        assert all(map(torch.equal, got, expected))
        assert got[1][got[0]].tolist() == list(range(k))
    if 1 < k < n:  # control: the number of neighbours matters
        centres = (density_peaks_ref(distance, k, few)[0] for few in (neighbours, 1))
        assert not torch.equal(*centres)


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.cases(1)
def test_batched_matrices_are_independent(several: bool, device: torch.device) -> None:
    similarity = cosine(features(2, 2, 12, 8, device=device))
    kernel, distance = similarity + 2 * torch.eye(12, device=device), 1 - similarity
    turned = similarity.transpose(-1, -2)
    assert not turned.is_contiguous()
    far, spread, peaks = max_min(turned, 5), dpp(kernel, 5), density_peaks(distance, 4, 3)
    for at in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert torch.equal(far[at], max_min_ref(similarity[at], 5))
        assert torch.equal(spread[at], dpp_ref(kernel[at], 5))
        for ours, theirs in zip(peaks, density_peaks_ref(distance[at], 4, 3), strict=True):
            assert torch.equal(ours[at], theirs)


def test_empty_batch(several: bool, device: torch.device) -> None:
    none = torch.zeros(0, 5, 5, device=device)
    assert max_min(none, 2).shape == dpp(none, 2).shape == (0, 2)
    assert [x.shape for x in density_peaks(none, 2, 2)] == [(0, 2), (0, 5)]


def test_cosine_matches_torch(device: torch.device) -> None:
    x = features(4, 6, device=device)
    x[2] = 0
    got = cosine(x.half())
    assert got.dtype == torch.float32 and not got[2].any()
    # The rows were rounded to half precision; the sums are in float32.
    close(got[0, 1], torch.cosine_similarity(x[0], x[1], 0), torch.float16, 1, scale=1)
    close(got[0, 1], torch.cosine_similarity(*x[:2].half().float(), 0), terms=6, scale=1)


def test_features_that_overflowed_give_rows(several: bool, device: torch.device) -> None:
    x = features(10, 6, device=device)
    whole = cosine(x)
    x[3], x[4, 0] = torch.nan, torch.inf
    got, finite = cosine(x), [i for i in range(10) if i not in (3, 4)]
    assert torch.equal(got[finite][:, finite], whole[finite][:, finite])
    assert not got[3].any() and not got[4].any()
    for run in (max_min, dpp, max_min_ref, dpp_ref):
        assert sorted(run(got, 10).tolist()) == list(range(10))


# --- several programs for one matrix -------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 4), (5, 2), (14, 6)])
def test_several_programs_match_reference(
    n: int, k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of_one_program(monkeypatch, 0)
    similarity = cosine(features(n, 100, device=device))
    worth = features(n, device=device, seed=9).abs() + 0.5
    kernel, ties = worth[:, None] * similarity * worth, grid(n, device=device)
    for matrix in (similarity, ties):
        expected = max_min_ref(matrix, k)
        assert torch.equal(max_min(matrix, k), expected)
        for got, wanted in zip(
            density_peaks(1 - matrix, k, (k + 1) // 2),
            density_peaks_ref(1 - matrix, k, (k + 1) // 2),
            strict=True,
        ):
            assert torch.equal(got, wanted)
    spread = dpp_ref(kernel, k)
    assert torch.equal(dpp(kernel, k), spread)
    if n == 14:  # control: the order of the choices is not that of the rows
        assert expected.tolist() != sorted(expected.tolist())
        assert spread.tolist() != sorted(spread.tolist())


def test_ties_take_lowest_indices_over_several_programs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of_one_program(monkeypatch, 0)
    same = torch.ones(10, 10, device=device)
    assert max_min(same, 9).tolist() == list(range(9))
    assert dpp(same, 9).tolist() == list(range(9))
    assert density_peaks(1 - same, 9, 5)[0].tolist() == list(range(9))
    same[8, 8] = 1.5  # control: one row is better
    assert dpp(same, 9).tolist() == [8, *range(8)]


@pytest.mark.parametrize("n", [7, 8, 9])
def test_number_of_rows_decides_programs(
    n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of_one_program(monkeypatch, 8)
    launched = launches(monkeypatch, module)
    similarity = cosine(features(n, 40, device=device))
    assert torch.equal(max_min(similarity, 3), max_min_ref(similarity, 3))
    assert torch.equal(dpp(similarity, 3), dpp_ref(similarity, 3))
    several = {"_max_min_step", "_dpp_step"}
    assert {of.kernel for of in launched} == (several if n > 8 else {"_max_min", "_dpp"})


def test_large_matrices_do_not_wait_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake CUDA tensors, whose values cannot be read; one launch per choice."""
    launched = launches(monkeypatch, module, run=False)
    monkeypatch.setattr(module, "use_triton", lambda *of: True)
    with FakeTensorMode():
        large = torch.rand(2, 8193, 8193, device="cuda")
        assert max_min(large, 5).shape == (2, 5)
        assert dpp(large, 4).shape == (2, 4)
        assert density_peaks(large, 3, 2)[1].shape == (2, 8193)
        with pytest.raises(DataDependentOutputException):  # control
            float(large.amax())
    assert [(of.kernel, of.grid) for of in launched] == [
        *[("_max_min_step", (65, 2))] * 5,
        *[("_dpp_step", (65, 2))] * 4,
        ("_peaks", (8193, 2)),
        ("_assign", (65, 2)),
    ]
