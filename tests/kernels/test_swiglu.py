"""The gate of an MLP: the kernel against Hugging Face's order of operations."""

from __future__ import annotations

import pytest
import torch

from vlmfast.errors import VLMFastError
from vlmfast.kernels.swiglu import swiglu, swiglu_ref

pytestmark = pytest.mark.usefixtures("triton")

# Units in the last place of what is rounded twice; the interpreter cuts bfloat16.
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def noise(*shape: int, device: torch.device, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 4).to(device, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(1,), (1, 1, 8), (3, 1024), (2, 3, 1500), (0, 8), (70, 3)])
def test_it_is_silu_times_up(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    gate, up = noise(2, *shape, device=device, dtype=dtype)
    got, expected = swiglu(gate, up), torch.nn.functional.silu(gate) * up
    assert got.dtype == dtype and got.shape == gate.shape and got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(swiglu_ref(gate, up), expected)
    if gate.numel() > 8:  # control
        assert not torch.allclose(got, swiglu_ref(up, gate), rtol=CLOSE[dtype])


def test_halves_of_one_product(device: torch.device) -> None:
    gate, up = noise(2, 5, 80, device=device).chunk(2, -1)
    torch.testing.assert_close(swiglu(gate, up), swiglu_ref(gate, up))
    turned = noise(9, 40, device=device).T
    torch.testing.assert_close(swiglu(turned, turned), swiglu_ref(turned, turned))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_what_is_far_from_zero(device: torch.device) -> None:
    gate = torch.tensor([-1e4, -200.0, -100.0, 0.0, 100.0, 1e4], device=device)
    got = swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(got, swiglu_ref(gate, torch.ones_like(gate)))
    assert got[4:].tolist() == [100.0, 1e4]


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_what_is_refused(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    x = torch.zeros(2, 8, device=device)
    for other in (x[:1], x.half()):
        with pytest.raises(VLMFastError, match=r"swiglu: gate \(2, 8\) in torch.float32, up \("):
            swiglu(x, other)
