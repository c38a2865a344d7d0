"""`gather_rows`: the kernel against PyTorch's gathers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.engine.kernels import launches
from vlmfast.kernels import gather_rows as module
from vlmfast.kernels.gather_rows import gather_rows, gather_rows_ref

pytestmark = pytest.mark.usefixtures("triton")

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32,
    torch.uint8, torch.bool,
]  # fmt: skip


def filled(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Tensor:
    """Random bits, including infinities. No NaN: PyTorch's gather on a CPU changes their bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), generator=generator).to(device, torch.uint8)
    x = raw.view(dtype).view(shape)
    return x.nan_to_num_(torch.inf) if dtype.is_floating_point else x


def drawn(shape: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    return torch.randint(0, n, shape, generator=torch.Generator().manual_seed(1)).to(device)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.is_contiguous()
    return all(
        torch.equal(bits(ours), bits(theirs)) for ours, theirs in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_index_all_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    x = filled((2, 40, 24), dtype, device)
    index = drawn((33,), 40, device)
    got = gather_rows(index, x, dim=1)
    assert same(got, (x.index_select(1, index),))
    assert same(got, gather_rows_ref(index, x, dim=1))
    assert not same(got, gather_rows_ref(index.flip(0), x, dim=1))  # control


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_per_head_all_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    x = filled((3, 40, 72), dtype, device)
    index = drawn((3, 21), 40, device)
    got = gather_rows(index, x)
    assert same(got, (x.gather(1, index[..., None].expand(-1, -1, 72)),))
    assert same(got, gather_rows_ref(index, x))
    assert not same(got, gather_rows_ref(index.roll(1, 0), x))  # control


def test_hidden_states_and_rotary_tables(device: torch.device) -> None:
    """Several rows and columns of tiles, the last ones partial."""
    s, index = 300, torch.arange(0, 300, 2, device=device)
    tensors = (
        filled((1, s, 600), torch.bfloat16, device),
        filled((1, s, 128), torch.float32, device, 1),
        filled((1, s, 128), torch.float32, device, 2),
        filled((3, s, 5), torch.int64, device, 3),
    )
    got = gather_rows(index, *tensors, dim=1)
    assert same(got, tuple(x[:, ::2].contiguous() for x in tensors))


def test_all_tensors_in_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(monkeypatch, module)
    x = filled((2, 9, 8), torch.float16, device)
    gather_rows(drawn((2, 4), 9, device), x, x[..., 0], x[..., :3])
    assert len(launched) == 1


def test_leading_and_trailing_axes(device: torch.device) -> None:
    x = filled((2, 3, 20, 4, 5), torch.float16, device)
    index = drawn((2, 3, 7), 20, device)
    assert same(gather_rows(index, x), gather_rows_ref(index, x))
    shared = index[0, 0]
    for dim in (0, 1, 3):
        at = shared % x.shape[dim]
        assert same(gather_rows(at, x, dim=dim), (x.index_select(dim, at),))
    flat = filled((20,), torch.int64, device)
    assert same(gather_rows(shared, flat), (flat[shared],))


@pytest.mark.parametrize("given", ["each", "all", "none", "full"])
def test_rows_after_counts_are_zero(given: str, device: torch.device) -> None:
    """After the counts, rows are zero and the index may hold any values."""
    tensors = (filled((3, 50, 40), torch.float16, device), filled((3, 50), torch.int64, device, 1))
    index = drawn((3, 45), 50, device)
    counts = {"each": [45, 0, 17], "all": 17, "none": 0, "full": [45] * 3}[given]
    counts = torch.tensor(counts, device=device)
    out_of_range = index.clone()
    for row, count in zip(out_of_range, counts.expand(3).tolist(), strict=True):
        row[count:] = 10**12
    got = gather_rows(out_of_range, *tensors, counts=counts)
    assert same(got, gather_rows_ref(out_of_range, *tensors, counts=counts))
    plain = gather_rows_ref(index, *tensors)
    for ours, whole in zip(got, plain, strict=True):
        for head, count in enumerate(counts.expand(3).tolist()):
            assert torch.equal(bits(ours[head, :count]), bits(whole[head, :count]))
            assert not bits(ours[head, count:]).any()


def test_counts_with_shared_index(device: torch.device) -> None:
    x = filled((2, 30, 8), torch.float32, device)
    index, count = drawn((20,), 30, device), torch.tensor(13, device=device)
    got = gather_rows(index, x, dim=1, counts=count)
    assert same(got, gather_rows_ref(index, x, dim=1, counts=count))
    assert torch.equal(bits(got[0][:, :13]), bits(x[:, index[:13]])) and not got[0][:, 13:].any()


def test_empty_index_and_empty_tensors(device: torch.device) -> None:
    x = filled((3, 30, 8), torch.float32, device)
    none = torch.zeros(3, 0, dtype=torch.int64, device=device)
    assert gather_rows(none) == ()
    assert gather_rows(none, x)[0].shape == (3, 0, 8)
    assert gather_rows(none, x[:, :0])[0].shape == (3, 0, 8)
    index = drawn((3, 4), 30, device)
    assert [y.shape[2] for y in gather_rows(index, x[..., :0], x)] == [0, 8]
