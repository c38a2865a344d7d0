"""``norm_rope_append``: the operations of a decode step between its matrix products.

`residual_norm`, before each product that reads the residual stream::

    h = x + residual                          y = w * (h / sqrt(mean(h^2) + eps))

In layers with a norm after attention and MLP as well (Gemma 3), ``x`` is normalized by the weights
of that one first. `rotate_append`, after the projection to queries, keys and values; ``x`` and
``y`` are the two halves of a head's row, and the tables have halves too::

    x' = x cos_x - y sin_x                    y' = y cos_y + x sin_y

for queries and keys, whose rows are normalized first in some families (Qwen3, Gemma 3). Keys and
values are appended to each head of the cache, at lengths that are read on the device, so that a
captured graph replays unchanged.

Every intermediate result is rounded as in Hugging Face's modules, in the dtype of the model or of
the tables: the rotated rows are bit-identical, a norm differs by the order of one sum. Weights are
applied to rounded rows (Llama), or as ``1 + w`` before rounding (Gemma). Cosines and
sines come from tables: in a kernel they would need a stack, and angles computed from powers there
are off by 1e-7 of the position.

Grid: one program per row of the stream; one per token and head of queries, keys and values.
Bytes: the stream three or four times (x, residual; h, y), each head once in and once out: 32 kB and
48 kB per token at width 4,096. Floor: negligible; docs/gpu.md has the launches per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, check_heads, contiguous_last, padded, pointer, tl, triton, use_triton

WIDEST = 16384  # entries of a row that fit into one program


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each head's row of queries and keys.

    Parameters
    ----------
    query, key : Tensor, (D,)
        Weights, in the dtype of queries and keys.
    eps : float
    unit_offset : bool
        As in `residual_norm`.
    """

    query: Tensor
    key: Tensor
    eps: float
    unit_offset: bool = False


def residual_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    branch_weight: Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``x + residual``, and the sum itself.

    Parameters
    ----------
    x : Tensor, (..., C)
    weight : Tensor, (C,)
    eps : float
    residual : Tensor, (..., C), optional
        None by default.
    branch_weight : Tensor, (C,), optional
        Weights of an RMSNorm of ``x``, with the same ``eps``, before ``residual`` is added.
    unit_offset : bool
        Whether weights are ``1 + weight``, applied in float32 before the result is rounded (Gemma).
        By default the normalized row is rounded first (Llama).

    Returns
    -------
    normed, total : Tensor, (..., C)
        ``total`` is ``x`` itself without a residual.

    Raises
    ------
    VLMFastError
        For other shapes, several dtypes, or ``branch_weight`` without ``residual``.
    """
    given = [t for t in (x, weight, residual, branch_weight) if t is not None]
    if branch_weight is not None and residual is None:
        raise VLMFastError("residual_norm: branch_weight without residual; it takes both or none")
    if any(t.shape != (x.shape if t is residual else x.shape[-1:]) for t in given[1:]):
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise VLMFastError(
            f"residual_norm: shapes {shapes}; it takes (..., C), (C,), (..., C) and (C,)"
        )
    if any(t.dtype != x.dtype for t in given):
        dtypes = ", ".join(str(t.dtype) for t in given)
        raise VLMFastError(f"residual_norm: tensors in {dtypes}; it takes one dtype")
    run = _launch_norm if use_triton("residual_norm", *given) else residual_norm_ref
    return run(x, weight, eps, residual, branch_weight, unit_offset)


def residual_norm_ref(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    branch_weight: Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """`residual_norm` in plain PyTorch."""
    if branch_weight is not None:
        x = _rms_norm(x, branch_weight, eps, unit_offset)
    total = x if residual is None else x + residual
    return _rms_norm(total, weight, eps, unit_offset), total


def _rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    norm: HeadNorm | None = None,
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
    norm : HeadNorm, optional
        Of queries and keys, before they are rotated; none by default.

    Returns
    -------
    Tensor, (B, Hq, T, D)
        The rotated queries.

    Raises
    ------
    VLMFastError
        For other shapes and dtypes.
    """
    given = query, key, value, cos, sin, keys, values, length
    _check(*given, norm)
    weights = () if norm is None else (norm.query, norm.key)
    run = _launch_rotate if use_triton("rotate_append", *given, *weights) else rotate_append_ref
    return run(*given, norm)


