"""``temporal_attention``: each patch attends to itself in this frame and in those before it.

    out_t = sum over u <= t of softmax_u(q_t . k_u / sqrt(d)) v_u      at each place, for each head

Shapes: query, key, value and the result (S, T, N, H, d): sequences of T frames with N places. T is
a handful (4 in training, the frames of a clip at most), S N H is tens of thousands. Fused attention
pads each of these little problems to a tile and wants them copied next to each other. Here one
program takes 32 rows, so many places of one head as fit, and goes back in time frame by frame; what
it meets again of keys and values is still in its cache. More than 16 frames are problems of a size
that suits `biased_attention`, and go there.

Grid: one program per 32 // T places (of T rounded up to a power of two), head and sequence.
Bytes: everything once: 4 frames of 576 places in 16 heads of 64 are 38 MB in float32, 8.8 us at
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
_FRAMES = 16  # from here on products of tiles pay


def temporal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over frames, separately at every place.

    Parameters
    ----------
    query, key, value : Tensor, (S, T, N, H, d)
        Of one dtype; views of one tensor as well.

    Returns
    -------
    Tensor, (S, T, N, H, d)
        Contiguous. The reference serves where a gradient is wanted.
    """
    if query.dim() != 5 or key.shape != query.shape or value.shape != query.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise VLMFastError(f"temporal_attention: shapes {shapes}; it takes (S, T, N, H, d) thrice")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise VLMFastError(
            f"temporal_attention: tensors in {query.dtype}, {key.dtype}, {value.dtype}; it takes "
            "one dtype"
        )
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if use_triton("temporal_attention", query, key, value) and not wanted:
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
    BD: tl.constexpr,
    BT: tl.constexpr,  # at least T
    BM: tl.constexpr,  # rows: BM // BT places
):
    s, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    row = tl.arange(0, BM)
    n = (tl.program_id(0) * (BM // BT) + row // BT).to(tl.int64)
    t = (row % BT).to(tl.int64)
    d = tl.arange(0, BD)
    real = (n < N) & (t < T)
    query += s * stride_qs + head * stride_qh
    key += s * stride_ks + head * stride_kh
    value += s * stride_vs + head * stride_vh
    inside = real[:, None] & (d < D)[None, :]
    at = (t * stride_qt + n * stride_qn)[:, None] + d[None, :]
    q = tl.load(query + at, mask=inside, other=0.0).to(tl.float32) * scaling
    m = tl.full((BM,), -1e30, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for back in range(T):
        seen = real & (t >= back)
        inside = seen[:, None] & (d < D)[None, :]
        at = ((t - back) * stride_kt + n * stride_kn)[:, None] + d[None, :]
        k = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
        at = ((t - back) * stride_vt + n * stride_vn)[:, None] + d[None, :]
        v = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(seen, tl.sum(q * k, 1), -1e30)
        top = tl.maximum(m, x)
        p = tl.where(seen, tl.exp2(x - top), 0.0)
        keep = tl.exp2(m - top)
        l = l * keep + p
        acc = acc * keep[:, None] + p[:, None] * v
        m = top
    acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    at = (((s * T + t) * N + n) * H + head)[:, None] * D + d[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


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
            BD=padded(d),
            BT=frames,
            BM=_ROWS,
            num_warps=_warps(d),
        )
    return out


def _warps(d: int) -> int:
    return 4 if d <= 128 else 8


def _variant(dtype: torch.dtype, d: int, frames: int = 4) -> Variant:
    strides = [f"stride_{of}{axis}" for of in "qkv" for axis in "stnh"]
    return Variant(
        _attend,
        dict.fromkeys(("query", "key", "value", "out"), pointer(dtype))
        | dict.fromkeys(strides, "i32:16")
        | {"scaling": "fp32", "T": "i32", "N": "i32"},
        {"H": 16, "D": d, "BD": padded(d), "BT": frames, "BM": _ROWS},
        _warps(d),
    )


VARIANTS = [
    _variant(torch.float16, 64),
    *(_variant(torch.bfloat16, d) for d in (64, 80, 96, 128)),
    *(_variant(torch.float32, d) for d in (64, 72, 80, 96, 128, 256)),
    _variant(torch.float32, 64, _FRAMES),
]
