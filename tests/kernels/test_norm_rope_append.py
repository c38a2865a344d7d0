"""`norm_rope_append`: the kernels against the references and Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from support.closeness import apart, close
from support.engine.kernels import INTERPRETED
from vlmfast.kernels.norm_rope_append import (
    HeadNorm,
    residual_norm,
    residual_norm_ref,
    rotate_append,
    rotate_append_ref,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("triton")


def noise(*shape: int, device: torch.device, dtype=torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


# --- norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 100), (5, 1024), (3, 2, 24)])
def test_norm_matches_llama(
    shape: tuple[int, ...], added: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (noise(*shape, device=device, dtype=dtype, seed=i) for i in (0, 1))
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(device, dtype)
    with torch.no_grad():
        norm.weight.copy_(noise(shape[-1], device=device, seed=2))
    residual = residual if added else None
    got, total = residual_norm(x, norm.weight.detach(), 1e-5, residual)
    whole = x + residual if added else x
    expected = norm(whole).detach()
    assert got.dtype == dtype and got.shape == x.shape
    # The mean of squares is a sum in float32; in half precision three results are rounded.
    terms = shape[-1] if dtype == torch.float32 else 3
    # Relative to each entry: nothing cancels after the sum.
    close(got, expected, dtype, terms, scale=expected.abs())
    close(total, whole, dtype, scale=whole.abs())
    reference = residual_norm_ref(x, norm.weight.detach(), 1e-5, residual)
    assert torch.equal(reference[0], expected) and torch.equal(reference[1], whole)
    if (
        dtype != torch.bfloat16
    ):  # control: the sum is normalized, not the row; bfloat16 is too coarse
        apart(got, norm(x if added else x + 1).detach(), dtype, terms, scale=expected.abs())


def norm_of(kind: type, size: int, device: torch.device, dtype: torch.dtype, seed: int):
    norm = kind(size, eps=1e-5).to(device, dtype).requires_grad_(False)
    norm.weight.copy_(noise(size, device=device, seed=seed))
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("shape", [(5, 100), (3, 2, 1024)])
def test_branch_norm_matches_modules(
    shape: tuple[int, ...], kind: type, dtype: torch.dtype, device: torch.device
) -> None:
    """The norm of a branch, the sum, and the norm that follows, in one launch."""
    x, residual = (noise(*shape, device=device, dtype=dtype, seed=i) for i in (0, 1))
    branch, norm = (norm_of(kind, shape[-1], device, dtype, seed) for seed in (2, 3))
    unit_offset = kind is Gemma3RMSNorm
    got, total = residual_norm(x, norm.weight, 1e-5, residual, branch.weight, unit_offset)
    whole = residual + branch(x)
    terms = 2 * shape[-1] if dtype == torch.float32 else 8
    scale = (residual.abs() + branch(x).abs()).amax(-1, keepdim=True)
    close(total, whole, terms=terms, scale=scale)
    close(got, norm(whole), terms=terms, scale=scale * norm(whole).abs().max())
    reference = residual_norm_ref(x, norm.weight, 1e-5, residual, branch.weight, unit_offset)
    assert torch.equal(reference[0], norm(whole)) and torch.equal(reference[1], whole)
    if dtype == torch.float32:  # control, for which the steps of half precision are too coarse
        wrong, _ = residual_norm(x, norm.weight, 1e-5, residual, branch.weight, not unit_offset)
        apart(wrong, norm(whole), terms=terms, scale=scale * norm(whole).abs().max())


def test_unit_offset_rounds_after_weighting(device: torch.device) -> None:
    """As in Gemma's module: the weights are applied in float32."""
    x, norm = (
        noise(64, 48, device=device, dtype=torch.float16),
        norm_of(Gemma3RMSNorm, 48, device, torch.float16, 1),
    )
    got, _ = residual_norm(x, norm.weight, 1e-5, unit_offset=True)
    other, _ = residual_norm_ref(x, (1.0 + norm.weight.float()).half(), 1e-5)
    # The sum of squares may differ in its last bit, and with it some entries.
    assert (got == norm(x)).float().mean() > 0.98 and (got == other).float().mean() < 0.8


def test_norm_rounds_before_weighting(device: torch.device) -> None:
    """In half precision the order matters."""
    x, weight = (noise(64, 48, device=device, dtype=torch.float16), noise(48, device=device))
    got, _ = residual_norm(x, weight.half(), 1e-6)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    # The sum of squares may differ in its last bit, and with it some entries.
    same = (got == weight.half() * wide.half()).float().mean()
    other = (got == (weight.half().float() * wide).half()).float().mean()
    assert same > 0.98 and other < 0.8


def test_norm_of_zeros_and_non_contiguous_rows(device: torch.device) -> None:
    x = noise(6, 40, device=device)
    x[2] = 0
    weight = torch.ones(20, device=device)
    for rows in (x[:, :20], x[:, ::2], x.T[:20].T):
        got, total = residual_norm(rows, weight, 1e-6, rows)
        close(got, residual_norm_ref(rows, weight, 1e-6, rows)[0], terms=20)
        assert torch.equal(total, rows + rows)
        assert got[2].tolist() == [0.0] * 20


# --- rotation and append -------------------------------------------------------------------------


