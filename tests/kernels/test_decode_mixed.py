"""Decode attention over quantised segments and a float tail: kernel against reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from golden_quant import decode as golden_decode
from vlmfast import VLMFastError
from vlmfast.kernels.decode_mixed import decode_mixed, decode_mixed_ref
from vlmfast.kernels.quantize_kv import Segment, quantise

pytestmark = pytest.mark.usefixtures("triton")

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "kv").glob("oracle-decode-mixed-*"))
KINDS = {
    "4 bit, whole": {"bits": 4, "scaled": True},
    "2 bit, whole": {"bits": 2, "scaled": True},
    "8 bit": {"bits": 8},
    "groups": {"bits": 2, "key_group": 8, "value_group": 8},
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def segment(kind: str, lengths: list[list[int]], dim: int, dtype, device, bias: bool) -> Segment:
    """A segment of ragged rows and heads; what lies behind them is garbage."""
    counts = torch.tensor(lengths)
    (batch, heads), n = counts.shape, max(map(max, lengths))
    parts = []
    for row in range(batch):
        keys, values = (noise(heads, n, dim, seed=7 * row + s).to(dtype) for s in (1, 2))
        order = torch.arange(n).expand(heads, -1)
        added = noise(heads, n, seed=row) if bias else None
        made = quantise(keys, values, order, counts[row], bias=added, **KINDS[kind])
        parts.append(made.unsqueeze())
    return Segment.cat(parts)._each(lambda name, x: x.to(device))


def case(batch, shared, groups, rows, dim, cap, dtype, device, kinds=(), bias=False):
    """Arguments of `decode_mixed`; the tail is ragged and poisoned behind its lengths."""
    query = noise(batch, shared * groups, rows, dim, seed=3).to(device, dtype)
    keys, values = (noise(batch, shared, cap, dim, seed=s).to(device, dtype) for s in (4, 5))
    length = torch.arange(1, batch * shared + 1).view(batch, shared) * cap // (batch * shared + 1)
    last = length[..., None] + torch.arange(rows)
    mask = (torch.arange(cap) < last[..., None]).to(device)
    gone = (~mask.any(2))[..., None]
    keys, values = keys.masked_fill(gone, torch.nan), values.masked_fill(gone, torch.nan)
    tail_bias = noise(batch, shared, cap, seed=6).to(device) if bias else None
    segments = []
    for at, kind in enumerate(kinds):
        lengths = [[(b * shared + h + at) * 11 % 40 for h in range(shared)] for b in range(batch)]
        if not any(map(any, lengths)):
            lengths[0][0] = 13
        segments.append(segment(kind, lengths, dim, dtype, device, bias))
    return query, segments, keys, values, mask, None, tail_bias


def check(arguments: tuple, mass: bool = False) -> None:
    got = decode_mixed(*arguments, want_mass=mass)
    expected = decode_mixed_ref(*arguments, want_mass=mass)
    close = CLOSE[arguments[0].dtype]
    assert got[0].dtype == expected[0].dtype
    torch.testing.assert_close(got[0], expected[0], rtol=close, atol=close)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=max(close, 1e-4))
    if mass:
        torch.testing.assert_close(got[2], expected[2], rtol=1e-4, atol=close)
    else:
        assert got[2] is None
    assert expected[0].isfinite().all()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kinds", [(), *[(kind,) for kind in KINDS], ("4 bit, whole", "groups")])
@pytest.mark.parametrize("groups", [1, 3])
def test_it_is_the_reference(kinds, groups, dtype, device) -> None:
    check(case(2, 2, groups, 1, 64, 50, dtype, device, kinds), mass=True)


@pytest.mark.parametrize("dim", [8, 72, 80, 96, 128])
def test_head_dimensions(dim: int, device) -> None:
    check(case(1, 2, 2, 1, dim, 33, torch.float32, device, ("4 bit, whole",)))


@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize("groups", [1, 4])
def test_several_rows_and_a_bias(rows: int, groups: int, device) -> None:
    kinds = ("2 bit, whole", "groups")
    check(case(2, 1, groups, rows, 32, 41, torch.float32, device, kinds, bias=True), mass=True)


def test_many_splits(device) -> None:
    """Longer than what one program reads."""
    check(case(1, 1, 2, 1, 16, 700, torch.float32, device, ("8 bit",)), mass=True)


def test_a_row_that_sees_nothing_is_zero(device) -> None:
    arguments = list(case(2, 2, 2, 1, 16, 20, torch.float32, device))
    arguments[4] = arguments[4].clone()
    arguments[4][1] = False
    out, lse, _ = decode_mixed(*arguments)
    assert not out[1].any()
    assert (lse[1] == -1e30).all()
    check(tuple(arguments))


def test_what_is_not_contiguous(device) -> None:
    query, segments, keys, values, mask, scaling, bias = case(
        1, 2, 2, 2, 32, 24, torch.float32, device
    )
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    check((query, segments, keys, values, mask[:, :1].expand(-1, 2, -1, -1), scaling, bias))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path, monkeypatch) -> None:
    data = load_file(path)
    golden_decode(data, {})
    with pytest.raises(AssertionError):  # control
        golden_decode(data | {"v4": data["v4"].roll(1, -1)}, {})


def test_a_control(device) -> None:
    """Another key is another result."""
    arguments = list(case(1, 1, 2, 1, 16, 20, torch.float32, device))
    expected = decode_mixed_ref(*arguments)[0]
    arguments[2] = arguments[2].clone()
    arguments[2][..., 0, :] += 1
    assert (decode_mixed(*arguments)[0] - expected).abs().max() > 1e-3


def test_what_is_refused(device) -> None:
    with pytest.raises(VLMFastError, match="head dimension 12"):
        decode_mixed(*case(1, 1, 1, 1, 12, 8, torch.float32, device))
    with pytest.raises(VLMFastError, match="head dimension 264"):
        decode_mixed(*case(1, 1, 1, 1, 264, 8, torch.float32, device))
    query, segments, keys, values, mask, *rest = case(1, 2, 2, 1, 16, 8, torch.float32, device)
    with pytest.raises(VLMFastError, match="one of float32, float16"):
        decode_mixed(query, segments, keys.half(), values.half(), mask, *rest)
    with pytest.raises(VLMFastError, match="cannot share"):
        decode_mixed(query[:, :3], segments, keys, values, mask, *rest)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_mixed_devices_are_refused() -> None:
    query, segments, keys, values, mask, *rest = case(1, 1, 1, 1, 16, 8, torch.float32, "cuda")
    with pytest.raises(VLMFastError, match="one device"):
        decode_mixed(query.cpu(), segments, keys, values, mask, *rest)
