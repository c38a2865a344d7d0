"""Products of a few rows with large matrices: the linear layers of a decode step.

Shapes: x (..., K) of at most `MOST` rows, weights (N, K) as a linear layer stores them, results
(..., N). One launch multiplies several weights with the same rows: queries, keys and values, or the
gate and the up projection of an MLP with its activation.

Bytes: every weight once, 2 N K in half precision. Floor: the bytes; 13 GB of the layers of a 7B
model are 3.1 ms at 4.3 TB/s. One row is multiplied on CUDA cores, from registers: a program reads a
few rows of a weight in long pieces, and many programs together keep enough loads in flight. More
rows are padded to the 16 of a matrix instruction, and the loads of the weights are pipelined. The
products are summed in float32, and rounded where the modules round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
from torch import Tensor
from torch.nn.functional import linear

from vlmfast.errors import VLMFastError

from ._blocks import Blocks, architecture, blocks
from ._triton import INTERPRETED, Variant, contiguous_last, pointer, tl, triton, use_triton
from .swiglu import activated, geglu_tanh_ref, swiglu_ref

MOST = 16  # rows
WEIGHTS = 3


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """``x @ weight.T + bias`` for one to `WEIGHTS` weights.

    Parameters
    ----------
    x : Tensor, (..., K)
        At most `MOST` rows for the kernel; PyTorch multiplies more.
    weights : sequence of Tensor, (N, K)
        In the dtype of ``x``, with contiguous rows.
    biases : sequence of Tensor or None, (N,)

    Returns
    -------
    tuple of Tensor, (..., N)
        Views of one buffer.

    Raises
    ------
    VLMFastError
        For other shapes and for several dtypes.
    """
    _check("linears", x, weights, biases)
    if _fits(x, weights) and use_triton("few_rows", x, *weights, *biases):
        return _launch_linears(x, weights, biases)
    return linears_ref(x, weights, biases)


def linears_ref(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """`linears` in plain PyTorch."""
    return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def gated_linear(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    gelu_tanh: bool = False,
) -> Tensor:
    """`swiglu` of two products, or `geglu_tanh`; as `linears` otherwise.

    Parameters
    ----------
    x : Tensor, (..., K)
    weights : Tensor, (I, K), twice
        Of the gate, and of what it multiplies.
    biases : Tensor or None, (I,), twice
    gelu_tanh : bool
        GELU instead of SiLU.

    Returns
    -------
    Tensor, (..., I)
    """
    _check("gated_linear", x, weights, biases)
    if weights[0].shape != weights[1].shape:
        raise VLMFastError(
            f"gated_linear: weights {tuple(weights[0].shape)} and {tuple(weights[1].shape)}; "
            "it takes one shape"
        )
    if _fits(x, weights) and use_triton("few_rows", x, *weights, *biases):
        return _launch_gated(x, weights, biases, gelu_tanh)
    return gated_linear_ref(x, weights, biases, gelu_tanh=gelu_tanh)


def gated_linear_ref(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    gelu_tanh: bool = False,
) -> Tensor:
    """`gated_linear` in plain PyTorch."""
    gate, up = linears_ref(x, weights, biases)
    return (geglu_tanh_ref if gelu_tanh else swiglu_ref)(gate, up)


def _fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel is made for these sizes; loads are of 16 bytes."""
    aligned = x.shape[-1] * x.element_size() % 16 == 0
    return 0 < x[..., 0].numel() <= MOST and aligned and all(w.stride(1) == 1 for w in weights)


