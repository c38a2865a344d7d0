"""Triton kernels of `decode_mixed`; its docstring describes them."""

# ruff: noqa: RUF005 - Triton joins tuples with + alone

from __future__ import annotations

from typing import no_type_check

from ._triton import tl, triton

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
def attend_row(
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
def attend_rows(
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
    """One split of a piece for BLOCK_M query rows, on the tensor cores; arguments of `attend_row`.

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
def join_splits(
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
def sum_mass(
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
