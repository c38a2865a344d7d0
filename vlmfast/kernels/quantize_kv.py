"""``quantize_kv``: keys and values as 8-, 4- or 2-bit codes, each with a step and a minimum.

An entry ``x`` of a group becomes ``q = round((x - min) / step)``, half to even, where ``step`` is
``(max - min) / (2^bits - 1)``; it is dequantized as ``q step + min``. Keys share step and minimum
per channel, over a group of slots; values per slot, over a group of channels. Values may first be
divided by a scale of their channel, the square root of its largest magnitude.

Codes are computed from the *stored* step and minimum. The stored minimum is never above the true
one, so that the error of an entry is at most half a step.

A byte stores ``n = 8 / bits`` codes, split along the channels: byte ``j`` of a slot has the codes
of channels ``j``, ``j + D/n``, ``j + 2 D/n`` ... from its lowest bits up. A kernel thus unpacks
whole halves (quarters) of the channels from a tile of bytes, without shuffling, and the two halves
are the ones that a rotary embedding pairs.

The Triton kernels match the reference on a CPU bit for bit. Minima and maxima of key channels are
reduced from blocks of slots, those of values are computed in one kernel, and one kernel computes
and packs the codes of both. Bytes: keys and values twice (the second time from the L2 cache, if
they fit), codes and parameters once. Floor for 2,944 slots of 32 heads, D=128, in 4 bits, at 4.3
TB/s: 22.4 us to read and 3.0 us to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._quantize_kv import launch_keys, launch_scale, launch_values, variants_of
from ._triton import Variant, use_triton

BITS = (2, 4, 8)
LIMIT = 6e4  # largest magnitude for parameters in float16


def check(bits: int, dim: int, value_group: int | None = None) -> None:
    """Raise ``ValueError`` if ``dim`` channels cannot be packed this way."""
    if bits not in BITS:
        raise ValueError(f"bits={bits} cannot be packed; allowed are 2, 4 and 8")
    if dim % (8 // bits):
        raise ValueError(
            f"{dim} channels cannot be packed into bytes of {8 // bits} codes; "
            f"their number must be a multiple of {8 // bits}"
        )
    if value_group is not None and (value_group < 1 or dim % value_group):
        raise ValueError(
            f"groups of {value_group} channels do not divide a head of {dim}; "
            f"allowed are the divisors of {dim}"
        )


# --- packing -------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., D) below ``2^bits`` into uint8 (..., D*bits//8), split along the last axis."""
    check(bits, codes.shape[-1])
    parts = codes.to(torch.uint8).chunk(8 // bits, -1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 (..., D)."""
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], -1)


# --- codes of one tensor -------------------------------------------------------------------------


