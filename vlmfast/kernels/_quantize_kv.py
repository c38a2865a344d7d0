"""Triton kernels of `quantize_kv` and their launches; its docstring describes them."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from ._blocks import Blocks, architecture, blocks
from ._triton import Variant, check_heads, contiguous_last, padded, tl, triton


@triton.jit
@no_type_check
def _rounded(x, dtype: tl.constexpr):
    """float32 rounded to ``dtype``; the interpreter itself does not round to bfloat16."""
    if dtype == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
@no_type_check
def _affine(low, high, levels, limit, eps, tiny, DTYPE: tl.constexpr):
    """Step and minimum of `affine`."""
    m_any = low <= high
    low, high = tl.where(m_any, low, 0.0), tl.where(m_any, high, 0.0)
    minimum = _rounded(tl.minimum(tl.maximum(low, -limit), limit), DTYPE)
    below = low - tl.abs(low) * eps - tiny
    below = _rounded(tl.minimum(tl.maximum(below, -limit), limit), DTYPE)
    minimum = tl.where(minimum > low, below, minimum)
    step = _rounded(tl.minimum(tl.div_rn(high - minimum, levels), limit), DTYPE)
    return tl.where(step == 0, 1.0, step), minimum


@triton.jit(do_not_specialize=("slots", "group"))
@no_type_check
def _extent(
    x,
    valid,  # bool (A, H, N), or None
    lows,  # out: float32 (A*H, chunks, D)
    highs,
    stride_x,  # tuples: of the leading axes and of slots
    stride_valid,
    heads,
    slots,
    group,  # slots of a group; a chunk never spans two
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Minimum and maximum of each channel, in one chunk of slots."""
    chunk, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group_chunks = tl.cdiv(group, BLOCK_N)
    n = chunk // group_chunks * group + chunk % group_chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_n = n < tl.minimum(slots, (chunk // group_chunks + 1) * group)
    if valid is not None:
        p_valid = valid + (lead // heads * stride_valid[0] + lead % heads * stride_valid[1])
        m_n = m_n & (tl.load(p_valid + n * stride_valid[2], mask=m_n, other=0) != 0)
    p_x = x + (lead // heads * stride_x[0] + lead % heads * stride_x[1])
    m_x = m_n[:, None] & (c < D)[None, :]
    b_x = tl.load(p_x + (n * stride_x[2])[:, None] + c[None, :], mask=m_x, other=0.0)  # [BN, BD]
    b_x = b_x.to(tl.float32)
    offsets = (lead * tl.num_programs(0) + chunk) * D + c
    tl.store(lows + offsets, tl.min(tl.where(m_x, b_x, float("inf")), 0), mask=c < D)
    tl.store(highs + offsets, tl.max(tl.where(m_x, b_x, float("-inf")), 0), mask=c < D)


@triton.jit(do_not_specialize=("chunks",))
@no_type_check
def _finish(
    lows,
    highs,
    step,  # out: (A*H*groups, D); for values, the scale
    minimum,  # out: the same; None for the scale
    chunks,  # of a group
    levels,
    limit,
    eps,
    tiny,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Parameters of the channels of one group, from the minima and maxima of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b_low = tl.full((BLOCK_D,), float("inf"), tl.float32)
    b_high = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    for start in range(0, chunks, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        offsets = (row * chunks + n)[:, None] * D + c[None, :]
        m_x = (n < chunks)[:, None] & (c < D)[None, :]
        b_x = tl.load(lows + offsets, mask=m_x, other=float("inf"))
        b_low = tl.minimum(b_low, tl.min(b_x, 0))
        b_x = tl.load(highs + offsets, mask=m_x, other=float("-inf"))
        b_high = tl.maximum(b_high, tl.max(b_x, 0))
    DTYPE: tl.constexpr = step.dtype.element_ty
    out = row * D + c
    if minimum is None:
        b_scale = _rounded(tl.sqrt_rn(tl.maximum(tl.maximum(-b_low, b_high), 0.0)), DTYPE)
        tl.store(step + out, tl.where(b_scale == 0, 1.0, b_scale).to(DTYPE), mask=c < D)
    else:
        b_step, b_low = _affine(b_low, b_high, levels, limit, eps, tiny, DTYPE)
        tl.store(step + out, b_step.to(DTYPE), mask=c < D)
        tl.store(minimum + out, b_low.to(DTYPE), mask=c < D)


@triton.jit
@no_type_check
def _read(p_x, offsets, m_x, p_scale, c, width):
    """Entries of a tile, float32, divided by their channels' scale; zeros where masked."""
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    if p_scale is not None:
        b_x = tl.div_rn(b_x, tl.load(p_scale + c, mask=c < width, other=1.0).to(tl.float32))
    return b_x


@triton.jit(do_not_specialize=("slots",))
@no_type_check
def _value_parameters(
    x,
    valid,
    scale,  # (A, H, D), or None
    step,  # out: (A*H, N, C)
    minimum,
    stride_x,
    stride_valid,
    stride_scale,
    heads,
    slots,
    levels,
    limit,
    eps,
    tiny,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Parameters of a group of channels in a block of slots."""
    lead, g = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_D)[None, :]
    m_n = n < slots
    m_valid = m_n
    if valid is not None:
        p_valid = valid + (lead // heads * stride_valid[0] + lead % heads * stride_valid[1])
        m_valid = m_n & (tl.load(p_valid + n * stride_valid[2], mask=m_n, other=0) != 0)
    p_x = x + (lead // heads * stride_x[0] + lead % heads * stride_x[1] + g * GROUP)
    if scale is not None:
        scale += lead // heads * stride_scale[0] + lead % heads * stride_scale[1] + g * GROUP
    m_x = m_valid[:, None] & (j < GROUP)
    b_x = _read(p_x, (n * stride_x[2])[:, None] + j, m_x, scale, j, GROUP)  # [BN, BD]
    b_low = tl.min(tl.where(j < GROUP, b_x, float("inf")), 1)
    b_high = tl.max(tl.where(j < GROUP, b_x, float("-inf")), 1)
    DTYPE: tl.constexpr = step.dtype.element_ty
    b_step, b_low = _affine(b_low, b_high, levels, limit, eps, tiny, DTYPE)
    out = (lead * slots + n) * tl.num_programs(2) + g
    tl.store(step + out, b_step.to(DTYPE), mask=m_n)
    tl.store(minimum + out, b_low.to(DTYPE), mask=m_n)


@triton.jit(do_not_specialize=("slots", "rows", "group"))
@no_type_check
def _pack(
    x,
    valid,
    scale,
    step,  # (A*H, rows, D // EACH)
    minimum,
    packed,  # out: uint8 (A*H, N, D * BITS // 8)
    stride_x,
    stride_valid,
    stride_scale,
    heads,
    slots,
    rows,
    group,  # slots that share parameters
    levels,
    D: tl.constexpr,
    BITS: tl.constexpr,
    CHANNEL_GROUP: tl.constexpr,  # channels that share parameters
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Codes of a block of slots, packed into bytes."""
    DB: tl.constexpr = D * BITS // 8
    lead = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    m_out = (n < slots)[:, None] & (c < DB)
    m_x = m_out
    if valid is not None:
        p_valid = valid + (lead // heads * stride_valid[0] + lead % heads * stride_valid[1])
        m_x = m_x & (tl.load(p_valid + n * stride_valid[2], mask=n < slots, other=0) != 0)[:, None]
    p_x = x + (lead // heads * stride_x[0] + lead % heads * stride_x[1])
    if scale is not None:
        scale += lead // heads * stride_scale[0] + lead % heads * stride_scale[1]
    row = ((lead * rows + n // group) * (D // CHANNEL_GROUP))[:, None]
    b_byte = tl.zeros((BLOCK_N, BLOCK_D), tl.int32)
    for i in tl.static_range(8 // BITS):
        column = i * DB + c
        b_x = _read(p_x, (n * stride_x[2])[:, None] + column, m_x, scale, column, i * DB + DB)
        b_low = tl.load(minimum + row + column // CHANNEL_GROUP, mask=m_out, other=0.0).to(
            tl.float32
        )
        b_step = tl.load(step + row + column // CHANNEL_GROUP, mask=m_out, other=1.0).to(tl.float32)
        b_x = tl.minimum(tl.maximum(tl.div_rn(b_x - b_low, b_step), 0.0), levels)
        b_x = (b_x + 12582912.0) - 12582912.0  # rounds half to even
        b_byte |= b_x.to(tl.int32) << (i * BITS)
    out = (lead * slots + n)[:, None] * DB + c
    tl.store(packed + out, b_byte.to(tl.uint8), mask=m_out)


def _with_lead_axes(x: Tensor, trailing: int) -> Tensor:
    """Reshape to two axes before the last ``trailing``; the last axis is contiguous."""
    missing = 2 + trailing - x.dim()
    x = x[(None,) * missing] if missing > 0 else x.flatten(0, -missing) if missing else x
    return x if not x.numel() or x.stride(-1) == 1 or trailing == 1 else x.contiguous()


class Slots:
    """Keys or values in the layout of the kernels.

    Parameters
    ----------
    x : Tensor, (..., N, D)
    valid : Tensor, bool, (..., N), optional
    """

    def __init__(self, x: Tensor, valid: Tensor | None) -> None:
        check_heads("quantize_kv", x.shape[-1])
        self.shape, self.device = x.shape[:-2], x.device
        self.slots, self.dim = x.shape[-2:]
        self.x = _with_lead_axes(x, 2)
        self.heads, self.leads = self.x.shape[1], self.x.shape[:2].numel()
        self.valid = None
        if valid is not None:
            self.valid = _with_lead_axes(valid.expand(x.shape[:-1]), 1).view(torch.uint8)
        self.strides = (
            tuple(self.x.stride()[:3]),
            (0, 0, 0) if self.valid is None else tuple(self.valid.stride()),
        )

    def make(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*self.shape, *shape), dtype=dtype, device=self.device)

    def parameters(
        self, group: int, groups: int, step: Tensor, minimum: Tensor | None, limits: tuple
    ) -> None:
        """Write the parameters of channels, each over ``group`` slots."""
        if not self.leads or not groups:
            return
        arch = architecture(self.device)
        extent, finish = (_blocks(name, self.dim, arch) for name in ("extent", "finish"))
        per = -(-group // extent.sizes["BLOCK_N"])
        lows, highs = (self.make(groups * per, self.dim) for _ in range(2))
        _extent[groups * per, self.leads, -(-self.dim // extent.sizes["BLOCK_D"])](
            self.x,
            self.valid,
            lows,
            highs,
            *self.strides,
            self.heads,
            self.slots,
            group,
            D=self.dim,
            **extent.options(),
        )
        _finish[self.leads * groups, -(-self.dim // finish.sizes["BLOCK_D"])](
            lows, highs, step, minimum, per, *limits, D=self.dim, **finish.options()
        )

    def pack(
        self,
        bits: int,
        scale: Tensor | None,
        step: Tensor,
        minimum: Tensor,
        group: int,
        each: int,
    ) -> Tensor:
        """Packed codes, for parameters that ``group`` slots and ``each`` channels share."""
        stored = self.dim * bits // 8
        packed = self.make(self.slots, stored, dtype=torch.uint8)
        if packed.numel():
            tile = _blocks("pack", stored, architecture(self.device))
            size_n, size_d = tile.sizes["BLOCK_N"], tile.sizes["BLOCK_D"]
            grid = (triton.cdiv(self.slots, size_n), self.leads, triton.cdiv(stored, size_d))
            _pack[grid](
                self.x,
                self.valid,
                scale,
                step,
                minimum,
                packed,
                *self.strides,
                _strides(scale),
                self.heads,
                self.slots,
                step.shape[-2],
                group,
                float(2**bits - 1),
                D=self.dim,
                BITS=bits,
                CHANNEL_GROUP=each,
                **tile.options(),
            )
        return packed


def _blocks(kernel: str, width: int, arch: int) -> Blocks:
    """For rows of ``width`` entries."""
    tile = blocks("quantize_kv", kernel, arch)
    return tile.resized(BLOCK_D=min(padded(width), tile.sizes["BLOCK_D"]))


def _limits(bits: int, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Constants of `affine`: largest code, and the limits of the parameters' dtype."""
    info = torch.finfo(dtype)
    return float(2**bits - 1), info.max, info.eps, info.smallest_normal * info.eps


def _strides(scale: Tensor | None) -> tuple[int, int]:
    return (0, 0) if scale is None else (scale.stride(0), scale.stride(1))


def launch_keys(
    x: Tensor, bits: int, group: int, valid: Tensor | None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantize_keys`."""
    rows = Slots(x, valid)
    groups = -(-rows.slots // group) if group else 1
    group = group or max(rows.slots, 1)
    step, minimum = (rows.make(groups, rows.dim, dtype=dtype) for _ in range(2))
    rows.parameters(group, groups, step, minimum, _limits(bits, dtype))
    return rows.pack(bits, None, step, minimum, group, 1), step, minimum


def launch_values(
    x: Tensor,
    bits: int,
    group: int,
    scale: Tensor | None,
    valid: Tensor | None,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantize_values`."""
    rows = Slots(x, valid)
    groups = rows.dim // group
    step, minimum = (rows.make(rows.slots, groups, dtype=dtype) for _ in range(2))
    if scale is not None:
        scale = contiguous_last(_with_lead_axes(scale.expand(*rows.shape, rows.dim), 1))
    if step.numel():
        tile = _blocks("values", group, architecture(rows.device))
        _value_parameters[triton.cdiv(rows.slots, tile.sizes["BLOCK_N"]), rows.leads, groups](
            rows.x,
            rows.valid,
            scale,
            step,
            minimum,
            *rows.strides,
            _strides(scale),
            rows.heads,
            rows.slots,
            *_limits(bits, dtype),
            GROUP=group,
            **tile.options(),
        )
    return rows.pack(bits, scale, step, minimum, 1, group), step, minimum


def launch_scale(x: Tensor, valid: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """As `channel_scale`."""
    rows = Slots(x, valid)
    scale = rows.make(rows.dim, dtype=dtype)
    rows.parameters(max(rows.slots, 1), 1, scale, None, (0.0, 0.0, 0.0, 0.0))
    return scale


def variants_of(arch: int, kind: str, dim: int) -> list[Variant]:
    """Variants for keys and values of ``kind``, without groups and with groups as in KIVI."""
    types: dict[str, Any] = {
        "x": f"*{kind}",
        "valid": "*u8",
        **dict.fromkeys(("lows", "highs"), "*fp32"),
        **dict.fromkeys(("step", "minimum", "scale"), "*fp16"),
        "packed": "*u8",
        "stride_x": ("i32:16",) * 3,
        "stride_valid": ("i32",) * 3,
        "stride_scale": ("i32:16",) * 2,
        **dict.fromkeys(("heads", "slots", "group", "chunks", "rows"), "i32"),
        **dict.fromkeys(("levels", "limit", "eps", "tiny"), "fp32"),
    }
    extent, finish = (_blocks(name, dim, arch) for name in ("extent", "finish"))
    found = [
        extent.variant(_extent, types, {"D": dim}),
        finish.variant(_finish, types, {"D": dim}),
        finish.variant(_finish, types, {"D": dim, "minimum": None}),
    ]
    for bits, each, scale in ((4, dim, {}), (2, dim // 4, {"scale": None})):
        tile = _blocks("values", each, arch)
        found.append(tile.variant(_value_parameters, types, {"GROUP": each, **scale}))
        tile, given = _blocks("pack", dim * bits // 8, arch), {"D": dim, "BITS": bits}
        found.append(tile.variant(_pack, types, {**given, "CHANNEL_GROUP": each, **scale}))
        found.append(tile.variant(_pack, types, {**given, "CHANNEL_GROUP": 1, "scale": None}))
    return found
