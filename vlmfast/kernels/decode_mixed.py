"""``decode_mixed``: attention over quantized segments and a float tail, as one softmax.

The keys of a KV head are one virtual row, ``[segments..., tail]``. One kernel per piece divides the
piece into splits: programs (split, batch row and KV head, block of query rows) that each process
a fraction of the *valid* slots (lengths are read on the device) and write the largest logit, the
sum of exponentials and the weighted values. A last kernel reduces the splits of all pieces. The
number of splits depends on shapes alone. Nothing synchronizes, a captured graph stays valid while
lengths grow, and the order of summation is fixed.

Query heads that share a KV head are rows of one tile, padded to 16 for the tensor cores. A single
row (one token, one query head per KV head) uses a kernel without tensor cores: each slot of a tile
keeps its own running softmax, and threads exchange nothing before the end.

Codes are multiplied without dequantizing them. With ``k = code step + min``, ``q k`` is
``(q step) code + q min``: the query is scaled once for all slots that share parameters. It is then
divided by its largest magnitude, so that no step underflows in half precision, and what rounding it
takes from codes in the middle of their range is added again. Each part of a half-split byte is one
more dot product. The scale of value channels is applied to the sums.

Bytes: codes and parameters of every segment once, the tail once, whatever the number of query
heads: for a slot and KV head of D=128, 512 as bfloat16, 132 in 4 bits and 68 in 2 bits (ZipCache),
and 96 in 2 bits with groups of 32 (KIVI). Floor: these over the bandwidth; at 4.3 TB/s 2,944 slots
of 32 heads take 11.2 us, 2.9 us, 1.5 us and 2.1 us. Partial results add ``4 (D + 2)`` bytes per
split and query row, written and read.
"""

# ruff: noqa: RUF005 - Triton joins tuples with + alone

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._blocks import Blocks, architecture, blocks
from ._triton import (
    INTERPRETED,
    Variant,
    check_heads,
    contiguous_last,
    padded,
    tl,
    triton,
    upcast,
    use_triton,
)
from .quantize_kv import Segment

MASKED_LOGIT = -1e30  # finite, so that a row that sees nothing is not NaN


