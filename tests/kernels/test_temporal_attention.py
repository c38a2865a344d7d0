"""`temporal_attention`: the kernel against the reference and PVC's layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from closeness import apart, close
from vlmfast.compressors.encoder.pvc.module import TemporalAttention
from vlmfast.errors import VLMFastError
from vlmfast.kernels import temporal_attention as module
from vlmfast.kernels.temporal_attention import temporal_attention, temporal_attention_ref

pytestmark = pytest.mark.usefixtures("triton")

# (S, T, N, H, d)
SHAPES = [
    (1, 1, 1, 1, 8),
    (1, 2, 50, 2, 16),
    (2, 4, 9, 3, 64),
    (1, 3, 13, 2, 72),
    (2, 5, 4, 1, 80),
    (1, 16, 3, 2, 96),
    (1, 7, 5, 1, 128),
    (1, 4, 3, 1, 256),
    (1, 17, 2, 2, 16),  # uses `biased_attention`
    (2, 40, 1, 1, 24),
]


def triple(shape: tuple[int, ...], device: torch.device, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, *shape, generator=generator).to(device, dtype).unbind(0)


def check(got: Tensor, expected: Tensor) -> None:
    """A logit over the head dimension, then over frames; in float32, the result is rounded."""
    assert got.dtype == expected.dtype and got.shape == expected.shape and got.is_contiguous()
    close(got, expected, terms=got.shape[1] + got.shape[-1] if got.dtype == torch.float32 else 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple, device: torch.device) -> None:
    q, k, v = triple(shape, device)
    got = temporal_attention(q, k, v)
    check(got, temporal_attention_ref(q, k, v))
    if shape[1] > 1:  # control: time has a direction
        back = temporal_attention_ref(*(x.flip(1) for x in (q, k, v))).flip(1)
        apart(got, back, terms=shape[1] + shape[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_matches_reference(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = triple((2, 4, 11, 2, 40), device, dtype)
    wide = temporal_attention_ref(q.float(), k.float(), v.float())
    check(temporal_attention(q, k, v), wide.to(dtype))


def test_attention_is_causal_and_per_position(device: torch.device) -> None:
    q, k, v = triple((1, 4, 10, 2, 16), device)
    before = temporal_attention(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, 2, 3], v[:, 2, 3] = 7.0, -5.0
    changed = (temporal_attention(q, k, v) != before).any(-1).any(-1)[0]
    assert changed.nonzero().tolist() == [[2, 3], [3, 3]]


@pytest.mark.parametrize("frames", [4, 17])
def test_views_of_joint_projection(frames: int, device: torch.device) -> None:
    """As in PVC's layer."""
    torch.manual_seed(0)
    layer = TemporalAttention(32, 4, 8).to(device)
    torch.nn.init.normal_(layer.out.weight)
    x, time = torch.randn(2, frames, 6, 32, device=device), torch.randn(frames, 8, device=device)
    with torch.no_grad():
        joint = layer.qkv(layer.norm(x, time[:, None])).unflatten(-1, (3, 4, -1))
        q, k, v = joint.unbind(3)
        assert not q.is_contiguous()
        got = x + layer.out(temporal_attention(q, k, v).flatten(3))
        close(
            got, layer(x, time), terms=32 + 8 + frames + 32
        )  # input projection, attention, output
    spread = [torch.stack([a, a], -1)[..., 0] for a in (q, k, v)]
    check(temporal_attention(*spread), temporal_attention_ref(q, k, v))


def test_gradients_use_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = triple((1, 2, 3, 1, 8), device)
    launched = []
    monkeypatch.setattr(module, "_launch", lambda *args: launched.append(1) or args[0])
    temporal_attention(q.requires_grad_(), k, v).sum().backward()
    assert q.grad is not None and not launched
    with torch.no_grad():
        temporal_attention(q, k, v)
    assert launched


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_invalid_inputs_raise(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    x = torch.zeros(1, 2, 3, 4, 8, device=device)
    for others in ((x, x[:, :1]), (x[0], x[0])):
        with pytest.raises(VLMFastError, match=r"temporal_attention: shapes .*; it takes"):
            temporal_attention(x, *others)
    with pytest.raises(
        VLMFastError, match=r"temporal_attention: tensors in .*; it takes one dtype"
    ):
        temporal_attention(x, x.half(), x)


@pytest.mark.parametrize("dim", [4, 20, 264])
@pytest.mark.parametrize("frames", [2, 17])
def test_unsupported_head_dimension_raises(frames: int, dim: int, device: torch.device) -> None:
    x = torch.zeros(1, frames, 1, 1, dim, device=device)
    with pytest.raises(VLMFastError, match=f"temporal_attention: head dimension {dim}; it takes"):
        temporal_attention(x, x, x)