def rotate_append_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    norm: HeadNorm | None = None,
) -> Tensor:
    """`rotate_append` in plain PyTorch."""
    if norm is not None:
        query = _rms_norm(query, norm.query, norm.eps, norm.unit_offset)
        key = _rms_norm(key, norm.key, norm.eps, norm.unit_offset)
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
    norm: HeadNorm | None,
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
    for x in () if norm is None else (norm.query, norm.key):
        if x.shape != (d,) or x.dtype != query.dtype:
            raise VLMFastError(
                f"rotate_append: weights of a norm {tuple(x.shape)} in {x.dtype}; it takes "
                f"({d},) in {query.dtype}"
            )


# --- Triton --------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _weighted(b_x, p_weight, m_x, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Normalized rows times the weights of their norm, rounded as its module does."""
    b_w = tl.load(p_weight, mask=m_x, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        b_x = b_x * (1.0 + b_w)
    else:
        b_x = b_w * b_x.to(dtype).to(tl.float32)
    return b_x.to(dtype)


@triton.jit(do_not_specialize=("C",))
@no_type_check
def _norm(
    x,
    residual,  # or None
    branch_weight,  # or None
    weight,
    normed,  # out
    total,  # out, or None without a residual
    stride_x,
    stride_r,
    eps,
    C,
    UNIT_OFFSET: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    m_c = c < C
    dtype: tl.constexpr = normed.dtype.element_ty
    b_h = tl.load(x + row * stride_x + c, mask=m_c, other=0.0).to(tl.float32)
    if branch_weight is not None:
        b_h = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / C + eps)
        b_h = _weighted(b_h, branch_weight + c, m_c, dtype, UNIT_OFFSET).to(tl.float32)
    if residual is not None:
        b_h += tl.load(residual + row * stride_r + c, mask=m_c, other=0.0).to(tl.float32)
        b_h = b_h.to(dtype)
        tl.store(total + row * C + c, b_h, mask=m_c)
        b_h = b_h.to(tl.float32)
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / C + eps)
    tl.store(normed + row * C + c, _weighted(b_y, weight + c, m_c, dtype, UNIT_OFFSET), mask=m_c)


