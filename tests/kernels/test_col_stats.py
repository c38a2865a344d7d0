"""`col_stats` and `row_lse`: the kernels against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close
from support.engine.kernels import parts_of_keys
from vlmfast.kernels.col_stats import STATISTICS, col_stats, col_stats_ref, row_lse, row_lse_ref

pytestmark = pytest.mark.usefixtures("triton")

# Heads (Hq, Hk), tokens S, head dimension D, and keyword arguments of `col_stats`.
CASES = {
    "minimal": ((1, 1), 1, 8, {}),
    "two blocks": ((2, 2), 65, 16, {}),
    "grouped": ((6, 2), 100, 64, {}),
    "one key head": ((4, 1), 70, 72, {}),
    "half precision": ((4, 2), 130, 128, {"dtype": torch.float16}),
    "bfloat16": ((4, 2), 96, 80, {"dtype": torch.bfloat16}),
    "bfloat16, widest": ((2, 1), 40, 256, {"dtype": torch.bfloat16}),
    "one row, keys in parts": ((2, 1), 300, 96, {"rows": [299]}),
    "few unsorted rows": ((4, 2), 200, 40, {"rows": [180, 3, 64, 63, 180]}),
    "the first row": ((2, 2), 70, 16, {"rows": [0]}),
    "rows of two blocks": ((2, 1), 150, 16, {"rows": range(40, 150)}),
    "left padding": ((2, 2), 140, 16, {"start": 70}),
    "left padding, few rows": ((2, 2), 140, 16, {"start": 70, "rows": [2, 69, 70, 71, 139]}),
    "rows before start": ((2, 2), 80, 16, {"start": 66, "rows": [0, 65]}),
    "not causal": ((2, 1), 70, 16, {"causal": False, "start": 3}),
    "not causal, few rows": ((2, 2), 130, 24, {"causal": False, "rows": [0, 129, 7]}),
    "bias": ((2, 2), 70, 16, {"bias": "normal"}),
    "bias that masks a key": ((2, 2), 70, 16, {"bias": "masks"}),
    "threshold": ((4, 2), 100, 32, {"threshold": 0.3}),
    "everything": (
        (6, 3),
        133,
        72,
        {
            "dtype": torch.float16,
            "rows": [132, 20, 66, 67],
            "start": 9,
            "bias": "normal",
            "threshold": 0.05,
            "scaling": 0.2,
        },
    ),
}


def inputs(case: str, device: torch.device, seed: int = 0) -> tuple[list, dict]:
    (hq, hk), s, d, how = CASES[case]
    how, generator = dict(how), torch.Generator().manual_seed(seed)
    dtype = how.pop("dtype", torch.float32)
    query = (torch.randn(hq, s, d, generator=generator) * 1.5).to(device, dtype)
    key = torch.randn(hk, s, d, generator=generator).to(device, dtype)
    if bias := how.pop("bias", None):
        how["bias"] = torch.randn(s, generator=generator).to(device)
        how["bias"][5] = -torch.inf if bias == "masks" else 0
    rows = how.pop("rows", None)
    rows = None if rows is None else torch.tensor(rows, device=device)
    return [query, key, rows], how


def seen(x: Tensor) -> Tensor:
    """Normalizers, with -inf for rows that see nothing."""
    return x.masked_fill(x == -1e30, -torch.inf)


def sums(args: list, how: dict) -> tuple[int, float]:
    """Terms of the sums of a statistic, and the largest magnitude of a logit.

    The absolute error of a logit is a relative error of its weight, so the tolerance grows with
    the logits.
    """
    query, _, rows = args
    largest = seen(row_lse_ref(*args, **{k: v for k, v in how.items() if k != "threshold"})[1])
    size = float(largest[largest.isfinite()].abs().amax()) if bool(largest.isfinite().any()) else 1
    taken = query.shape[1] if rows is None else len(rows)
    return sum(query.shape[1:]) + taken, max(size, 1.0)


def check(got: dict[str, Tensor], expected: dict[str, Tensor], terms: int, size: float) -> None:
    assert list(got) == list(expected)
    for name, wanted in expected.items():
        assert got[name].dtype == wanted.dtype and got[name].shape == wanted.shape
        if name == "count":  # an entry at the threshold may fall on either side
            assert ((got[name] - wanted).abs() <= 1).all()
            assert (got[name] != wanted).float().mean() < 0.01
        elif name == "nnz":
            assert torch.equal(got[name], wanted)
        else:  # nonnegative sums: the tolerance is relative to each column
            whole = wanted + expected["sum"] if name == "entropy" else wanted
            close(got[name], wanted, terms=terms, scale=size * whole)


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
def test_col_stats_matches_reference(case: str, device: torch.device) -> None:
    args, how = inputs(case, device)
    got = col_stats(*args, **how)
    expected, (terms, size) = col_stats_ref(*args, **how), sums(args, how)
    check(got, expected, terms, size)
    if case not in ("minimal", "the first row", "rows before start"):
        # Control: other queries give other statistics.
        other = col_stats_ref(*inputs(case, device, seed=1)[0], **how)
        for name in ("sum", "sumsq", "max", "entropy"):
            apart(got[name], other[name], terms=terms, scale=size * expected["sum"].clamp(min=1))


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", CASES)
def test_row_lse_matches_reference(case: str, device: torch.device) -> None:
    args, how = inputs(case, device)
    how.pop("threshold", None)
    got, expected = row_lse(*args, **how), row_lse_ref(*args, **how)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        close(seen(ours), seen(theirs), terms=sums(args, how)[0])
    if case not in ("rows before start", "minimal"):  # control
        other = row_lse_ref(*inputs(case, device, seed=1)[0], **how)
        apart(seen(got[0]), seen(other[0]), terms=sums(args, how)[0])
    empty = args[2] is not None and how.get("causal", True) and args[2] < how.get("start", 0)
    if empty is not False:
        assert (got[0][:, empty] == -1e30).all() and (got[1][:, empty] == -1e30).all()
        assert (got[0][:, ~empty] > -1e3).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 32])
def test_row_lse_is_independent_of_key_parts(
    parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parts are after every row, some before the first key, some have one block."""
    args, how = inputs("left padding, few rows", device)
    parts_of_keys(monkeypatch, 2 * parts)
    got = row_lse(*args, **how)
    for ours, theirs in zip(got, row_lse_ref(*args, **how), strict=True):
        close(seen(ours), seen(theirs), terms=sums(args, how)[0])


