"""Quantized keys and values: parameters, segments, and the methods that quantize.

test_golden compares them with the reference implementations.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import tiny_models
from support.closeness import tolerance
from vlmfast import VLM
from vlmfast.api.vlm import Answer
from vlmfast.compressors.cache.kivi import Kivi
from vlmfast.compressors.cache.zipcache import ZipCache, least_salient
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels import quantize_kv
from vlmfast.kernels.quantize_kv import (
    Segment,
    channel_scale,
    parameter_dtype,
    quantize,
)

FLOAT = torch.float32
BITS = st.sampled_from([2, 4, 8])
SEEDS = st.integers(0, 10_000)


def noise(*shape: int, seed: int = 0, spread: float = 0.0, dtype: torch.dtype = FLOAT) -> Tensor:
    """Normal numbers; with ``spread``, channels of very different scale and mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    size = (spread * torch.randn(shape[-1], generator=generator)).exp()
    middle = spread * torch.randn(shape[-1], generator=generator)
    return (x * size + middle).to(dtype)


def segment(
    heads: int = 2, n: int = 40, dim: int = 16, bits: int = 4, seed: int = 0, lengths=None, **more
) -> Segment:
    lengths = torch.full((heads,), n) if lengths is None else torch.tensor(lengths)
    order = torch.arange(n).expand(heads, -1)
    keys, values = noise(heads, n, dim, seed=seed), noise(heads, n, dim, seed=seed + 1)
    return quantize(keys, values, order, lengths, bits, **more)