def tables(b: int, t: int, d: int, device: torch.device, dtype: torch.dtype):
    position = torch.arange(b * t, device=device).view(b, t, 1) * 37 + 5
    power = 10000 ** -(torch.arange(0, d, 2, device=device) / d)
    angle = torch.cat([position * power] * 2, -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def step(
    b: int, hq: int, hk: int, t: int, d: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Heads as views of one projection, and ragged buffers."""
    joint = noise(b, t, hq + 2 * hk, d, device=device, dtype=dtype).transpose(1, 2)
    query, key, value = joint.split((hq, hk, hk), 1)
    cos, sin = tables(b, t, d, device, dtype)
    length = torch.arange(b * hk, device=device).view(b, hk) * 3 % 7
    keys, values = (noise(b, hk, 12, d, device=device, dtype=dtype, seed=i) for i in (1, 2))
    return {
        "query": query,
        "key": key,
        "value": value,
        "cos": cos,
        "sin": sin,
        "keys": keys,
        "values": values,
        "length": length,
    }


def both(inputs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    results = []
    for run in (rotate_append, rotate_append_ref):
        own = inputs | {name: inputs[name].clone() for name in ("keys", "values")}
        results.append([run(**own), own["keys"], own["values"]])
    return tuple(results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 8), (2, 4, 2, 1, 72), (3, 2, 2, 1, 80), (1, 4, 1, 5, 96), (2, 2, 1, 1, 128)],
)
def test_rotate_append_matches_reference(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    inputs = step(*sizes, device=device, dtype=dtype)
    got, expected = both(inputs)
    b, _, hk, t, _ = sizes
    rotated = apply_rotary_pos_emb(inputs["query"], inputs["key"], inputs["cos"], inputs["sin"])
    assert torch.equal(expected[0], rotated[0])
    for row in range(b):
        for head in range(hk):
            n = int(inputs["length"][row, head])
            for ours, before, new in zip(
                got[1:], ("keys", "values"), (rotated[1], inputs["value"]), strict=True
            ):
                initial, ours = inputs[before][row, head], ours[row, head]
                assert torch.equal(ours[:n], initial[:n])
                assert torch.equal(ours[n + t :], initial[n + t :])
                close(ours[n : n + t], new[row, head], terms=2)
    assert torch.equal(got[2], expected[2])  # values are copied as they are
    close(got[0], expected[0], terms=2)
    if dtype == torch.float16 or not INTERPRETED:  # rounded where the reference rounds
        assert dtype == torch.float32 or all(map(torch.equal, got, expected))
    if dtype != torch.bfloat16:  # control, for which the steps of bfloat16 are too coarse
        apart(got[0], rotate_append_ref(**inputs | {"sin": -inputs["sin"]}), terms=2)


def test_float32_tables_avoid_rounding(device: torch.device) -> None:
    """No intermediate rounding, and one table for all rows."""
    inputs = step(2, 2, 1, 3, 64, device, torch.float16)
    cos, sin = tables(1, 3, 64, device, torch.float32)
    got, expected = both(inputs | {"cos": cos, "sin": sin})
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs, torch.float16)
    rounded, _ = both(inputs | {"cos": cos.half(), "sin": sin.half()})
    assert not torch.equal(got[0], rounded[0])


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 1, 72), (1, 4, 1, 5, 96)])
def test_head_norm_matches_modules(
    sizes: tuple[int, ...], kind: type, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = step(*sizes, device=device, dtype=dtype)
    query, key = (norm_of(kind, sizes[-1], device, dtype, seed) for seed in (3, 4))
    norm = HeadNorm(query.weight, key.weight, 1e-5, kind is Gemma3RMSNorm)
    got, expected = both(inputs | {"norm": norm})
    normed = inputs | {"query": query(inputs["query"]), "key": key(inputs["key"])}
    modules = both(normed)[1]
    assert all(map(torch.equal, expected, modules))
    assert torch.equal(got[2], expected[2])
    terms = sizes[-1] if dtype == torch.float32 else 8
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs, terms=terms)
    if dtype == torch.float32:  # controls
        apart(got[0], both(inputs)[1][0], terms=terms)
        swapped = HeadNorm(norm.key, norm.query, norm.eps, norm.unit_offset)
        apart(got[1], both(inputs | {"norm": swapped})[1][1], terms=terms)


def test_tokens_beyond_capacity_are_ignored(device: torch.device) -> None:
    inputs = step(1, 1, 2, 4, 8, device, torch.float32)
    buffer = noise(1, 2, 20, 8, device=device)
    inputs |= {"keys": buffer[:, :, 4:12], "values": buffer[:, :, 12:]}
    inputs["length"] = torch.tensor([[6, 0]], device=device)
    before = buffer.clone()
    rotate_append(**inputs)
    changed = (buffer != before).any(-1)[0]
    assert changed[0].nonzero().flatten().tolist() == [10, 11, 18, 19]
    assert changed[1].nonzero().flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


def test_int32_strided_lengths(device: torch.device) -> None:
    inputs = step(2, 2, 2, 1, 16, device, torch.float32)
    _, expected = both(inputs)
    wide = torch.stack([inputs["length"].int()] * 2, -1)[..., 0]
    got, _ = both(inputs | {"length": wide, "query": inputs["query"].clone()})
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs, terms=2)
