"""``decode_mixed``: attention over quantised segments and a float tail, as one softmax.

The keys of a KV head are one virtual row, ``[segments..., tail]``. A kernel per piece cuts the
piece into splits: programs (split, batch row and KV head, block of query rows) that each go over
their share of the slots *that exist* (lengths are read on the device) and leave the largest logit,
the sum of exponentials and the weighted values. A last kernel joins the splits of all pieces. The
number of splits follows from shapes alone, so nothing waits for the device, a captured graph stays
valid while lengths grow, and sums are always made in the same order.

Query heads that share a KV head are rows of one tile, padded to 16 for the tensor cores. One row
alone (one token, one query head per KV head) has kernels without them: each slot of a tile then
keeps its own running softmax and nothing is exchanged between threads before the end.

Codes are used as they are. With ``k = code step + min``, ``q k`` is ``(q step) code + q min``: the
query is scaled once for all slots that share parameters. It is then divided by its largest
magnitude, so that no step is lost in half precision. Half-split bytes give whole parts of the
channels, each of which is one more dot product. The scale of value channels is applied to sums.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import INTERPRETED, Variant, check_heads, padded, tl, triton, upcast, use_triton
from .quantize_kv import Segment

NOTHING = -1e30  # logit of what is not there; finite, so that a row that sees nothing is not NaN


def decode_mixed(
    query: Tensor,
    segments: Sequence[Segment],
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_mask: Tensor,
    scaling: float | None = None,
    tail_bias: Tensor | None = None,
    want_mass: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of a few query rows over ``[segments..., tail]``.

    Parameters
    ----------
    query : Tensor, (B, Hq, T, D)
    segments : sequence of Segment
        With a batch axis, ``Hk`` heads each. Every row sees all slots within ``lengths``; what
        lies beyond them is never read into a result, whatever it holds.
    tail_keys, tail_values : Tensor, (B, Hk, cap, D)
        Shared by ``Hq // Hk`` query heads each.
    tail_mask : Tensor, bool, (B, Hk, T, cap) or what expands to it
        Which slots of the tail a row sees. A slot that no row sees may hold anything.
    scaling : float, optional
        ``D ** -0.5`` by default.
    tail_bias : Tensor, float32, (B, Hk, cap), optional
        Added to the logits of each key of the tail.
    want_mass : bool
        Whether ``mass`` is returned.

    Returns
    -------
    out : Tensor, (B, Hq, T, D)
        In the query's dtype; zeros for a row that sees nothing.
    lse : Tensor, float32, (B, Hq, T)
        Natural logarithm of the sum of exponentiated logits; -1e30 for a row that sees nothing.
    mass : Tensor, float32, (B, Hk, cap), or None
        Attention that each slot of the tail receives: sum over the rows, mean over the query heads
        that share it.

    Raises
    ------
    VLMFastError
        For tensors on several devices; on Triton also for what its kernels do not take.
    """
    given = [of for segment in segments for of in segment.tensors()]
    if not use_triton("decode_mixed", query, tail_keys, tail_values, tail_mask, tail_bias, *given):
        return decode_mixed_ref(
            query, segments, tail_keys, tail_values, tail_mask, scaling, tail_bias, want_mass
        )
    rows, (batch, shared, cap) = query.shape[2], tail_keys.shape[:3]
    tail = Floats(
        tail_keys, tail_values, tail_mask.expand(batch, shared, rows, cap), MASK, tail_bias
    )
    return attend("decode_mixed", query, [*segments, tail], scaling, tail if want_mass else None)


