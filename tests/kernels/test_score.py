"""`atp_score`: the kernel against the reference and against ATP's layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from closeness import apart, close
from vlmfast.compressors.prefill.atp.module import Point
from vlmfast.errors import VLMFastError
from vlmfast.kernels import score as module
from vlmfast.kernels.score import atp_score, atp_score_ref

pytestmark = pytest.mark.usefixtures("triton")


def inputs(h: int, n: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    attention = torch.randn(h, n, generator=generator).mul(2).softmax(1)
    attention[:, n // 2 + 1 :: 7] = 0.0  # the logarithm is clamped
    received, heads = torch.randn(h, n, generator=generator), torch.randn(2, h, generator=generator)
    soft = torch.rand(n, generator=generator) + 0.01
    slope, offset = torch.tensor([1.5, 0.7]), torch.tensor([0.1, -0.3])
    every = (attention, received, soft, *heads, slope, offset)
    return [x.to(device) for x in every]


def check(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], h: int, n: int) -> None:
    """Sums over the heads, then over the tokens."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape
        close(ours, theirs, terms=h + n)


@pytest.mark.parametrize(("h", "n"), [(1, 1), (1, 300), (4, 256), (17, 50), (32, 576)])
def test_matches_reference(h: int, n: int, device: torch.device) -> None:
    args = inputs(h, n, device)
    got = atp_score(*args)
    check(got, atp_score_ref(*args), h, n)
    if n > 1:
        for at in range(7):  # control: every input matters
            other = [x.flip(0) if i == at else x for i, x in enumerate(args)]
            if not torch.equal(other[at], args[at]):
                apart(got[0], atp_score_ref(*other)[0], terms=h + n)


def test_matches_atp_layer(device: torch.device) -> None:
    torch.manual_seed(0)
    point = Point(6, learned=True).to(device)
    for parameter in point.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention, received, soft, *_ = inputs(6, 90, device)
    with torch.no_grad():
        expected = point(attention, received, torch.zeros(90, device=device), soft)
        red, means = atp_score(
            attention,
            received,
            soft,
            point.cross_heads,
            point.self_heads,
            point.slope,
            point.offset,
        )
        close(red, expected.red, terms=6 + 90)
        z = point.hidden(means)
        terms = 6 + 90 + 2 + z.shape[-1]
        close(point.theta_r(z).sigmoid()[0], expected.theta_r, terms=terms)
        close(point.theta_s(z).sigmoid()[0], expected.theta_s, terms=terms)


def test_non_contiguous_inputs(device: torch.device) -> None:
    args = inputs(3, 40, device)
    views = [torch.stack([x, x], -1)[..., 0] for x in args]
    views[0] = args[0].T.contiguous().T
    check(atp_score(*views), atp_score_ref(*args), 3, 40)


def test_gradients_use_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_launch")
    args = inputs(2, 9, device)
    red, means = atp_score(*args[:5], args[5].requires_grad_(), args[6])
    (red.sum() + means.sum()).backward()
    assert args[5].grad is not None
    with torch.no_grad(), pytest.raises(NameError):
        atp_score(*args)


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_invalid_inputs_raise(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    args = inputs(3, 9, device)
    for at in range(7):
        wrong = [x[:1] if i == at else x for i, x in enumerate(args)]
        with pytest.raises(VLMFastError, match=r"atp_score: shapes .*; it takes \(H, N\) twice"):
            atp_score(*wrong)
    with pytest.raises(VLMFastError, match=r"atp_score: shapes .*, none empty"):
        atp_score(*inputs(3, 9, device)[:0], *(x[..., :0] for x in args[:3]), *args[3:])
    with pytest.raises(VLMFastError, match=r"atp_score: tensors in .*; it takes float32"):
        atp_score(args[0].half(), *args[1:])
