"""Replays the stored quantiser cases: KIVI, ZipCache and attention over mixed segments."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.compressors.kivi import Kivi
from vlmfast.compressors.zipcache import ZipCache, least_salient, saliency
from vlmfast.kernels.col_stats import col_stats
from vlmfast.kernels.decode_mixed import decode_mixed
from vlmfast.kernels.quantize_kv import (
    Segment,
    channel_scale,
    dequantise_keys,
    dequantise_values,
    pack,
    quantise_keys,
    quantise_values,
    unpack,
)
from vlmfast.kv import KV
from vlmfast.layout import TokenLayout
from vlmfast.stages import ColumnStats, Phase, Step

FLOAT = torch.float32
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
HALF = {"rtol": 2e-3, "atol": 2e-3}  # computed in float16 by the reference


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return HALF if dtype == torch.float16 else CLOSE


# --- what the references store -------------------------------------------------------------------


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes in int32 words along ``dim``, the first of each run in the lowest bits."""
    runs = codes.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)).long()
    packed = (runs << torch.arange(0, 32, bits)).sum(-1)
    return packed.to(torch.int32).movedim(-1, dim)


def from_words(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse of `words`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (
        ((packed.movedim(dim, -1)[..., None] >> shifts) & (2**bits - 1))
        .flatten(-2)
        .movedim(-1, dim)
    )


def agree(ours: Tensor, stored: Tensor, bits: int, dtype: torch.dtype) -> None:
    """Equal bytes; in float16, where the references count, codes at a tie may be the next one."""
    assert ours.shape == stored.shape
    apart = (unpack(ours, bits).int() - unpack(stored, bits).int()).abs()
    if dtype == torch.float16:
        assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 2e-3 * 2**bits
    else:
        assert int(apart.max()) == 0


def folded(x: Tensor) -> Tensor:
    """(B, H, n, D) as rows of all heads, (B, n, H*D)."""
    return x.transpose(1, 2).flatten(2)


def unfolded(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def rows_of(x: Tensor) -> Tensor:
    """(B, n, C) as (B*n, C): the references take key statistics over the batch."""
    return x.flatten(0, 1)


def same(ours: Tensor, stored: Tensor, **tolerance) -> None:
    torch.testing.assert_close(ours.float(), stored.float().reshape(ours.shape), **tolerance)


# --- KIVI ----------------------------------------------------------------------------------------


def kivi(data: dict, meta: dict) -> None:
    """Steps, minima and codes of both quantisers, by the functions and by the stage."""
    bits, group = int(meta["bits"]), int(meta["group_size"])
    tokens, channels = -2, -1
    stage = Kivi(bits=bits, group=group, residual=group)
    step = Step(Phase.PREFILL, depth=1)
    for at, (k, v) in enumerate(zip(data["k"], data["v"], strict=True)):
        kv = stage.compress(step, 0, plain(k, v), None)
        (segment,) = kv.segments
        assert (len(segment), len(kv)) == (k.shape[1], 0)
        for packed, name, dim in (
            (segment.key_codes, "k", tokens),
            (segment.value_codes, "v", channels),
        ):
            theirs = from_words(data[f"{name}_code"][at], bits, dim)
            assert torch.equal(words(theirs, bits, dim), data[f"{name}_code"][at])
            agree(packed, pack(theirs, bits), bits, k.dtype)
        same(segment.key_step, data["k_scale"][at], **HALF)
        same(segment.key_min, data["k_min"][at], rtol=0, atol=0)
        same(segment.value_step, data["v_scale"][at], **HALF)
        same(segment.value_min, data["v_min"][at], rtol=0, atol=0)
        keys, values = segment.dequantise(FLOAT)
        for ours, stored, x, dim in (
            (keys, data["k_dequant"][at].float(), k.float(), tokens),
            (values, data["v_dequant"][at].float(), v.float(), channels),
        ):
            rounding = 2e-3 * (1 + x.abs().amax(dim, keepdim=True))
            assert float(((ours - stored).abs() > rounding).float().mean()) < 2e-3 * 2**bits
            # Where a code differs, ours is as near to what was quantised.
            assert bool(((ours - x).abs() <= (stored - x).abs() + rounding).all())


def plain(keys: Tensor, values: Tensor) -> KV:
    heads, n = keys.shape[:2]
    order = torch.arange(n).expand(heads, -1)
    full = torch.full((heads,), n)
    return KV(keys, values, order, order, torch.zeros(heads, n, dtype=torch.bool), full)


# --- ZipCache ------------------------------------------------------------------------------------


def zipcache_quant(data: dict, meta: dict) -> None:
    """The three quantisers on folded heads."""
    heads, dtype = data["k"].shape[1], data["k"].dtype
    close = tolerance(dtype)
    k, v = folded(data["k"]), folded(data["v"])
    batch, n = k.shape[:2]
    for bits in (2, 4, 8):
        packed, step, minimum = quantise_keys(rows_of(k), bits, dtype=dtype)
        agree(packed, data[f"chan{bits}_q"].flatten(0, -2), bits, dtype)
        same(step, data[f"chan{bits}_step"], **close)
        same(minimum, data[f"chan{bits}_min"], **close)
        back = dequantise_keys(packed, step, minimum, bits, 0).unflatten(0, (batch, n))
        same(unfolded(back, heads), data[f"chan{bits}_deq"], **close)
        scale = channel_scale(rows_of(v), dtype=dtype).expand(batch, -1)
        for name, by in (("tok", None), ("cst", scale)):
            x = k if f"{name}{bits}_of_keys" in data else v
            packed, step, minimum = quantise_values(x, bits, scale=by, dtype=dtype)
            same(step, data[f"{name}{bits}_step"], **close)
            same(minimum, data[f"{name}{bits}_min"], **close)
            agree(packed, data[f"{name}{bits}_q"], bits, dtype)
            back = dequantise_values(packed, step, minimum, bits, by)
            same(unfolded(back, heads), data[f"{name}{bits}_deq"], **close)
        same(scale[:1], data[f"cst{bits}_chanscale"], **close)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))


