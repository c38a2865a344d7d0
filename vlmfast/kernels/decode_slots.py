"""``decode_slots``: attention of one token per row over lists of slots of a cache.

Each KV head of each row has a list of slots, and reads these and every slot of one range, the
newest ones: the keys are one virtual row, ``[listed..., start ... end - 1]``. It is divided into
splits as in `decode_mixed`, whose last kernel reduces them. A program loads the indices of a tile,
then the keys and values at these indices: nothing is gathered to memory. The query heads of a KV
head are the rows of a tile, padded to 16 for the tensor cores.

Bytes: 8 per listed slot for its index; its key and value, whatever the number of query heads. A
slot of D=128 in half precision is 512 contiguous bytes of key and value, so that a list in any
order reads whole sectors. Floor: for 294 of 2,944 slots of 32 heads, 1.1 us as bfloat16 at
4.3 TB/s, where all slots take 11.2 us. PyTorch's gather writes and reads these bytes once more.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._blocks import Blocks, architecture, blocks
from ._decode_mixed import head_base, tile_range
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
from .decode_mixed import check_dtypes, count_splits, decode_mixed_ref, join


def decode_slots(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    counts: Tensor,
    start: Tensor,
    end: Tensor,
    newest: int,
    scaling: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query row per head over listed slots and a range of slots.

    Parameters
    ----------
    query : Tensor, (B, Hq, 1, D)
    keys, values : Tensor, (B, Hk, N, D)
        Shared by ``Hq // Hk`` query heads each. Slots that are not read may hold any values.
    slots : Tensor, int64, (B, Hk, K)
        Indices of slots, in any order.
    counts : Tensor, int64, (B, Hk)
        How many of the K each head reads, the first ones; the others may be any numbers.
    start, end : Tensor, int64, (B, Hk)
        Each head also reads the slots from ``start`` to ``end - 1``; none where ``end <= start``.
    newest : int
        The largest ``end - start`` of all heads, or more.
    scaling : float, optional
        ``D ** -0.5`` by default.
    bias : Tensor, float32, (B, Hk, N), optional
        Added to the logits of each key.

    Returns
    -------
    out : Tensor, (B, Hq, 1, D)
        In the query's dtype; zeros for a row that reads nothing.
    lse : Tensor, float32, (B, Hq, 1)
        Natural logarithm of the sum of exponentiated logits; -1e30 for a row that reads nothing.

    Raises
    ------
    VLMFastError
        For shapes that do not belong together; on Triton also for unsupported sizes and dtypes.
    """
    _check(query, keys, values, slots, (counts, start, end))
    given = query, keys, values, slots, counts, start, end
    if not use_triton("decode_slots", *given, bias):
        return decode_slots_ref(*given, newest, scaling, bias)
    return _launch(*given, newest, scaling, bias)