def decode_mixed_ref(
    query: Tensor,
    segments: Sequence[Segment],
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_mask: Tensor,
    scaling: float | None = None,
    tail_bias: Tensor | None = None,
    want_mass: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`decode_mixed` in plain PyTorch: each segment is dequantised as it comes."""
    heads, rows, dim = query.shape[1:]
    shared = tail_keys.shape[1]
    inner = torch.promote_types(query.dtype, torch.float32)  # float32, but for float64
    # (B, Hk, G*T, D): the query heads of a KV head become rows, so that no key is repeated.
    q = query.to(inner).unflatten(1, (shared, heads // shared)).flatten(2, 3)
    q = q * (dim**-0.5 if scaling is None else scaling)

    logits, values = [], []
    for segment in segments:
        k, v = segment.dequantise(inner)
        logits.append(_logits(q, k, segment.bias, segment.valid[:, :, None]))
        values.append(_clean(v, segment.valid))
    mask = tail_mask.expand(len(query), shared, -1, -1)
    of_rows = mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads // shared, 1)
    logits.append(_logits(q, tail_keys.to(inner), tail_bias, of_rows))
    values.append(_clean(tail_values.to(inner), mask.any(2)))

    x = torch.cat(logits, -1)
    top = x.amax(-1, keepdim=True)
    # Where a row sees nothing, every logit is the floor and its exponential would be one.
    p = (x - top).exp().masked_fill(x <= NOTHING, 0.0)
    total = p.sum(-1, keepdim=True)
    lse = torch.where(total > 0, top + total.log(), NOTHING)
    p = p / total.masked_fill(total == 0, 1.0)
    parts = p.split([v.shape[2] for v in values], -1)
    out = sum(part @ v for part, v in zip(parts, values, strict=True))
    mass = None
    if want_mass:
        mass = parts[-1].unflatten(2, (-1, rows)).sum(3).mean(2).float()
    return (
        out.view(query.shape).to(query.dtype),
        lse.squeeze(-1).view(query.shape[:-1]).float(),
        mass,
    )


def _logits(q: Tensor, keys: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
    """(B, Hk, G*T, N), at the floor where a row does not see the key."""
    x = q @ keys.transpose(-1, -2)
    if bias is not None:
        x = x + bias[:, :, None]
    return x.masked_fill(~seen, NOTHING)


def _clean(values: Tensor, seen: Tensor) -> Tensor:
    """Zeros in slots that nobody sees: a weight of zero does not undo a NaN."""
    return values.masked_fill(~seen[..., None], 0.0)


# --- Triton --------------------------------------------------------------------------------------

# What a row sees of a piece of floats. Kernels get it as a constant: they cannot read these names.
LENGTHS, MASK, ANCESTORS = 0, 1, 2


@triton.jit
def _share(tiles):
    """First tile of this program's split, and the end of it."""
    size = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.program_id(0) * size
    return first, tl.minimum(first + size, tiles)


@triton.jit
def _first(base, strides, b, h, ALIGN: tl.constexpr):
    """First slot of a head, and the way to the next; Triton itself only sees multiples of 16."""
    base += b * (strides[0] // ALIGN * ALIGN) + h * (strides[1] // ALIGN * ALIGN)
    return base, strides[2] // ALIGN * ALIGN


@triton.jit
def _codes(packed, I: tl.constexpr, BITS: tl.constexpr):
    """Part ``I`` of the codes in a tile of bytes as float32, ``2 ** (I BITS)`` times too large.

    Bits stay where they are; who multiplies with codes anyway divides by that.
    """
    return (packed.to(tl.int32) & (((1 << BITS) - 1) << (I * BITS))).to(tl.float32)


@triton.jit
def _parts(base, inside, scaling, PARTS: tl.constexpr, DB: tl.constexpr):
    """Query rows as a tuple of their parts, float32."""
    out = ()
    for i in tl.static_range(PARTS):
        x = tl.load(base + i * DB, mask=inside, other=0.0).to(tl.float32)
        out = out + (x * scaling,)
    return out


@triton.jit
def _fold(
    q,
    step,
    low,
    inside,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    DB: tl.constexpr,
):
    """Queries to multiply `_codes` with, and what is added: their product with the minima.

    ``step`` and ``low`` point to the parameters of the columns of the first part.
    """
    out = ()
    rest = q[0] * tl.load(low, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(PARTS):
        s = tl.load(step + i * DB, mask=inside, other=0.0).to(tl.float32)
        out = out + (q[i] * (s * (1.0 / (1 << (i * BITS)))),)
        if i > 0:
            rest += q[i] * tl.load(low + i * DB, mask=inside, other=0.0).to(tl.float32)
    return out, tl.sum(rest, 1, keep_dims=True)


@triton.jit
def _operands(a, OPERAND: tl.constexpr, PARTS: tl.constexpr):
    """Query rows for the tensor cores, and what they are divided by: half precision is enough."""
    size = tl.max(tl.abs(a[0]), 1, keep_dims=True)
    for i in tl.static_range(1, PARTS):
        size = tl.maximum(size, tl.max(tl.abs(a[i]), 1, keep_dims=True))
    size = tl.where(size > 0, size, 1.0)
    out = ()
    for i in tl.static_range(PARTS):
        out = out + ((a[i] / size).to(OPERAND),)
    return out, size


@triton.jit
def _of_slots(
    base, c, live, PARTS: tl.constexpr, EACH: tl.constexpr, DB: tl.constexpr, FROM: tl.constexpr
):
    """A parameter that ``EACH`` channels of a slot share: a tuple by part, in columns ``c``.

    ``base`` points to those of each slot. One column where all channels of a part share it. Each
    part is divided by what its `_codes` are too large by: 2 to the part times ``FROM``.
    """
    out = ()
    for i in tl.static_range(PARTS):
        if EACH % DB == 0:
            x = tl.load(base + i * DB // EACH, mask=live, other=0.0).to(tl.float32)
        elif (DB % EACH == 0) & (DB // EACH <= 4):  # choosing one beats reading it per channel
            x = tl.load(base + i * DB // EACH, mask=live, other=0.0).to(tl.float32)
            for g in tl.static_range(1, DB // EACH):
                y = tl.load(base + i * DB // EACH + g, mask=live, other=0.0)
                x = tl.where(c >= g * EACH, y.to(tl.float32), x)
        else:
            x = tl.load(base + (i * DB + c) // EACH, mask=live & (c < DB), other=0.0)
            x = x.to(tl.float32)
        out = out + (x * (1.0 / (1 << (i * FROM))),)
    return out


@triton.jit
def _leave(sums, acc, scale, c, inside, PARTS: tl.constexpr, DB: tl.constexpr):
    """Store weighted sums, times the scale of their channels."""
    for i in tl.static_range(PARTS):
        x = acc[i]
        if scale is not None:
            x = x * tl.load(scale + i * DB + c, mask=c < DB, other=0.0).to(tl.float32)
        tl.store(sums + i * DB + c, x, mask=inside)


@triton.jit(do_not_specialize=("tokens", "slots", "splits", "before"))
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
    splits,  # of all pieces
    before,  # of the pieces before this one
    G: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,  # 0: floats
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    UP: tl.constexpr,
):
    """One split of a piece for one query row: BN softmaxes, which take ``ROWS`` slots of each tile.

    Those slots stand behind each other, in one key group. All is float32.
    """
    PARTS: tl.constexpr = 8 // BITS if BITS else 1
    DB: tl.constexpr = D // PARTS
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    c = tl.arange(0, BD)[None, :]
    query += b * stride_query[0] + h * stride_query[1] + c
    if GROUP == 0:
        q = _parts(query, c < DB, scaling, PARTS, DB)
    keys, next_key = _first(keys, stride_keys, b, h, ALIGN)
    values, next_value = _first(values, stride_values, b, h, ALIGN)
    seen += b * stride_seen[0] + h * stride_seen[1]
    if bias is not None:
        bias += b * stride_bias[0] + h * stride_bias[1]
    if BITS:
        key_step += b * stride_key_step[0] + h * stride_key_step[1] + c
        key_min += b * stride_key_step[0] + h * stride_key_step[1] + c
        value_step += b * stride_value_step[0] + h * stride_value_step[1]
        value_min += b * stride_value_step[0] + h * stride_value_step[1]
        if GROUP == 0:
            a, rest = _fold(q, key_step, key_min, c < DB, PARTS, BITS, DB)

    if SEEN == 0:
        slots = tl.load(seen).to(tl.int32)
    m = tl.full((BN, 1), -1e30, tl.float32)
    l = tl.zeros((BN, 1), tl.float32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros((BN, BD), tl.float32),)
    first, last = _share(tl.cdiv(slots, ROWS * BN))
    for tile in range(first, last):
        start = (tile * BN + tl.arange(0, BN))[:, None] * ROWS
        live, x, some = (), (), start < 0
        for j in tl.static_range(ROWS):
            n = start + j
            see = n < slots
            if SEEN == 1:
                see = see & (tl.load(seen + n * stride_seen[3], mask=see, other=0) != 0)
            if SEEN == 2:
                word = tl.load(seen + n // 64 * stride_seen[3], mask=see, other=0)
                see = see & (((word >> (n % 64).to(tl.int64)) & 1) != 0)
            live, some = live + (see,), some | see
            x = x + (tl.full((BN, 1), -1e30, tl.float32),)
        go = True
        if SEEN == 1:
            go = tl.max(tl.reshape(some.to(tl.int32), [BN]), 0) > 0
        if go:
            if GROUP:
                at = start // GROUP * stride_key_step[2]
                there = (c < DB) & (start < slots)
                q = _parts(query, c < DB, scaling, PARTS, DB)  # again: too much to hold
                a, rest = _fold(q, key_step + at, key_min + at, there, PARTS, BITS, DB)
            x, v, top = (), (), m
            for j in tl.static_range(ROWS):
                n, inside = start + j, live[j] & (c < DB)
                k = tl.load(keys + n * next_key + c, mask=inside, other=0)
                v = v + (tl.load(values + n * next_value + c, mask=inside, other=0),)
                if BITS:
                    y = a[0] * _codes(k, 0, BITS)
                    for i in tl.static_range(1, PARTS):
                        y += a[i] * _codes(k, i, BITS)
                    y = tl.sum(y, 1, keep_dims=True) + rest
                else:
                    y = tl.sum(q[0] * k.to(tl.float32), 1, keep_dims=True)
                if bias is not None:
                    y += tl.load(bias + n, mask=live[j], other=0.0).to(tl.float32)
                y = tl.where(live[j], tl.maximum(y, -1e30), -1e30)
                x, top = x + (y,), tl.maximum(top, y)
            by, m = tl.exp(m - top), top
            l, w, more, steps, lows = l * by, (), (), (), ()
            for j in tl.static_range(ROWS):
                w = w + (tl.where(x[j] > -1e30, tl.exp(x[j] - top), 0.0),)
                l += w[j]
                if BITS:
                    at = (start + j) * stride_value_step[2]
                    steps = steps + (_of_slots(value_step + at, c, live[j], PARTS, EACH, DB, BITS),)
                    lows = lows + (_of_slots(value_min + at, c, live[j], PARTS, EACH, DB, 0),)
            for i in tl.static_range(PARTS):
                y = acc[i] * by
                if BITS:  # minima first: where channels share them, their sum is a single column
                    low = w[0] * lows[0][i]
                    for j in tl.static_range(1, ROWS):
                        low += w[j] * lows[j][i]
                    y += low
                for j in tl.static_range(ROWS):
                    if BITS:
                        y += w[j] * steps[j][i] * _codes(v[j], i, BITS)
                    else:
                        y += w[j] * v[j].to(tl.float32)
                more = more + (y,)
            acc = more
        if logits is not None:
            for j in tl.static_range(ROWS):
                n = start + j
                tl.store(logits + head.to(tl.int64) * slots + n, x[j], mask=n < slots)
    top = tl.max(m, 0, keep_dims=True)
    w = tl.exp(m - top)
    at = head.to(tl.int64) * splits + before + tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    tl.store(largest + at, top)
    tl.store(total + at, tl.sum(l * w, 0, keep_dims=True))
    if last > first:
        out = ()
        for i in tl.static_range(PARTS):
            out = out + (tl.sum(acc[i] * w, 0, keep_dims=True),)
        if scale is not None:
            scale += b * stride_scale[0] + h * stride_scale[1]
        _leave(sums + at * D, out, scale, c, c < DB, PARTS, DB)


@triton.jit(do_not_specialize=("tokens", "slots", "splits", "before"))
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
    splits,
    before,
    G: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    SEEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    UP: tl.constexpr,
):
    """One split of a piece for BM query rows, on the tensor cores; arguments of `_attend_one`.

    Rows are numbered by query head of the KV head, then by token.
    """
    PARTS: tl.constexpr = 8 // BITS if BITS else 1
    DB: tl.constexpr = D // PARTS
    PER: tl.constexpr = (GROUP + BN - 1) // BN  # tiles of a key group
    OPERAND: tl.constexpr = tl.float32 if UP else query.dtype.element_ty
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    r = (tl.program_id(2) * BM + tl.arange(0, BM))[:, None]
    there = r < G * tokens
    c = tl.arange(0, BD)[None, :]
    query += b * stride_query[0]
    row = (h * G + r // tokens) * stride_query[1] + r % tokens * stride_query[2]
    q = _parts(query + row + c, there & (c < DB), 1.0, PARTS, DB)
    keys, next_key = _first(keys, stride_keys, b, h, ALIGN)
    values, next_value = _first(values, stride_values, b, h, ALIGN)
    seen += b * stride_seen[0] + h * stride_seen[1]
    if bias is not None:
        bias += b * stride_bias[0] + h * stride_bias[1]
    if BITS:
        key_step += b * stride_key_step[0] + h * stride_key_step[1] + c
        key_min += b * stride_key_step[0] + h * stride_key_step[1] + c
        value_step += b * stride_value_step[0] + h * stride_value_step[1]
        value_min += b * stride_value_step[0] + h * stride_value_step[1]
        if GROUP == 0:
            a, rest = _fold(q, key_step, key_min, c < DB, PARTS, BITS, DB)
            a, size = _operands(a, OPERAND, PARTS)

    if SEEN == 0:
        slots = tl.load(seen).to(tl.int32)
    m = tl.full((BM, 1), -1e30, tl.float32)
    l = tl.zeros((BM, 1), tl.float32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros((BM, BD), tl.float32),)
    if GROUP:
        first, last = _share(tl.cdiv(slots, GROUP) * PER)
    else:
        first, last = _share(tl.cdiv(slots, BN))
    for tile in range(first, last):
        start, end = tile * BN, slots
        if GROUP:  # a tile never reaches into two groups
            start = tile // PER * GROUP + tile % PER * BN
            end = tl.minimum(tile // PER * GROUP + GROUP, slots)
        n = start + tl.arange(0, BN)
        see, live = there & (n < end)[None, :], (n < end)[:, None]
        go = True
        if SEEN == 1:
            at = r % tokens * stride_seen[2] + (n * stride_seen[3])[None, :]
            see = see & (tl.load(seen + at, mask=see, other=0) != 0)
            used = tl.max(see.to(tl.int32), 0)
            go, live = tl.max(used, 0) > 0, used[:, None] > 0
        if SEEN == 2:
            at = r % tokens * stride_seen[2] + (n // 64 * stride_seen[3])[None, :]
            word = tl.load(seen + at, mask=see, other=0)
            see = see & (((word >> (n % 64).to(tl.int64)[None, :]) & 1) != 0)
        x = tl.full((BM, BN), -1e30, tl.float32)
        if go:
            k = tl.load(keys + (n * next_key)[:, None] + c, mask=live & (c < DB), other=0)
            v = tl.load(values + (n * next_value)[:, None] + c, mask=live & (c < DB), other=0)
            if BITS:
                if GROUP:
                    at = start // GROUP * stride_key_step[2]
                    a, rest = _fold(q, key_step + at, key_min + at, c < DB, PARTS, BITS, DB)
                    a, size = _operands(a, OPERAND, PARTS)
                x = tl.zeros((BM, BN), tl.float32)
                for i in tl.static_range(PARTS):
                    y = tl.trans(_codes(k, i, BITS).to(OPERAND))
                    x = tl.dot(a[i], y, x, input_precision="ieee")
                x = x * size + rest
            else:
                x = tl.dot(q[0].to(OPERAND), tl.trans(k.to(OPERAND)), input_precision="ieee")
            x = x * scaling
            if bias is not None:
                x += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
            see = see & (x > -1e30)
            x = tl.where(see, x, -1e30)
            top = tl.maximum(m, tl.max(x, 1, keep_dims=True))
            p = tl.where(see, tl.exp(x - top), 0.0)
            by = tl.exp(m - top)
            l, m = l * by + tl.sum(p, 1, keep_dims=True), top
            p = p.to(OPERAND)
            if BITS:
                at = (n * stride_value_step[2])[:, None]
                step = _of_slots(value_step + at, c, live, PARTS, EACH, DB, BITS)
                low = _of_slots(value_min + at, c, live, PARTS, EACH, DB, 0)
            more = ()
            for i in tl.static_range(PARTS):
                if BITS:
                    y = (_codes(v, i, BITS) * step[i] + low[i]).to(OPERAND)
                else:
                    y = v.to(OPERAND)
                more = more + (tl.dot(p, y, acc[i] * by, input_precision="ieee"),)
            acc = more
        if logits is not None:
            to = (head.to(tl.int64) * G * tokens + r) * slots + n[None, :]
            tl.store(logits + to, x, mask=there & (n < end)[None, :])
    at = (head.to(tl.int64) * splits + before + tl.program_id(0)) * G * tokens + r
    tl.store(largest + at, m, mask=there)
    tl.store(total + at, l, mask=there)
    if last > first:
        if scale is not None:
            scale += b * stride_scale[0] + h * stride_scale[1]
        _leave(sums + at * D, acc, scale, c, there & (c < DB), PARTS, DB)


@triton.jit(do_not_specialize=("splits", "rows"))
def _join(
    largest,
    total,
    sums,
    out,  # out: (B*Hk, G*T, D)
    lse,  # out: float32 (B*Hk, G*T)
    splits,
    rows,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    """One query row: its splits as one softmax."""
    head, r = tl.program_id(1).to(tl.int64), tl.program_id(0)
    d = tl.arange(0, BD)[None, :]
    m = tl.full((BS, 1), -1e30, tl.float32)
    l = tl.zeros((BS, 1), tl.float32)
    acc = tl.zeros((BS, BD), tl.float32)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)[:, None]
        at = (head * splits + s) * rows + r
        of = tl.load(total + at, mask=s < splits, other=0.0)
        x = tl.load(largest + at, mask=s < splits, other=-1e30)
        top = tl.maximum(m, x)
        p, by = tl.exp(x - top), tl.exp(m - top)
        part = tl.load(sums + at * D + d, mask=(of > 0) & (d < D), other=0.0)
        l, m, acc = l * by + p * of, top, acc * by + p * part
    top = tl.max(m, 0, keep_dims=True)
    w = tl.exp(m - top)
    whole = tl.sum(l * w, 0, keep_dims=True)
    some = whole > 0
    whole = tl.where(some, whole, 1.0)
    acc = tl.sum(acc * w, 0, keep_dims=True) / whole
    at = head * rows + r + tl.zeros((1, 1), tl.int32)
    tl.store(out + at * D + d, acc.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + at, tl.where(some, top + tl.log(whole), -1e30))


@triton.jit(do_not_specialize=("rows", "slots"))
def _mass(
    logits,
    lse,
    mass,  # out: float32 (B*Hk, slots)
    rows,
    slots,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """What a block of slots receives: sum over the rows of each query head, mean over the heads."""
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for start in range(0, rows, BM):
        r = start + tl.arange(0, BM)[:, None]
        at = head * rows + r
        z = tl.load(lse + at, mask=r < rows, other=0.0)
        inside = (r < rows) & (n < slots)[None, :]
        x = tl.load(logits + at * slots + n[None, :], mask=inside, other=-1e30)
        acc += tl.sum(tl.where(x > -1e30, tl.exp(x - z), 0.0), 0)
    tl.store(mass + head * slots + n, acc / G, mask=n < slots)


@dataclass(frozen=True)
class Floats:
    """Keys and values that are not quantised, for `attend`.

    Parameters
    ----------
    keys, values : Tensor, (B, Hk, N, D)
    seen : Tensor
        Of ``kind`` ``LENGTHS``: (B, Hk), how many slots exist; ``MASK``: bool, (B, Hk, T, N);
        ``ANCESTORS``: int64, (B, Hk, T, words), 64 slots to a word.
    bias : Tensor, (B, Hk, N), optional
    """

    keys: Tensor
    values: Tensor
    seen: Tensor
    kind: int
    bias: Tensor | None = None

    def __len__(self) -> int:
        return self.keys.shape[2]


ROOM = 1024  # programs of one row of the batch: some eight for each processor of a large GPU
LEAST = 128  # slots of a split; their bytes are many times those of the partial result


def _splits(slots: int, heads: int, rows: int) -> int:
    """How many programs share the slots. The batch has no part in it, so results neither."""
    if not slots or not rows:
        return 0
    least = LEAST if rows <= 4 else 2 * LEAST
    return max(min(-(-slots // least), ROOM // (heads * -(-rows // 64))), 1)


def attend(
    name: str,
    query: Tensor,
    pieces: Sequence[Segment | Floats],
    scaling: float | None = None,
    mass_of: Floats | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention over all pieces as one softmax, on Triton; arguments as in `decode_mixed`."""
    floats = [piece for piece in pieces if isinstance(piece, Floats)]
    (batch, every, tokens, dim), heads = query.shape, floats[0].keys.shape[1]
    _check(name, query, pieces, heads)
    rows, flat = every // heads * tokens, batch * heads
    scaling = dim**-0.5 if scaling is None else scaling

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    counts = [_splits(len(piece), heads, rows) for piece in pieces]
    splits = sum(counts)
    # The interpreter cuts numbers off where it should round them to bfloat16.
    out = make(*query.shape, dtype=torch.float32 if INTERPRETED else query.dtype)
    lse = make(batch, every, tokens)
    partial = (make(flat, splits, rows), make(flat, splits, rows), make(flat, splits, rows, dim))
    logits = mass = None
    if mass_of is not None:
        logits, mass = make(flat, rows, len(mass_of)), make(batch, heads, len(mass_of))
    if query.numel():
        before, query = 0, _inner(query)
        for piece, count in zip(pieces, counts, strict=True):
            if count:
                outputs = (logits if piece is mass_of else None, *partial)
                _launch(query, piece, outputs, scaling, count, splits, before)
            before += count
        block = padded(dim)
        _join[rows, flat](*partial, out, lse, splits, rows, D=dim, BD=block, BS=2048 // block)
    if mass is not None and mass.numel():
        _mass[triton.cdiv(len(mass_of), 128), flat](
            logits, lse, mass, rows, len(mass_of), G=every // heads, BM=8, BN=128
        )
    return out.to(query.dtype), lse, mass


def _check(name: str, query: Tensor, pieces: Sequence[Segment | Floats], heads: int) -> None:
    (batch, every, _, dim) = query.shape
    check_heads(name, dim)
    if not heads or every % heads:
        raise VLMFastError(f"{name}: {every} query heads cannot share {heads} KV heads")
    dtypes = {query.dtype}
    for of in pieces:
        if isinstance(of, Segment):
            shape, own = (*of.lengths.shape, len(of), of.dim), of.lengths.shape
        else:
            dtypes |= {of.keys.dtype, of.values.dtype}
            shape, own = of.keys.shape, of.values.shape[:2]
        if shape[:2] != (batch, heads) or own != shape[:2] or shape[3] != dim:
            raise VLMFastError(
                f"{name}: keys {tuple(shape)} for queries {tuple(query.shape)}; it takes "
                f"({batch}, {heads}, slots, {dim}) in all pieces"
            )
    if len(dtypes) > 1 or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise VLMFastError(
            f"{name}: queries, keys and values in {', '.join(sorted(map(str, dtypes)))}; "
            "it takes one of float32, float16 and bfloat16"
        )


def _inner(x: Tensor) -> Tensor:
    """With its last axis in one piece, as kernels take it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With equal strides, and their last axis in one piece."""
    alike = len({x.stride() for x in tensors}) == 1
    return tuple(_inner(x) if alike else x.contiguous() for x in tensors)


def _launch(
    query: Tensor,
    piece: Segment | Floats,
    outputs: tuple[Tensor | None, ...],
    scaling: float,
    count: int,
    splits: int,
    before: int,
) -> None:
    """Partial results of a piece, in ``count`` of all splits."""
    (batch, every, tokens, dim), bias = query.shape, piece.bias
    none = (None, None)
    if isinstance(piece, Segment):
        keys, values = _inner(piece.key_codes), _inner(piece.value_codes)
        key_parameters = _alike(piece.key_step, piece.key_min)
        value_parameters = _alike(piece.value_step, piece.value_min)
        scale = None if piece.value_scale is None else _inner(piece.value_scale)
        seen, kind = piece.lengths, LENGTHS
        layout = (piece.bits, piece.group, dim // piece.value_step.shape[-1])
    else:
        keys, values = _inner(piece.keys), _inner(piece.values)
        key_parameters, value_parameters, scale = none, none, None
        seen, kind, layout = piece.seen, piece.kind, (0, 0, dim)
    heads = keys.shape[1]
    if bias is not None:
        bias = _inner(bias.expand(keys.shape[:3]))
    if seen.dtype == torch.bool:
        seen = seen.view(torch.uint8)

    def strides(x: Tensor | None, axes: int = 3) -> tuple[int, ...]:
        return (0,) * axes if x is None else (*x.stride(), 0, 0)[:axes]

    group = every // heads
    sizes = (query.element_size(), keys.element_size())
    kernel, flags, warps, stages = _choose(group, tokens, dim, sizes, layout, kind)
    # What all strides are multiples of is how much a thread reads at once.
    flags["ALIGN"] = math.gcd(16, *keys.stride()[:3], *values.stride()[:3])
    kernel[count, batch * heads, triton.cdiv(group * tokens, flags.get("BM", 1))](
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
        splits,
        before,
        SEEN=kind,
        UP=upcast(query),
        **flags,
        num_warps=warps,
        num_stages=stages,
    )


def _choose(
    group: int,
    tokens: int,
    dim: int,
    sizes: tuple[int, int],
    layout: tuple[int, int, int],
    seen: int,
) -> tuple[Any, dict[str, int], int, int]:
    """Kernel, compile-time parameters, warps and stages; ``sizes``: bytes of entries of q and k."""
    bits, slots, each = layout  # slots in a key group
    stored = dim * bits // 8 if bits else dim
    block = padded(stored)
    flags = {"G": group, "D": dim, "BITS": bits, "GROUP": slots, "EACH": each, "BD": block}
    if group * tokens == 1:
        # A thread has 16 bytes of a slot. It gives up on registers where it has many channels.
        rows = 1 if bits == 2 else 2 if stored > each else 4
        rows = min(rows, slots & -slots) if slots else rows
        flags |= {"ROWS": rows, "BN": min(max(2048 // (block * sizes[1]), 1), 128)}
        return _attend_one, flags, 4, 2
    # Smaller tiles for what would not fit into registers; float32 is made of single products.
    # Hopper's tensor cores multiply 64 rows at a time; 32 take more registers than these.
    rows = 64 if sizes[0] == 2 and group * tokens > 16 else 16
    narrow = sizes[0] > 2 or block * sizes[1] > 256 or block > stored
    tile = 32 if narrow or (seen == MASK and rows > 16) else 64
    flags |= {"BM": rows, "BN": min(padded(slots), tile) if slots else tile}
    return _attend, flags, 8 if rows > 16 else 4, 3 if bits and block == stored else 2


def variant(
    kind: str,
    dim: int,
    group: int,
    tokens: int,
    layout: tuple[int, int, int] | None = None,
    seen: int = LENGTHS,
    mass: bool = False,
) -> Variant:
    """What `_launch` would ask for."""
    bits, slots, each = layout or (0, 0, dim)
    kernel, flags, warps, stages = _choose(
        group, tokens, dim, (2, 1 if bits else 2), (bits, slots, each), seen
    )
    align = math.gcd(16, dim * bits // 8 if bits else dim)
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
        **dict.fromkeys(("heads", "tokens", "slots", "splits", "before"), "i32"),
    }
    absent = [] if seen == MASK else ["bias"]
    absent += [] if mass else ["logits"]
    absent += ["scale"] if slots else []
    absent += [] if bits else ["key_step", "key_min", "value_step", "value_min", "scale"]
    constants = {**flags, "ALIGN": align, "SEEN": seen, "UP": False, **dict.fromkeys(absent)}
    return Variant(kernel, types, constants, warps, stages)


def _joining(kind: str, dim: int) -> Variant:
    pointers = {
        **dict.fromkeys(("largest", "total", "sums", "lse"), "*fp32"),
        "out": f"*{kind}",
        "splits": "i32",
        "rows": "i32",
    }
    return Variant(_join, pointers, {"D": dim, "BD": padded(dim), "BS": 2048 // padded(dim)})


# Query heads per KV head, and tokens.
_ONE, _FOUR, _CHAIN = (1, 1), (4, 1), (4, 26)
VARIANTS = [
    *(
        variant("bf16", 128, *queries, layout, *seen)
        for queries in (_ONE, _FOUR)
        for layout, seen in (
            ((4, 0, 128), ()),
            ((2, 0, 128), ()),
            ((8, 0, 128), ()),
            ((2, 32, 32), ()),
            (None, (MASK,)),
            (None, (MASK, True)),
        )
    ),
    # A chain of drafted tokens, over a tail that may be ragged.
    *(
        variant("bf16", dim, *_CHAIN, None, MASK, mass)
        for dim in (80, 128)
        for mass in (False, True)
    ),
    *(
        variant("fp16", dim, *queries, layout, *seen)
        for queries, dim in ((_ONE, 64), (_FOUR, 80), (_ONE, 96))
        for layout, seen in (((4, 0, dim), ()), ((2, 0, dim), ()), (None, (MASK,)))
    ),
    *(_joining("bf16", dim) for dim in (80, 128)),
    Variant(
        _mass,
        {**dict.fromkeys(("logits", "lse", "mass"), "*fp32"), "rows": "i32", "slots": "i32"},
        {"G": 4, "BM": 8, "BN": 128},
    ),
]