def affine(low: Tensor, high: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Step and minimum as stored, for groups with values from ``low`` to ``high``.

    Empty groups have ``low > high``. A step of zero becomes one; all codes are then 0.
    """
    low, high = low.masked_fill(low > high, 0.0), high.masked_fill(low > high, 0.0)
    info = torch.finfo(dtype)
    minimum = low.clamp(info.min, info.max).to(dtype)
    below = (low - low.abs() * info.eps - info.smallest_normal * info.eps).clamp(info.min, info.max)
    minimum = torch.where(minimum.float() > low, below.to(dtype), minimum)
    step = ((high - minimum.float()) / (2**bits - 1)).clamp(max=info.max).to(dtype)
    return step.masked_fill(step == 0, 1), minimum


def encode(x: Tensor, step: Tensor, minimum: Tensor, bits: int) -> Tensor:
    """Codes of ``x``: integers, in float32."""
    return ((x - minimum.float()) / step.float()).round().clamp(0, 2**bits - 1)


def grouped(x: Tensor, group: int, fill: float = 0.0) -> Tensor:
    """Slots (..., N, D) in groups (..., G, group, D), the last one padded; 0: one group."""
    if group == 0:
        return x.unsqueeze(-3)
    return pad(x, (0, 0, 0, -x.shape[-2] % group), value=fill).unflatten(-2, (-1, group))


def quantize_keys(
    x: Tensor, bits: int, group: int = 0, valid: Tensor | None = None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize keys per channel, over groups of slots.

    Parameters
    ----------
    x : Tensor, (..., N, D)
    group : int
        Slots that share the parameters of a channel; 0 for all. The last group may be smaller.
    valid : Tensor, bool, (..., N), optional
        Valid slots; the others do not affect the parameters and may hold any values.

    Returns
    -------
    packed : Tensor, uint8, (..., N, D*bits//8)
    step, minimum : Tensor, dtype, (..., G, D)
    """
    check(bits, x.shape[-1])
    run = launch_keys if use_triton("quantize_kv", x, valid) else quantize_keys_ref
    return run(x, bits, group, valid, dtype=dtype)


def quantize_keys_ref(
    x: Tensor, bits: int, group: int = 0, valid: Tensor | None = None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_keys` in plain PyTorch."""
    x = x.float()
    low = high = x
    if valid is not None:
        masked = ~valid[..., None]
        x = x.masked_fill(masked, 0.0)
        low, high = x.masked_fill(masked, torch.inf), x.masked_fill(masked, -torch.inf)
    if x.shape[-2] == 0:  # one invalid slot, so that the reduction is not empty
        low, high = pad(low, (0, 0, 0, 1), value=1.0), pad(high, (0, 0, 0, 1), value=-1.0)
    low = grouped(low, group, torch.inf).amin(-2)
    high = grouped(high, group, -torch.inf).amax(-2)
    groups = -(-x.shape[-2] // group) if group else 1
    step, minimum = affine(low[..., :groups, :], high[..., :groups, :], bits, dtype)
    codes = encode(grouped(x, group), step[..., None, :], minimum[..., None, :], bits)
    codes = codes.flatten(-3, -2)[..., : x.shape[-2], :]
    return pack(codes, bits), step, minimum


def quantize_values(
    x: Tensor,
    bits: int,
    group: int | None = None,
    scale: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize values per slot, over groups of channels.

    Parameters
    ----------
    x : Tensor, (..., N, D)
    group : int, optional
        Channels that share the parameters of a slot; all by default.
    scale : Tensor, (..., D), optional
        Divisor of each channel.
    valid : Tensor, bool, (..., N), optional
        Valid slots; the others may hold any values.

    Returns
    -------
    packed : Tensor, uint8, (..., N, D*bits//8)
    step, minimum : Tensor, dtype, (..., N, D//group)
    """
    group = x.shape[-1] if group is None else group
    check(bits, x.shape[-1], group)
    run = launch_values if use_triton("quantize_kv", x, scale, valid) else quantize_values_ref
    return run(x, bits, group, scale, valid, dtype=dtype)


def quantize_values_ref(
    x: Tensor,
    bits: int,
    group: int,
    scale: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_values` in plain PyTorch."""
    x = x.float()
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0.0)
    if scale is not None:
        x = x / scale.float()[..., None, :]
    x = x.unflatten(-1, (-1, group))
    step, minimum = affine(x.amin(-1), x.amax(-1), bits, dtype)
    return (
        pack(encode(x, step[..., None], minimum[..., None], bits).flatten(-2), bits),
        step,
        minimum,
    )


def channel_scale(x: Tensor, valid: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """``sqrt(max |x|)`` of each channel of (..., N, D) over the slots; 1 if all are zero."""
    run = launch_scale if use_triton("quantize_kv", x, valid) else channel_scale_ref
    return run(x, valid, dtype=dtype)


def channel_scale_ref(x: Tensor, valid: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """`channel_scale` in plain PyTorch."""
    x = x.float().abs()
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0.0)
    # In float64: not every library rounds the square root of float32 correctly.
    scale = pad(x, (0, 0, 0, 1)).amax(-2).double().sqrt().float().to(dtype)
    return scale.masked_fill(scale == 0, 1)


def dequantize_keys(packed: Tensor, step: Tensor, minimum: Tensor, bits: int, group: int) -> Tensor:
    """The inverse of `quantize_keys`, float32 (..., N, D)."""
    codes = unpack(packed, bits).float()
    step, minimum = step.float(), minimum.float()
    if group:
        step = step.repeat_interleave(group, -2)[..., : codes.shape[-2], :]
        minimum = minimum.repeat_interleave(group, -2)[..., : codes.shape[-2], :]
    return codes * step + minimum


def dequantize_values(
    packed: Tensor, step: Tensor, minimum: Tensor, bits: int, scale: Tensor | None = None
) -> Tensor:
    """The inverse of `quantize_values`, float32 (..., N, D)."""
    codes = unpack(packed, bits).float().unflatten(-1, (step.shape[-1], -1))
    x = (codes * step.float()[..., None] + minimum.float()[..., None]).flatten(-2)
    return x if scale is None else x * scale.float()[..., None, :]


def parameter_dtype(*tensors: Tensor) -> torch.dtype:
    """float16 if the tensors' range fits into it, else their own dtype.

    bfloat16 is not preferred: its steps and minima have three bits less. Synchronizes with the
    device, unless the tensors are float16.
    """
    own = tensors[0].dtype
    return own if own == torch.float16 or not fits([largest(*tensors)]) else torch.float16


def largest(*tensors: Tensor) -> Tensor:
    """The largest absolute value of the tensors, float32, (); 0 where they are empty."""
    found = [x.abs().amax().float() for x in tensors if x.numel()]
    return torch.stack(found).max() if found else tensors[0].new_zeros((), dtype=torch.float32)


def fits(values: Sequence[Tensor]) -> bool:
    """Whether float16 holds all of some `largest` values, of any devices; waits for these."""
    home = values[0].device
    return bool(torch.stack([value.to(home) for value in values]).max() <= LIMIT)


# --- keys and values together --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Segment:
    """Quantized keys and values; the leading axes are (H,) or (B, H).

    Parameters
    ----------
    bits : int
        8, 4 or 2.
    group : int
        Slots that share the key parameters of a channel; 0: all slots of the segment.
    key_codes, value_codes : Tensor, uint8, (..., N, D*bits//8)
    key_step, key_min : Tensor, (..., G, D)
        ``G = ceil(N / group)``; 1 if ``group`` is 0.
    value_step, value_min : Tensor, (..., N, C)
        For ``C`` groups of ``D/C`` channels each.
    value_scale : Tensor, (..., D), optional
        Factor of each channel of the values.
    lengths : Tensor, int64, (...,)
        Number of valid slots; the others, at the end, are padding.
    order : Tensor, int32, (..., N)
        Index of each slot's token in the full sequence; in a cache layer with a window, its
        `rank` in that layer. Attention reads it only for such layers.
    bias : Tensor, float32, (..., N), optional
        Added to the logit of each key.
    """

    bits: int
    group: int
    key_codes: Tensor
    key_step: Tensor
    key_min: Tensor
    value_codes: Tensor
    value_step: Tensor
    value_min: Tensor
    value_scale: Tensor | None
    lengths: Tensor
    order: Tensor
    bias: Tensor | None = None

    def __len__(self) -> int:
        return self.key_codes.shape[-2]

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return self.key_codes.shape[-1] * 8 // self.bits

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """Segments with equal keys can be batched, and written into each other."""
        return self.bits, self.group, self.value_step.shape[-1], self.value_scale is not None

    @property
    def valid(self) -> Tensor:
        """Tensor, bool, (..., N): valid slots."""
        return torch.arange(len(self), device=self.lengths.device) < self.lengths[..., None]

    def dequantize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (..., N, D), computed in float32; padding gives finite numbers."""
        keys = dequantize_keys(self.key_codes, self.key_step, self.key_min, self.bits, self.group)
        values = dequantize_values(
            self.value_codes, self.value_step, self.value_min, self.bits, self.value_scale
        )
        return keys.to(dtype), values.to(dtype)

    def tensors(self) -> list[Tensor]:
        """All tensors of the segment."""
        return [x for name in TENSORS if (x := getattr(self, name)) is not None]

    def held_bytes(self) -> int:
        """Bytes of the valid slots: codes, parameters and biases; synchronizes with the device."""
        n = self.lengths
        groups = -(-n // self.group) if self.group else (n > 0).long()
        per_slot = 2 * self.key_codes.shape[-1]
        per_slot += 2 * self.value_step.shape[-1] * self.value_step.element_size()
        per_slot += 0 if self.bias is None else self.bias.element_size()
        total = n * per_slot + groups * (2 * self.dim * self.key_step.element_size())
        if self.value_scale is not None:
            total = total + (n > 0) * (self.dim * self.value_scale.element_size())
        return int(total.sum())

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> Segment:
        tensors: dict[str, Any] = {
            name: change(name, x) for name in TENSORS if (x := getattr(self, name)) is not None
        }
        return replace(self, **tensors)

    def unsqueeze(self) -> Segment:
        """Add a leading batch axis."""
        return self._each(lambda name, x: x[None])

    def squeeze(self) -> Segment:
        """Remove a leading batch axis of one row."""
        return self._each(lambda name, x: x[0])

    def select(self, rows: slice) -> Segment:
        """Views of batch rows."""
        return self._each(lambda name, x: x[rows])

    def clone(self) -> Segment:
        """A copy that shares no memory."""
        return self._each(lambda name, x: x.clone())

    def _with_bias(self) -> Segment:
        if self.bias is not None:
            return self
        return replace(self, bias=torch.zeros(self.order.shape, device=self.order.device))

    def first(self, slots: int) -> Segment:
        """The first ``slots`` slots, including padding if a head has fewer."""
        groups = -(-slots // self.group) if self.group else 1

        def change(name: str, x: Tensor) -> Tensor:
            if name == "lengths":
                return x.clamp(max=slots)
            if name == "value_scale":
                return x
            if name in _BY_GROUP:
                return x[..., :groups, :]
            return x[..., :slots] if name in ("order", "bias") else x[..., :slots, :]

        return self._each(change)

    def resized(self, batch: int, slots: int, *, bias: bool = False) -> Segment:
        """A copy for ``batch`` rows of ``slots`` slots each, in which `write` fills the new ones.

        Parameters
        ----------
        batch, slots : int
            Not below those in use; ``slots`` a multiple of ``group``.
        bias : bool
            Whether a bias is added where there is none.
        """
        source = self._with_bias() if bias else self
        larger = source._zeros(batch, slots, slots // self.group if self.group else 1)
        for new, old in zip(larger.tensors(), source.tensors(), strict=True):
            new[tuple(map(slice, old.shape))] = old
        return larger

    def _zeros(self, batch: int, slots: int, groups: int) -> Segment:
        def zeros(name: str, x: Tensor) -> Tensor:
            size = [batch, *x.shape[1:]]
            if name in _BY_GROUP:
                size[2] = groups
            elif name not in ("lengths", "value_scale"):
                size[2] = slots
            return x.new_zeros(size)

        return self._each(zeros)

    def write(self, row: int, start: int, other: Segment) -> None:
        """Write the slots of ``other`` to a row of this segment, in place.

        Parameters
        ----------
        row : int
        start : int
            Slots that the row has, in every head to which ``other`` adds slots; a multiple of
            ``group``, and 0 where all slots share their parameters.
        other : Segment, leading axes (H,)
            Of equal `key`. If values have a channel scale, it must be that of the row.

        Raises
        ------
        ValueError
            Where the slots cannot be written there.
        """
        if self.key != other.key:
            raise ValueError(
                "segments of different kinds (bits, group, value groups, scaled): "
                f"{sorted([self.key, other.key])}; they must be equal"
            )
        if start % self.group if self.group else start:
            raise ValueError(
                f"{start} slots in groups of {self.group or 'all'} cannot grow; "
                "their number must be a multiple of the group"
            )
        slots = slice(start, start + len(other))
        first = start // self.group if self.group else 0
        groups = slice(first, first + other.key_step.shape[-2])
        for name in TENSORS:
            target, source = getattr(self, name), getattr(other, name)
            if target is None:
                continue
            if name == "lengths":
                target[row] = source + target[row] if start else source
            elif name == "value_scale":
                target[row] = source
            elif name in _BY_GROUP:
                target[row, :, groups] = source
            else:  # a bias may be missing
                target[row, :, slots] = 0 if source is None else source

    def move(self, source: int, target: int) -> None:
        """Copy one row to another, in place."""
        for x in self.tensors():
            x[target] = x[source]

    @staticmethod
    def empty(like: Segment, batch: int) -> Segment:
        """``batch`` rows without slots, to batch with rows that have such a segment."""
        return like._zeros(batch, 0, 0 if like.group else 1)


TENSORS = tuple(f.name for f in fields(Segment) if f.name not in ("bits", "group"))
_BY_GROUP = ("key_step", "key_min")  # the others, but lengths and the scale, are by slot


def quantize(
    keys: Tensor,
    values: Tensor,
    order: Tensor,
    lengths: Tensor,
    bits: int,
    *,
    key_group: int = 0,
    value_group: int | None = None,
    scaled: bool | Tensor = False,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Segment:
    """Quantize keys and values to a `Segment`.

    Parameters
    ----------
    keys, values : Tensor, (..., N, D)
    order : Tensor, int64, (..., N)
        Index of each slot's token in the full sequence.
    lengths : Tensor, int64, (...,)
        Number of valid slots; the others may hold any values.
    bits : int
        2, 4 or 8.
    key_group : int
        Slots that share the key parameters of a channel; 0 for all.
    value_group : int, optional
        Channels that share the value parameters of a slot; all by default.
    scaled : bool or Tensor (..., D)
        Whether values are divided by a scale per channel, or that scale.
    bias : Tensor, (..., N), optional
    dtype : torch.dtype, optional
        Of the parameters; larger values are clamped. By default `parameter_dtype`, which
        synchronizes with the device.

    Raises
    ------
    ValueError
        If the channels cannot be packed this way.
    """
    check(bits, keys.shape[-1], value_group)
    valid = torch.arange(keys.shape[-2], device=keys.device) < lengths[..., None]
    if dtype is None:
        dtype = parameter_dtype(*(x.masked_fill(~valid[..., None], 0.0) for x in (keys, values)))
    scale: Tensor | None
    if isinstance(scaled, Tensor):
        scale = scaled
    else:
        scale = channel_scale(values, valid, dtype=dtype) if scaled else None
    key_codes, key_step, key_min = quantize_keys(keys, bits, key_group, valid, dtype=dtype)
    value_codes, value_step, value_min = quantize_values(
        values, bits, value_group, scale, valid, dtype=dtype
    )
    return Segment(
        bits=bits,
        group=key_group,
        key_codes=key_codes,
        key_step=key_step,
        key_min=key_min,
        value_codes=value_codes,
        value_step=value_step,
        value_min=value_min,
        value_scale=scale,
        lengths=lengths.long(),
        order=order.int(),
        bias=None if bias is None else bias.float(),
    )


def variants(arch: int) -> list[Variant]:
    """What launches compile on an architecture."""
    return [*variants_of(arch, "bf16", 128), *variants_of(arch, "fp16", 80)]