def batched(segments: list[Segment], rows: int) -> Segment:
    """Segments (H,) in the first of ``rows`` rows, as a layer of the cache holds them."""
    group = segments[0].group or 1
    slots = -(-max(map(len, segments)) // group) * group
    bias = any(segment.bias is not None for segment in segments)
    store = Segment.empty(segments[0].unsqueeze(), rows).resized(rows, slots, bias=bias)
    for row, segment in enumerate(segments):
        store.write(row, 0, segment)
    return store


def same(a: Segment, b: Segment) -> bool:
    """Whether two segments contain the same slots; padding beyond ``lengths`` is ignored."""
    if a.key != b.key or not torch.equal(a.lengths, b.lengths):
        return False
    n = int(a.lengths.max())
    valid = a.first(n).valid[..., None]
    pairs = [
        *zip(a.first(n).dequantize(FLOAT), b.first(n).dequantize(FLOAT), strict=True),
        (a.first(n).order[..., None], b.first(n).order[..., None]),
    ]
    if (a.bias is None) != (b.bias is None):
        return False
    if a.bias is not None:
        pairs.append((a.first(n).bias[..., None], b.first(n).bias[..., None]))
    return all(torch.equal(x.where(valid, 0), y.where(valid, 0)) for x, y in pairs)


# --- codes ---------------------------------------------------------------------------------------


def test_parameters_are_float16_if_the_range_fits():
    small, large = noise(1, 9, 8), 1e5 * noise(1, 9, 8)
    assert parameter_dtype(small.bfloat16(), small.bfloat16()) == torch.float16
    assert parameter_dtype(small, large) == torch.float32
    assert parameter_dtype(small.bfloat16(), large.bfloat16()) == torch.bfloat16
    assert parameter_dtype(small[:, :0], small[:, :0]) == torch.float16
    args = (torch.arange(9)[None], torch.tensor([9]), 8)
    wide = quantize(large, small, *args)
    assert wide.key_step.dtype == torch.float32
    error = (wide.dequantize(FLOAT)[0] - large).abs()
    assert bool((error <= 0.5 * wide.key_step + tolerance(FLOAT, 3, large.abs().max())).all())
    forced = quantize(large, small, *args, dtype=torch.float16)
    assert all(bool(x.isfinite().all()) for x in forced.dequantize(FLOAT))
    # Padding does not require a wider type.
    args = (torch.arange(9)[None], torch.tensor([8]), 8)
    small[:, 8] = torch.inf
    assert quantize(small, small, *args).key_step.dtype == torch.float16


@pytest.mark.parametrize(
    ("dim", "bits", "value_group", "message"),
    [
        (16, 3, None, "bits=3 cannot be packed; allowed are 2, 4 and 8"),
        (15, 4, None, "must be a multiple of 2"),
        (18, 2, None, "must be a multiple of 4"),
        (16, 4, 5, "groups of 5 channels do not divide a head of 16"),
        (16, 4, 0, "groups of 0 channels"),
    ],
)
def test_unsupported_shapes_raise(dim, bits, value_group, message):
    with pytest.raises(ValueError, match=message):
        segment(dim=dim, bits=bits, value_group=value_group)


# --- segments ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    bits=BITS,
    group=st.sampled_from([0, 8]),
    scaled=st.booleans(),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    biased=st.integers(0, 2),
    seed=SEEDS,
)
def test_batched_segments_equal_single_rows(bits, group, scaled, sizes, biased, seed):
    singles = []
    for at, n in enumerate(sizes):
        bias = noise(2, n, seed=seed + 7) if at < biased else None
        lengths = [n, max(n - 3, 0)]
        singles.append(
            segment(
                n=n,
                bits=bits,
                seed=seed + at,
                key_group=group,
                scaled=scaled,
                bias=bias,
                lengths=lengths,
            )
        )
    joined = batched(singles, len(sizes) + 2)
    assert joined.lengths.shape == (len(sizes) + 2, 2)
    assert len(joined) == -(-max(sizes) // (group or 1)) * (group or 1)
    assert not joined.lengths[len(sizes) :].any()
    for at, single in enumerate(singles):
        row = joined.select(slice(at, at + 1)).first(len(single)).squeeze()
        if joined.bias is not None and single.bias is None:
            single = replace(single, bias=torch.zeros(single.order.shape))
        assert same(row, single)
    if joined.bias is None:
        assert joined.held_bytes() == sum(single.held_bytes() for single in singles)
    assert all(bool(x.isfinite().all()) for x in joined.dequantize(FLOAT))


@settings(max_examples=30, deadline=None)
@given(bits=BITS, pages=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=SEEDS)
def test_pages_are_appended_in_order(bits, pages, seed):
    group = 8
    n = group * sum(pages)
    keys, values = noise(2, n, 16, seed=seed), noise(2, n, 16, seed=seed + 1)
    order = torch.arange(n).expand(2, -1)
    scale = channel_scale(values[:, :group], dtype=torch.float16)

    def part(start: int, stop: int) -> Segment:
        return quantize(
            keys[:, start:stop],
            values[:, start:stop],
            order[:, start:stop],
            torch.full((2,), stop - start),
            bits,
            key_group=group,
            scaled=scale,
        )

    grown = Segment.empty(part(0, group).unsqueeze(), 1).resized(1, n)
    other, at = grown.clone(), 0
    for count in pages:
        grown.write(0, at, part(at, at + group * count))
        at += group * count
    whole = part(0, n).unsqueeze()
    assert same(grown, whole)
    assert grown.held_bytes() == whole.held_bytes()
    if len(pages) > 1:
        other.write(0, 0, part(group, 2 * group))
        other.write(0, group, part(0, group))
        assert not same(other.first(2 * group), whole.first(2 * group))
    assert same(whole.first(group), part(0, group).unsqueeze())


@pytest.mark.parametrize(
    ("group", "value_group", "scaled", "biased"),
    [(0, None, True, False), (8, 4, False, True), (16, 16, True, True), (0, 8, False, False)],
)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_count_existing_slots_only(bits, group, value_group, scaled, biased):
    n, dim, lengths = 40, 16, [40, 21, 0]
    stored = segment(
        heads=3,
        n=n,
        bits=bits,
        lengths=lengths,
        key_group=group,
        value_group=value_group,
        scaled=scaled,
        bias=noise(3, n) if biased else None,
    )
    expected = 0
    for length in lengths:
        groups = -(-length // group) if group else int(length > 0)
        expected += 2 * length * dim * bits // 8  # codes of keys and of values
        expected += 2 * 2 * length * (dim // (value_group or dim))  # value step and minimum
        expected += 2 * 2 * groups * dim  # key step and minimum
        expected += 2 * dim * (scaled and length > 0)
        expected += 4 * length * biased
    assert stored.held_bytes() == expected
    assert stored.unsqueeze().held_bytes() == expected
    assert segment(heads=3, n=n, bits=bits, lengths=[40, 21, 1]).held_bytes() != expected


# --- KIVI ----------------------------------------------------------------------------------------


def prompt(n: int, heads: int = 2, dim: int = 32, seed: int = 0, lengths=None, bias=None) -> KV:
    order = 3 + torch.arange(n).expand(heads, -1)
    return KV(
        keys=noise(heads, n, dim, seed=seed, spread=0.5),
        values=noise(heads, n, dim, seed=seed + 1),
        order=order,
        position=order,
        visual=torch.zeros(heads, n, dtype=torch.bool),
        lengths=torch.full((heads,), n) if lengths is None else torch.tensor(lengths),
        bias=bias,
    )


def prefill_context(n: int) -> PrefillContext:
    order = 3 + torch.arange(n)
    return PrefillContext(depth=1, layout=TokenLayout.text(order, order[None]))


def test_kivi_uses_three_bits_per_value():
    kv = prompt(256, dim=64)
    (stored,) = Kivi().compress(prefill_context(256), 0, kv, None).segments
    assert stored.held_bytes() * 8 == 3 * kv.keys.numel() * 2


def test_kivi_quantizes_what_the_shortest_head_has():
    stage, step = Kivi(bits=2, group=8, residual=16), prefill_context(80)
    out, counts = stage.compress(step, 0, prompt(80, lengths=[70, 41]), None), []
    assert len(out.segments[0]) == 32 and out.lengths.tolist() == [38, 9]
    for more in (0, 6, 7):  # until that head has 16
        given = {"notes": step.notes, "max_length": len(out) + more, "order": out.order}
        slots = SimpleNamespace(**given, quantize=lambda count, make: counts.append(count))
        stage.expand()[1].step(slots, 0)
    assert counts == [16]


def test_unsupported_head_sizes_raise():
    with pytest.raises(RecipeError, match="kivi: groups of 32 channels do not divide a head of 48"):
        Kivi().compress(prefill_context(128), 0, prompt(128, dim=48), None)
    narrow = Kivi().compress(prefill_context(128), 0, prompt(128, dim=16), None)
    assert narrow.segments[0].key == (2, 32, 1, False)
    with pytest.raises(RecipeError, match="zipcache: 6 channels cannot be packed"):
        ZipCache().compress(prefill_context(8), 0, prompt(8, dim=6), columns(8))


# --- ZipCache ------------------------------------------------------------------------------------


def columns(n: int, heads: int = 2, groups: int = 2, seed: int = 0) -> ColumnStats:
    received = torch.rand(heads, groups, n, generator=torch.Generator().manual_seed(seed))
    nnz = torch.arange(n, 0, -1).clamp(max=4).expand(heads, -1)
    return ColumnStats(nnz, torch.arange(4), received)


@given(
    share=st.sampled_from([0.0, 0.25, 0.4, 0.5, 1.0]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=SEEDS,
)
def test_least_salient_is_the_lowest_per_head(share, lengths, seed):
    n = max(*lengths, 1)
    score = noise(len(lengths), n, seed=seed)
    low = least_salient(score, share, torch.tensor(lengths))
    for row, mine, length in zip(score, low, lengths, strict=True):
        assert int(mine.sum()) == int(share * length)
        assert not mine[length:].any()
        if 0 < mine.sum() < length:
            assert row[mine].max() < row[:length][~mine[:length]].min()


def test_saliency_ties_prefer_the_lower_index():
    low = least_salient(torch.ones(1, 10), 0.4, torch.tensor([10]))
    assert low[0].nonzero().flatten().tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("lengths", [[40, 40], [40, 17]])
def test_zipcache_splits_slots_into_two_precisions(lengths):
    n, stage, step = 40, ZipCache(), prefill_context(40)
    kv, stats = prompt(n, lengths=lengths, bias=noise(2, n, seed=4)), columns(n)
    out = stage.compress(step, 0, kv, stats)
    high, low = out.segments
    assert len(out) == 0 and not out.lengths.any()
    assert (high.key, low.key) == ((4, 0, 1, True), (2, 0, 1, True))
    assert low.lengths.tolist() == [int(0.4 * length) for length in lengths]
    assert torch.equal(high.value_scale, low.value_scale)
    score = stage.score(step, kv, stats)
    for head, length in enumerate(lengths):
        orders = [part.order[head, : part.lengths[head]].long() - 3 for part in (high, low)]
        assert torch.cat(orders).sort().values.tolist() == list(range(length))
        assert all(bool((order.diff() > 0).all()) for order in orders)
        assert score[head, orders[0]].min() > score[head, orders[1]].max()
        for part, order in zip((high, low), orders, strict=True):
            mine = slice(0, len(order))
            assert torch.equal(part.bias[head, mine], kv.bias[head, order])
            alone = quantize(
                kv.keys[head : head + 1, order],
                kv.values[head : head + 1, order],
                kv.order[head : head + 1, order],
                torch.tensor([len(order)]),
                part.bits,
                scaled=part.value_scale[head : head + 1],
            )
            for ours, other in zip(part.dequantize(FLOAT), alone.dequantize(FLOAT), strict=True):
                assert torch.equal(ours[head, mine], other[0])
    error = [
        (kv.keys.mean(1) - part.dequantize(FLOAT)[0].mean(1)).abs().mean() for part in (high, low)
    ]
    assert error[0] < error[1]


@pytest.mark.parametrize(("important", "bits"), [(1.0, [4]), (0.0, [2]), (0.5, [4, 2])])
def test_zipcache_with_one_precision(important, bits):
    out = ZipCache(important=important).compress(prefill_context(20), 0, prompt(20), columns(20))
    assert [part.bits for part in out.segments] == bits
    equal = ZipCache(important=important, bits_high=8, bits_low=8)
    (part,) = equal.compress(prefill_context(20), 0, prompt(20), columns(20)).segments
    assert (part.bits, len(part)) == (8, 20)


def test_zipcache_requests_fractions_of_probe_rows():
    stage = ZipCache(recent=0.1, random=0.2, seed=7)
    (request,) = set(stage.text_stats(3).values())
    assert set(stage.text_stats(3)) == {0, 1, 2}
    assert (request.rows, request.n, request.random, request.seed) == ("probe", 0.1, 0.2, 7)


# --- dtype of the parameters ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["kivi:group=4,residual=8", "fastv+zipvl"])
def test_prompt_is_prefilled_again_where_float16_is_too_small(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 is assumed for the parameters, and checked once after all layers."""
    vlm = VLM(*tiny_models.build_llava_next())
    vlm.prefix_cache.limit = 0
    passes: list[int] = []
    vlm.adapter.decoder.register_forward_pre_hook(lambda module, args: passes.append(1))
    asked = {"question": "what is here ?", "images": tiny_models.make_image(128, 96)}

    def answer() -> tuple[int, Answer]:
        passes.clear()
        found = vlm.ask(**asked, recipe=recipe, max_new_tokens=1)
        return len(passes), found

    once, small = answer()
    monkeypatch.setattr(quantize_kv, "LIMIT", 0.0)
    twice, large = answer()
    assert (once, twice) == (1, 2)
    assert small.stats.kv_bytes < large.stats.kv_bytes, "parameters in float32"
    assert small.trace.to_dict() == large.trace.to_dict(), "recorded once"
    assert small.stats.visual_tokens_kept == large.stats.visual_tokens_kept
