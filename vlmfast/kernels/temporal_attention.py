"""``temporal_attention``: each patch attends to itself in this frame and in earlier frames.

    out_t = sum over u <= t of softmax_u(q_t . k_u / sqrt(d)) v_u    for each position and head

Shapes: query, key, value and the result (S, T, N, H, d): sequences of T frames with N positions.
T is small (4 in training, at most the frames of a video), S N H is tens of thousands. Fused
attention would pad each of these small problems to a tile and requires a contiguous copy. Here one
program takes 32 rows, as many positions of one head as fit, and loops backwards over the frames;
keys and values that it reads again are still in its cache. More than 16 frames are passed to
`biased_attention`, which is faster at that size.

Grid: one program per 32 // T positions (of T rounded up to a power of two), head and sequence.
Bytes: everything once: 4 frames of 576 positions in 16 heads of 64 are 38 MB in float32, 8.8 us at
4.3 TB/s. Floor: the bytes; 2 S T T N H d operations are 0.2 us of what float32 can do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlmfast.errors import VLMFastError

from ._triton import Variant, check_heads, padded, pointer, tl, triton, use_triton
from .biased_attention import biased_attention

_ROWS = 32  # of one program
_FRAMES = 16  # with more, products of tiles are faster


def temporal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over frames, separately at every position.

    Parameters
    ----------
    query, key, value : Tensor, (S, T, N, H, d)
        Of one dtype; may be views of one tensor.

    Returns
    -------
    Tensor, (S, T, N, H, d)
        Contiguous. The reference is used if a gradient is required.
    """
    if query.dim() != 5 or key.shape != query.shape or value.shape != query.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise VLMFastError(f"temporal_attention: shapes {shapes}; it takes (S, T, N, H, d) thrice")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise VLMFastError(
            f"temporal_attention: tensors in {query.dtype}, {key.dtype}, {value.dtype}; it takes "
            "one dtype"
        )
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if use_triton("temporal_attention", query, key, value) and not needs_grad:
        return _launch(query, key, value)
    return temporal_attention_ref(query, key, value)


def temporal_attention_ref(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`temporal_attention` in plain PyTorch."""
    q, k, v = (x.permute(0, 2, 3, 1, 4) for x in (query, key, value))  # (S, N, H, T, d)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.permute(0, 3, 1, 2, 4).contiguous()


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("T", "N"))
def _attend(
    query,
    key,
    value,
    out,  # (S, T, N, H, d)
    stride_qs,
    stride_qt,
    stride_qn,
    stride_qh,
    stride_ks,
    stride_kt,
    stride_kn,
    stride_kh,
    stride_vs,
    stride_vt,
    stride_vn,
    stride_vh,
    scaling,  # times log2(e)
    T,
    N,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,  # at least T
    BLOCK_M: tl.constexpr,  # rows: BLOCK_M // BLOCK_T positions
):
    s, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    row = tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) * (BLOCK_M // BLOCK_T) + row // BLOCK_T).to(tl.int64)
    t = (row % BLOCK_T).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    m_row = (n < N) & (t < T)
    p_q = query + (s * stride_qs + head * stride_qh)
    p_k = key + (s * stride_ks + head * stride_kh)
    p_v = value + (s * stride_vs + head * stride_vh)
    m_x = m_row[:, None] & (d < D)[None, :]
    offsets = (t * stride_qt + n * stride_qn)[:, None] + d[None, :]
    b_q = tl.load(p_q + offsets, mask=m_x, other=0.0).to(tl.float32) * scaling  # [BM, BD]
    row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for back in range(T):
        m_s = m_row & (t >= back)
        m_x = m_s[:, None] & (d < D)[None, :]
        offsets = ((t - back) * stride_kt + n * stride_kn)[:, None] + d[None, :]
        b_k = tl.load(p_k + offsets, mask=m_x, other=0.0).to(tl.float32)  # [BM, BD]
        offsets = ((t - back) * stride_vt + n * stride_vn)[:, None] + d[None, :]
        b_v = tl.load(p_v + offsets, mask=m_x, other=0.0).to(tl.float32)
        b_s = tl.where(m_s, tl.sum(b_q * b_k, 1), -1e30)
        new_max = tl.maximum(row_max, b_s)
        b_p = tl.where(m_s, tl.exp2(b_s - new_max), 0.0)
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + b_p
        acc = acc * alpha[:, None] + b_p[:, None] * b_v
        row_max = new_max
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    offsets = (((s * T + t) * N + n) * H + head)[:, None] * D + d[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=m_row[:, None] & (d < D)[None, :])


def _launch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    s, t, n, h, d = query.shape
    check_heads("temporal_attention", d)
    if t > _FRAMES:
        q, k, v = (x.permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (query, key, value))
        mixed = biased_attention(q, k, v).unflatten(0, (s, n))
        return mixed.permute(0, 3, 1, 2, 4).contiguous()
    query, key, value = (x if x.stride(4) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty(s, t, n, h, d, dtype=query.dtype, device=query.device)
    if out.numel():
        frames = padded(t, 1)
        _attend[(triton.cdiv(n, _ROWS // frames), s * h)](
            query,
            key,
            value,
            out,
            *query.stride()[:4],
            *key.stride()[:4],
            *value.stride()[:4],
            d**-0.5 * 1.4426950408889634,
            t,
            n,
            H=h,
            D=d,
            BLOCK_D=padded(d),
            BLOCK_T=frames,
            BLOCK_M=_ROWS,
            num_warps=_warps(d),
        )
    return out


def _warps(d: int) -> int:
    return 4 if d <= 128 else 8


def _variant(dtype: torch.dtype, d: int, frames: int = 4) -> Variant:
    strides = [f"stride_{x}{axis}" for x in "qkv" for axis in "stnh"]
    return Variant(
        _attend,
        dict.fromkeys(("query", "key", "value", "out"), pointer(dtype))
        | dict.fromkeys(strides, "i32:16")
        | {"scaling": "fp32", "T": "i32", "N": "i32"},
        {"H": 16, "D": d, "BLOCK_D": padded(d), "BLOCK_T": frames, "BLOCK_M": _ROWS},
        _warps(d),
    )


VARIANTS = [
    _variant(torch.float16, 64),
    *(_variant(torch.bfloat16, d) for d in (64, 80, 96, 128)),
    *(_variant(torch.float32, d) for d in (64, 72, 80, 96, 128, 256)),
    _variant(torch.float32, 64, _FRAMES),
]
