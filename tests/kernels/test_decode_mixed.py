"""Decode attention over quantized segments and a float tail: kernel against reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.closeness import close
from support.engine.kernels import (
    INTERPRETED,
    codes,
    launches,
    parameters_one_by_one,
    tl,
    triton,
)
from vlmfast import VLMFastError
from vlmfast.kernels import decode_mixed as module
from vlmfast.kernels.decode_mixed import decode_mixed, decode_mixed_ref
from vlmfast.kernels.quantize_kv import TENSORS, Segment, quantize

pytestmark = [
    pytest.mark.usefixtures("triton"),
    # The interpreter uses NumPy, which warns about the infinities of some tests.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

KINDS = {
    "4 bit, whole": {"bits": 4, "scaled": True},
    "2 bit, whole": {"bits": 2, "scaled": True},
    "8 bit": {"bits": 8},
    "groups": {"bits": 2, "key_group": 8, "value_group": 8},
    # Tiles that end at a group border; several value groups per part; groups across parts.
    "odd groups": {"bits": 4, "key_group": 24, "value_group": 16},
    "groups across parts": {"bits": 2, "key_group": 5, "value_group": 32, "scaled": True},
    "small groups": {"bits": 8, "key_group": 40, "value_group": 4},
}
USUAL = list(KINDS)[:4]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def segment(kind: str, lengths: list[list[int]], dim: int, dtype, device, bias: bool) -> Segment:
    """A segment of ragged rows and heads, with garbage in its padding."""
    counts = torch.tensor(lengths)
    (batch, heads), n = counts.shape, max(map(max, lengths))
    parts = []
    for row in range(batch):
        keys, values = (noise(heads, n, dim, seed=7 * row + s).to(dtype) for s in (1, 2))
        order = torch.arange(n).expand(heads, -1)
        logit_bias = noise(heads, n, seed=row) if bias else None
        with pytest.MonkeyPatch.context() as patch:  # not under test here
            patch.setenv("VLMFAST_KERNELS", "torch")
            made = quantize(keys, values, order, counts[row], bias=logit_bias, **KINDS[kind])
        parts.append(made.unsqueeze())
    tensors = {name: [getattr(part, name) for part in parts] for name in TENSORS}
    whole = {name: torch.cat(of).to(device) for name, of in tensors.items() if of[0] is not None}
    return replace(parts[0], **whole)


def case(batch, shared, groups, rows, dim, cap, dtype, device, kinds=(), bias=False):
    """Arguments of `decode_mixed`; the tail is ragged, with NaN after its lengths."""
    query = noise(batch, shared * groups, rows, dim, seed=3).to(device, dtype)
    keys, values = (noise(batch, shared, cap, dim, seed=s).to(device, dtype) for s in (4, 5))
    length = torch.arange(1, batch * shared + 1).view(batch, shared) * cap // (batch * shared + 1)
    last = length[..., None] + torch.arange(rows)
    mask = (torch.arange(cap) < last[..., None]).to(device)
    masked = (~mask.any(2))[..., None]
    keys, values = keys.masked_fill(masked, torch.nan), values.masked_fill(masked, torch.nan)
    tail_bias = noise(batch, shared, cap, seed=6).to(device) if bias else None
    segments = []
    for at, kind in enumerate(kinds):
        lengths = [[(b * shared + h + at) * 11 % 40 for h in range(shared)] for b in range(batch)]
        if not any(map(any, lengths)):
            lengths[0][0] = 13
        segments.append(segment(kind, lengths, dim, dtype, device, bias))
    return query, segments, keys, values, mask, None, tail_bias


def sums(arguments: tuple) -> int:
    """Terms of the sums: a logit over the head dimension, then the values over all slots."""
    query, segments, keys = arguments[:3]
    return query.shape[-1] + keys.shape[2] + sum(map(len, segments))


def seen(lse: Tensor) -> Tensor:
    """Normalizers, with -inf for rows that see nothing."""
    return lse.masked_fill(lse == -1e30, -torch.inf)


def check(arguments: tuple, mass: bool = False) -> None:
    got = decode_mixed(*arguments, want_attention_mass=mass)
    expected = decode_mixed_ref(*arguments, want_attention_mass=mass)
    assert got[0].dtype == expected[0].dtype
    dtype, terms = arguments[0].dtype, sums(arguments)
    # Sums are in float32. In half precision the result and the operands of the tensor cores
    # (queries and weights) are rounded.
    inner = (torch.float32, terms) if INTERPRETED or dtype == torch.float32 else (dtype, 2)
    close(got[0], expected[0], dtype, terms if dtype == torch.float32 else 2)
    close(seen(got[1]), seen(expected[1]), *inner)
    if mass:
        close(got[2], expected[2], *inner)
    else:
        assert got[2] is None
    assert expected[0].isfinite().all()


BOTH = ("4 bit, whole", "groups")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kinds", [(), *[(kind,) for kind in USUAL], BOTH])
@pytest.mark.parametrize("groups", [1, 3])
def test_matches_reference(kinds, groups, device) -> None:
    check(case(2, 2, groups, 1, 64, 50, torch.float32, device, kinds), mass=True)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_queries_do_not_shift_all_logits(bits, grouped, device, monkeypatch) -> None:
    """Outliers stretch the range of each key channel; all other codes are in its middle.

    Queries times steps are rounded in the same direction in all channels. Against codes from 0 on
    this would move all logits of the segment together, and weigh it wrongly against the tail.
    """
    monkeypatch.setattr(module, "upcast", lambda x: False)  # operands as on a GPU
    dim, slots, offset, step = 64, 256, 2.0, 60.0 / 2**bits
    middle = (2**bits - 1) / 2
    codes = (torch.rand(slots, dim, generator=torch.Generator().manual_seed(0)) < 0.5) + middle // 1
    channels = torch.arange(dim)
    codes[channels, channels], codes[dim + channels, channels] = 0, 2**bits - 1
    keys = (offset + step * (codes - middle)).half()[None, None]
    values = torch.zeros(1, 1, slots, dim).half()
    order, lengths = torch.arange(slots).expand(1, 1, -1), torch.full((1, 1), slots)
    part = quantize(
        keys.to(device),
        values.to(device),
        order.to(device),
        lengths.to(device),
        bits,
        key_group=slots if grouped else 0,
        dtype=torch.float16,
    )
    large = 1.5  # its product with the step is the scale of the row
    entries = 1 + torch.arange(512) / 1024
    lost = entries / large - (entries / large).half().float()
    query = torch.full((1, 2, 1, dim), float(entries[lost.argmax()]))
    query[..., 0] = large
    tail = torch.full((1, 1, slots, dim), offset), torch.ones(1, 1, slots, dim)
    mask = torch.ones(1, 1, 1, slots, dtype=torch.bool)
    query, keys, values = (x.half().to(device) for x in (query, *tail))
    got = decode_mixed(query, [part], keys, values, mask.to(device))
    exact = (query.double(), [part], keys.double(), values.double(), mask.to(device))
    expected = decode_mixed_ref(*exact)
    # A summand of a logit: a query, a step, and a code that is half a step from the middle.
    scale = large * step * 0.5 * dim**-0.5
    close(got[1], expected[1], torch.float16, dim, scale=scale)
    close(got[0], expected[0], torch.float16, 2)


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", ["odd groups", "groups across parts", "small groups"])
@pytest.mark.parametrize("groups", [1, 2])
def test_odd_group_sizes_match_reference(kind, groups, device) -> None:
    check(case(2, 1, groups, 1, 96, 20, torch.float32, device, (kind,)), mass=True)
    check(case(1, 2, groups, 1, 64, 20, torch.float32, device, (kind,)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize("groups", [1, 4])
def test_multiple_rows_with_bias_match_reference(rows: int, groups: int, device) -> None:
    kinds = ("2 bit, whole", "groups")
    check(case(2, 1, groups, rows, 32, 41, torch.float32, device, kinds, bias=True), mass=True)


def test_long_tail_matches_reference(device) -> None:
    """Longer than the slots of one program."""
    check(case(1, 1, 2, 1, 16, 700, torch.float32, device, ("8 bit",)), mass=True)


@pytest.mark.cases(1)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kinds", [("4 bit, whole", "groups"), ("odd groups",), ()])
def test_one_tile_per_split_matches_default(kinds, groups, device, monkeypatch) -> None:
    """As many programs as tiles, including programs without slots."""
    arguments = case(1, 2, groups, 1, 32, 100, torch.float32, device, kinds, bias=True)
    whole = decode_mixed(*arguments, want_attention_mass=True)
    monkeypatch.setattr(module, "MIN_SLOTS", 16)
    check(arguments, mass=True)
    for ours, other in zip(whole, decode_mixed(*arguments, want_attention_mass=True), strict=True):
        close(ours, other, terms=sums(arguments))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("4 bit, whole", torch.float16),
        ("2 bit, whole", torch.bfloat16),
        ("groups", torch.bfloat16),
        ("odd groups", torch.float16),
    ],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_wide_loads_of_parameters_match_narrow(kind, groups, dtype, device, monkeypatch) -> None:
    """Bit for bit: several parameters in one load where their place in memory allows it."""
    arguments = list(case(1, 2, groups, 1, 64, 8, dtype, device, (kind,)))
    small = arguments[1][0]
    if dtype == torch.bfloat16:
        names = ("key_step", "key_min", "value_step", "value_min", "value_scale")
        narrow = {name: x.to(dtype) for name in names if (x := getattr(small, name)) is not None}
        small = replace(small, **narrow)
    whole = small.resized(1, -(-len(small) // 24) * 24)  # a capacity, as of a cache
    masked = ~whole.valid[..., None]
    own = {name: getattr(whole, name) for name in ("value_step", "value_min")}
    own = {name: x.masked_fill(masked, torch.nan) for name, x in own.items()}
    whole = replace(whole, **own)
    arguments[1] = [whole]
    check(tuple(arguments))
    wide = decode_mixed(*arguments)[:2]
    words = parameters_one_by_one(monkeypatch)
    assert all(map(torch.equal, wide, decode_mixed(*arguments)[:2]))
    assert len(words) == 1 and words[0] > 1
    arguments[1] = [small.first(len(small) - len(small) % 2 - 1)]  # a view, with an odd length
    decode_mixed(*arguments)
    assert words[1] == 1 or kind in ("groups", "odd groups")
    own["value_step"] = own["value_step"] * 2  # control
    arguments[1] = [replace(whole, **own)]
    assert not torch.equal(wide[0], decode_mixed(*arguments)[0])


@triton.jit
def _all_codes(packed, out, I: tl.constexpr, BITS: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, codes(tl.load(packed + at), I, BITS))


@pytest.mark.parametrize(("bits", "part"), [(8, 0), (4, 0), (4, 1), *((2, i) for i in range(4))])
def test_codes_are_exact(bits: int, part: int, device) -> None:
    packed = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, device=device)
    _all_codes[(1,)](packed, out, part, bits)
    mask = (2**bits - 1) << (part * bits)
    assert torch.equal(out, (packed & mask).float())
    assert not torch.equal(out, (packed & (mask >> 1)).float())  # control


@pytest.mark.cases(1)
@pytest.mark.parametrize("groups", [1, 2])
def test_row_is_independent_of_batch(groups, device) -> None:
    """Bit for bit: the order of summation does not depend on the batch."""
    query, segments, keys, values, mask, *_ = case(
        3, 1, groups, 1, 16, 40, torch.float32, device, ("4 bit, whole", "groups")
    )
    together = decode_mixed(query, segments, keys, values, mask, want_attention_mass=True)
    for row in (0, 2):
        at = torch.tensor([row], device=device)
        own = [x[at] for x in (query, keys, values, mask)]
        of_row = [of.select(slice(row, row + 1)) for of in segments]
        alone = decode_mixed(own[0], of_row, *own[1:], want_attention_mass=True)
        for ours, other in zip(together, alone, strict=True):
            assert torch.equal(ours[at], other)


@pytest.mark.cases(1)
@pytest.mark.parametrize("groups", [1, 2])
def test_padding_is_not_read(groups, device) -> None:
    """Codes, parameters and biases after the lengths; the tail has NaN in all tests."""
    arguments = list(
        case(2, 1, groups, 1, 16, 20, torch.float32, device, ("2 bit, whole", "groups"), bias=True)
    )
    clean = decode_mixed(*arguments, want_attention_mass=True)
    spoiled = []
    for part in arguments[1]:
        masked = ~part.valid
        wide = masked[..., None]
        first = torch.arange(part.key_step.shape[-2], device=device) * part.group
        unused = ((first >= part.lengths[..., None]) & (part.group > 0))[..., None]
        changed = {
            "key_codes": part.key_codes.masked_fill(wide, 255),
            "value_codes": part.value_codes.masked_fill(wide, 255),
            "key_step": part.key_step.masked_fill(unused, torch.nan),
            "key_min": part.key_min.masked_fill(unused, torch.inf),
            "value_step": part.value_step.masked_fill(wide, torch.nan),
            "value_min": part.value_min.masked_fill(wide, torch.inf),
            "bias": part.bias.masked_fill(masked, torch.nan),
        }
        spoiled.append(replace(part, **changed))
    arguments[1] = spoiled
    for ours, other in zip(clean, decode_mixed(*arguments, want_attention_mass=True), strict=True):
        assert torch.equal(ours, other)

    def longer(part: Segment) -> Segment:
        return replace(part, lengths=part.lengths.clamp(max=len(part) - 1) + 1)

    arguments[1] = [longer(part) for part in spoiled]  # control: one spoiled slot becomes valid
    got = decode_mixed(*arguments)
    assert not all(
        torch.equal(ours[0], other[0]) for ours, other in zip(got[:2], clean[:2], strict=True)
    )


def test_infinite_bias_masks_keys(device) -> None:
    arguments = list(case(1, 2, 2, 1, 16, 20, torch.float32, device, bias=True))
    arguments[6][..., 1] = -torch.inf
    check(tuple(arguments), mass=True)
    arguments[6][:] = -torch.inf
    out, lse, _ = decode_mixed(*arguments)
    assert not out.any() and (lse == -1e30).all()


def test_mask_of_all_heads(device) -> None:
    arguments = list(case(2, 2, 2, 1, 16, 20, torch.float32, device))
    arguments[4] = arguments[4].all(1, keepdim=True)
    check(tuple(arguments), mass=True)
    whole = decode_mixed(*arguments)[0]
    arguments[4] = arguments[4].expand(-1, 2, -1, -1)
    assert torch.equal(decode_mixed(*arguments)[0], whole)


def test_empty_tail_and_empty_query(device) -> None:
    query, _, keys, values, mask, *_ = case(1, 2, 2, 1, 16, 20, torch.float32, device)
    none = (keys[:, :, :0], values[:, :, :0], mask[..., :0])
    out, lse, mass = decode_mixed(query, [], *none, want_attention_mass=True)
    assert not out.any() and (lse == -1e30).all() and mass.shape == (1, 2, 0)
    out, lse, mass = decode_mixed(
        query[:, :, :0], [], keys, values, mask[:, :, :0], want_attention_mass=True
    )
    assert out.shape == (1, 4, 0, 16) and lse.shape == (1, 4, 0)


def test_launch_does_not_synchronize(device, monkeypatch) -> None:
    arguments = case(2, 2, 2, 1, 32, 40, torch.float32, device, ("4 bit, whole", "groups"))

    def refuse(*args, **kwargs):
        raise AssertionError("synchronized")

    methods = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
    with monkeypatch.context() as patch:
        for name in methods:
            patch.setattr(torch.Tensor, name, refuse)
        with pytest.raises(AssertionError, match="synchronized"):  # control
            int(arguments[1][0].lengths.max())
        launched = launches(patch, module, run=False)
        decode_mixed(*arguments, want_attention_mass=True)
    assert launched and all(isinstance(size, int) for of in launched for size in of.grid)


def test_fully_masked_row_is_zero(device) -> None:
    arguments = list(case(2, 2, 2, 1, 16, 20, torch.float32, device))
    arguments[4] = arguments[4].clone()
    arguments[4][1] = False
    out, lse, _ = decode_mixed(*arguments)
    assert not out[1].any()
    assert (lse[1] == -1e30).all()
    check(tuple(arguments))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_mixed_devices_raise() -> None:
    query, segments, keys, values, mask, *rest = case(1, 1, 1, 1, 16, 8, torch.float32, "cuda")
    with pytest.raises(VLMFastError, match="one device"):
        decode_mixed(query.cpu(), segments, keys, values, mask, *rest)
