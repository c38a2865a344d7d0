"""``norm_rope_append``: the operations of a decode step between its matrix products.

`residual_norm`, before each product that reads the residual stream::

    h = x + residual                          y = w * (h / sqrt(mean(h^2) + eps))

`rotate_append`, after the projection to queries, keys and values; ``x`` and ``y`` are the two
halves of a head's row, and the tables have halves too::

    x' = x cos_x - y sin_x                    y' = y cos_y + x sin_y

for queries and keys. Keys and values are appended to each head of the cache, at lengths that are
read on the device, so that a captured graph replays unchanged.

Every intermediate result is rounded as in Hugging Face's Llama, in the dtype of the model or of the
tables: the rotated rows are bit-identical, the norm differs by the order of one sum. Cosines and
sines come from tables: in a kernel they would need a stack, and angles computed from powers there
are off by 1e-7 of the position.

Grid: one program per row of the stream; one per token and head of queries, keys and values.
Bytes: the stream three or four times (x, residual; h, y), each head once in and once out: 32 kB and
48 kB per token at width 4,096. Floor: negligible; the kernels save ten launches per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, check_heads, padded, pointer, tl, triton, use_triton

WIDEST = 16384  # entries of a row that fit into one program


def residual_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``x + residual``, and the sum itself.

    Parameters
    ----------
    x : Tensor, (..., C)
    weight : Tensor, (C,)
    eps : float
    residual : Tensor, (..., C), optional
        None by default.

    Returns
    -------
    normed, total : Tensor, (..., C)
        ``total`` is ``x`` itself without a residual.
    """
    others = (weight,) if residual is None else (weight, residual)
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, *others))
        raise VLMFastError(f"residual_norm: shapes {shapes}; it takes (..., C), (C,) and (..., C)")
    if any(t.dtype != x.dtype for t in others):
        dtypes = ", ".join(str(t.dtype) for t in (x, *others))
        raise VLMFastError(f"residual_norm: tensors in {dtypes}; it takes one dtype")
    if use_triton("residual_norm", x, weight, residual):
        return _launch_norm(x, weight, eps, residual)
    return residual_norm_ref(x, weight, eps, residual)


