"""Replays the stored quantizer cases: KIVI, ZipCache and attention over mixed segments."""

from __future__ import annotations

import torch
from torch import Tensor

from support.closeness import close, tolerance
from support.golden.case import Reader, coarsest
from vlmfast.compressors.cache.kivi import Kivi
from vlmfast.compressors.cache.zipcache import ZipCache, least_salient, saliency
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.col_stats import col_stats
from vlmfast.kernels.decode_mixed import decode_mixed
from vlmfast.kernels.quantize_kv import (
    Segment,
    channel_scale,
    dequantize_keys,
    dequantize_values,
    pack,
    quantize_keys,
    quantize_values,
    unpack,
)

FLOAT = torch.float32
PAIR = ("scale", "min")
STEP = 3  # operations up to a step, and between a number, its code and its dequantized value


# --- what the references store -------------------------------------------------------------------


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes in int32 words along ``dim``, the first of each run in the lowest bits."""
    runs = codes.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)).long()
    packed = (runs << torch.arange(0, 32, bits)).sum(-1)
    return packed.to(torch.int32).movedim(-1, dim)


def from_texts(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse of `words`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (
        ((packed.movedim(dim, -1)[..., None] >> shifts) & (2**bits - 1))
        .flatten(-2)
        .movedim(-1, dim)
    )


def unrounded(x: Tensor, step: Tensor, minimum: Tensor) -> Tensor:
    """Codes of ``x`` before rounding; each step and minimum covers as many of ``x`` as fit."""
    x, step, minimum = x.double(), step.double(), minimum.double()
    for dim in (-2, -1):
        times = x.shape[dim] // step.shape[dim]
        step, minimum = (of.repeat_interleave(times, dim) for of in (step, minimum))
    return (x - minimum) / step


def agree(
    ours: Tensor,
    stored: Tensor,
    bits: int,
    codes: Tensor,
    dtype: torch.dtype,
    theirs: Tensor | None = None,
) -> Tensor:
    """Both are the `unrounded` ``codes``, rounded to the nearest. Returns where they are equal.

    The references compute in ``dtype``, which determines how far around a half a tie reaches.
    ``theirs`` are the unrounded codes by their own steps, where these differ.
    """
    assert ours.shape == stored.shape
    ours, stored = unpack(ours, bits).int(), unpack(stored, bits).int()
    for rounded, exact in ((ours, codes), (stored, codes if theirs is None else theirs)):
        reach = 0.5 + tolerance(dtype, STEP, exact.abs()).to(exact.device)
        assert bool(((rounded - exact).abs() <= reach).all())
    return ours == stored


def restored(
    ours: Tensor,
    stored: Tensor,
    x: Tensor,
    dim: int,
    equal: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Dequantized values of equal codes of ``x`` that share a step along ``dim``."""
    size = x.abs().amax(dim, keepdim=True).expand_as(x)[equal]
    close(ours[equal], stored[equal], dtype or x.dtype, STEP, scale=size)


def folded(x: Tensor) -> Tensor:
    """(B, H, n, D) as rows of all heads, (B, n, H*D)."""
    return x.transpose(1, 2).flatten(2)


def rows_of(x: Tensor) -> Tensor:
    """(B, n, C) as (B*n, C): the references take key statistics over the batch."""
    return x.flatten(0, 1)


def same(ours: Tensor, stored: Tensor) -> None:
    """Steps, minima and scales: each is a few operations away from its inputs."""
    stored = stored.reshape(ours.shape)
    close(ours, stored, terms=STEP, scale=stored.abs())


# --- KIVI ----------------------------------------------------------------------------------------


