"""Quantized keys and values: the kernels match the reference on a CPU bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlmfast.kernels import quantize_kv
from vlmfast.kernels.quantize_kv import (
    channel_scale,
    channel_scale_ref,
    quantize,
    quantize_keys,
    quantize_keys_ref,
    quantize_values,
    quantize_values_ref,
)

pytestmark = [
    pytest.mark.usefixtures("triton"),
    # The interpreter uses NumPy, which warns about the infinities of some tests.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Channels of very different scale and mean."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(shape[-1], generator=generator).exp()
    mean = torch.randn(shape[-1], generator=generator)
    return (torch.randn(shape, generator=generator) * scale + mean).to(dtype)


def ragged(*lead: int, n: int, seed: int = 0) -> Tensor:
    """Mask of valid slots; one head has none."""
    lengths = torch.randint(0, n + 1, lead, generator=torch.Generator().manual_seed(seed))
    lengths.view(-1)[-1] = 0
    return torch.arange(n) < lengths[..., None]


def same(ours, theirs) -> bool:
    """Equal dtypes, shapes and bits."""
    ours, theirs = ((x,) if isinstance(x, Tensor) else x for x in (ours, theirs))
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
        for a, b in zip(ours, theirs, strict=True)
    )


KEYS = [(2, 0), (4, 0), (8, 0), (2, 32), (4, 24), (8, 8)]
VALUES = [(2, None), (4, None), (8, None), (4, 8)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("bits", "group"), KEYS)
@pytest.mark.parametrize("stored", TYPES)
def test_keys_match_reference(bits, group, stored, device):
    for dim, n, dtype, masked_only in ((16, 70, torch.float32, True), (72, 33, stored, False)):
        x, valid = noise(1, 2, n, dim, dtype=dtype), ragged(1, 2, n=n)
        for seen in (valid,) if masked_only else (None,):
            expected = quantize_keys_ref(x, bits, group, seen, dtype=stored)
            mask = None if seen is None else seen.to(device)
            assert same(quantize_keys(x.to(device), bits, group, mask, dtype=stored), expected)
    other = noise(1, 2, n, dim, seed=1).to(device)  # control
    assert not same(quantize_keys(other, bits, group, dtype=stored), expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("bits", "group"), VALUES)
@pytest.mark.parametrize("stored", TYPES)
def test_values_match_reference(bits, group, stored, device):
    for dim, n, dtype, masked_only in ((16, 40, torch.float32, True), (72, 9, stored, False)):
        x, valid = noise(2, n, dim, dtype=dtype), ragged(2, n=n)
        for seen in (valid,) if masked_only else (None,):
            mask = None if seen is None else seen.to(device)
            scale = channel_scale_ref(x, seen, dtype=stored)
            assert same(channel_scale(x.to(device), mask, dtype=stored), scale)
            for divisor in (scale,) if masked_only else (None, scale):
                expected = quantize_values_ref(x, bits, group or dim, divisor, seen, dtype=stored)
                divisor = None if divisor is None else divisor.to(device)
                assert same(
                    quantize_values(x.to(device), bits, group, divisor, mask, dtype=stored),
                    expected,
                )
    other = noise(2, n, dim, seed=1).to(device)  # control
    assert not same(quantize_values(other, bits, group, dtype=stored), expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stored", TYPES)
def test_out_of_range_values_match_reference(stored, device):
    """Clamped as in the reference; also tiny values, and values midway between codes."""
    rows = [1e5, 3e38, 1e-9, 1e-30, 0.0, 1.0]
    x = noise(1, 40, 16)[:, None] * torch.tensor(rows)[:, None, None]
    x[0, 5, :, 0] = torch.linspace(-1, 1, 40)  # a channel around zero, and a constant one
    x[0, 5, :, 1] = 100.003
    x[0, 5, :, 2] = torch.arange(40) / 2  # codes of 2.5: half to even
    x[0, 5, :, 3] = -0.0
    for bits in (2, 8):
        expected = quantize_keys_ref(x, bits, 0, dtype=stored)
        assert same(quantize_keys(x.to(device), bits, 0, dtype=stored), expected)
        expected = quantize_values_ref(x, bits, 8, dtype=stored)
        assert same(quantize_values(x.to(device), bits, 8, dtype=stored), expected)


def test_single_slot_and_wide_head(device):
    x = noise(1, 1, 136).half()
    expected = quantize_keys_ref(x, 2, 0, dtype=torch.float16)
    assert same(quantize_keys(x.to(device), 2, 0, dtype=torch.float16), expected)
    scale = channel_scale_ref(x, dtype=torch.float16)
    assert same(channel_scale(x.to(device), dtype=torch.float16), scale)
    expected = quantize_values_ref(x, 4, 136, scale, dtype=torch.float16)
    ours = quantize_values(x.to(device), 4, None, scale.to(device), dtype=torch.float16)
    assert same(ours, expected)


def test_rounds_half_to_even(device):
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 15.0])[None, :, None].repeat(1, 1, 8)
    packed, step, _ = quantize_keys(x.to(device), 4, dtype=torch.float32)
    assert bool((step == 1).all())
    assert (packed[0, :, 0] & 15).tolist() == [0, 0, 2, 2, 4, 15]


@pytest.mark.cases(1)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e9])
def test_padding_does_not_affect_parameters(poison, device):
    n = 40
    keys, values = noise(2, 2, n, 16), noise(2, 2, n, 16, seed=1)
    lengths = torch.tensor([[n, 0], [32, 1]])
    masked = torch.arange(n) >= lengths[..., None]
    spoiled = [x.masked_fill(masked[..., None], poison).to(device) for x in (keys, values)]
    order = torch.arange(n, device=device).expand(2, 2, -1)
    arguments = (order, lengths.to(device), 4)
    more = {"key_group": 16, "value_group": 8, "scaled": True, "dtype": torch.float16}
    whole = quantize(*spoiled, *arguments, **more)
    clean = quantize(keys.to(device), values.to(device), *arguments, **more)
    assert same(whole.tensors(), clean.tensors())
    assert all(bool(x.isfinite().all()) for x in whole.dequantize(torch.float32))
    longer = quantize(*spoiled, order, lengths.clamp(max=n - 1).to(device) + 1, 4, **more)
    assert not same(whole.tensors(), longer.tensors())


def test_segment_matches_reference(device, monkeypatch):
    keys, values = noise(2, 90, 64).half(), noise(2, 90, 64, seed=1).half()
    arguments = (torch.arange(90).expand(2, -1), torch.tensor([90, 41]), 2)
    for more in ({"scaled": True}, {"key_group": 32, "value_group": 32}):
        monkeypatch.setenv("VLMFAST_KERNELS", "triton")
        on = [x.to(device) if isinstance(x, Tensor) else x for x in (keys, values, *arguments)]
        ours = quantize(*on, **more)
        monkeypatch.setenv("VLMFAST_KERNELS", "torch")
        theirs = quantize(keys, values, *arguments, **more)
        assert ours.key == theirs.key
        assert same(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("shape", [(2, 0, 16), (0, 5, 16), (2, 3, 0, 16)])
@pytest.mark.parametrize("group", [0, 8])
def test_empty_slots_and_heads(shape, group, device):
    x = torch.zeros(shape)
    expected = quantize_keys_ref(x, 4, group, dtype=torch.float16)
    assert same(quantize_keys(x.to(device), 4, group, dtype=torch.float16), expected)
    if shape[0]:
        expected = channel_scale_ref(x, dtype=torch.float16)
        assert same(channel_scale(x.to(device), dtype=torch.float16), expected)
    packed, step, _ = quantize_values(x.to(device), 4, 8, dtype=torch.float16)
    assert packed.shape == (*shape[:-1], 8) and step.shape == (*shape[:-1], 2)


def test_environment_selects_implementation(device, monkeypatch):
    monkeypatch.setattr(quantize_kv, "quantize_keys_ref", None)
    quantize_keys(noise(1, 4, 8).to(device), 4, dtype=torch.float16)
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    with pytest.raises(TypeError):
        quantize_keys(noise(1, 4, 8).to(device), 4, dtype=torch.float16)