def residual_norm_ref(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`residual_norm` in plain PyTorch."""
    total = x if residual is None else x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), total


def rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
) -> Tensor:
    """Rotate queries and keys; append keys and values to the cache.

    Parameters
    ----------
    query : Tensor, (B, Hq, T, D)
    key, value : Tensor, (B, Hk, T, D)
    cos, sin : Tensor, (B or 1, T, D)
        Tables of the positions of these tokens, in the model's dtype or in float32; those of M-RoPE
        with their sections already chosen.
    keys, values : Tensor, (B, Hk, capacity, D)
        Buffers of the cache; changed in place. The caller ensures that they are large enough:
        tokens beyond ``capacity`` are ignored on a GPU, and an error in the reference.
    length : Tensor, int64 or int32, (B, Hk)
        Number of used slots; not advanced.

    Returns
    -------
    Tensor, (B, Hq, T, D)
        The rotated queries.
    """
    _check(query, key, value, cos, sin, keys, values, length)
    run = rotate_append_ref
    if use_triton("rotate_append", query, key, value, cos, sin, keys, values, length):
        run = _launch_rotate
    return run(query, key, value, cos, sin, keys, values, length)


def rotate_append_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
) -> Tensor:
    """`rotate_append` in plain PyTorch."""
    tokens = query.shape[2]
    slots = length.long()[..., None] + torch.arange(tokens, device=length.device)
    slots = slots[..., None].expand(-1, -1, -1, keys.shape[3])
    keys.scatter_(2, slots, _rotated(key, cos, sin))
    values.scatter_(2, slots, value)
    return _rotated(query, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x * cos[:, None] + rotated * sin[:, None]).to(x.dtype)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
) -> None:
    b, _, t, d = query.shape
    hk = key.shape[1]
    matches = (
        key.shape == value.shape == (b, hk, t, d)
        and cos.shape == sin.shape
        and cos.shape in ((b, t, d), (1, t, d))
        and keys.shape == values.shape == (b, hk, keys.shape[2], d)
        and length.shape == (b, hk)
    )
    if not matches:
        named = {"query": query, "key": key, "value": value, "cos": cos, "sin": sin}
        named |= {"keys": keys, "values": values, "length": length}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise VLMFastError(
            f"rotate_append: {shapes}; it takes (B, Hq, T, D), (B, Hk, T, D) twice, (B, T, D) "
            "twice, (B, Hk, capacity, D) twice and (B, Hk)"
        )
    if d % 2:
        raise VLMFastError(f"rotate_append: head dimension {d}; it takes even ones")
    if any(x.dtype != query.dtype for x in (key, value, keys, values)):
        dtypes = ", ".join(str(x.dtype) for x in (query, key, value, keys, values))
        raise VLMFastError(f"rotate_append: tensors in {dtypes}; it takes one dtype")
    if cos.dtype != sin.dtype or cos.dtype not in (query.dtype, torch.float32):
        raise VLMFastError(
            f"rotate_append: tables in {cos.dtype} and {sin.dtype}; it takes {query.dtype} or "
            "float32 for both"
        )


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("C",))
def _norm(
    x,
    residual,  # or None
    weight,
    normed,  # out
    total,  # out, or None without a residual
    stride_x,
    stride_r,
    eps,
    C,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    dtype: tl.constexpr = normed.dtype.element_ty
    b_h = tl.load(x + row * stride_x + c, mask=c < C, other=0.0).to(tl.float32)
    if residual is not None:
        b_h += tl.load(residual + row * stride_r + c, mask=c < C, other=0.0).to(tl.float32)
        b_h = b_h.to(dtype)
        tl.store(total + row * C + c, b_h, mask=c < C)
        b_h = b_h.to(tl.float32)
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / C + eps)
    b_w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    b_y = b_w * b_y.to(dtype).to(tl.float32)
    tl.store(normed + row * C + c, b_y.to(dtype), mask=c < C)


@triton.jit(do_not_specialize=("T", "capacity"))
def _rotate(
    query,
    key,
    value,
    cos,
    sin,
    keys,
    values,
    length,
    rotated,  # out: (B, T, Hq, D)
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_cb,
    stride_ct,
    stride_ckb,
    stride_ckh,
    stride_ckt,
    stride_cvb,
    stride_cvh,
    stride_cvt,
    stride_lb,
    stride_lh,
    T,
    capacity,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,  # at least D / 2
):
    b, t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK_H)
    half: tl.constexpr = D // 2
    m_half = j < half
    if head < HQ:
        p_in = query + b * stride_qb + head * stride_qh + t * stride_qt
        p_out = rotated + ((b * T + t) * HQ + head) * D
        m_store = m_half
    else:
        kv_head = (head - HQ) % HK
        slot = tl.load(length + b * stride_lb + kv_head * stride_lh).to(tl.int64) + t
        m_store = j < tl.where((slot >= 0) & (slot < capacity), half, 0)
        if head < HQ + HK:
            p_in = key + b * stride_kb + kv_head * stride_kh + t * stride_kt
            p_out = keys + b * stride_ckb + kv_head.to(tl.int64) * stride_ckh + slot * stride_ckt
        else:
            p_in = value + b * stride_vb + kv_head * stride_vh + t * stride_vt
            p_out = values + b * stride_cvb + kv_head.to(tl.int64) * stride_cvh + slot * stride_cvt
    b_x = tl.load(p_in + j, mask=m_half, other=0.0)
    b_y = tl.load(p_in + half + j, mask=m_half, other=0.0)
    if head < HQ + HK:
        # Round products and sums to the dtype of the tables, as an eager rotation does.
        TABLE: tl.constexpr = cos.dtype.element_ty
        offset = b * stride_cb + t * stride_ct + j
        x, y = b_x.to(tl.float32), b_y.to(tl.float32)
        cos_x = tl.load(cos + offset, mask=m_half, other=0.0).to(tl.float32)
        cos_y = tl.load(cos + offset + half, mask=m_half, other=0.0).to(tl.float32)
        sin_x = tl.load(sin + offset, mask=m_half, other=0.0).to(tl.float32)
        sin_y = tl.load(sin + offset + half, mask=m_half, other=0.0).to(tl.float32)
        first = (x * cos_x).to(TABLE).to(tl.float32) + (-y * sin_x).to(TABLE).to(tl.float32)
        second = (y * cos_y).to(TABLE).to(tl.float32) + (x * sin_y).to(TABLE).to(tl.float32)
        b_x, b_y = first.to(b_x.dtype), second.to(b_y.dtype)
    tl.store(p_out + j, b_x, mask=m_store)
    tl.store(p_out + half + j, b_y, mask=m_store)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def _launch_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    c = x.shape[-1]
    if not 0 < c <= WIDEST:
        raise VLMFastError(f"residual_norm: rows of {c}; it takes 1 to {WIDEST}")
    rows = x.reshape(-1, c)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    residual_rows = None
    if residual is not None:
        residual_rows = residual.reshape(-1, c)
        residual_rows = (
            residual_rows if residual_rows.stride(1) == 1 else residual_rows.contiguous()
        )
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = padded(c)
        _norm[(len(rows),)](
            rows,
            residual_rows,
            weight.contiguous(),
            normed,
            None if residual is None else total,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            eps,
            c,
            BLOCK_C=block,
            num_warps=_warps(block),
        )
    return normed, total


def _launch_rotate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
) -> Tensor:
    b, hq, t, d = query.shape
    hk = key.shape[1]
    check_heads("rotate_append", d)
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise VLMFastError("rotate_append: buffers whose last axis is not contiguous")
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    cos, sin = cos.contiguous(), sin.contiguous()
    rotated = torch.empty(b, t, hq, d, dtype=query.dtype, device=query.device)
    if b and t:
        _rotate[(b * t, hq + 2 * hk)](
            query,
            key,
            value,
            cos,
            sin,
            keys,
            values,
            length,
            rotated,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            *length.stride(),
            t,
            keys.shape[2],
            HQ=hq,
            HK=hk,
            D=d,
            BLOCK_H=padded(d // 2),
            num_warps=1,
        )
    return rotated.transpose(1, 2)


_STREAM = ("x", "residual", "weight", "normed", "total")
_HEADS = ("query", "key", "value", "keys", "values", "rotated")
_TYPES = {
    "length": "*i64",
    "eps": "fp32",
    **dict.fromkeys(("C", "T", "capacity", "stride_lb", "stride_lh"), "i32"),
    **dict.fromkeys([f"stride_{x}" for x in "xr"], "i32:16"),
    **dict.fromkeys([f"stride_{x}{axis}" for x in "qkv" for axis in "bht"], "i32:16"),
    **dict.fromkeys([f"stride_c{x}{axis}" for x in "kv" for axis in "bht"], "i32:16"),
    **dict.fromkeys(("stride_cb", "stride_ct"), "i32:16"),
}


def _norm_variant(dtype: torch.dtype, width: int, **given: object) -> Variant:
    types, block = _TYPES | dict.fromkeys(_STREAM, pointer(dtype)), padded(width)
    return Variant(_norm, types, {"BLOCK_C": block, **given}, warps=_warps(block))


def _rotation_variant(dtype: torch.dtype, d: int, table: torch.dtype) -> Variant:
    types = _TYPES | dict.fromkeys(_HEADS, pointer(dtype))
    types |= dict.fromkeys(("cos", "sin"), pointer(table))
    return Variant(_rotate, types, {"HQ": 32, "HK": 8, "D": d, "BLOCK_H": padded(d // 2)}, warps=1)


VARIANTS = [
    *(_norm_variant(torch.bfloat16, width) for width in (64, 3584, 4096, 8192, WIDEST)),
    _norm_variant(torch.float16, 4096, residual=None, total=None),
    _norm_variant(torch.float32, 4096),
    *(_rotation_variant(torch.bfloat16, d, torch.bfloat16) for d in (64, 80, 96, 128, 256)),
    _rotation_variant(torch.bfloat16, 128, torch.float32),
    _rotation_variant(torch.float16, 128, torch.float16),
]