def decode_slots_ref(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    counts: Tensor,
    start: Tensor,
    end: Tensor,
    newest: int,
    scaling: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`decode_slots` in plain PyTorch: gathered keys and values are one tail of `decode_mixed`."""
    at, mask = gathered(slots, counts, start, end, newest)
    tail = keys[at], values[at], mask[:, :, None]
    own = None if bias is None else bias[at]
    return decode_mixed_ref(query, [], *tail, scaling, own)[:2]


def gathered(
    slots: Tensor, counts: Tensor, start: Tensor, end: Tensor, newest: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Index (B, Hk, M) of all slots that are read, in one list, and which of the M are valid."""
    steps = torch.arange(newest, device=slots.device)
    listed = torch.arange(slots.shape[2], device=slots.device) < counts[..., None]
    new = start[..., None] + steps
    mask = torch.cat([listed, new < end[..., None]], 2)
    index = torch.cat([slots, new], 2).masked_fill(~mask, 0)
    rows, heads = (torch.arange(n, device=slots.device) for n in index.shape[:2])
    return (rows[:, None, None], heads[:, None], index), mask


def _check(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, numbers: tuple[Tensor, ...]
) -> None:
    (batch, query_heads, tokens, dim), heads = query.shape, keys.shape[1]
    if tokens != 1 or not heads or query_heads % heads:
        raise VLMFastError(
            f"decode_slots: queries {tuple(query.shape)} for {heads} KV heads; it takes one token "
            "per row, and the same number of query heads for each KV head"
        )
    if keys.shape != values.shape or (len(keys), keys.shape[3]) != (batch, dim):
        raise VLMFastError(
            f"decode_slots: keys {tuple(keys.shape)} and values {tuple(values.shape)} for queries "
            f"{tuple(query.shape)}; it takes ({batch}, {heads}, slots, {dim})"
        )
    shapes = {tuple(x.shape) for x in numbers} | {tuple(slots.shape[:2])}
    dtypes = {x.dtype for x in (slots, *numbers)}
    if shapes != {(batch, heads)} or slots.dim() != 3 or dtypes != {torch.int64}:
        raise VLMFastError(
            f"decode_slots: slots {tuple(slots.shape)} with numbers "
            f"{', '.join(str(tuple(x.shape)) for x in numbers)}; it takes int64, "
            f"({batch}, {heads}, any) and ({batch}, {heads})"
        )


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("num_splits",))
@no_type_check
def _attend_list(
    query,
    keys,
    values,
    slots,
    counts,  # int64 (B*Hk,), as `start` and `end`
    start,
    end,
    bias,
    largest,  # out: float32 (B*Hk, splits, G)
    total,  # out: the same
    sums,  # out: float32 (B*Hk, splits, G, D); only where `total` is not zero
    stride_query,  # tuples: batch, head
    stride_keys,  # batch, head, slot
    stride_values,
    stride_slots,
    stride_bias,
    scaling,
    heads,
    num_splits,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of the slots of a KV head, for BLOCK_M of its query heads."""
    OPERAND: tl.constexpr = tl.float32 if UPCAST else query.dtype.element_ty
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    g = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    m_g = g < G  # [BM, 1]
    c = tl.arange(0, BLOCK_D)[None, :]
    m_c = c < D  # [1, BD]
    p_q = query + b * stride_query[0] + (h * G + g) * stride_query[1] + c
    b_q = tl.load(p_q, mask=m_g & m_c, other=0.0).to(OPERAND)  # [BM, BD]
    p_k, next_key = head_base(keys, stride_keys, b, h, ALIGN)
    p_v, next_value = head_base(values, stride_values, b, h, ALIGN)
    p_slots = slots + (b * stride_slots[0] + h * stride_slots[1])
    if bias is not None:
        p_bias = bias + (b * stride_bias[0] + h * stride_bias[1])
    listed, first_new = tl.load(counts + head), tl.load(start + head)
    visible = listed + tl.maximum(tl.load(end + head) - first_new, 0)

    row_max = tl.full((BLOCK_M, 1), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M, 1), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first, last = tile_range(tl.cdiv(visible, BLOCK_N).to(tl.int32))
    for tile in range(first, last):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        b_slot = tl.load(p_slots + n * stride_slots[2], mask=n < listed, other=0)  # [BN]
        b_slot = tl.where(n < listed, b_slot, first_new + n - listed)
        m_n = n < visible
        m_kv = m_n[:, None] & m_c
        b_k = tl.load(p_k + (b_slot * next_key)[:, None] + c, mask=m_kv, other=0)  # [BN, BD]
        b_v = tl.load(p_v + (b_slot * next_value)[:, None] + c, mask=m_kv, other=0)
        b_s = tl.dot(b_q, tl.trans(b_k.to(OPERAND)), input_precision="ieee") * scaling  # [BM, BN]
        if bias is not None:
            b_s += tl.load(p_bias + b_slot, mask=m_n, other=0.0).to(tl.float32)[None, :]
        m_s = m_n[None, :] & (b_s > -1e30)
        b_s = tl.where(m_s, b_s, -1e30)
        new_max = tl.maximum(row_max, tl.max(b_s, 1, keep_dims=True))
        b_p = tl.where(m_s, tl.exp(b_s - new_max), 0.0)
        alpha = tl.exp(row_max - new_max)  # [BM, 1]
        row_sum, row_max = row_sum * alpha + tl.sum(b_p, 1, keep_dims=True), new_max
        acc = tl.dot(b_p.to(OPERAND), b_v.to(OPERAND), acc * alpha, input_precision="ieee")
    offset = (head.to(tl.int64) * num_splits + tl.program_id(0)) * G + g
    tl.store(largest + offset, row_max, mask=m_g)
    tl.store(total + offset, row_sum, mask=m_g)
    if last > first:
        tl.store(sums + offset * D + c, acc, mask=m_g & m_c)


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    counts: Tensor,
    start: Tensor,
    end: Tensor,
    newest: int,
    scaling: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (batch, query_heads, _, dim), heads = query.shape, keys.shape[1]
    check_heads("decode_slots", dim)
    check_dtypes("decode_slots", {query.dtype, keys.dtype, values.dtype})
    group, flat, device = query_heads // heads, batch * heads, query.device
    num_splits = max(count_splits(slots.shape[2] + newest, heads, group), 1)
    # The interpreter truncates to bfloat16 instead of rounding.
    wide = torch.float32 if INTERPRETED else query.dtype
    out = torch.empty(query.shape, dtype=wide, device=device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=device)
    sizes = flat, num_splits, group
    largest, total = (torch.empty(sizes, dtype=torch.float32, device=device) for _ in range(2))
    sums = torch.empty((*sizes, dim), dtype=torch.float32, device=device)
    if not query.numel():
        return out.to(query.dtype), lse
    query, keys, values = (contiguous_last(x) for x in (query, keys, values))
    if bias is not None:
        bias = contiguous_last(bias.expand(keys.shape[:3]))
    arch = architecture(device)
    tile = _tile(arch, dim, query.element_size())
    _attend_list[num_splits, flat, triton.cdiv(group, tile.sizes["BLOCK_M"])](
        query,
        keys,
        values,
        slots,
        *(x.contiguous() for x in (counts, start, end)),
        bias,
        largest,
        total,
        sums,
        query.stride()[:2],
        keys.stride()[:3],
        values.stride()[:3],
        slots.stride(),
        (0, 0) if bias is None else bias.stride()[:2],
        dim**-0.5 if scaling is None else scaling,
        heads,
        num_splits,
        G=group,
        D=dim,
        # The common divisor of all strides decides how many entries a thread loads at once.
        ALIGN=math.gcd(16, *keys.stride()[:3], *values.stride()[:3]),
        UPCAST=upcast(query),
        **tile.options(),
    )
    join((largest, total, sums), out, lse)
    return out.to(query.dtype), lse


def _tile(arch: int, dim: int, size: int) -> Blocks:
    """Blocks for heads of ``dim`` channels with entries of ``size`` bytes."""
    block = padded(dim)
    narrow = size > 2 or block * size > 256 or block > dim
    return blocks("decode_slots", "narrow" if narrow else "wide", arch).resized(BLOCK_D=block)


def variants(arch: int) -> list[Variant]:
    """What launches compile on an architecture."""
    found = []
    for kind, dim, group, biased in (
        ("bf16", 128, 1, False),
        ("bf16", 128, 4, True),
        ("bf16", 64, 7, False),
        ("fp16", 80, 4, False),
        ("fp32", 128, 7, True),
    ):
        types: dict[str, Any] = {
            **dict.fromkeys(("query", "keys", "values"), f"*{kind}"),
            **dict.fromkeys(("slots", "counts", "start", "end"), "*i64"),
            **dict.fromkeys(("bias", "largest", "total", "sums"), "*fp32"),
            "stride_query": ("i32:16",) * 2,
            **dict.fromkeys(("stride_keys", "stride_values"), ("i32:16",) * 3),
            "stride_slots": ("i32",) * 3,
            "stride_bias": ("i32:16",) * 2,
            "scaling": "fp32",
            **dict.fromkeys(("heads", "num_splits"), "i32"),
        }
        constants = {"G": group, "D": dim, "ALIGN": 16, "UPCAST": kind == "fp32"}
        absent = {} if biased else {"bias": None}
        tile = _tile(arch, dim, 4 if kind == "fp32" else 2)
        found.append(tile.variant(_attend_list, types, {**constants, **absent}))
    return found
