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

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._blocks import Blocks, architecture, blocks
from ._decode_mixed import (
    LENGTHS,
    MASK,
    attend_row,
    attend_rows,
    join_splits,
    sum_mass,
)
from ._triton import (
    INTERPRETED,
    Variant,
    check_heads,
    contiguous_last,
    padded,
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
    given = tail_keys, tail_values, tail_mask
    quantized = [x for segment in segments for x in segment.tensors()]
    if not use_triton("decode_mixed", query, *given, tail_bias, *quantized):
        more = scaling, tail_bias, want_attention_mass
        return decode_mixed_ref(query, segments, *given, *more)
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
        sum_mass[triton.cdiv(len(mass_of), tile.sizes["BLOCK_N"]), flat](
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
    join_splits[rows, flat](*partial, out, lse, num_splits, rows, D=dim, **tile.options())


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
    check_dtypes(name, dtypes)


def check_dtypes(name: str, dtypes: set[torch.dtype]) -> None:
    """Check that queries, keys and values have one dtype, which the kernels support."""
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
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
        return attend_row, flags, replace(tile, sizes={"ROWS": rows, "BLOCK_N": slots_at_once})
    # Smaller tiles where larger ones do not fit into registers; float32 has no tensor cores.
    # Hopper's tensor cores multiply 64 rows at a time; 32 rows need more registers than 64.
    rows = 64 if sizes[0] == 2 and group * tokens > 16 else 16
    narrow = sizes[0] > 2 or block * sizes[1] > 256 or block > stored
    narrow = narrow or (seen == MASK and rows > 16)
    condition = f"{rows} rows, {'narrow' if narrow else 'codes' if bits else 'floats'}"
    tile = blocks("decode_mixed", condition, arch)
    if slots:
        tile = tile.resized(BLOCK_N=min(padded(slots), tile.sizes["BLOCK_N"]))
    return attend_rows, flags, tile


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
    return _join_blocks(dim, arch).variant(join_splits, pointers, {"D": dim})


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
        blocks("decode_mixed", "attention mass", arch).variant(sum_mass, types, {"G": 4}),
    ]