def kivi(data: Reader, meta: Reader) -> None:
    """Steps, minima and codes of both quantizers, by the functions and by the stage."""
    bits, group = meta.count("bits"), meta.count("group_size")
    tokens, channels = -2, -1
    stage = Kivi(bits=bits, group=group, residual=group)
    context = PrefillContext(TokenLayout.text(torch.arange(1), torch.arange(1)[None]), depth=1)
    for at, (k, v) in enumerate(zip(data["k"], data["v"], strict=True)):
        kv = stage.compress(context, 0, plain(k, v), None)
        (segment,) = kv.segments
        assert (len(segment), len(kv)) == (k.shape[1], 0)
        keys, values = segment.dequantize(FLOAT)
        for name, x, packed, steps, minimum, back, dim in (
            ("k", k, segment.key_codes, segment.key_step, segment.key_min, keys, tokens),
            ("v", v, segment.value_codes, segment.value_step, segment.value_min, values, channels),
        ):
            theirs = from_texts(data[f"{name}_code"][at], bits, dim)
            assert torch.equal(words(theirs, bits, dim), data[f"{name}_code"][at])
            same(steps, data[f"{name}_scale"][at])
            stored = data[f"{name}_min"][at].reshape(minimum.shape)
            if minimum.dtype == stored.dtype:
                assert torch.equal(minimum, stored)  # chosen, not computed
            else:  # rounded down, so that no entry is below it
                assert bool((minimum.to(stored.dtype) <= stored).all())
                same(minimum, stored)
            codes = unrounded(x, steps, minimum)
            # Ours stores steps in half precision, also of inputs in float32.
            dtype = coarsest({"x": x, "steps": steps}, ("x", "steps"))
            own = unrounded(x, *(data[f"{name}_{of}"][at].reshape(steps.shape) for of in PAIR))
            equal = agree(packed, pack(theirs, bits), bits, codes, dtype, own)
            stored = data[f"{name}_dequant"][at]
            restored(back, stored, x, dim, equal, dtype)
            # Where a code differs, ours is as near to the original value.
            size = x.abs().amax(dim, keepdim=True)
            ours, stored = ((of.double() - x.double()).abs().cpu() for of in (back, stored))
            assert bool((ours <= stored + tolerance(dtype, STEP, size)).all())


def plain(keys: Tensor, values: Tensor) -> KV:
    heads, n = keys.shape[:2]
    order = torch.arange(n).expand(heads, -1)
    full = torch.full((heads,), n)
    return KV(keys, values, order, order, torch.zeros(heads, n, dtype=torch.bool), full)


# --- ZipCache ------------------------------------------------------------------------------------


def zipcache_quant(data: Reader, meta: Reader) -> None:
    """The three quantizers on folded heads."""
    dtype = data["k"].dtype
    k, v = folded(data["k"]), folded(data["v"])
    batch = len(k)
    for bits in (2, 4, 8):
        packed, step, minimum = quantize_keys(rows_of(k), bits, dtype=dtype)
        same(step, data[f"chan{bits}_step"])
        same(minimum, data[f"chan{bits}_min"])
        x = rows_of(k)
        codes = unrounded(x, step, minimum)
        equal = agree(packed, data[f"chan{bits}_q"].flatten(0, -2), bits, codes, dtype)
        back = dequantize_keys(packed, step, minimum, bits, 0)
        restored(back, rows_of(folded(data[f"chan{bits}_deq"])), x, 0, equal)
        scale = channel_scale(rows_of(v), dtype=dtype).expand(batch, -1)
        for name, by in (("tok", None), ("cst", scale)):
            x = k if f"{name}{bits}_of_keys" in data else v
            packed, step, minimum = quantize_values(x, bits, scale=by, dtype=dtype)
            same(step, data[f"{name}{bits}_step"])
            same(minimum, data[f"{name}{bits}_min"])
            codes = unrounded(scaled(x, by), step, minimum)
            equal = agree(packed, data[f"{name}{bits}_q"], bits, codes, dtype)
            back = dequantize_values(packed, step, minimum, bits, by)
            restored(back, folded(data[f"{name}{bits}_deq"]), x, -1, equal)
        same(scale[:1], data[f"cst{bits}_chanscale"])


def scaled(x: Tensor, by: Tensor | None) -> Tensor:
    """Channels (B, n, C) over their scales (B, C)."""
    return x if by is None else x / by[:, None]


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))


def zipcache_mixed(data: Reader, meta: Reader) -> None:
    """Keys and values in two precisions, on folded heads."""
    k, v = data["k"], data["v"]
    batch, _, n, _ = k.shape
    dtype = k.dtype
    count = int(meta.number("unimportant_ratio") * n)
    meta.choice("bits", {"4 important / 2 unimportant": (4, 2)}, "4 important / 2 unimportant")
    assert data["unimportant"].shape[2] == count
    scale = channel_scale(rows_of(folded(v)), dtype=dtype)
    same(scale, data["v_chanscale"])
    every = torch.cat([data["important"], data["unimportant"]], 2).sort().values
    assert bool((every == torch.arange(n)).all())
    for name, index, bits in (
        ("imp", data["important"], 4),
        ("un", data["unimportant"], 2),
    ):
        x = rows_of(folded(gathered(k, index)))
        packed, step, minimum = quantize_keys(x, bits, dtype=dtype)
        same(step, data[f"k_{name}_step"])
        same(minimum, data[f"k_{name}_min"])
        codes = unrounded(x, step, minimum)
        equal = agree(packed, data[f"k_{name}_q"].flatten(0, -2), bits, codes, dtype)
        back = dequantize_keys(packed, step, minimum, bits, 0)
        restored(back, rows_of(folded(gathered(data["k_deq"], index))), x, 0, equal)
        x, by = folded(gathered(v, index)), scale.expand(batch, -1)
        packed, step, minimum = quantize_values(x, bits, scale=by, dtype=dtype)
        same(step, data[f"v_{name}_step"])
        same(minimum, data[f"v_{name}_min"])
        codes = unrounded(scaled(x, by), step, minimum)
        equal = agree(packed, data[f"v_{name}_q"], bits, codes, dtype)
        back = dequantize_values(packed, step, minimum, bits, by)
        restored(back, folded(gathered(data["v_deq"], index)), x, -1, equal)