def test_order_of_rows_does_not_matter(device: torch.device) -> None:
    (query, key, rows), how = inputs("few unsorted rows", device)
    first = col_stats(query, key, rows, **how)
    second = col_stats(query, key, rows.flip(0), **how)
    assert all(torch.equal(first[name], second[name]) for name in STATISTICS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("want", [("sum",), ("nnz",), ("entropy", "max"), ("count", "nnz"), ()])
def test_want_selects_statistics(want: tuple[str, ...], device: torch.device) -> None:
    args, how = inputs("threshold", device)
    complete, selected = col_stats(*args, **how), col_stats(*args, **how, want=want)
    assert set(selected) == set(want)
    assert all(torch.equal(selected[name], complete[name]) for name in want)


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_per_reduces_over_heads(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    args, how = inputs("threshold", device)
    head = col_stats(*args, **how)
    for per, dims in (("group", 1), ("all", (0, 1))):
        got = col_stats(*args, **how, per=per)
        for name, reduced in got.items():
            if name == "nnz":
                assert torch.equal(reduced, head[name])
            else:
                joined = head[name].amax(dims) if name == "max" else head[name].sum(dims)
                assert reduced.dtype == head[name].dtype
                close(reduced, joined.to(reduced.dtype), torch.float32, len(args[0]), scale=joined)
