"""`swiglu`: the kernel against Hugging Face's order of operations."""

from __future__ import annotations

import pytest
import torch

from closeness import apart, close
from vlmfast.errors import VLMFastError
from vlmfast.kernels.swiglu import swiglu, swiglu_ref

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


def test_non_contiguous_halves(device: torch.device) -> None:
    gate, up = noise(2, 5, 80, device=device).chunk(2, -1)
    close(swiglu(gate, up), swiglu_ref(gate, up), terms=2)
    turned = noise(9, 40, device=device).T
    close(swiglu(turned, turned), swiglu_ref(turned, turned), terms=2)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_magnitudes(device: torch.device) -> None:
    gate = torch.tensor([-1e4, -200.0, -100.0, 0.0, 100.0, 1e4], device=device)
    got = swiglu(gate, torch.ones_like(gate))
    expected = swiglu_ref(gate, torch.ones_like(gate))
    # The error of an exponential grows with its argument: 100 units in the last place at -100.
    close(got, expected, terms=2, scale=expected.abs() * gate.abs())
    assert got[4:].tolist() == [100.0, 1e4]


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_invalid_inputs_raise(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    x = torch.zeros(2, 8, device=device)
    for other in (x[:1], x.half()):
        with pytest.raises(VLMFastError, match=r"swiglu: gate \(2, 8\) in torch.float32, up \("):
            swiglu(x, other)
