"""Column statistics and row normalisers: the kernels against their references."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from closeness import apart, close
from golden_stats import colstats_case
from vlmfast.errors import VLMFastError
from vlmfast.kernels import col_stats as module
from vlmfast.kernels.col_stats import STATISTICS, col_stats, col_stats_ref, row_lse, row_lse_ref

GOLDEN = Path(os.environ.get("VLMFAST_GOLDEN") or Path(__file__).parents[1] / "golden")

pytestmark = pytest.mark.usefixtures("triton")

# Heads (Hq, Hk), tokens S, head dimension D, and how `col_stats` is called.
CASES = {
    "one of everything": ((1, 1), 1, 8, {}),
    "two blocks": ((2, 2), 65, 16, {}),
    "grouped": ((6, 2), 100, 64, {}),
    "one key head": ((4, 1), 70, 72, {}),
    "half precision": ((4, 2), 130, 128, {"dtype": torch.float16}),
    "bfloat16": ((4, 2), 96, 80, {"dtype": torch.bfloat16}),
    "bfloat16, widest": ((2, 1), 40, 256, {"dtype": torch.bfloat16}),
    "one row, keys in parts": ((2, 1), 300, 96, {"rows": [299]}),
    "few rows, not in order": ((4, 2), 200, 40, {"rows": [180, 3, 64, 63, 180]}),
    "the first row": ((2, 2), 70, 16, {"rows": [0]}),
    "rows of two blocks": ((2, 1), 150, 16, {"rows": range(40, 150)}),
    "padding in front": ((2, 2), 140, 16, {"start": 70}),
    "padding, and rows of it": ((2, 2), 140, 16, {"start": 70, "rows": [2, 69, 70, 71, 139]}),
    "nothing seen": ((2, 2), 80, 16, {"start": 66, "rows": [0, 65]}),
    "all see all": ((2, 1), 70, 16, {"causal": False, "start": 3}),
    "all see all, some rows": ((2, 2), 130, 24, {"causal": False, "rows": [0, 129, 7]}),
    "a bias": ((2, 2), 70, 16, {"bias": "normal"}),
    "a bias that hides a key": ((2, 2), 70, 16, {"bias": "hides"}),
    "a threshold": ((4, 2), 100, 32, {"threshold": 0.3}),
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
        how["bias"][5] = -torch.inf if bias == "hides" else 0
    rows = how.pop("rows", None)
    rows = None if rows is None else torch.tensor(rows, device=device)
    return [query, key, rows], how


def seen(x: Tensor) -> Tensor:
    """Normalisers; a row that sees nothing has none."""
    return x.masked_fill(x == -1e30, -torch.inf)


def sums(args: list, how: dict) -> tuple[int, float]:
    """The sums behind a statistic, and the size of the logits.

    What a logit is off by, a weight is off by relative to itself: its tolerance grows with them.
    """
    query, _, rows = args
    largest = seen(row_lse_ref(*args, **{k: v for k, v in how.items() if k != "threshold"})[1])
    size = float(largest[largest.isfinite()].abs().amax()) if bool(largest.isfinite().any()) else 1
    taken = query.shape[1] if rows is None else len(rows)
    return sum(query.shape[1:]) + taken, max(size, 1.0)


def check(got: dict[str, Tensor], expected: dict[str, Tensor], terms: int, size: float) -> None:
    assert list(got) == list(expected)
    for name, of in expected.items():
        assert got[name].dtype == of.dtype and got[name].shape == of.shape
        if name == "count":  # an entry at the threshold may fall on either side
            assert ((got[name] - of).abs() <= 1).all()
            assert (got[name] != of).float().mean() < 0.01
        elif name == "nnz":
            assert torch.equal(got[name], of)
        else:  # sums of what is not negative: each column has its own size
            whole = of + expected["sum"] if name == "entropy" else of
            close(got[name], of, terms=terms, scale=size * whole)


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_the_reference(case: str, device: torch.device) -> None:
    args, how = inputs(case, device)
    got = col_stats(*args, **how)
    expected, (terms, size) = col_stats_ref(*args, **how), sums(args, how)
    check(got, expected, terms, size)
    if case not in ("one of everything", "the first row", "nothing seen"):
        # Control: other queries receive other things.
        other = col_stats_ref(*inputs(case, device, seed=1)[0], **how)
        for name in ("sum", "sumsq", "max", "entropy"):
            apart(got[name], other[name], terms=terms, scale=size * expected["sum"].clamp(min=1))


@pytest.mark.parametrize("case", CASES)
def test_normalisers_are_those_of_the_reference(case: str, device: torch.device) -> None:
    args, how = inputs(case, device)
    how.pop("threshold", None)
    got, expected = row_lse(*args, **how), row_lse_ref(*args, **how)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        close(seen(ours), seen(theirs), terms=sums(args, how)[0])
    if case not in ("nothing seen", "one of everything"):  # control
        other = row_lse_ref(*inputs(case, device, seed=1)[0], **how)
        apart(seen(got[0]), seen(other[0]), terms=sums(args, how)[0])
    blind = args[2] is not None and how.get("causal", True) and args[2] < how.get("start", 0)
    if blind is not False:
        assert (got[0][:, blind] == -1e30).all() and (got[1][:, blind] == -1e30).all()
        assert (got[0][:, ~blind] > -1e3).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 32])
def test_parts_of_the_keys_do_not_show(
    parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parts lie behind every row, some before the first key, some hold one block."""
    args, how = inputs("padding, and rows of it", device)
    monkeypatch.setattr(module, "_PROGRAMS", 2 * parts)
    got = row_lse(*args, **how)
    for ours, theirs in zip(got, row_lse_ref(*args, **how), strict=True):
        close(seen(ours), seen(theirs), terms=sums(args, how)[0])


