"""`biased_attention`: the kernel against its reference, and the effect of a bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close
from vlmfast.kernels.biased_attention import biased_attention, biased_attention_ref

pytestmark = pytest.mark.usefixtures("triton")

# Batch, heads (Hq, Hk), rows T, keys S, head dimension D, and keyword arguments.
CASES = {
    "minimal": (1, (1, 1), 1, 1, 8, {}),
    "one row": (2, (4, 2), 1, 70, 16, {"bias": "heads"}),
    "two blocks of rows": (1, (2, 1), 140, 140, 16, {"bias": "keys"}),
    "grouped": (2, (4, 2), 33, 33, 64, {"bias": "heads"}),
    "no bias": (1, (2, 2), 70, 70, 72, {}),
    "fewer rows than keys": (1, (2, 1), 20, 90, 24, {"bias": "keys"}),
    "not causal": (2, (2, 1), 50, 65, 80, {"bias": "rows", "causal": False}),
    "padding": (3, (2, 2), 40, 40, 16, {"bias": "rows", "causal": False, "lengths": (40, 7, 0)}),
    "causal padding": (2, (2, 1), 70, 70, 16, {"lengths": (66, 3), "bias": "heads"}),
    "masked keys": (1, (2, 2), 30, 30, 16, {"bias": "masks"}),
    "wide": (1, (2, 1), 70, 70, 256, {"bias": "keys"}),
    "scaling": (1, (2, 1), 40, 40, 96, {"scaling": 0.3, "bias": "keys"}),
}


def inputs(
    name: str, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[list[Tensor | None], dict]:
    b, (hq, hk), t, s, d, how = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(b, hq, t, d, generator=generator)
    key, value = torch.randn(2, b, hk, s, d, generator=generator)
    how, bias = dict(how), None
    shapes = {"keys": (s,), "rows": (b, 1, s), "heads": (b, hk, s), "masks": (s,)}
    if kind := how.pop("bias", None):
        bias = torch.randint(1, 30, shapes[kind], generator=generator).float().log().to(device)
    if kind == "masks":
        bias[:3] = -torch.inf
        bias[9:20] = -torch.inf
    if lengths := how.get("lengths"):
        how["lengths"] = torch.tensor(lengths, device=device)
        for row, n in enumerate(lengths):
            key[row, :, n:], value[row, :, n:] = torch.nan, torch.nan
    return [query.to(device, dtype), key.to(device, dtype), value.to(device, dtype), bias], how


def sums(args: list[Tensor | None]) -> int:
    """Terms of the sums: a logit over the head dimension, then the values over the keys."""
    return args[1].shape[-1] + args[1].shape[-2]


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str, device: torch.device) -> None:
    args, how = inputs(name, device)
    got, expected = biased_attention(*args, **how), biased_attention_ref(*args, **how)
    assert got.shape == args[0].shape and got.dtype == torch.float32
    close(got, expected, terms=sums(args))
    assert bool(got.isfinite().all())
    if args[3] is not None:
        bare = biased_attention_ref(*args[:3], **how)
        apart(got, bare, terms=sums(args))  # control: without the bias the result differs


def test_fully_masked_rows_are_zero(device: torch.device) -> None:
    args, how = inputs("masked keys", device)
    got = biased_attention(*args, **how)
    assert not got[:, :, :3].any() and got[:, :, 3:].any(-1).all()
    args, how = inputs("padding", device)
    assert not biased_attention(*args, **how)[2].any()
