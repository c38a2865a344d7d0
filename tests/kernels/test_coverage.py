"""`coverage`: the kernel against its reference, and the lazy reference against the plain one."""

from __future__ import annotations

from heapq import heapreplace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from support.engine.kernels import evaluate_all_gains, launches
from vlmfast.kernels import coverage as module
from vlmfast.kernels.coverage import cover, cover_ref

BLOCK = module.TABLE["coverage"]["step"].sizes


def worths(n: int, seed: int) -> Tensor:
    rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 0:
        rows[n - n // 2 :] = rows[: n // 2].clone()  # duplicates: every gain is a tie
    rows = torch.nn.functional.normalize(rows)
    alike = (rows @ rows.T + 1) / 2
    # Multiples of a sixteenth: sums in any order are exact.
    return (16 * alike).round() / 16 if seed % 4 == 0 else alike


def sixteenths(*shape: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Multiples of 1/16, of which sums in any order are exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 17, shape, generator=generator) / 16).to(device)


# --- the references ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("n", "k"), [(9, 9), (70, 20), (200, 60), (200, 0)])
def test_lazy_gains_equal_all_gains(
    n: int, k: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worth = worths(n, seed)
    generator = torch.Generator().manual_seed(seed)
    bonus = torch.rand(n, generator=generator) if seed % 2 else None
    scale = torch.rand(n, generator=generator) if seed % 5 > 2 else None
    lazily = cover_ref(worth, k, bonus, scale)
    evaluate_all_gains(monkeypatch)
    assert torch.equal(lazily, cover_ref(worth, k, bonus, scale))
    assert len(set(lazily.tolist())) == k


def test_few_gains_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains only decrease: of 200 columns, a choice evaluates a few."""
    evaluated = []
    monkeypatch.setattr(module, "heapreplace", lambda *a: evaluated.append(1) or heapreplace(*a))
    cover_ref(worths(200, 1), 60)
    assert 0 < len(evaluated) < 60 * 40


# --- the kernel ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 1, 1),
        (3, 5, 0),
        (20, BLOCK["BLOCK_N"], BLOCK["BLOCK_N"]),
        (BLOCK["BLOCK_R"], BLOCK["BLOCK_N"] + 1, 4),
        (BLOCK["BLOCK_R"] + 1, 3 * BLOCK["BLOCK_N"] - 1, 6),
        (40, 40, 40),
    ],
)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_kernel_matches_reference(
    rows: int, n: int, k: int, weighted: bool, device: torch.device
) -> None:
    """Exact sums: the same columns, in the same order, whatever the order of the sums."""
    worth = sixteenths(rows, n, device=device)
    given = [sixteenths(n, seed=s, device=device) if weighted else None for s in (1, 2)]
    chosen = cover(worth, k, *given)
    assert chosen.dtype == torch.int64 and chosen.device == worth.device
    assert torch.equal(chosen, cover_ref(worth, k, *given))
    assert len(set(chosen.tolist())) == k
    if k == n > 1:  # control: the order is not that of the columns
        assert chosen.tolist() != sorted(chosen.tolist())


@pytest.mark.usefixtures("triton")
def test_ties_take_lowest_index_over_several_programs(device: torch.device) -> None:
    same = torch.ones(5, 3 * BLOCK["BLOCK_N"], device=device)
    assert cover(same, 20).tolist() == list(range(20))
    same[2, 17] = 2  # control: one column covers more
    assert cover(same, 20).tolist() == [17, *range(17), 18, 19]


@pytest.mark.usefixtures("triton")
def test_inputs_of_any_dtype_and_stride(device: torch.device) -> None:
    worth = sixteenths(12, 9, device=device)
    bonus = sixteenths(9, 2, seed=1, device=device)
    expected = cover_ref(worth, 5, bonus[:, 0])
    assert torch.equal(cover(worth.T.contiguous().T.half(), 5, bonus[:, 0]), expected)
    assert not torch.equal(cover(worth, 5, bonus[:, 1]), expected)  # control


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_numbers_that_overflowed_give_columns(bad: float, device: torch.device) -> None:
    worth, bonus, scale = sixteenths(30, 20), sixteenths(20), sixteenths(20, seed=1)
    worth[:, 3] = worth[4] = bonus[5] = scale[6] = scale[7] = bad
    given = [x.to(device) for x in (bonus, scale)]
    for run in (cover, cover_ref):
        chosen = run(worth.to(device), 20, *given).tolist()
        assert sorted(chosen) == list(range(20))
    assert sorted(cover(torch.full((4, 5), bad, device=device), 3).tolist()) == [0, 1, 2]


def test_kernel_does_not_wait_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake CUDA tensors, whose values cannot be read; one launch per choice."""
    launched = launches(monkeypatch, module, run=False)
    monkeypatch.setattr(module, "use_triton", lambda *of: True)
    monkeypatch.setattr(module, "architecture", lambda device: 90)
    with FakeTensorMode():
        worth = torch.rand(100, 8 * BLOCK["BLOCK_N"] + 1, device="cuda")
        assert cover(worth, 5).shape == (5,)
        with pytest.raises(DataDependentOutputException):  # control
            float(worth.amax())
    assert [of.grid for of in launched] == [(9, 1)] * 5
