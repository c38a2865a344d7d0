"""`biased_attention`: the kernel against its reference, and the effect of a bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from closeness import apart, close
from vlmfast.errors import VLMFastError
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


def test_reference_matches_sdpa_with_mask(device: torch.device) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 20, 8, device=device)
    bias = torch.randn(20, device=device)
    rows = torch.arange(20, device=device)
    added = bias.expand(20, 20).masked_fill(rows > rows[:, None], -torch.inf)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=added)
    for run in (biased_attention, biased_attention_ref):
        close(run(query, key, value, bias), expected, terms=8 + 20)


def test_bias_log_n_equals_n_copies_of_a_key(device: torch.device) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 12, 16, device=device)
    weight = torch.tensor([1, 3, 1, 2, 5, 1, 1, 1, 4, 1, 1, 1], device=device)
    got = biased_attention(query, key, value, weight.float().log(), causal=False)
    many = (x.repeat_interleave(weight, 2) for x in (key, value))
    close(got, biased_attention(query, *many, causal=False), terms=16 + int(weight.sum()))


def test_fully_masked_rows_are_zero(device: torch.device) -> None:
    args, how = inputs("masked keys", device)
    got = biased_attention(*args, **how)
    assert not got[:, :, :3].any() and got[:, :, 3:].any(-1).all()
    args, how = inputs("padding", device)
    assert not biased_attention(*args, **how)[2].any()


def test_non_contiguous_inputs(device: torch.device) -> None:
    args, how = inputs("grouped", device)
    expected = biased_attention_ref(*args, **how)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[:3]]
    spread = [torch.stack([x, x], -1)[..., 0] for x in args]
    for views in (turned + args[3:], spread):
        close(biased_attention(*views, **how), expected, terms=sums(args))


def test_is_deterministic(device: torch.device) -> None:
    args, how = inputs("two blocks of rows", device)
    assert torch.equal(biased_attention(*args, **how), biased_attention(*args, **how))


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_invalid_inputs_raise(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    x = torch.zeros(2, 3, 9, 16, device=device)
    bias = torch.zeros(8, device=device)
    invalid = {
        r"key \(2, 2, 9, 16\)": (x, x[:, :2], x[:, :2]),
        r"value \(2, 3, 8, 16\)": (x, x, x[:, :, 1:]),
        r"key \(2, 3, 9, 8\)": (x, x[..., :8], x[..., :8]),
        "no query row or no key": (x, x[:, :, :0], x[:, :, :0]),
        "9 causal rows over 8 keys; it takes at most 8": (x, x[:, :, 1:], x[:, :, 1:]),
        r"torch\.float32, torch\.float16, torch\.float32": (x, x.half(), x),
        r"bias of shape \(8,\); it takes \(9,\) to \(2, 3, 9\)": (x, x, x, bias),
    }
    for message, args in invalid.items():
        with pytest.raises(VLMFastError, match=f"biased_attention: .*{message}"):
            biased_attention(*args)
    with pytest.raises(VLMFastError, match=r"lengths of shape \(3,\); it takes \(2,\)"):
        biased_attention(x, x, x, lengths=torch.ones(3, dtype=torch.int64, device=device))


@pytest.mark.parametrize("dim", [4, 20, 264])
def test_unsupported_head_dimension_raises(dim: int, device: torch.device) -> None:
    x = torch.zeros(1, 1, 2, dim, device=device)
    with pytest.raises(VLMFastError, match=f"biased_attention: head dimension {dim}; it takes mu"):
        biased_attention(x, x, x)