@triton.jit(do_not_specialize=("T", "capacity"))
@no_type_check
def _rotate(
    query,
    key,
    value,
    cos,
    sin,
    keys,
    values,
    length,
    query_weight,  # of a norm, or None
    key_weight,
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
    eps,
    T,
    capacity,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
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
        if query_weight is not None:
            x, y = b_x.to(tl.float32), b_y.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x + y * y, 0) / D + eps)
            p_weight = tl.where(head < HQ, query_weight, key_weight) + j
            dtype: tl.constexpr = query.dtype.element_ty
            b_x = _weighted(x * scale, p_weight, m_half, dtype, UNIT_OFFSET)
            b_y = _weighted(y * scale, p_weight + half, m_half, dtype, UNIT_OFFSET)
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
    return min(max(block // 512, 1), 32)


def _launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    unit_offset: bool,
) -> tuple[Tensor, Tensor]:
    c = x.shape[-1]
    if not 0 < c <= WIDEST:
        raise VLMFastError(f"residual_norm: rows of {c}; it takes 1 to {WIDEST}")
    rows = contiguous_last(x.reshape(-1, c))
    residual_rows = None if residual is None else contiguous_last(residual.reshape(-1, c))
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = padded(c)
        _norm[(len(rows),)](
            rows,
            residual_rows,
            None if branch_weight is None else branch_weight.contiguous(),
            weight.contiguous(),
            normed,
            None if residual is None else total,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            eps,
            c,
            UNIT_OFFSET=unit_offset,
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
    norm: HeadNorm | None,
) -> Tensor:
    b, hq, t, d = query.shape
    hk = key.shape[1]
    check_heads("rotate_append", d)
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise VLMFastError("rotate_append: buffers whose last axis is not contiguous")
    query, key, value = map(contiguous_last, (query, key, value))
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
            None if norm is None else norm.query.contiguous(),
            None if norm is None else norm.key.contiguous(),
            rotated,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            *length.stride(),
            0.0 if norm is None else norm.eps,
            t,
            keys.shape[2],
            HQ=hq,
            HK=hk,
            D=d,
            UNIT_OFFSET=norm is not None and norm.unit_offset,
            BLOCK_H=padded(d // 2),
            num_warps=1,
            # A fused multiply-add would not round the product.
            enable_fp_fusion=False,
        )
    return rotated.transpose(1, 2)


_STREAM = ("x", "residual", "branch_weight", "weight", "normed", "total")
_HEADS = ("query", "key", "value", "keys", "values", "rotated", "query_weight", "key_weight")
_TYPES = {
    "length": "*i64",
    "eps": "fp32",
    **dict.fromkeys(("C", "T", "capacity", "stride_lb", "stride_lh"), "i32"),
    **dict.fromkeys([f"stride_{x}" for x in "xr"], "i32:16"),
    **dict.fromkeys([f"stride_{x}{axis}" for x in "qkv" for axis in "bht"], "i32:16"),
    **dict.fromkeys([f"stride_c{x}{axis}" for x in "kv" for axis in "bht"], "i32:16"),
    **dict.fromkeys(("stride_cb", "stride_ct"), "i32:16"),
}
_PLAIN = {"branch_weight": None, "UNIT_OFFSET": False}
_GEMMA = {"UNIT_OFFSET": True}


def _norm_variant(dtype: torch.dtype, width: int, **given: object) -> Variant:
    types, block = _TYPES | dict.fromkeys(_STREAM, pointer(dtype)), padded(width)
    return Variant(_norm, types, {"BLOCK_C": block, **given}, warps=_warps(block))


def _rotation_variant(
    dtype: torch.dtype, d: int, table: torch.dtype, unit_offset: bool | None = None
) -> Variant:
    """``unit_offset``: that of the norm of queries and keys, if there is one."""
    types = _TYPES | dict.fromkeys(_HEADS, pointer(dtype))
    types |= dict.fromkeys(("cos", "sin"), pointer(table))
    given: dict[str, int | None] = {"HQ": 32, "HK": 8, "D": d, "BLOCK_H": padded(d // 2)}
    given["UNIT_OFFSET"] = bool(unit_offset)
    if unit_offset is None:
        given |= dict.fromkeys(("query_weight", "key_weight"))
    return Variant(_rotate, types, given, warps=1, fp_fusion=False)


VARIANTS = [
    *(_norm_variant(torch.bfloat16, width, **_PLAIN) for width in (64, 3584, 4096, 8192, WIDEST)),
    _norm_variant(torch.float16, 4096, residual=None, total=None, **_PLAIN),
    _norm_variant(torch.float32, 4096, **_PLAIN),
    *(_norm_variant(torch.bfloat16, width, **_GEMMA) for width in (2560, 5376, WIDEST)),
    _norm_variant(torch.bfloat16, 2560, residual=None, total=None, **_PLAIN | _GEMMA),
    *(_rotation_variant(torch.bfloat16, d, torch.bfloat16) for d in (64, 80, 96, 128, 256)),
    _rotation_variant(torch.bfloat16, 128, torch.float32),
    _rotation_variant(torch.float16, 128, torch.float16),
    _rotation_variant(torch.bfloat16, 128, torch.bfloat16, unit_offset=False),
    _rotation_variant(torch.bfloat16, 256, torch.bfloat16, unit_offset=True),
]
