"""`select`: the kernels against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from support.engine.kernels import launches
from vlmfast.kernels import select as module
from vlmfast.kernels.select import mass_count, mass_count_ref, top_k, top_k_ref

INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.usefixtures("triton")


def scored(kind: str, rows: tuple[int, ...], n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, n, generator=generator)
    if kind == "ties":
        x = x.round()
    if kind == "equal":
        x = torch.full_like(x, -2.5)
    if kind == "odd":  # both zeros are equal; NaN of either sign comes first
        odd = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-42, -1e-42, 3e38, -NAN])
        x = odd[torch.randint(0, len(odd), x.shape, generator=generator)]
    return x


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "odd"])
@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_top_k_matches_reference(kind: str, n: int, device: torch.device) -> None:
    scores = scored(kind, (1, 2), n).to(device)
    for k in {0, n // 3, n - 1, n + 5}:
        got = top_k(scores, k)
        assert got.dtype == torch.int64 and got.shape == (1, 2, min(k, n))
        assert torch.equal(got, top_k_ref(scores, k))
    if kind == "distinct" and n > 16:  # control
        assert not torch.equal(
            top_k(scores, 5), top_k_ref(scored(kind, (1, 2), n, 1), 5).to(device)
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["distinct", "ties", "odd"])
@pytest.mark.parametrize("shape", ["shared", "own"])
def test_first_entries_precede_all_others(kind: str, shape: str, device: torch.device) -> None:
    n = 90
    scores = scored(kind, (2,), n).to(device)
    first = scored("distinct", (2,) if shape == "own" else (), n, 1).to(device) < -0.7
    for k in (1, int(first.sum(-1).min()), 30, n):
        got = top_k(scores, k, first)
        assert torch.equal(got, top_k_ref(scores, k, first))
        marked = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, got, True)
        first_of = first.expand_as(scores)
        # No other entry is selected while a preferred entry is not.
        assert ((marked & ~first_of).any(1) <= ~(first_of & ~marked).any(1)).all()
    assert not torch.equal(top_k(scores, 30, first), top_k(scores, 30))  # control


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", [False, True])
def test_k_per_row(first: bool, device: torch.device) -> None:
    scores = scored("ties", (2, 3), 50).to(device)
    k = torch.tensor([[0, 1, 50], [7, 20, 49]], device=device)
    preferred = scored("distinct", (), 50, 2).to(device) > 0.8 if first else None
    for width in (50, 71):
        got = top_k(scores, k, preferred, width=width)
        assert torch.equal(got, top_k_ref(scores, k, preferred, width=width))
        for row, count, row_scores in zip(
            got.flatten(0, 1), k.flatten().tolist(), scores.flatten(0, 1), strict=True
        ):
            assert torch.equal(row[:count], top_k(row_scores, count, preferred))
            assert not row[count:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_dtypes_and_non_contiguous_scores(dtype: torch.dtype, device: torch.device) -> None:
    scores = (scored("distinct", (40, 3), 2).to(device) * 9).to(dtype)[..., 1].T
    assert not scores.is_contiguous()
    assert torch.equal(top_k(scores, 11), top_k_ref(scores, 11))
    assert torch.equal(mass_count(scores.abs(), 20.0), mass_count_ref(scores.abs(), 20.0))


def test_empty_rows_and_empty_batch(device: torch.device) -> None:
    assert top_k(torch.zeros(0, 5, device=device), 2).shape == (0, 2)
    assert top_k(torch.zeros(3, 0, device=device), 2).shape == (3, 0)
    assert mass_count(torch.zeros(0, 5, device=device), 1.0).shape == (0,)
    assert mass_count(torch.zeros(3, 0, device=device), 1.0).tolist() == [0, 0, 0]


def test_long_rows_use_sort(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest row that fits into a program, and one entry more."""
    launched = launches(monkeypatch, module)
    for n in (module.LONGEST, module.LONGEST + 1):
        scores, first = scored("ties", (1,), n), scored("distinct", (n,), 1, 1)[:, 0] > 1.2
        rank, preferred = scores[0].tolist(), first.tolist()
        best = sorted(range(n), key=lambda i: (not preferred[i], -rank[i], i))
        assert rank[best[2000]] == rank[best[1999]]  # a tie at the last place
        scores, first = scores.to(device), first.to(device)
        got = top_k(scores, 2000, first)
        assert got[0].tolist() == sorted(best[:2000])
        assert not torch.equal(got, top_k(scores, 2000))  # control
        mass = scores.abs()
        assert torch.equal(mass_count(mass, 900.0), mass_count_ref(mass, 900.0))
    assert [of.args[0].shape for of in launched] == [(1, module.LONGEST)] * 3


def test_long_rows_do_not_wait_for_device() -> None:
    """On fake CUDA tensors, whose values cannot be read."""
    with FakeTensorMode():
        scores = torch.rand(3, module.LONGEST + 1, device="cuda")
        counts = torch.ones(3, dtype=torch.int64, device="cuda")
        assert top_k_ref(scores, counts, scores[0] > 0.5, width=9).shape == (3, 9)
        assert mass_count_ref(scores, 0.3).shape == (3,)
        with pytest.raises(DataDependentOutputException):  # control
            int(counts.max())


# --- mass ----------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("n", [1, 2, 33, 200])
def test_mass_count_matches_reference(n: int, device: torch.device) -> None:
    """Multiples of 1/4, whose sums are exact."""
    mass = (scored("distinct", (4,), n).abs() * 4).round().to(device) / 4
    total = float(mass.sum(-1).max())
    for target in (-1.0, 0.0, 0.25, 0.3 * total, total, total + 1, INF):
        got = mass_count(mass, target)
        assert got.dtype == torch.int64
        assert torch.equal(got, mass_count_ref(mass, target))
    every = torch.tensor([0.0, 0.25, 0.5 * total, 2 * total], device=device)
    assert torch.equal(mass_count(mass, every), mass_count_ref(mass, every))
    if n == 200:  # control
        assert len(set(mass_count(mass, every).tolist())) == 3
        assert not torch.equal(mass_count(mass, 9.0), mass_count_ref(mass, 20.0))


def test_mass_count_of_zeros(device: torch.device) -> None:
    nothing = torch.zeros(2, 7, device=device)
    assert mass_count(nothing, 1.0).tolist() == [7, 7]
    assert mass_count(nothing, 0.0).tolist() == [1, 1]
