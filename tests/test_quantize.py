"""Quantized keys and values: codes, segments, attention over them, and quantizers.

test_golden compares them with the reference implementations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import tiny_models
from closeness import apart, close, tolerance
from vlmfast import VLM
from vlmfast.api.vlm import Answer
from vlmfast.compressors.cache.kivi import Kivi
from vlmfast.compressors.cache.zipcache import ZipCache, least_salient, saliency
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels import quantize_kv
from vlmfast.kernels.decode_mixed import decode_mixed
from vlmfast.kernels.quantize_kv import (
    Segment,
    channel_scale,
    pack,
    parameter_dtype,
    quantize,
    quantize_keys,
    unpack,
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


@given(bits=BITS, rows=st.integers(1, 5), width=st.integers(1, 9), seed=SEEDS)
def test_pack_unpack_round_trip(bits, rows, width, seed):
    dim = width * 8 // bits
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, dim), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)
    other = codes.clone()
    other[0, 0] ^= 1
    assert not torch.equal(pack(other, bits), packed)


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (8, [7, 200, 3, 4], [7, 200, 3, 4]),
        (4, [1, 2, 3, 4], [1 | 3 << 4, 2 | 4 << 4]),
        (2, [1, 2, 3, 0, 2, 2, 1, 1], [1 | 3 << 2 | 2 << 4 | 1 << 6, 2 | 0 << 2 | 2 << 4 | 1 << 6]),
    ],
)
def test_packed_byte_layout(bits, codes, packed):
    assert pack(torch.tensor(codes), bits).tolist() == packed


@settings(max_examples=60, deadline=None)
@given(
    bits=BITS,
    n=st.integers(1, 70),
    group=st.sampled_from([0, 8, 32]),
    value_group=st.sampled_from([None, 4, 16]),
    scaled=st.booleans(),
    spread=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=SEEDS,
)
def test_dequantization_error_is_within_half_a_step(
    bits, n, group, value_group, scaled, spread, dtype, seed
):
    keys = noise(2, n, 16, seed=seed, spread=spread, dtype=dtype)
    values = noise(2, n, 16, seed=seed + 1, spread=spread, dtype=dtype)
    stored = quantize(
        keys,
        values,
        torch.arange(n).expand(2, -1),
        torch.tensor([n, n]),
        bits,
        key_group=group,
        value_group=value_group,
        scaled=scaled,
    )
    assert stored.key == (bits, group, 16 // (value_group or 16), scaled)
    k, v = stored.dequantize(FLOAT)
    step = stored.key_step.float()
    step = step.repeat_interleave(group, 1)[:, :n] if group else step
    # The quotient is rounded, the sum of scaled code and minimum, and a step that is
    # subnormal in float16, by half a unit of 2**-24.
    step_slack = (2**bits - 1) * 2**-25
    slack = tolerance(FLOAT, 3, keys.float().abs().amax()) + step_slack
    assert bool(((k - keys.float()).abs() <= 0.5 * step + slack).all())
    step = stored.value_step.float().repeat_interleave(value_group or 16, 2)
    if scaled:
        step = step * stored.value_scale.float()[:, None]
        step_slack = step_slack * stored.value_scale.float()[:, None]
    slack = tolerance(FLOAT, 3, values.float().abs().amax()) + step_slack
    error = (v - values.float()).abs()
    assert bool((error <= 0.5 * step + slack).all())
    if n > 20 and bits == 2:
        assert not bool((error <= 0.25 * step + slack).all())


def test_stored_minimum_is_below_the_true_one():
    """Otherwise float16 rounding would erase a channel of small range far from zero."""
    keys = 100 + noise(1, 64, 8) * 1e-2
    _, step, minimum = quantize_keys(keys, 4, dtype=torch.float16)
    assert bool((minimum.float() <= keys.amin(1, keepdim=True)).all())
    slack = tolerance(FLOAT, 2, keys.max())
    assert bool((minimum.float() + 15 * step.float() >= keys.amax(1, keepdim=True) - slack).all())
    assert not bool((keys.amin(1, keepdim=True).half().float() <= keys.amin(1)).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 1e-7])
def test_constant_groups_round_trip(bits, value):
    x = torch.full((1, 5, 16), value)
    stored = quantize(x, x, torch.arange(5)[None], torch.tensor([5]), bits, scaled=True)
    assert bool((stored.key_step == 1).all()) and not stored.key_codes.any()
    # A float16 minimum is lower by less than a unit in the last place, also for subnormal
    # numbers; and the scale is rounded.
    half = torch.finfo(torch.float16)
    for back in stored.dequantize(FLOAT):
        assert (back - x).abs().max() <= 1.5 * half.eps * max(abs(value), half.smallest_normal)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=2, max_size=2),
    group=st.sampled_from([0, 8]),
    poison=st.sampled_from([torch.nan, torch.inf, 1e9]),
    seed=SEEDS,
)
def test_padding_does_not_affect_parameters(lengths, group, poison, seed):
    n = max(*lengths, 1)
    keys, values = noise(2, n, 16, seed=seed), noise(2, n, 16, seed=seed + 1)
    gone = torch.arange(n) >= torch.tensor(lengths)[:, None]
    order = torch.arange(n).expand(2, -1)
    spoiled = [x.masked_fill(gone[..., None], poison) for x in (keys, values)]
    whole = quantize(*spoiled, order, torch.tensor(lengths), 4, key_group=group, scaled=True)
    assert all(bool(x.isfinite().all()) for x in whole.dequantize(FLOAT))
    for head, length in enumerate(lengths):
        alone = quantize(
            keys[head : head + 1, :length],
            values[head : head + 1, :length],
            order[:1, :length],
            torch.tensor([length]),
            4,
            key_group=group,
            scaled=True,
        )
        mine = whole._each(lambda name, x, head=head: x[head : head + 1])
        assert same(mine.first(length), alone)
        assert mine.held_bytes() == alone.held_bytes()
        if length:
            assert torch.equal(mine.value_scale, alone.value_scale)


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
        if joined.bias is not None:
            single = single._with_bias()
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


# --- attention -----------------------------------------------------------------------------------


def dense(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and probabilities in float64, head by head; ``seen`` (B, Hk, T, N)."""
    b, heads, rows, dim = query.shape
    shared = heads // keys.shape[1]
    out, p = torch.zeros(query.shape).double(), torch.zeros(b, heads, rows, keys.shape[2]).double()
    lse = torch.full((b, heads, rows), -1e30).double()
    for i in range(b):
        for h in range(heads):
            for t in range(rows):
                at = seen[i, h // shared, t].nonzero().flatten()
                if len(at):
                    k, v = (x[i, h // shared, at].double() for x in (keys, values))
                    x = k @ query[i, h, t].double() * dim**-0.5 + bias[i, h // shared, at]
                    p[i, h, t, at] = x.softmax(0)
                    lse[i, h, t], out[i, h, t] = x.logsumexp(0), x.softmax(0) @ v
    return out, lse, p


def problem(seed: int, heads: int, shared: int, rows: int, empty_tail: bool, biased: bool) -> dict:
    """A batch of three: one without a segment of the second kind, one empty."""
    dim, cap = 16, 9
    generator = torch.Generator().manual_seed(seed)

    def lengths(top: int) -> list[int]:
        return torch.randint(1, top + 1, (heads,), generator=generator).tolist()

    def bias(n: int) -> Tensor | None:
        return noise(heads, n, seed=seed + n) if biased else None

    def row(n: int, at: int, **more) -> Segment:
        return segment(heads, n, dim, seed=seed + at, lengths=lengths(n), bias=bias(n), **more)

    first = [row(33, 3, bits=4, scaled=True), row(17, 5, bits=4, scaled=True)]
    second = row(24, 11, bits=2, key_group=8, value_group=8)
    segments = [batched(first, 3), batched([second], 3)]
    tail = torch.randint(0, cap - rows, (3, heads), generator=generator)
    if empty_tail:
        tail[2] = -rows
    slots = torch.arange(cap)
    mask = slots < (tail[..., None, None] + 1 + torch.arange(rows)[:, None]).clamp(min=0)
    return {
        "query": noise(3, heads * shared, rows, dim, seed=seed + 21),
        "segments": segments,
        "tail_keys": noise(3, heads, cap, dim, seed=seed + 22),
        "tail_values": noise(3, heads, cap, dim, seed=seed + 23),
        "tail_mask": mask,
        "tail_bias": noise(3, heads, cap, seed=seed + 24) if biased else None,
    }


def together(problem: dict) -> tuple[Tensor, ...]:
    """All keys, values, visibility masks and biases, dequantized and concatenated."""
    parts = [segment.dequantize(FLOAT) for segment in problem["segments"]]
    rows = problem["query"].shape[2]
    keys = torch.cat([*(k for k, _ in parts), problem["tail_keys"]], 2)
    values = torch.cat([*(v for _, v in parts), problem["tail_values"]], 2)
    seen = [s.valid[:, :, None].expand(-1, -1, rows, -1) for s in problem["segments"]]
    zeros = torch.zeros(keys.shape[:3])
    biases = [s.bias for s in problem["segments"]] + [problem["tail_bias"]]
    bias = zeros if biases[-1] is None else torch.cat(biases, 2)
    return keys, values, torch.cat([*seen, problem["tail_mask"]], 3), bias


@settings(max_examples=25, deadline=None)
@given(
    seed=SEEDS,
    heads=st.sampled_from([1, 2]),
    shared=st.sampled_from([1, 2, 3]),
    rows=st.sampled_from([1, 3]),
    empty_tail=st.booleans(),
    biased=st.booleans(),
)
def test_attention_equals_dense_over_dequantized(seed, heads, shared, rows, empty_tail, biased):
    case = problem(seed, heads, shared, rows, empty_tail, biased)
    out, lse, mass = decode_mixed(**case, want_attention_mass=True)
    expected, lse_expected, p = dense(case["query"], *together(case))
    terms = 16 + together(case)[0].shape[2]
    close(out, expected.float(), terms=terms)
    nothing = lse_expected.float() == -1e30
    assert torch.equal(lse == -1e30, nothing)
    close(lse.masked_fill(nothing, 0), lse_expected.float().masked_fill(nothing, 0), terms=terms)
    tail = p[..., -case["tail_mask"].shape[-1] :]
    close(mass, tail.unflatten(1, (heads, -1)).mean(2).sum(2).float(), terms=terms)
    if empty_tail:
        assert not out[2].any() and not mass[2].any()
        assert bool((lse[2] == -1e30).all())
    # Controls: the query of another head, and one more slot.
    wrong, _, _ = decode_mixed(**case | {"query": case["query"].roll(1, 2 if rows > 1 else 3)})
    apart(wrong, expected.float(), terms=terms)
    shorter = replace(case["segments"][0], lengths=case["segments"][0].lengths - 1)
    wrong, _, _ = decode_mixed(**case | {"segments": [shorter, case["segments"][1]]})
    apart(wrong, expected.float(), terms=terms)


def poisoned(stored: Segment) -> Segment:
    """Garbage in the padding slots, including their parameters."""
    gone = ~stored.valid[..., None]
    groups = stored.key_step
    if stored.group:
        first = torch.arange(groups.shape[-2]) * stored.group
        unused = (first >= stored.lengths[..., None])[..., None]
        groups = groups.masked_fill(unused, torch.nan)
    return replace(
        stored,
        key_codes=stored.key_codes.masked_fill(gone, 255),
        value_codes=stored.value_codes.masked_fill(gone, 255),
        key_step=groups,
        value_step=stored.value_step.masked_fill(gone, torch.nan),
        value_min=stored.value_min.masked_fill(gone, torch.inf),
        bias=None if stored.bias is None else stored.bias.masked_fill(gone[..., 0], torch.nan),
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shared", [1, 2])
def test_padding_slots_are_not_read(biased, shared):
    case = problem(5, 2, shared, 2, empty_tail=True, biased=biased)
    clean = decode_mixed(**case, want_attention_mass=True)
    unseen = ~case["tail_mask"].any(2)
    dirty = case | {
        "segments": [poisoned(part) for part in case["segments"]],
        "tail_keys": case["tail_keys"].masked_fill(unseen[..., None], torch.nan),
        "tail_values": case["tail_values"].masked_fill(unseen[..., None], torch.inf),
    }
    if biased:
        dirty["tail_bias"] = case["tail_bias"].masked_fill(unseen, torch.nan)
    for ours, other in zip(clean, decode_mixed(**dirty, want_attention_mass=True), strict=True):
        assert torch.equal(ours, other)
    # Control: the same garbage in existing slots changes the result.
    longer = [replace(part, lengths=part.lengths + 1) for part in dirty["segments"]]
    assert not bool(decode_mixed(**dirty | {"segments": longer})[0].isfinite().all())


def test_half_precision_inputs_compute_in_float32():
    case = problem(3, 2, 2, 1, empty_tail=False, biased=False)
    halves = {name: case[name].bfloat16() for name in ("query", "tail_keys", "tail_values")}
    floats = {name: x.float() for name, x in halves.items()}
    ours, lse, _ = decode_mixed(**case | halves)
    exact, exact_lse, _ = decode_mixed(**case | floats)
    assert ours.dtype == torch.bfloat16 and lse.dtype == FLOAT
    assert torch.equal(ours, exact.bfloat16()) and torch.equal(lse, exact_lse)


def test_broadcast_mask():
    case = problem(3, 2, 2, 1, empty_tail=False, biased=False)
    mask = case["tail_mask"][:, :1]
    whole = decode_mixed(
        **case | {"tail_mask": mask.expand(-1, 2, -1, -1)}, want_attention_mass=True
    )
    for ours, other in zip(
        whole, decode_mixed(**case | {"tail_mask": mask}, want_attention_mass=True), strict=True
    ):
        assert torch.equal(ours, other)
    without = decode_mixed(**case | {"segments": []})
    assert bool(without[0].isfinite().all()) and not torch.equal(without[0], whole[0])


def test_the_order_of_segments_does_not_matter():
    case = problem(8, 2, 2, 1, empty_tail=False, biased=True)
    ours, other = (
        decode_mixed(**case | {"segments": order})[0]
        for order in (case["segments"], case["segments"][::-1])
    )
    close(ours, other, terms=16 + together(case)[0].shape[2])


def test_no_device_synchronization():
    """Tensors without data: reading a value, or a data-dependent shape, fails."""
    case = problem(3, 2, 2, 1, empty_tail=False, biased=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        case = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in case.items()
        }
        case["segments"] = [
            part._each(lambda _, x: mode.from_tensor(x)) for part in case["segments"]
        ]
        out, lse, mass = decode_mixed(**case, want_attention_mass=True)
        assert (out.shape, lse.shape, mass.shape) == ((3, 4, 1, 16), (3, 4, 1), (3, 2, 9))
        keys, lengths = torch.zeros(2, 8, 16), torch.full((2,), 8)
        order = torch.arange(8).expand(2, -1)
        page = quantize(keys, keys, order, lengths, 4, scaled=True, dtype=torch.float16)
        page.unsqueeze().select(slice(1)).clone()
        with pytest.raises(DataDependentOutputException):
            page.held_bytes()


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


class Tail:
    """The part of `vlmfast.core.protocols.Slots` that quantizers use."""

    def __init__(self, kv: KV, context: PrefillContext) -> None:
        self.keys, self.values, self.order = kv.keys, kv.values, kv.order
        self.length, self.max_length, self.seen = kv.lengths.clone(), len(kv), 1000
        self.notes, self.pages = context.notes, list(kv.segments)
        self.calls = 0

    def write(self, key: Tensor, value: Tensor) -> None:
        padding = self.keys.new_full((len(self.keys), 1, self.keys.shape[2]), torch.nan)
        self.keys, self.values = (torch.cat([x, padding], 1) for x in (self.keys, self.values))
        self.order = torch.cat([self.order, torch.zeros_like(padding[..., 0]).long()], 1)
        heads = torch.arange(len(key))
        self.keys[heads, self.length], self.values[heads, self.length] = key, value
        self.order[heads, self.length] = self.seen
        self.length, self.max_length, self.seen = (
            self.length + 1,
            self.max_length + 1,
            self.seen + 1,
        )

    def quantize(self, count: int, make) -> None:
        assert count <= int(self.length.min())
        page = make(self.keys[:, :count], self.values[:, :count])
        assert not page.order.is_set_to(self.order)
        self.order, self.keys, self.values = (
            x[:, count:].clone() for x in (self.order, self.keys, self.values)
        )
        self.length, self.max_length, self.calls = (
            self.length - count,
            self.max_length - count,
            self.calls + 1,
        )
        last = self.pages and self.pages[-1]
        if last and last.key == page.key and last.group:
            slots, bias = len(last) + len(page), page.bias is not None
            grown = last.unsqueeze().resized(1, slots, bias=bias)
            grown.write(0, len(last), page)
            self.pages[-1] = grown.squeeze()
        else:
            self.pages.append(page)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 100])
def test_kivi_keeps_less_than_a_residual_in_full_precision(n):
    stage, kv = Kivi(bits=4, group=8, residual=32), prompt(n)
    out = stage.compress(prefill_context(n), 0, kv, None)
    if n < 32:
        assert out is kv
        return
    (stored,) = out.segments
    assert (len(stored), len(out)) == (n // 32 * 32, n % 32)
    assert stored.key == (4, 8, 4, False)
    assert torch.equal(torch.cat([stored.order.long(), out.order], 1), kv.order)
    assert torch.equal(out.keys, kv.keys[:, len(stored) :])
    assert torch.equal(out.lengths, torch.full((2,), n % 32))
    own = quantize(
        kv.keys[:, 8:16], kv.values[:, 8:16], kv.order[:, 8:16], torch.tensor([8, 8]), 4,
        key_group=8, value_group=8,
    )  # fmt: skip
    keys, values = stored.dequantize(FLOAT)
    assert torch.equal(keys[:, 8:16], own.dequantize(FLOAT)[0])
    assert torch.equal(values[:, 8:16], own.dequantize(FLOAT)[1])
    assert not torch.equal(keys[:, :8], own.dequantize(FLOAT)[0])


def test_kivi_uses_three_bits_per_value():
    kv = prompt(256, dim=64)
    (stored,) = Kivi().compress(prefill_context(256), 0, kv, None).segments
    assert stored.held_bytes() * 8 == 3 * kv.keys.numel() * 2


def test_kivi_with_biases_and_ragged_heads():
    bias = noise(2, 80, seed=5)
    stage, step = Kivi(bits=2, group=8, residual=16), prefill_context(80)
    kv = prompt(80, lengths=[70, 41], bias=bias)
    kv.keys[1, 41:], kv.values[1, 41:] = torch.nan, torch.nan
    out = stage.compress(step, 0, kv, None)
    (stored,) = out.segments
    assert len(stored) == 32 and out.lengths.tolist() == [38, 9]
    assert torch.equal(stored.bias, bias[:, :32]) and torch.equal(out.bias, bias[:, 32:])
    assert all(bool(x.isfinite().all()) for x in stored.dequantize(FLOAT))
    # Decoding quantizes what the shortest head has; it is 29 slots shorter than the longest.
    slots, part = Tail(out, step), stage.expand()[1]
    lengths = []
    for _ in range(30):
        part.step(slots, 0)
        lengths.append(slots.length.tolist())
        slots.write(noise(2, 32, seed=1), noise(2, 32, seed=2))
    assert all(longest - shortest == 29 for longest, shortest in lengths)
    assert lengths[6:8] == [[44, 15], [29 + 0, 0]]
    assert all(bool(x.isfinite().all()) for p in slots.pages for x in p.dequantize(FLOAT))


@pytest.mark.parametrize("n", [5, 40])
def test_kivi_quantizes_answer_like_prompt(n):
    """The codes of prompt and answer equal those of a longer prompt."""
    stage, total = Kivi(bits=2, group=8, residual=16), 70
    kv = prompt(total)
    start, step = torch.arange(n), prefill_context(n)
    slots, part = Tail(stage.compress(step, 0, kv.select(start), None), step), stage.expand()[1]
    slots.seen = 3 + n
    for at in range(n, total):
        part.step(slots, 0)
        assert slots.max_length < 16
        slots.write(kv.keys[:, at], kv.values[:, at])
    part.step(slots, 0)
    whole = stage.compress(prefill_context(total), 0, kv, None)
    assert slots.max_length == len(whole) == total % 16
    (stored,) = slots.pages
    assert same(stored, whole.segments[0])
    assert torch.equal(slots.keys, whole.keys)
    assert slots.calls == total // 16 - n // 16
    assert not same(
        stored, Kivi(bits=4, group=8, residual=16).compress(step, 0, kv, None).segments[0]
    )


def test_kivi_quantizes_many_new_tokens_at_once():
    stage, step = Kivi(bits=2, group=8, residual=16), prefill_context(50)
    slots = Tail(prompt(50), step)
    stage.expand()[1].step(slots, 0)
    assert (slots.max_length, slots.calls) == (2, 1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bits": 3}, "kivi: bits=3 cannot be packed; allowed are 2, 4 and 8"),
        ({"bits": 16}, "kivi: bits=16 is out of range"),
        ({"residual": 100}, "kivi: residual=100 does not consist of groups of 32"),
    ],
)
def test_kivi_invalid_parameters_raise(parameters, message):
    with pytest.raises(RecipeError, match=message):
        Kivi(**parameters)


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


def test_saliency_is_averaged_over_attending_rows():
    stats, n = columns(20), 20
    full = ZipCache().score(prefill_context(n), prompt(n), stats)
    close(full, stats.sum.sum(1) / (n - torch.arange(n)), terms=2 + 1)
    probe = ZipCache(norm="probe").score(prefill_context(n), prompt(n), stats)
    close(probe, stats.sum.sum(1) / stats.nnz, terms=2 + 1)
    assert not torch.equal(full, probe)
    assert bool(saliency(stats.sum, 0 * stats.nnz).isfinite().all())
    # If slots were dropped, each is divided by the number of rows that still attend to it.
    left = torch.tensor([0, 3, 4, 11, 19])
    kv = prompt(n).select(left)
    remaining = ColumnStats(stats.nnz[:, left], stats.rows, stats.sum[..., left])
    assert torch.equal(ZipCache().score(prefill_context(n), kv, remaining), full[:, left])


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


def test_zipcache_quantizes_answer_in_pages():
    stage, step = ZipCache(page=16), prefill_context(20)
    kv = prompt(20)
    compressed = stage.compress(step, 0, kv, columns(20))
    slots, part = Tail(compressed, step), stage.expand()[1]
    keys, values = noise(2, 40, 32, seed=8), noise(2, 40, 32, seed=9)
    for at in range(40):
        part.step(slots, 0)
        assert slots.max_length < 16
        slots.write(keys[:, at], values[:, at])
    assert slots.calls == 2
    high, low, pages = slots.pages
    # Slots that were quantized earlier are unchanged.
    assert high is compressed.segments[0] and low is compressed.segments[1]
    assert pages.key == (4, 16, 1, True) and pages.lengths.tolist() == [32, 32]
    assert torch.equal(pages.value_scale, high.value_scale)
    assert pages.order[0].tolist() == list(range(1000, 1032))
    own = quantize(
        keys[:, 16:32], values[:, 16:32], kv.order[:, :16], torch.tensor([16, 16]), 4,
        key_group=16, scaled=high.value_scale,
    )  # fmt: skip
    for ours, other in zip(pages.dequantize(FLOAT), own.dequantize(FLOAT), strict=True):
        assert torch.equal(ours[:, 16:], other)
        assert not torch.equal(ours[:, :16], other)


def test_zipcache_requests_fractions_of_probe_rows():
    stage = ZipCache(recent=0.1, random=0.2, seed=7)
    (request,) = set(stage.text_stats(3).values())
    assert set(stage.text_stats(3)) == {0, 1, 2}
    assert (request.rows, request.n, request.random, request.seed) == ("probe", 0.1, 0.2, 7)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bits_high": 6}, "zipcache: bits_high=6 cannot be packed; allowed are 2, 4 and 8"),
        ({"bits_high": 2, "bits_low": 4}, "bits_low=4 is more than bits_high=2"),
        ({"important": 1.5}, "important=1.5 is out of range"),
        ({"recent": 0.0}, "recent=0 is out of range"),
    ],
)
def test_zipcache_invalid_parameters_raise(parameters, message):
    with pytest.raises(RecipeError, match=message):
        ZipCache(**parameters)


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