def test_order_of_rows_does_not_show(device: torch.device) -> None:
    (query, key, rows), how = inputs("few rows, not in order", device)
    first = col_stats(query, key, rows, **how)
    second = col_stats(query, key, rows.flip(0), **how)
    assert all(torch.equal(first[name], second[name]) for name in STATISTICS)


def test_views_are_taken_as_they_are(device: torch.device) -> None:
    """Heads behind tokens, as projections leave them; every second channel; part of a buffer."""
    (query, key, rows), how = inputs("grouped", device)
    expected = col_stats(query, key, rows, **how)
    buffer = torch.full((2, 3 * 100, 64), torch.nan, device=device)
    buffer[:, 50:150] = key
    wide = torch.full((6, 100, 128), torch.nan, device=device)
    wide[..., ::2] = query
    for q, k in (
        (query.transpose(0, 1).contiguous().transpose(0, 1), key),
        (query, buffer[:, 50:150]),
        (wide[..., ::2], key),
    ):
        assert not (q.is_contiguous() and k.is_contiguous())
        got = col_stats(q, k, rows, **how)
        assert all(torch.equal(got[name], of) for name, of in expected.items())


@pytest.mark.parametrize("want", [("sum",), ("nnz",), ("entropy", "max"), ("count", "nnz"), ()])
def test_only_what_is_wanted(want: tuple[str, ...], device: torch.device) -> None:
    args, how = inputs("a threshold", device)
    every, some = col_stats(*args, **how), col_stats(*args, **how, want=want)
    assert set(some) == set(want)
    assert all(torch.equal(some[name], every[name]) for name in want)


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_heads_together(choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    args, how = inputs("a threshold", device)
    head = col_stats(*args, **how)
    for per, dims in (("group", 1), ("all", (0, 1))):
        got = col_stats(*args, **how, per=per)
        for name, of in got.items():
            if name == "nnz":
                assert torch.equal(of, head[name])
            else:
                joined = head[name].amax(dims) if name == "max" else head[name].sum(dims)
                assert of.dtype == head[name].dtype
                close(of, joined.to(of.dtype), torch.float32, len(args[0]), scale=joined)


def test_the_same_bits_every_time(device: torch.device) -> None:
    args, how = inputs("everything", device)
    first, second = col_stats(*args, **how), col_stats(*args, **how)
    assert all(torch.equal(first[name], second[name]) for name in STATISTICS)


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("oracle-colstats-*")), ids=lambda p: p.stem)
def test_stored_statistics(path: Path, device: torch.device) -> None:
    data = {name: of.to(device) for name, of in load_file(path).items()}
    colstats_case(data, {})
    for b, start in enumerate(data["start"].tolist()):
        lse, largest = row_lse(data["q"][b], data["k"][b], data["rows"].long(), start=start)
        terms = sum(data["k"].shape[-2:])
        close(seen(lse), seen(data["lse"][b]), terms=terms)
        close(seen(largest), seen(data["rowmax_logit"][b]), terms=terms)
    with pytest.raises(AssertionError):  # control
        colstats_case(data | {"k": data["k"].roll(1, 2)}, {})


def test_stored_statistics_are_there() -> None:
    assert list(GOLDEN.rglob("oracle-colstats-*"))


@pytest.mark.parametrize("choice", ["triton", "torch"])
@pytest.mark.parametrize("name", ["col_stats", "row_lse"])
def test_what_is_refused(
    choice: str, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    run = getattr(module, name)
    x = torch.randn(2, 9, 16, device=device)
    refused = {
        "no query row or no key": (x[:, :0], x[:, :0]),
        "queries in torch.float32, keys in torch.float16": (x, x.half()),
        r"queries \(2, 9, 16\) and keys \(2, 9, 8\)": (x, x[..., :8]),
        r"keys \(2, 8, 16\)": (x, x[:, :8]),
        "a divisor of Hq": (x, torch.cat([x, x[:1]])),
    }
    for told, args in refused.items():
        with pytest.raises(VLMFastError, match=f"{name}: .*{told}"):
            run(*args)
    with pytest.raises(VLMFastError, match=f"{name}: no query row"):
        run(x, x, torch.zeros(0, dtype=torch.int64, device=device))
    with pytest.raises(VLMFastError, match=f"{name}: rows of torch.bool; it takes int64"):
        run(x, x, torch.ones(9, dtype=torch.bool, device=device))
    with pytest.raises(VLMFastError, match=rf"{name}: a bias of shape \(2, 9\); it takes \(9,\)"):
        run(x, x, bias=torch.zeros(2, 9, device=device))


@pytest.mark.parametrize("dim", [4, 20, 264])
def test_head_dimensions_that_are_refused(dim: int, device: torch.device) -> None:
    x = torch.randn(2, 9, dim, device=device)
    with pytest.raises(VLMFastError, match=rf"col_stats: head dimension {dim}; it takes mult"):
        col_stats(x, x)
    with pytest.raises(VLMFastError, match=rf"row_lse: head dimension {dim}; it takes multiples"):
        row_lse(x, x)


def test_unknown_words(device: torch.device) -> None:
    x = torch.randn(2, 9, 16, device=device)
    with pytest.raises(VLMFastError, match=r"want=\['mean'\] must be among sum, sumsq, max"):
        col_stats(x, x, want=("sum", "mean"))
    with pytest.raises(VLMFastError, match="per='token' must be one of head, group, all"):
        col_stats(x, x, per="token")