def zipcache_mixed(data: dict, meta: dict) -> None:
    """Keys and values in two precisions, on folded heads."""
    k, v = data["k"], data["v"]
    batch, heads, n, _ = k.shape
    dtype, close = k.dtype, tolerance(k.dtype)
    count = int(float(meta["unimportant_ratio"]) * n)
    assert data["unimportant"].shape[2] == count
    scale = channel_scale(rows_of(folded(v)), dtype=dtype)
    same(scale, data["v_chanscale"], **close)
    keys, values = torch.zeros(k.shape), torch.zeros(v.shape)
    for name, index, bits in (
        ("imp", data["important"], 4),
        ("un", data["unimportant"], 2),
    ):
        x, kept = folded(gathered(k, index)), index.shape[2]
        packed, step, minimum = quantise_keys(rows_of(x), bits, dtype=dtype)
        agree(packed, data[f"k_{name}_q"].flatten(0, -2), bits, dtype)
        same(step, data[f"k_{name}_step"], **close)
        same(minimum, data[f"k_{name}_min"], **close)
        back = dequantise_keys(packed, step, minimum, bits, 0).unflatten(0, (batch, kept))
        at = index[..., None].expand(-1, -1, -1, k.shape[3])
        keys.scatter_(2, at, unfolded(back, heads))
        x, by = folded(gathered(v, index)), scale.expand(batch, -1)
        packed, step, minimum = quantise_values(x, bits, scale=by, dtype=dtype)
        agree(packed, data[f"v_{name}_q"], bits, dtype)
        same(step, data[f"v_{name}_step"], **close)
        same(minimum, data[f"v_{name}_min"], **close)
        back = dequantise_values(packed, step, minimum, bits, by)
        values.scatter_(2, at, unfolded(back, heads))
    same(keys, data["k_deq"], **close)
    same(values, data["v_deq"], **close)


def zipcache_saliency(data: dict, meta: dict) -> None:
    """Scores and the low segment, by the functions and by the stage."""
    (q,), (k,), rows = data["q"], data["k"], data["probe_ids"]
    n, share = k.shape[1], float(meta["unimportant_ratio"])
    assert len(rows) == n - int(0.95 * n) + int(0.05 * n)
    stats = col_stats(q, k, rows)  # a row that was drawn twice counts twice
    score = saliency(stats["sum"], n - torch.arange(n).expand(len(k), -1))
    same(score, data["saliency"][0], rtol=1e-4, atol=1e-7)
    low = least_salient(score, share, torch.full((len(k),), n))
    stored = torch.zeros_like(low).scatter(1, data["unimportant"][0], True)
    assert torch.equal(low, stored)

    order = torch.arange(n)
    step = Step(Phase.PREFILL, depth=1, layout=TokenLayout.text(order, order[None]))
    nnz = stats.pop("nnz").expand(len(k), -1)
    columns = ColumnStats(**stats, nnz=nnz, rows=rows.unique())
    high_segment, low_segment = (
        ZipCache(important=1 - share).compress(step, 0, plain(k, k), columns).segments
    )
    assert (high_segment.bits, low_segment.bits) == (4, 2)
    assert torch.equal(low_segment.order.long(), data["unimportant"][0].sort(1).values)
    assert torch.equal(high_segment.order.long(), (~stored).nonzero()[:, 1].view(len(k), -1))


# --- attention over segments ---------------------------------------------------------------------


def decode(data: dict, meta: dict) -> None:
    """Output and log-sum-exp; the same with anything in the slots that do not exist."""
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
        same(out[:, :, 0], data["out"], rtol=1e-5, atol=2e-6)
        same(lse[:, :, 0], data["lse"], rtol=1e-5, atol=1e-5)


def stored_segment(data: dict, bits: int, poison: bool) -> Segment:
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