def decode_mixed(
    query: Tensor,
    segments: Sequence[Segment],
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_mask: Tensor,
    scaling: float | None = None,
    tail_bias: Tensor | None = None,
    want_attention_mass: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of a few query rows over ``[segments..., tail]``.

    Parameters
    ----------
    query : Tensor, (B, Hq, T, D)
    segments : sequence of Segment
        With a batch axis, ``Hk`` heads each. Every row sees all slots within ``lengths``; slots
        beyond them are ignored and may hold any values.
    tail_keys, tail_values : Tensor, (B, Hk, cap, D)
        Shared by ``Hq // Hk`` query heads each.
    tail_mask : Tensor, bool, (B, Hk, T, cap) or what expands to it; or int64, (B, Hk)
        Which slots of the tail a row sees, or how many, the first ones. A slot that no row sees
        may hold any values. Counts are faster: only these slots are visited.
    scaling : float, optional
        ``D ** -0.5`` by default.
    tail_bias : Tensor, float32, (B, Hk, cap), optional
        Added to the logits of each key of the tail.
    want_attention_mass : bool
        Whether ``attention_mass`` is returned.

    Returns
    -------
    out : Tensor, (B, Hq, T, D)
        In the query's dtype; zeros for a row that sees nothing.
    lse : Tensor, float32, (B, Hq, T)
        Natural logarithm of the sum of exponentiated logits; -1e30 for a row that sees nothing.
    attention_mass : Tensor, float32, (B, Hk, cap), or None
        Attention that each slot of the tail receives: sum over the rows, mean over the query heads
        that share it.

    Raises
    ------
    VLMFastError
        For tensors on several devices; on Triton also for unsupported shapes and dtypes.
    """
    segment_tensors = [x for segment in segments for x in segment.tensors()]
    if not use_triton(
        "decode_mixed", query, tail_keys, tail_values, tail_mask, tail_bias, *segment_tensors
    ):
        return decode_mixed_ref(
            query,
            segments,
            tail_keys,
            tail_values,
            tail_mask,
            scaling,
            tail_bias,
            want_attention_mass,
        )
    if tail_mask.dtype != torch.bool and not want_attention_mass:
        tail = Floats(tail_keys, tail_values, tail_mask, LENGTHS, tail_bias)
    else:
        rows, (batch, shared, cap) = query.shape[2], tail_keys.shape[:3]
        mask = _mask(tail_mask, cap).expand(batch, shared, rows, cap)
        tail = Floats(tail_keys, tail_values, mask, MASK, tail_bias)
    return attend(
        "decode_mixed", query, [*segments, tail], scaling, tail if want_attention_mass else None
    )


def decode_mixed_ref(
    query: Tensor,
    segments: Sequence[Segment],
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_mask: Tensor,
    scaling: float | None = None,
    tail_bias: Tensor | None = None,
    want_attention_mass: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`decode_mixed` in plain PyTorch: segments are dequantized one after another."""
    heads, rows, dim = query.shape[1:]
    shared = tail_keys.shape[1]
    compute_dtype = torch.promote_types(query.dtype, torch.float32)  # float32 or float64
    # (B, Hk, G*T, D): the query heads of a KV head become rows, so that no key is repeated.
    q = query.to(compute_dtype).unflatten(1, (shared, heads // shared)).flatten(2, 3)
    q = q * (dim**-0.5 if scaling is None else scaling)

    logits, values = [], []
    for segment in segments:
        k, v = segment.dequantize(compute_dtype)
        logits.append(_logits(q, k, segment.bias, segment.valid[:, :, None]))
        values.append(_zero_masked(v, segment.valid))
    mask = _mask(tail_mask, tail_keys.shape[2]).expand(len(query), shared, -1, -1)
    row_mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads // shared, 1)
    logits.append(_logits(q, tail_keys.to(compute_dtype), tail_bias, row_mask))
    values.append(_zero_masked(tail_values.to(compute_dtype), mask.any(2)))

    logits_all = torch.cat(logits, -1)
    row_max = logits_all.amax(-1, keepdim=True)
    # If a row sees nothing, every logit is the maximum and its exponential would be one.
    p = (logits_all - row_max).exp().masked_fill(logits_all <= MASKED_LOGIT, 0.0)
    row_sum = p.sum(-1, keepdim=True)
    lse = torch.where(row_sum > 0, row_max + row_sum.log(), MASKED_LOGIT)
    p = p / row_sum.masked_fill(row_sum == 0, 1.0)
    parts = p.split([v.shape[2] for v in values], -1)
    out = sum(part @ v for part, v in zip(parts, values, strict=True))
    attention_mass = None
    if want_attention_mass:
        attention_mass = parts[-1].unflatten(2, (-1, rows)).sum(3).mean(2).float()
    return (
        out.view(query.shape).to(query.dtype),
        lse.squeeze(-1).view(query.shape[:-1]).float(),
        attention_mass,
    )


def _mask(seen: Tensor, slots: int) -> Tensor:
    """A mask (B, Hk, T, N) itself, or that of the number of slots that every row sees, (B, Hk)."""
    if seen.dtype == torch.bool:
        return seen
    return (torch.arange(slots, device=seen.device) < seen[..., None])[:, :, None]


def _logits(q: Tensor, keys: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
    """(B, Hk, G*T, N), `MASKED_LOGIT` where a row does not see the key."""
    x = q @ keys.transpose(-1, -2)
    if bias is not None:
        x = x + bias[:, :, None]
    return x.masked_fill(~seen, MASKED_LOGIT)


def _zero_masked(values: Tensor, seen: Tensor) -> Tensor:
    """Zeros in slots that no row sees, since 0 * NaN is NaN."""
    return values.masked_fill(~seen[..., None], 0.0)


# --- Triton --------------------------------------------------------------------------------------

# How `Floats.seen` is encoded. Kernels get it as a constant: they cannot read these names.
LENGTHS, MASK, ANCESTORS = 0, 1, 2


@triton.jit
@no_type_check
def tile_range(tiles):
    """First and last (exclusive) tile of this program's split."""
    size = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.program_id(0) * size
    return first, tl.minimum(first + size, tiles)


@triton.jit
@no_type_check
def head_base(base, strides, b, h, ALIGN: tl.constexpr):
    """Pointer to a head's first slot, and the stride of slots.

    Dividing and multiplying by ``ALIGN`` shows Triton alignments other than 16.
    """
    base += b * (strides[0] // ALIGN * ALIGN) + h * (strides[1] // ALIGN * ALIGN)
    return base, strides[2] // ALIGN * ALIGN


@triton.jit
@no_type_check
def _codes(packed, I: tl.constexpr, BITS: tl.constexpr):
    """Part ``I`` of the codes in a tile of bytes as float32, ``2 ** (I BITS)`` times too large.

    The bits are not shifted; the caller folds the division into its factors. Nor are they
    converted, which GPUs do at a fraction of the rate of additions: they become the last bits of
    2^23, whose neighbors in float32 are integers. The difference is exact.
    """
    bits = (packed.to(tl.int32) & (((1 << BITS) - 1) << (I * BITS))) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
@no_type_check
def _load_parts(base, m_q, scaling, PARTS: tl.constexpr, PART_D: tl.constexpr):
    """Query rows as a tuple of their parts, float32."""
    parts = ()
    for i in tl.static_range(PARTS):
        b_q = tl.load(base + i * PART_D, mask=m_q, other=0.0).to(tl.float32)
        parts = parts + (b_q * scaling,)
    return parts


@triton.jit
@no_type_check
def _fold_steps(
    b_q,
    p_step,
    p_min,
    m_step,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    PART_D: tl.constexpr,
):
    """Queries times the steps, to multiply with `_codes`, and their product with the minima.

    ``p_step`` and ``p_min`` point to the parameters of the columns of the first part.
    """
    folded = ()
    b_rest = b_q[0] * tl.load(p_min, mask=m_step, other=0.0).to(tl.float32)
    for i in tl.static_range(PARTS):
        b_step = tl.load(p_step + i * PART_D, mask=m_step, other=0.0).to(tl.float32)
        folded = folded + (b_q[i] * (b_step * (1.0 / (1 << (i * BITS)))),)
        if i > 0:
            b_rest += b_q[i] * tl.load(p_min + i * PART_D, mask=m_step, other=0.0).to(tl.float32)
    return folded, tl.sum(b_rest, 1, keep_dims=True)


@triton.jit
@no_type_check
def _to_operands(b_q, b_rest, OPERAND: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr):
    """Query rows in the dtype of the tensor cores, and the scale that they are divided by.

    ``b_rest`` gets what rounding takes from the product with codes in the middle of their range, so
    that only deviations from it are multiplied with rounded rows.
    """
    row_scale = tl.max(tl.abs(b_q[0]), 1, keep_dims=True)
    for i in tl.static_range(1, PARTS):
        row_scale = tl.maximum(row_scale, tl.max(tl.abs(b_q[i]), 1, keep_dims=True))
    row_scale = tl.where(row_scale > 0, row_scale, 1.0)
    operands = ()
    for i in tl.static_range(PARTS):
        operand = (b_q[i] / row_scale).to(OPERAND)
        operands = operands + (operand,)
        middle = ((1 << BITS) - 1) * (1 << (i * BITS)) * 0.5
        b_lost = b_q[i] - operand.to(tl.float32) * row_scale
        b_rest += tl.sum(b_lost, 1, keep_dims=True) * middle
    return operands, row_scale, b_rest


@triton.jit
@no_type_check
def _load_word(p_x, m_x, WORD: tl.constexpr):
    """``WORD`` neighboring entries from each pointer on, in one load: a tuple, float32."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    if WORD == 1:
        entries = (tl.load(p_x, mask=m_x, other=0.0).to(tl.float32),)
    else:
        INTEGER: tl.constexpr = tl.int32 if WORD == 2 else tl.int64
        b_word = tl.load(p_x.to(tl.pointer_type(INTEGER)), mask=m_x, other=0)
        entries = ()
        for i in tl.static_range(WORD):
            b_x = (b_word >> (16 * i)).to(tl.int16).to(DTYPE, bitcast=True)
            entries = entries + (b_x.to(tl.float32),)
    return entries


@triton.jit
@no_type_check
def _load_slots(p_x, m_slots, WORD: tl.constexpr):
    """A parameter of neighboring slots, the first at ``p_x``: a tuple, zeros where masked.

    The mask of a slot implies those of the slots before it.
    """
    entries = ()
    for j in tl.static_range(0, len(m_slots), WORD):
        b_x = _load_word(p_x + j, m_slots[j], WORD)
        for i in tl.static_range(WORD):
            entries = entries + (tl.where(m_slots[j + i], b_x[i], 0.0),)
    return entries


@triton.jit
@no_type_check
def _load_tile(p_x, start, end, BLOCK_N: tl.constexpr, WORD: tl.constexpr):
    """A parameter of a tile of slots, [BN, 1]; zeros from ``end`` on."""
    n = start + tl.arange(0, BLOCK_N)
    if WORD == 1:
        b_x = tl.load(p_x + n, mask=n < end, other=0.0).to(tl.float32)
    else:
        first = start + 2 * tl.arange(0, BLOCK_N // 2)
        b_even, b_odd = _load_word(p_x + first, first < end, 2)
        b_x = tl.where(n < end, tl.interleave(b_even, b_odd), 0.0)
    return b_x[:, None]


@triton.jit
@no_type_check
def _to_parts(b_x, PARTS: tl.constexpr, SHIFT: tl.constexpr):
    """A parameter that all channels of a slot share: a tuple by part, as `_load_groups`."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts = parts + (b_x * (1.0 / (1 << (i * SHIFT))),)
    return parts


@triton.jit
@no_type_check
def _load_groups(
    p_base,
    c,
    m_slots,
    PARTS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    PART_D: tl.constexpr,
    SHIFT: tl.constexpr,
    WORD: tl.constexpr,
):
    """A parameter that ``VALUE_GROUP`` channels of a slot share: a tuple by part, in columns ``c``.

    ``p_base`` points to the parameters of each slot. One column if all channels of a part share
    them. Part i is divided by ``2 ** (i SHIFT)``, the factor by which its `_codes` are too large.
    """
    # A select is cheaper than a load per channel.
    WHOLE: tl.constexpr = VALUE_GROUP % PART_D == 0
    SELECT: tl.constexpr = (PART_D % VALUE_GROUP == 0) & (PART_D // VALUE_GROUP <= 4)
    groups = ()
    if WHOLE | SELECT:
        for g in tl.static_range(0, PARTS * PART_D // VALUE_GROUP, WORD):
            groups = groups + _load_word(p_base + g, m_slots, WORD)
    parts = ()
    for i in tl.static_range(PARTS):
        if WHOLE | SELECT:
            b_x = groups[i * PART_D // VALUE_GROUP]
            for g in tl.static_range(1, PART_D // VALUE_GROUP):
                b_x = tl.where(c >= g * VALUE_GROUP, groups[i * PART_D // VALUE_GROUP + g], b_x)
        else:
            b_x = tl.load(
                p_base + (i * PART_D + c) // VALUE_GROUP, mask=m_slots & (c < PART_D), other=0.0
            )
            b_x = b_x.to(tl.float32)
        parts = parts + (b_x * (1.0 / (1 << (i * SHIFT))),)
    return parts


@triton.jit
@no_type_check
def _store_sums(p_sums, acc, p_scale, c, m_sums, PARTS: tl.constexpr, PART_D: tl.constexpr):
    """Store weighted sums, times the scale of their channels."""
    for i in tl.static_range(PARTS):
        b_sum = acc[i]
        if p_scale is not None:
            b_sum = b_sum * tl.load(p_scale + i * PART_D + c, mask=c < PART_D, other=0.0).to(
                tl.float32
            )
        tl.store(p_sums + i * PART_D + c, b_sum, mask=m_sums)


@triton.jit(do_not_specialize=("tokens", "slots", "num_splits", "first_split"))
@no_type_check
def _attend_one(
    query,
    keys,
    key_step,
    key_min,
    values,
    value_step,
    value_min,
    scale,
    bias,
    seen,  # lengths, mask or ancestors
    logits,  # out: float32 (B*Hk, G*T, slots), or None
    largest,  # out: float32 (B*Hk, splits, G*T)
    total,  # out: the same
    sums,  # out: float32 (B*Hk, splits, G*T, D); only where `total` is not zero
    stride_query,  # tuples: batch, head, token or slot or group
    stride_keys,
    stride_key_step,  # and of the minima
    stride_values,
    stride_value_step,
    stride_scale,
    stride_bias,
    stride_seen,  # batch, head, token, slot
    scaling,
    heads,
    tokens,
    slots,
    num_splits,  # of all pieces
    first_split,  # number of splits of the pieces before this one
    G: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,  # 0: floats
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    WORD: tl.constexpr,  # value parameters that one load reads
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of a piece for one query row: BLOCK_N softmaxes of ``ROWS`` slots of each tile.

    These slots are consecutive and in one key group. Everything is float32.
    """
    PARTS: tl.constexpr = 8 // BITS if BITS else 1
    PART_D: tl.constexpr = D // PARTS
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    c = tl.arange(0, BLOCK_D)[None, :]
    m_c = c < PART_D
    p_q = query + (b * stride_query[0] + h * stride_query[1] + c)
    if KEY_GROUP == 0:
        b_q = _load_parts(p_q, m_c, scaling, PARTS, PART_D)
    p_k, next_key = head_base(keys, stride_keys, b, h, ALIGN)
    p_v, next_value = head_base(values, stride_values, b, h, ALIGN)
    p_seen = seen + (b * stride_seen[0] + h * stride_seen[1])
    if bias is not None:
        p_bias = bias + (b * stride_bias[0] + h * stride_bias[1])
    if BITS:
        p_key_step = key_step + (b * stride_key_step[0] + h * stride_key_step[1] + c)
        p_key_min = key_min + (b * stride_key_step[0] + h * stride_key_step[1] + c)
        p_value_step = value_step + (b * stride_value_step[0] + h * stride_value_step[1])
        p_value_min = value_min + (b * stride_value_step[0] + h * stride_value_step[1])
        if KEY_GROUP == 0:
            b_qs, b_rest = _fold_steps(b_q, p_key_step, p_key_min, m_c, PARTS, BITS, PART_D)

    if SEEN == 0:
        slots = tl.load(p_seen).to(tl.int32)
    row_max = tl.full((BLOCK_N, 1), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_N, 1), tl.float32)
    acc = ()  # one [BN, BD] for each part of the channels
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros((BLOCK_N, BLOCK_D), tl.float32),)
    first, last = tile_range(tl.cdiv(slots, ROWS * BLOCK_N))
    for tile in range(first, last):
        start = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * ROWS
        m_slots, b_s, m_any = (), (), start < 0
        for j in tl.static_range(ROWS):
            n = start + j
            m_n = n < slots  # [BN, 1]
            if SEEN == 1:
                m_n = m_n & (tl.load(p_seen + n * stride_seen[3], mask=m_n, other=0) != 0)
            if SEEN == 2:
                word = tl.load(p_seen + n // 64 * stride_seen[3], mask=m_n, other=0)
                m_n = m_n & (((word >> (n % 64).to(tl.int64)) & 1) != 0)
            m_slots, m_any = m_slots + (m_n,), m_any | m_n
            b_s = b_s + (tl.full((BLOCK_N, 1), -1e30, tl.float32),)
        is_visible = True
        if SEEN == 1:
            is_visible = tl.max(tl.reshape(m_any.to(tl.int32), [BLOCK_N]), 0) > 0
        if is_visible:
            if KEY_GROUP:
                offset = start // KEY_GROUP * stride_key_step[2]
                m_step = m_c & (start < slots)
                # Loaded again for each tile: too much to keep in registers.
                b_q = _load_parts(p_q, m_c, scaling, PARTS, PART_D)
                b_qs, b_rest = _fold_steps(
                    b_q, p_key_step + offset, p_key_min + offset, m_step, PARTS, BITS, PART_D
                )
            b_s, b_v, new_max = (), (), row_max
            for j in tl.static_range(ROWS):
                n, m_kv = start + j, m_slots[j] & m_c
                b_k = tl.load(p_k + n * next_key + c, mask=m_kv, other=0)  # [BN, BD]
                b_v = b_v + (tl.load(p_v + n * next_value + c, mask=m_kv, other=0),)
                if BITS:
                    b_x = b_qs[0] * _codes(b_k, 0, BITS)
                    for i in tl.static_range(1, PARTS):
                        b_x += b_qs[i] * _codes(b_k, i, BITS)
                    b_x = tl.sum(b_x, 1, keep_dims=True) + b_rest  # [BN, 1]
                else:
                    b_x = tl.sum(b_q[0] * b_k.to(tl.float32), 1, keep_dims=True)
                if bias is not None:
                    b_x += tl.load(p_bias + n, mask=m_slots[j], other=0.0).to(tl.float32)
                b_x = tl.where(m_slots[j], tl.maximum(b_x, -1e30), -1e30)
                b_s, new_max = b_s + (b_x,), tl.maximum(new_max, b_x)
            alpha, row_max = tl.exp(row_max - new_max), new_max
            row_sum, b_p, new_acc, b_steps, b_mins = row_sum * alpha, (), (), (), ()
            if BITS and VALUE_GROUP == D:
                b_step = _load_slots(p_value_step + start, m_slots, WORD)
                b_min = _load_slots(p_value_min + start, m_slots, WORD)
            for j in tl.static_range(ROWS):
                b_p = b_p + (tl.where(b_s[j] > -1e30, tl.exp(b_s[j] - new_max), 0.0),)
                row_sum += b_p[j]
                if BITS and VALUE_GROUP == D:
                    b_steps = b_steps + (_to_parts(b_step[j], PARTS, BITS),)
                    b_mins = b_mins + (_to_parts(b_min[j], PARTS, 0),)
                elif BITS:
                    offset = (start + j) * stride_value_step[2]
                    b_group = _load_groups(
                        p_value_step + offset, c, m_slots[j], PARTS, VALUE_GROUP, PART_D, BITS, WORD
                    )
                    b_steps = b_steps + (b_group,)
                    b_group = _load_groups(
                        p_value_min + offset, c, m_slots[j], PARTS, VALUE_GROUP, PART_D, 0, WORD
                    )
                    b_mins = b_mins + (b_group,)
            for i in tl.static_range(PARTS):
                b_acc = acc[i] * alpha
                if BITS:  # minima first: where channels share them, their sum is a single column
                    min_sum = b_p[0] * b_mins[0][i]
                    for j in tl.static_range(1, ROWS):
                        min_sum += b_p[j] * b_mins[j][i]
                    b_acc += min_sum
                for j in tl.static_range(ROWS):
                    if BITS:
                        b_acc += b_p[j] * b_steps[j][i] * _codes(b_v[j], i, BITS)
                    else:
                        b_acc += b_p[j] * b_v[j].to(tl.float32)
                new_acc = new_acc + (b_acc,)
            acc = new_acc
        if logits is not None:
            for j in tl.static_range(ROWS):
                n = start + j
                tl.store(logits + head.to(tl.int64) * slots + n, b_s[j], mask=n < slots)
    final_max = tl.max(row_max, 0, keep_dims=True)
    alpha = tl.exp(row_max - final_max)
    offset = head.to(tl.int64) * num_splits + first_split + tl.program_id(0)
    offset += tl.zeros((1, 1), tl.int32)
    tl.store(largest + offset, final_max)
    tl.store(total + offset, tl.sum(row_sum * alpha, 0, keep_dims=True))
    if last > first:
        out = ()
        for i in tl.static_range(PARTS):
            out = out + (tl.sum(acc[i] * alpha, 0, keep_dims=True),)
        if scale is not None:
            scale += b * stride_scale[0] + h * stride_scale[1]
        _store_sums(sums + offset * D, out, scale, c, m_c, PARTS, PART_D)


@triton.jit(do_not_specialize=("tokens", "slots", "num_splits", "first_split"))
@no_type_check
def _attend(
    query,
    keys,
    key_step,
    key_min,
    values,
    value_step,
    value_min,
    scale,
    bias,
    seen,
    logits,
    largest,
    total,
    sums,
    stride_query,
    stride_keys,
    stride_key_step,
    stride_values,
    stride_value_step,
    stride_scale,
    stride_bias,
    stride_seen,
    scaling,
    heads,
    tokens,
    slots,
    num_splits,
    first_split,
    G: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    WORD: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of a piece for BLOCK_M query rows, on the tensor cores; arguments of `_attend_one`.

    Rows are ordered by query head of the KV head, then by token.
    """
    PARTS: tl.constexpr = 8 // BITS if BITS else 1
    PART_D: tl.constexpr = D // PARTS
    GROUP_TILES: tl.constexpr = (KEY_GROUP + BLOCK_N - 1) // BLOCK_N
    OPERAND: tl.constexpr = tl.float32 if UPCAST else query.dtype.element_ty
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    r = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    m_r = r < G * tokens  # [BM, 1]
    c = tl.arange(0, BLOCK_D)[None, :]
    m_c = c < PART_D  # [1, BD]
    p_q = query + b * stride_query[0]
    p_q += (h * G + r // tokens) * stride_query[1] + r % tokens * stride_query[2]
    p_q += c  # [BM, BD]
    b_q = _load_parts(p_q, m_r & m_c, 1.0, PARTS, PART_D)
    p_k, next_key = head_base(keys, stride_keys, b, h, ALIGN)
    p_v, next_value = head_base(values, stride_values, b, h, ALIGN)
    p_seen = seen + (b * stride_seen[0] + h * stride_seen[1])
    if bias is not None:
        p_bias = bias + (b * stride_bias[0] + h * stride_bias[1])
    if BITS:
        p_key_step = key_step + (b * stride_key_step[0] + h * stride_key_step[1] + c)
        p_key_min = key_min + (b * stride_key_step[0] + h * stride_key_step[1] + c)
        p_value_step = value_step + (b * stride_value_step[0] + h * stride_value_step[1])
        p_value_min = value_min + (b * stride_value_step[0] + h * stride_value_step[1])
        if KEY_GROUP == 0:
            b_qs, b_rest = _fold_steps(b_q, p_key_step, p_key_min, m_c, PARTS, BITS, PART_D)
            b_qs, row_scale, b_rest = _to_operands(b_qs, b_rest, OPERAND, PARTS, BITS)

    if SEEN == 0:
        slots = tl.load(p_seen).to(tl.int32)
    row_max = tl.full((BLOCK_M, 1), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M, 1), tl.float32)
    acc = ()  # one [BM, BD] for each part of the channels
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros((BLOCK_M, BLOCK_D), tl.float32),)
    if KEY_GROUP:
        first, last = tile_range(tl.cdiv(slots, KEY_GROUP) * GROUP_TILES)
    else:
        first, last = tile_range(tl.cdiv(slots, BLOCK_N))
    for tile in range(first, last):
        start, end = tile * BLOCK_N, slots
        if KEY_GROUP:  # a tile never crosses the border of a group
            start = tile // GROUP_TILES * KEY_GROUP + tile % GROUP_TILES * BLOCK_N
            end = tl.minimum(tile // GROUP_TILES * KEY_GROUP + KEY_GROUP, slots)
        n = start + tl.arange(0, BLOCK_N)
        m_s, m_n = m_r & (n < end)[None, :], (n < end)[:, None]  # [BM, BN], [BN, 1]
        is_visible = True
        if SEEN == 1:
            offset = r % tokens * stride_seen[2] + (n * stride_seen[3])[None, :]
            m_s = m_s & (tl.load(p_seen + offset, mask=m_s, other=0) != 0)
            used = tl.max(m_s.to(tl.int32), 0)
            is_visible, m_n = tl.max(used, 0) > 0, used[:, None] > 0
        if SEEN == 2:
            offset = r % tokens * stride_seen[2] + (n // 64 * stride_seen[3])[None, :]
            word = tl.load(p_seen + offset, mask=m_s, other=0)
            m_s = m_s & (((word >> (n % 64).to(tl.int64)[None, :]) & 1) != 0)
        b_s = tl.full((BLOCK_M, BLOCK_N), -1e30, tl.float32)
        if is_visible:
            # [BN, BD] both
            b_k = tl.load(p_k + (n * next_key)[:, None] + c, mask=m_n & m_c, other=0)
            b_v = tl.load(p_v + (n * next_value)[:, None] + c, mask=m_n & m_c, other=0)
            if BITS:
                if KEY_GROUP:
                    offset = start // KEY_GROUP * stride_key_step[2]
                    b_qs, b_rest = _fold_steps(
                        b_q, p_key_step + offset, p_key_min + offset, m_c, PARTS, BITS, PART_D
                    )
                    b_qs, row_scale, b_rest = _to_operands(b_qs, b_rest, OPERAND, PARTS, BITS)
                b_s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for i in tl.static_range(PARTS):
                    b_code = tl.trans(_codes(b_k, i, BITS).to(OPERAND))  # [BD, BN]
                    b_s = tl.dot(b_qs[i], b_code, b_s, input_precision="ieee")
                b_s = b_s * row_scale + b_rest
            else:
                b_s = tl.dot(b_q[0].to(OPERAND), tl.trans(b_k.to(OPERAND)), input_precision="ieee")
            b_s = b_s * scaling
            if bias is not None:
                b_s += tl.load(p_bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
            m_s = m_s & (b_s > -1e30)
            b_s = tl.where(m_s, b_s, -1e30)
            new_max = tl.maximum(row_max, tl.max(b_s, 1, keep_dims=True))
            b_p = tl.where(m_s, tl.exp(b_s - new_max), 0.0)  # [BM, BN]
            alpha = tl.exp(row_max - new_max)  # [BM, 1]
            row_sum, row_max = row_sum * alpha + tl.sum(b_p, 1, keep_dims=True), new_max
            b_p = b_p.to(OPERAND)
            if BITS and VALUE_GROUP == D:
                b_step = _load_tile(p_value_step, start, end, BLOCK_N, WORD)
                b_min = _load_tile(p_value_min, start, end, BLOCK_N, WORD)
                b_step, b_min = _to_parts(b_step, PARTS, BITS), _to_parts(b_min, PARTS, 0)
            elif BITS:
                offset = (n * stride_value_step[2])[:, None]
                b_step = _load_groups(
                    p_value_step + offset, c, m_n, PARTS, VALUE_GROUP, PART_D, BITS, WORD
                )
                b_min = _load_groups(
                    p_value_min + offset, c, m_n, PARTS, VALUE_GROUP, PART_D, 0, WORD
                )
            new_acc = ()
            for i in tl.static_range(PARTS):
                if BITS:
                    b_x = (_codes(b_v, i, BITS) * b_step[i] + b_min[i]).to(OPERAND)
                else:
                    b_x = b_v.to(OPERAND)
                new_acc = new_acc + (tl.dot(b_p, b_x, acc[i] * alpha, input_precision="ieee"),)
            acc = new_acc
        if logits is not None:
            offset = (head.to(tl.int64) * G * tokens + r) * slots + n[None, :]
            tl.store(logits + offset, b_s, mask=m_r & (n < end)[None, :])
    split = head.to(tl.int64) * num_splits + first_split + tl.program_id(0)
    offset = split * G * tokens + r
    tl.store(largest + offset, row_max, mask=m_r)
    tl.store(total + offset, row_sum, mask=m_r)
    if last > first:
        if scale is not None:
            scale += b * stride_scale[0] + h * stride_scale[1]
        _store_sums(sums + offset * D, acc, scale, c, m_r & m_c, PARTS, PART_D)


@triton.jit(do_not_specialize=("num_splits", "rows"))
@no_type_check
def _join(
    largest,
    total,
    sums,
    out,  # out: (B*Hk, G*T, D)
    lse,  # out: float32 (B*Hk, G*T)
    num_splits,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Reduce the splits of one query row to one softmax."""
    head, r = tl.program_id(1).to(tl.int64), tl.program_id(0)
    d = tl.arange(0, BLOCK_D)[None, :]
    row_max = tl.full((BLOCK_S, 1), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_S, 1), tl.float32)
    acc = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[:, None]
        offset = (head * num_splits + s) * rows + r
        b_total = tl.load(total + offset, mask=s < num_splits, other=0.0)
        b_max = tl.load(largest + offset, mask=s < num_splits, other=-1e30)
        new_max = tl.maximum(row_max, b_max)
        b_p, alpha = tl.exp(b_max - new_max), tl.exp(row_max - new_max)
        b_sum = tl.load(sums + offset * D + d, mask=(b_total > 0) & (d < D), other=0.0)
        row_sum, row_max, acc = row_sum * alpha + b_p * b_total, new_max, acc * alpha + b_p * b_sum
    new_max = tl.max(row_max, 0, keep_dims=True)
    weight = tl.exp(row_max - new_max)
    denominator = tl.sum(row_sum * weight, 0, keep_dims=True)
    is_visible = denominator > 0
    denominator = tl.where(is_visible, denominator, 1.0)
    acc = tl.sum(acc * weight, 0, keep_dims=True) / denominator
    offset = head * rows + r + tl.zeros((1, 1), tl.int32)
    tl.store(out + offset * D + d, acc.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + offset, tl.where(is_visible, new_max + tl.log(denominator), -1e30))


@triton.jit(do_not_specialize=("rows", "slots"))
@no_type_check
def _attention_mass(
    logits,
    lse,
    attention_mass,  # out: float32 (B*Hk, slots)
    rows,
    slots,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention that a block of slots receives: sum over the rows, mean over the query heads."""
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, rows, BLOCK_M):
        r = start + tl.arange(0, BLOCK_M)[:, None]
        offset = head * rows + r
        b_lse = tl.load(lse + offset, mask=r < rows, other=0.0)
        m_s = (r < rows) & (n < slots)[None, :]
        b_s = tl.load(logits + offset * slots + n[None, :], mask=m_s, other=-1e30)
        acc += tl.sum(tl.where(b_s > -1e30, tl.exp(b_s - b_lse), 0.0), 0)
    tl.store(attention_mass + head * slots + n, acc / G, mask=n < slots)


@dataclass(frozen=True)
class Floats:
    """Keys and values that are not quantized, for `attend`.

    Parameters
    ----------
    keys, values : Tensor, (B, Hk, N, D)
    seen : Tensor
        For ``kind`` ``LENGTHS``: (B, Hk), number of valid slots; ``MASK``: bool, (B, Hk, T, N);
        ``ANCESTORS``: int64, (B, Hk, T, words), 64 slots per word.
    bias : Tensor, (B, Hk, N), optional
    """

    keys: Tensor
    values: Tensor
    seen: Tensor
    kind: int
    bias: Tensor | None = None

    def __len__(self) -> int:
        return self.keys.shape[2]


MAX_PROGRAMS = 1024  # of one batch row: about eight for each multiprocessor of a large GPU
MIN_SLOTS = 128  # of a split; their bytes are many times those of the partial result


def count_splits(slots: int, heads: int, rows: int) -> int:
    """Number of splits of ``slots``. Independent of the batch, and so are the results."""
    if not slots or not rows:
        return 0
    min_slots = MIN_SLOTS if rows <= 4 else 2 * MIN_SLOTS
    return max(min(-(-slots // min_slots), MAX_PROGRAMS // (heads * -(-rows // 64))), 1)


def attend(
    name: str,
    query: Tensor,
    pieces: Sequence[Segment | Floats],
    scaling: float | None = None,
    mass_of: Floats | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention over all pieces as one softmax, on Triton; arguments as in `decode_mixed`."""
    floats = [piece for piece in pieces if isinstance(piece, Floats)]
    (batch, query_heads, tokens, dim), heads = query.shape, floats[0].keys.shape[1]
    _check(name, query, pieces, heads)
    rows, flat = query_heads // heads * tokens, batch * heads
    scaling = dim**-0.5 if scaling is None else scaling

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    counts = [count_splits(len(piece), heads, rows) for piece in pieces]
    num_splits = sum(counts)
    # The interpreter truncates to bfloat16 instead of rounding.
    out = empty(*query.shape, dtype=torch.float32 if INTERPRETED else query.dtype)
    lse = empty(batch, query_heads, tokens)
    partial = (
        empty(flat, num_splits, rows),
        empty(flat, num_splits, rows),
        empty(flat, num_splits, rows, dim),
    )
    logits = attention_mass = None
    if mass_of is not None:
        logits, attention_mass = empty(flat, rows, len(mass_of)), empty(batch, heads, len(mass_of))
    if query.numel():
        first_split, query = 0, contiguous_last(query)
        for piece, count in zip(pieces, counts, strict=True):
            if count:
                outputs = (logits if piece is mass_of else None, *partial)
                _launch(query, piece, outputs, scaling, count, num_splits, first_split)
            first_split += count
        join(partial, out, lse)
    if mass_of is not None and attention_mass is not None and attention_mass.numel():
        tile = blocks("decode_mixed", "attention mass", architecture(query.device))
        _attention_mass[triton.cdiv(len(mass_of), tile.sizes["BLOCK_N"]), flat](
            logits,
            lse,
            attention_mass,
            rows,
            len(mass_of),
            G=query_heads // heads,
            **tile.options(),
        )
    return out.to(query.dtype), lse, attention_mass


def join(partial: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    """Reduce the partial results of all splits to one softmax.

    Parameters
    ----------
    partial : Tensor, float32, (B*Hk, splits, G*T), the same, and (B*Hk, splits, G*T, D)
        Largest logit, sum of exponentials, and weighted values, which are read where the sum is
        not zero.
    out : Tensor, (B*Hk, G*T, D) entries
        Written, as is ``lse``, float32, (B*Hk, G*T) entries.
    """
    flat, num_splits, rows, dim = partial[2].shape
    tile = _join_blocks(dim, architecture(out.device))
    _join[rows, flat](*partial, out, lse, num_splits, rows, D=dim, **tile.options())


def _check(name: str, query: Tensor, pieces: Sequence[Segment | Floats], heads: int) -> None:
    (batch, query_heads, _, dim) = query.shape
    check_heads(name, dim)
    if not heads or query_heads % heads:
        raise VLMFastError(f"{name}: {query_heads} query heads cannot share {heads} KV heads")
    dtypes = {query.dtype}
    for piece in pieces:
        if isinstance(piece, Segment):
            shape, leading = (*piece.lengths.shape, len(piece), piece.dim), piece.lengths.shape
        else:
            dtypes |= {piece.keys.dtype, piece.values.dtype}
            shape, leading = piece.keys.shape, piece.values.shape[:2]
        if shape[:2] != (batch, heads) or leading != shape[:2] or shape[3] != dim:
            raise VLMFastError(
                f"{name}: keys {tuple(shape)} for queries {tuple(query.shape)}; it takes "
                f"({batch}, {heads}, slots, {dim}) in all pieces"
            )
    if len(dtypes) > 1 or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise VLMFastError(
            f"{name}: queries, keys and values in {', '.join(sorted(map(str, dtypes)))}; "
            "it takes one of float32, float16 and bfloat16"
        )


def _same_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With equal strides and a contiguous last axis."""
    alike = len({x.stride() for x in tensors}) == 1
    return tuple(contiguous_last(x) if alike else x.contiguous() for x in tensors)


def _launch(
    query: Tensor,
    piece: Segment | Floats,
    outputs: tuple[Tensor | None, ...],
    scaling: float,
    count: int,
    num_splits: int,
    first_split: int,
) -> None:
    """Partial results of a piece, in ``count`` of all splits."""
    (batch, query_heads, tokens, dim), bias = query.shape, piece.bias
    key_parameters: tuple[Tensor | None, ...] = (None, None)
    value_parameters: tuple[Tensor | None, ...] = (None, None)
    if isinstance(piece, Segment):
        keys, values = contiguous_last(piece.key_codes), contiguous_last(piece.value_codes)
        key_parameters = _same_strides(piece.key_step, piece.key_min)
        own: tuple[Tensor, ...] = (piece.value_step, piece.value_min)
        if piece.value_step.shape[-1] == 1:  # the kernels expect neighboring slots
            own = tuple(x.squeeze(-1) for x in own)
        value_parameters = own = _same_strides(*own)
        scale = None if piece.value_scale is None else contiguous_last(piece.value_scale)
        seen, kind = piece.lengths, LENGTHS
        layout = (piece.bits, piece.group, dim // piece.value_step.shape[-1])
    else:
        keys, values = contiguous_last(piece.keys), contiguous_last(piece.values)
        scale = None
        seen, kind, layout = piece.seen, piece.kind, (0, 0, dim)
    heads = keys.shape[1]
    if bias is not None:
        bias = contiguous_last(bias.expand(keys.shape[:3]))
    if seen.dtype == torch.bool:
        seen = seen.view(torch.uint8)

    def strides(x: Tensor | None, axes: int = 3) -> tuple[int, ...]:
        return (0,) * axes if x is None else (*x.stride(), 0, 0)[:axes]

    group = query_heads // heads
    sizes = (query.element_size(), keys.element_size())
    arch = architecture(query.device)
    kernel, flags, tile = _configure(arch, group, tokens, dim, sizes, layout, kind)
    # The common divisor of all strides decides how many entries a thread loads at once.
    flags["ALIGN"] = math.gcd(16, *keys.stride()[:3], *values.stride()[:3])
    if isinstance(piece, Segment):
        flags["WORD"] = _word(layout, tile.sizes.get("ROWS", 2), dim, len(piece), *own)
    kernel[count, batch * heads, triton.cdiv(group * tokens, tile.sizes.get("BLOCK_M", 1))](
        query,
        keys,
        *key_parameters,
        values,
        *value_parameters,
        scale,
        bias,
        seen,
        *outputs,
        strides(query),
        strides(keys),
        strides(key_parameters[0]),
        strides(values),
        strides(value_parameters[0]),
        strides(scale, 2),
        strides(bias, 2),
        strides(seen, 4),
        scaling,
        heads,
        tokens,
        len(piece),
        num_splits,
        first_split,
        SEEN=kind,
        UPCAST=upcast(query),
        **flags,
        **tile.options(),
    )


def _word(
    layout: tuple[int, int, int], rows: int, dim: int, slots: int, *parameters: Tensor
) -> int:
    """Value parameters that one load reads: 4 or 2 neighbors in 16 bits each, where aligned, or 1.

    They belong to one slot, or to ``rows`` slots if all channels of a slot share them.
    """
    if any(x.element_size() != 2 for x in parameters):
        return 1
    places = [
        place for x in parameters for place in (*x.stride()[: x.dim() - 1], x.storage_offset())
    ]
    _, key_group, each = layout
    run = dim // each if each < dim else math.gcd(rows, key_group, slots)
    return math.gcd(4, run, *places)


def _configure(
    arch: int,
    group: int,
    tokens: int,
    dim: int,
    sizes: tuple[int, int],
    layout: tuple[int, int, int],
    seen: int,
) -> tuple[Any, dict[str, int], Blocks]:
    """Kernel, compile-time parameters and blocks; ``sizes``: bytes of entries of q and k."""
    bits, slots, each = layout  # slots in a key group
    stored = dim * bits // 8 if bits else dim
    block = padded(stored)
    flags = {
        "G": group,
        "D": dim,
        "BITS": bits,
        "KEY_GROUP": slots,
        "VALUE_GROUP": each,
        "WORD": 1,
        "BLOCK_D": block,
    }
    if group * tokens == 1:
        # A thread loads 16 bytes of a slot; with many channels it would run out of registers.
        rows = (2 if each == dim else 1) if bits == 2 else 2 if stored > each else 4
        rows = min(rows, slots & -slots) if slots else rows
        tile = blocks("decode_mixed", "one row", arch)
        slots_at_once = min(max(tile.sizes["bytes"] // (block * sizes[1]), 1), tile.sizes["slots"])
        return _attend_one, flags, replace(tile, sizes={"ROWS": rows, "BLOCK_N": slots_at_once})
    # Smaller tiles where larger ones do not fit into registers; float32 has no tensor cores.
    # Hopper's tensor cores multiply 64 rows at a time; 32 rows need more registers than 64.
    rows = 64 if sizes[0] == 2 and group * tokens > 16 else 16
    narrow = sizes[0] > 2 or block * sizes[1] > 256 or block > stored
    narrow = narrow or (seen == MASK and rows > 16)
    condition = f"{rows} rows, {'narrow' if narrow else 'codes' if bits else 'floats'}"
    tile = blocks("decode_mixed", condition, arch)
    if slots:
        tile = tile.resized(BLOCK_N=min(padded(slots), tile.sizes["BLOCK_N"]))
    return _attend, flags, tile


def _join_blocks(dim: int, arch: int) -> Blocks:
    tile = blocks("decode_mixed", "join", arch)
    return replace(
        tile, sizes={"BLOCK_D": padded(dim), "BLOCK_S": tile.sizes["entries"] // padded(dim)}
    )


def variant(
    arch: int,
    kind: str,
    dim: int,
    group: int,
    tokens: int,
    layout: tuple[int, int, int] | None = None,
    seen: int = LENGTHS,
    attention_mass: bool = False,
) -> Variant:
    """The variant that `_launch` would compile."""
    bits, slots, each = layout or (0, 0, dim)
    kernel, flags, tile = _configure(
        arch, group, tokens, dim, (2, 1 if bits else 2), (bits, slots, each), seen
    )
    align = math.gcd(16, dim * bits // 8 if bits else dim)
    if bits:  # of capacities, which are multiples of 4
        flags["WORD"] = math.gcd(
            4, *((tile.sizes.get("ROWS", 2), slots) if each == dim else (dim // each,))
        )
    types: dict[str, Any] = {
        "query": f"*{kind}",
        **dict.fromkeys(("keys", "values"), "*u8" if bits else f"*{kind}"),
        **dict.fromkeys(("key_step", "key_min", "value_step", "value_min", "scale"), "*fp16"),
        **dict.fromkeys(("bias", "logits", "largest", "total", "sums"), "*fp32"),
        "seen": "*u8" if seen == MASK else "*i64",
        **dict.fromkeys(("stride_query", "stride_key_step"), ("i32:16",) * 3),
        **dict.fromkeys(("stride_keys", "stride_values"), ("i32" if align < 16 else "i32:16",) * 3),
        "stride_value_step": ("i32",) * 3,
        **dict.fromkeys(("stride_scale", "stride_bias"), ("i32:16",) * 2),
        "stride_seen": ("i32",) * 4,
        "scaling": "fp32",
        **dict.fromkeys(("heads", "tokens", "slots", "num_splits", "first_split"), "i32"),
    }
    absent = [] if seen == MASK else ["bias"]
    absent += [] if attention_mass else ["logits"]
    absent += ["scale"] if slots else []
    absent += [] if bits else ["key_step", "key_min", "value_step", "value_min", "scale"]
    constants = {**flags, "ALIGN": align, "SEEN": seen, "UPCAST": False, **dict.fromkeys(absent)}
    return tile.variant(kernel, types, constants)


def _join_variant(arch: int, kind: str, dim: int) -> Variant:
    pointers = {
        **dict.fromkeys(("largest", "total", "sums", "lse"), "*fp32"),
        "out": f"*{kind}",
        "num_splits": "i32",
        "rows": "i32",
    }
    return _join_blocks(dim, arch).variant(_join, pointers, {"D": dim})


_ONE, _FOUR, _CHAIN = (1, 1), (4, 1), (4, 26)  # query heads per KV head, and tokens


def variants(arch: int) -> list[Variant]:
    """What launches compile on an architecture."""
    types = {
        **dict.fromkeys(("logits", "lse", "attention_mass"), "*fp32"),
        **dict.fromkeys(("rows", "slots"), "i32"),
    }
    return [
        *(
            variant(arch, "bf16", 128, *queries, layout, *seen)
            for queries in (_ONE, _FOUR)
            for layout, seen in (
                ((4, 0, 128), ()),
                ((2, 0, 128), ()),
                ((8, 0, 128), ()),
                ((4, 32, 32), ()),
                ((2, 32, 32), ()),
                (None, ()),
                (None, (MASK,)),
                (None, (MASK, True)),
            )
        ),
        # A chain of drafted tokens, over a tail that may be ragged.
        *(
            variant(arch, "bf16", dim, *_CHAIN, None, MASK, attention_mass)
            for dim in (80, 128)
            for attention_mass in (False, True)
        ),
        *(
            variant(arch, "fp16", dim, *queries, layout, *seen)
            for queries, dim in ((_ONE, 64), (_FOUR, 80), (_ONE, 96))
            for layout, seen in (((4, 0, dim), ()), ((2, 0, dim), ()), (None, (MASK,)))
        ),
        *(_join_variant(arch, "bf16", dim) for dim in (80, 128)),
        blocks("decode_mixed", "attention mass", arch).variant(_attention_mass, types, {"G": 4}),
    ]
