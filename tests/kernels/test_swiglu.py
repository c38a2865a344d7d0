"""`swiglu`: the kernel against Hugging Face's order of operations."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from support.closeness import apart, close
from vlmfast.kernels.swiglu import geglu_tanh, geglu_tanh_ref, swiglu, swiglu_ref

pytestmark = pytest.mark.usefixtures("triton")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def noise(*shape: int, device: torch.device, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 4).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1, 1, 8), (3, 1024), (2, 3, 1500), (0, 8), (70, 3)])
def test_matches_silu_times_up(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    gate, up = noise(2, *shape, device=device, dtype=dtype)
    got, expected = swiglu(gate, up), torch.nn.functional.silu(gate) * up
    assert got.dtype == dtype and got.shape == gate.shape and got.is_contiguous()
    # Rounded twice, nothing cancels; the error of an exponential grows with its argument.
    scale = expected.abs().float() * (gate.abs().clamp(min=1) if dtype == torch.float32 else 1)
    close(got, expected, terms=2, scale=scale)
    assert torch.equal(swiglu_ref(gate, up), expected)
    if gate.numel() > 8:  # control
        apart(got, swiglu_ref(up, gate), terms=2, scale=scale)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 1500), (0, 8)])
def test_geglu_matches_gelu_times_up(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    gate, up = noise(2, *shape, device=device, dtype=dtype)
    activation = ACT2FN["gelu_pytorch_tanh"]
    got, expected = geglu_tanh(gate, up), activation(gate) * up
    assert got.dtype == dtype and got.shape == gate.shape and got.is_contiguous()
    # ``1 + tanh`` cancels for negative gates: the error is relative to the gate.
    scale = (gate * up).abs().float() if dtype == torch.float32 else expected.abs() + 1e-3
    close(got, expected, terms=4, scale=scale)
    assert torch.equal(geglu_tanh_ref(gate, up), expected)
    if gate.numel() > 8:  # controls
        apart(got, geglu_tanh_ref(up, gate), terms=4, scale=scale)
        apart(got, swiglu_ref(gate, up), terms=4, scale=scale)
        exact = torch.nn.functional.gelu(gate) * up
        if dtype == torch.float32:
            apart(got, exact, terms=4, scale=scale)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_magnitudes(device: torch.device) -> None:
    gate = torch.tensor([-1e4, -200.0, -100.0, 0.0, 100.0, 1e4], device=device)
    got = swiglu(gate, torch.ones_like(gate))
    expected = swiglu_ref(gate, torch.ones_like(gate))
    # The error of an exponential grows with its argument: 100 units in the last place at -100.
    close(got, expected, terms=2, scale=expected.abs() * gate.abs())
    assert got[4:].tolist() == [100.0, 1e4]
    assert geglu_tanh(gate, torch.ones_like(gate)).tolist() == [0.0] * 4 + [100.0, 1e4]