def zipcache_saliency(data: Reader, meta: Reader) -> None:
    """Scores and the low-precision segment, by the functions and by the stage."""
    (q,), (k,), rows = data["q"], data["k"], data["probe_ids"]
    n, share = k.shape[1], meta.number("unimportant_ratio")
    assert len(rows) == n - int(0.95 * n) + int(0.05 * n)
    stats = col_stats(q, k, rows)  # a row that was drawn twice counts twice
    score = saliency(stats["sum"], n - torch.arange(n).expand(len(k), -1))
    # A logit's terms, those of its row, and the sum over the probes; nothing cancels.
    terms = k.shape[2] + n + len(rows)
    close(score, data["saliency"][0], terms=terms, scale=data["saliency"][0])
    low = least_salient(score, share, torch.full((len(k),), n))
    stored = torch.zeros_like(low).scatter(1, data["unimportant"][0], True)
    assert torch.equal(low, stored)

    order = torch.arange(n)
    context = PrefillContext(depth=1, layout=TokenLayout.text(order, order[None]))
    nnz = stats.pop("nnz").expand(len(k), -1)
    columns = ColumnStats(**stats, nnz=nnz, rows=rows.unique())
    high_segment, low_segment = (
        ZipCache(important=1 - share).compress(context, 0, plain(k, k), columns).segments
    )
    assert (high_segment.bits, low_segment.bits) == (4, 2)
    assert torch.equal(low_segment.order.long(), data["unimportant"][0].sort(1).values)
    assert torch.equal(high_segment.order.long(), (~stored).nonzero()[:, 1].view(len(k), -1))


# --- attention over segments ---------------------------------------------------------------------


def decode(data: Reader, meta: Reader) -> None:
    """Output and log-sum-exp; the same with arbitrary values in free slots."""
    q = data["q"].float()[:, :, None]
    for poison in (False, True):
        tail_k, tail_v = data["k_tail"].float(), data["v_tail"].float()
        seen = torch.arange(tail_k.shape[2]) < data["lentail"][..., None]
        if poison:
            tail_k = tail_k.masked_fill(~seen[..., None], torch.nan)
            tail_v = tail_v.masked_fill(~seen[..., None], torch.inf)
        segments = [stored_segment(data, bits, poison) for bits in (4, 2)]
        out, lse, mass = decode_mixed(q, segments, tail_k, tail_v, seen[:, :, None])
        assert mass is None
        terms = q.shape[-1] + sum(len(of) for of in segments) + tail_k.shape[2]
        close(out[:, :, 0], data["out"], terms=terms)
        close(lse[:, :, 0], data["lse"], terms=terms)


def stored_segment(data: Reader, bits: int, poison: bool) -> Segment:
    k, v = data[f"k{bits}"], data[f"v{bits}"]
    lengths = data[f"len{bits}"].long()
    step, minimum = data[f"v{bits}_step"], data[f"v{bits}_min"]
    if poison:
        gone = torch.arange(k.shape[2]) >= lengths[..., None]
        k, v = k.masked_fill(gone[..., None], 255), v.masked_fill(gone[..., None], 170)
        step, minimum = step.masked_fill(gone, torch.nan), minimum.masked_fill(gone, torch.inf)
    return Segment(
        bits=bits,
        group=0,
        key_codes=k,
        key_step=data[f"k{bits}_step"][:, :, None],
        key_min=data[f"k{bits}_min"][:, :, None],
        value_codes=v,
        value_step=step[..., None],
        value_min=minimum[..., None],
        value_scale=data[f"v{bits}_ch"],
        lengths=lengths,
        order=torch.arange(k.shape[2], dtype=torch.int32).expand(k.shape[:3]),
    )