def _check(
    name: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> None:
    if not 1 <= len(weights) == len(biases) <= WEIGHTS:
        raise VLMFastError(
            f"{name}: {len(weights)} weights and {len(biases)} biases; it takes 1 to {WEIGHTS}"
        )
    fits = all(w.dim() == 2 and w.shape[1] == x.shape[-1] for w in weights)
    pairs = zip(weights, biases, strict=True)
    if not fits or any(b is not None and b.shape != w.shape[:1] for w, b in pairs):
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        biased = ", ".join("none" if b is None else str(tuple(b.shape)) for b in biases)
        raise VLMFastError(
            f"{name}: x {tuple(x.shape)}, weights {shapes}, biases {biased}; it takes (..., K), "
            "(N, K) and (N,)"
        )
    if any(of is not None and of.dtype != x.dtype for of in (*weights, *biases)):
        raise VLMFastError(f"{name}: tensors in several dtypes; it takes one")


# --- Triton --------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _product(
    x,
    p_weight,
    stride_x,
    M,
    K,
    m_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows of ``x`` times some rows of a weight: (BLOCK_N,) of one row, else (BLOCK_M, BLOCK_N)."""
    k = tl.arange(0, BLOCK_K)
    if BLOCK_M == 1:
        b_acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            m_k = k0 + k < K
            b_w = tl.load(
                p_weight[:, None] + k0 + k[None, :],
                mask=m_n[:, None] & m_k[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            b_x = tl.load(x + k0 + k, mask=m_k, other=0.0)
            b_acc += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
        b_out = tl.sum(b_acc, 1)
    else:
        m = tl.arange(0, BLOCK_M).to(tl.int64)
        b_out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            m_k = k0 + k < K
            b_w = tl.load(
                p_weight[:, None] + k0 + k[None, :],
                mask=m_n[:, None] & m_k[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            b_x = tl.load(
                x + m[:, None] * stride_x + k0 + k[None, :],
                mask=(m[:, None] < M) & m_k[None, :],
                other=0.0,
            )
            if UPCAST:
                b_w, b_x = b_w.to(tl.float32), b_x.to(tl.float32)
            b_out = tl.dot(b_x, tl.trans(b_w), b_out, input_precision="ieee")
    return b_out


@triton.jit
@no_type_check
def _biased(b_out, bias, n, m_n, BLOCK_M: tl.constexpr):
    if bias is not None:
        b_bias = tl.load(bias + n, mask=m_n, other=0.0).to(tl.float32)
        b_out += b_bias if BLOCK_M == 1 else b_bias[None, :]
    return b_out


@triton.jit
@no_type_check
def _stored(out, b_out, n, m_n, M, width, BLOCK_M: tl.constexpr):
    if BLOCK_M == 1:
        tl.store(out + n, b_out.to(out.dtype.element_ty), mask=m_n)
    else:
        m = tl.arange(0, BLOCK_M).to(tl.int64)
        p_out = out + m[:, None] * width + n[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(m[:, None] < M) & m_n[None, :])


@triton.jit(do_not_specialize=("M",))
@no_type_check
def _linears(
    x,  # (M, K)
    weight_0,  # (N_0, K) ...
    weight_1,  # or None
    weight_2,
    bias_0,  # (N_0,) ..., or None
    bias_1,
    bias_2,
    out,  # out: (M, width), the results side by side
    stride_x,
    stride_0,
    stride_1,
    stride_2,
    M,
    K,
    N_0,
    N_1,
    N_2,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_0, tiles_1 = tl.cdiv(N_0, BLOCK_N), tl.cdiv(N_1, BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    if tile < tiles_0:
        n += tile * BLOCK_N
        m_n = n < N_0
        p_weight = weight_0 + n.to(tl.int64) * stride_0
        b_out = _product(x, p_weight, stride_x, M, K, m_n, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
        _stored(out, _biased(b_out, bias_0, n, m_n, BLOCK_M), n, m_n, M, width, BLOCK_M)
    elif tile < tiles_0 + tiles_1:
        if weight_1 is not None:
            n += (tile - tiles_0) * BLOCK_N
            m_n = n < N_1
            p_weight = weight_1 + n.to(tl.int64) * stride_1
            b_out = _product(x, p_weight, stride_x, M, K, m_n, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
            b_out = _biased(b_out, bias_1, n, m_n, BLOCK_M)
            _stored(out + N_0, b_out, n, m_n, M, width, BLOCK_M)
    else:
        if weight_2 is not None:
            n += (tile - tiles_0 - tiles_1) * BLOCK_N
            m_n = n < N_2
            p_weight = weight_2 + n.to(tl.int64) * stride_2
            b_out = _product(x, p_weight, stride_x, M, K, m_n, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
            b_out = _biased(b_out, bias_2, n, m_n, BLOCK_M)
            _stored(out + N_0 + N_1, b_out, n, m_n, M, width, BLOCK_M)


@triton.jit(do_not_specialize=("M",))
@no_type_check
def _gated(
    x,  # (M, K)
    gate,  # (N, K)
    up,
    gate_bias,  # (N,), or None
    up_bias,
    out,  # out: (M, N)
    stride_x,
    stride_g,
    stride_u,
    M,
    K,
    N,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = n < N
    row = n.to(tl.int64)
    b_g = _product(x, gate + row * stride_g, stride_x, M, K, m_n, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
    b_u = _product(x, up + row * stride_u, stride_x, M, K, m_n, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST)
    # Rounded where `swiglu` gets and rounds them.
    b_g = _biased(b_g, gate_bias, n, m_n, BLOCK_M).to(dtype).to(tl.float32)
    b_u = _biased(b_u, up_bias, n, m_n, BLOCK_M).to(dtype).to(tl.float32)
    _stored(out, activated(b_g, b_u, dtype, GELU), n, m_n, M, N, BLOCK_M)


def _configured(rows: int, columns: int, dtype: torch.dtype, arch: int) -> Blocks:
    """The blocks for ``rows`` and a product of ``columns``."""
    if rows == 1:
        return blocks("few_rows", "one row", arch)
    if dtype == torch.float32:
        return blocks("few_rows", "float32", arch)
    # Few columns need small tiles to occupy the GPU.
    return blocks("few_rows", "narrow" if columns <= 8192 else "wide", arch)


def _launch_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    rows = contiguous_last(x.reshape(-1, x.shape[-1]))
    sizes = [len(weight) for weight in weights]
    out = torch.empty(*x.shape[:-1], sum(sizes), dtype=x.dtype, device=x.device)
    table = _configured(len(rows), sum(sizes), x.dtype, architecture(x.device))
    missing = WEIGHTS - len(weights)
    own = [None if bias is None else bias.contiguous() for bias in biases]
    if sum(sizes):
        _linears[(sum(triton.cdiv(size, table.sizes["BLOCK_N"]) for size in sizes),)](
            rows,
            *weights,
            *[None] * missing,
            *own,
            *[None] * missing,
            out,
            rows.stride(0),
            *(weight.stride(0) for weight in weights),
            *[0] * missing,
            len(rows),
            rows.shape[1],
            *sizes,
            *[0] * missing,
            sum(sizes),
            UPCAST=INTERPRETED,
            **table.options(),
        )
    return out.split(sizes, -1)


def _launch_gated(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    gelu_tanh: bool,
) -> Tensor:
    gate, up = weights
    rows = contiguous_last(x.reshape(-1, x.shape[-1]))
    out = torch.empty(*x.shape[:-1], len(gate), dtype=x.dtype, device=x.device)
    table = _configured(len(rows), 2 * len(gate), x.dtype, architecture(x.device))
    if len(gate):
        _gated[(triton.cdiv(len(gate), table.sizes["BLOCK_N"]),)](
            rows,
            gate,
            up,
            *(None if bias is None else bias.contiguous() for bias in biases),
            out,
            rows.stride(0),
            gate.stride(0),
            up.stride(0),
            len(rows),
            rows.shape[1],
            len(gate),
            GELU=gelu_tanh,
            UPCAST=INTERPRETED,
            **table.options(),
        )
    return out


_TENSORS = (
    *("x", "weight_0", "weight_1", "weight_2", "bias_0", "bias_1", "bias_2"),
    *("gate", "up", "gate_bias", "up_bias", "out"),
)


def variants(arch: int) -> list[Variant]:
    """What `linears` and `gated_linear` compile."""
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        types = dict.fromkeys(_TENSORS, pointer(dtype)) | {"M": "i32"}
        types |= dict.fromkeys(("K", "N", "N_0", "N_1", "N_2", "width"), "i32:16")
        types |= {f"stride_{name}": "i32:16" for name in "x012gu"}
        plain, gated = (
            dict.fromkeys(("bias_0", "bias_1", "bias_2")),
            dict.fromkeys(("gate_bias", "up_bias")),
        )
        alone = dict.fromkeys(("weight_1", "weight_2")) | plain
        alone |= dict.fromkeys(("stride_1", "stride_2", "N_1", "N_2"), 0)
        for rows, columns in ((1, 4096), (MOST, 4096), (MOST, 22016)):
            table = _configured(rows, columns, dtype, arch)
            for constants in (plain, {}, alone) if dtype == torch.bfloat16 else (plain,):
                given = {"UPCAST": False, **constants}
                found.append(table.variant(_linears, types, given))
            given = {"UPCAST": False, "GELU": False, **gated}
            found.append(table.variant(_gated, types, given))
    return found
