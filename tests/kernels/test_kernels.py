"""Choosing slots, and the attention that each key receives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import apart, close, tolerance
from support.engine.kernels import entries_at_once
from vlmfast import VLMFastError
from vlmfast.kernels.col_stats import col_stats
from vlmfast.kernels.select import mass_count, ranked, top_k

# Few values, so that there are ties.
SCORES = st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 1.0, 1e30, math.inf]), max_size=40)


# --- selection -----------------------------------------------------------------------------------


@given(SCORES)
def test_ranks_equal_those_of_a_stable_sort(scores):
    got = ranked(torch.tensor(scores)).tolist()
    assert got == sorted(range(len(scores)), key=lambda i: (-scores[i], i))


@given(SCORES, st.integers(0, 45), st.randoms(use_true_random=False))
def test_top_k_is_in_ascending_order(scores, k, random):
    """Ties go to the lower index; preferred slots come before any score."""
    n = len(scores)
    best = sorted(sorted(range(n), key=lambda i: (-scores[i], i))[:k])
    assert top_k(torch.tensor(scores), k).tolist() == best
    first = [random.random() < 0.4 for _ in range(n)]
    best = sorted(sorted(range(n), key=lambda i: (not first[i], -scores[i], i))[:k])
    got = top_k(torch.tensor(scores), k, torch.tensor(first, dtype=torch.bool))
    assert got.tolist() == best and got.dtype == torch.int64


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.integers(0, 20), st.integers(0, 99)
)
def test_rows_are_ranked_independently(b, h, n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (b, h, n), generator=generator)
    shared = torch.rand(n, generator=generator) < 0.3
    got, preferred = top_k(scores, k), top_k(scores, k, shared)
    for i in range(b):
        for j in range(h):
            assert torch.equal(got[i, j], top_k(scores[i, j], k))
            assert torch.equal(preferred[i, j], top_k(scores[i, j], k, shared))
    order = ranked(scores)
    assert torch.equal(torch.gather(scores, -1, order), scores.sort(-1, descending=True).values)


def test_preference_is_not_a_large_bonus():
    """In half precision a bonus would swallow the scores, or be swallowed by them."""
    scores = torch.tensor([6e4, 5.0, 4.0, 6e4, 3.0], dtype=torch.float16)
    first = torch.tensor([False, True, False, False, True])
    assert top_k(scores, 1, first).tolist() == [1]
    assert top_k(scores, 3, first).tolist() == [0, 1, 4]
    assert top_k(scores, 3).tolist() == [0, 1, 3]  # control


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=30),
    st.one_of(st.integers(-5, 2200), st.integers(0, 64)),
)
@example([0, 0], 0)
@example([1, 2, 3], 6)
@example([1, 2, 3], 7)
def test_smallest_number_that_reaches_a_mass(mass, target):
    """Whole numbers, whose sums are exact; the definition, one by one."""
    total, wanted = 0, len(mass)
    for count, of in enumerate(sorted(mass, reverse=True), 1):
        total += of
        if total >= target:
            wanted = count
            break
    assert mass_count(torch.tensor(mass), float(target)).item() == wanted
    rows = torch.tensor([mass, mass[::-1]])
    assert mass_count(rows, float(target)).tolist() == [wanted, wanted]
    every = torch.tensor([float(target), 0.0])
    assert mass_count(rows, every).tolist() == [wanted, 1]


def test_fraction_of_a_softmax_is_reached():
    p = torch.randn(7, 200, generator=torch.Generator().manual_seed(0)).softmax(-1)
    count = mass_count(p, 0.9)
    sums = p.double().sort(-1, descending=True).values.cumsum(-1)
    slack = float(tolerance(torch.float32, 200, 1))  # it sums in float32
    assert (sums.gather(-1, count[:, None] - 1) >= 0.9 - slack).all()
    assert (sums.gather(-1, count[:, None] - 2) < 0.9 + slack).all()
    assert mass_count(p, 1.1).tolist() == [200] * 7


# --- received attention --------------------------------------------------------------------------


def whole_map(
    query: Tensor,
    key: Tensor,
    scaling: float | None = None,
    *,
    causal: bool = True,
    start: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention (Hq, S, S) in float64, and its mask (S, S)."""
    hq, s, d = query.shape
    keys = key.double().repeat_interleave(hq // len(key), 0)
    logits = query.double() @ keys.transpose(-1, -2) * (d**-0.5 if scaling is None else scaling)
    if bias is not None:
        logits = logits + bias.double()
    seen = torch.ones(s, s, dtype=torch.bool)
    seen = (seen.tril() if causal else seen) & (torch.arange(s) >= start)
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.where(seen, p, 0.0), seen


def largest_logit(query: Tensor, key: Tensor, scaling: float | None = None, **how) -> float:
    keys = key.float().repeat_interleave(len(query) // len(key), 0)
    largest = (query.float() @ keys.transpose(-1, -2)).abs().max()
    return max(float(largest) * (query.shape[-1] ** -0.5 if scaling is None else scaling), 1.0)


CASES = {
    "heads of their own": {},
    "grouped": {"heads": (6, 2)},
    "one key head": {"heads": (4, 1)},
    "some rows": {"rows": [3, 9, 10, 21, 29]},
    "the last row": {"rows": [29]},
    "the first row": {"rows": [0]},
    "a row twice": {"rows": [4, 4, 20]},
    "padding in front": {"start": 7},
    "padding, and rows of it": {"start": 7, "rows": [2, 6, 7, 8, 25]},
    "a bias": {"bias": True},
    "a bias that hides a key": {"bias": "hides"},
    "all see all": {"causal": False},
    "all see all, some rows": {"causal": False, "rows": [0, 5, 17], "heads": (4, 2)},
    "all see all after padding": {"causal": False, "start": 4},
    "a threshold": {"threshold": 0.5},
    "a low threshold": {"threshold": 0.01, "heads": (6, 2), "rows": [0, 11, 12, 29]},
    "a threshold and padding": {"threshold": 0.3, "start": 5},
    "another scale": {"scaling": 0.9},
    "half precision": {"dtype": torch.bfloat16, "heads": (4, 2)},
    "everything": {
        "heads": (4, 2), "rows": [6, 9, 28], "start": 3, "bias": True, "threshold": 0.2,
        "scaling": 0.4,
    },
}  # fmt: skip
S, D = 30, 8


def inputs(case: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, dict]:
    given = dict(CASES[case])
    hq, hk = given.pop("heads", (3, 3))
    generator = torch.Generator().manual_seed(seed)
    dtype = given.pop("dtype", torch.float32)
    query = torch.randn(hq, S, D, generator=generator).to(dtype) * 1.5
    key = torch.randn(hk, S, D, generator=generator).to(dtype)
    if bias := given.pop("bias", False):
        given["bias"] = torch.randn(S, generator=generator)
        if bias == "hides":
            given["bias"][5] = -torch.inf
    rows = given.pop("rows", None)
    return query, key, None if rows is None else torch.tensor(rows), given


@pytest.mark.parametrize("case", CASES)
def test_statistics_equal_those_of_the_whole_map(case):
    query, key, rows, how = inputs(case)
    threshold = how.pop("threshold", 0.0)
    got = col_stats(query, key, rows, threshold=threshold, **how)
    p, seen = whole_map(query, key, **how)
    rows = torch.arange(S) if rows is None else rows
    p, seen = p[:, rows], seen[rows]
    hk = len(key)
    expected = {
        "sum": p.sum(1),
        "sumsq": p.square().sum(1),
        "max": p.amax(1),
        "entropy": -(p * (p + 1e-10).log()).sum(1),
    }
    terms, size = D + S + len(rows), largest_logit(query, key, **how)
    for name, of in expected.items():
        assert got[name].dtype == torch.float32
        assert got[name].shape == (hk, len(query) // hk, S)
        # Columns of non-negative entries: each has its own size. A weight's relative error is its
        # logit's absolute error.
        whole = of.abs() + expected["sum"] if name == "entropy" else of
        close(got[name].flatten(0, 1), of, torch.float32, terms, scale=size * whole)
    assert got["count"].dtype == torch.int32 and got["nnz"].dtype == torch.int64
    # A row before the first key of a causal map sees no key; one of the other kind sees all.
    assert torch.equal(got["nnz"], seen.sum(0))
    if threshold:
        reach = (p >= threshold * p.amax(-1, keepdim=True)) & seen
        assert torch.equal(got["count"].flatten(0, 1), reach.sum(1).int())
        assert got["count"].any() and (got["count"] < got["nnz"]).any()
    else:
        assert not got["count"].any()
    assert not any(of.isnan().any() for of in got.values())
    if case == "the first row":  # sees itself alone in any case
        return
    # Control: other queries give other statistics.
    other = col_stats(*inputs(case, seed=1)[:2], rows, threshold=threshold, **how)
    apart(other["sum"], got["sum"], terms=terms, scale=size)


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_rows_give_equal_statistics(case, monkeypatch):
    """The whole map is never materialized; the block size must not matter."""
    query, key, rows, how = inputs(case)
    expected = col_stats(query, key, rows, **how)
    sizes, softmax = [], Tensor.softmax

    def record(self, *args, **kwargs):
        sizes.append(self.numel())
        return softmax(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "softmax", record)
    for entries in (1, 4 * S * len(query), 7 * S * len(query) + 5):
        sizes.clear()
        entries_at_once(monkeypatch, entries)
        got = col_stats(query, key, rows, **how)
        for name, of in expected.items():
            if of.is_floating_point():
                close(got[name], of, terms=D + 2 * S, scale=largest_logit(query, key, **how))
            else:
                assert torch.equal(got[name], of)
        assert max(sizes) <= max(entries, S * len(query))  # at least one row
        if rows is None:
            assert len(sizes) > 1


def test_empty_selection_of_rows_is_refused():
    query, key, *_ = inputs("grouped")
    with pytest.raises(VLMFastError, match="at least one of each"):
        col_stats(query, key, torch.tensor([], dtype=torch.int64))
    with pytest.raises(VLMFastError, match="at least one of each"):
        col_stats(query[:, :0], key[:, :0])
