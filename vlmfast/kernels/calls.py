"""Inputs of the calls in `catalogue`: shapes, random tensors, and what a call moves."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .quantize_kv import Segment

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """One layer of a language model with its prompt, and where its tensors are.

    Parameters
    ----------
    heads, kv_heads, dim : int
    length : int
        Tokens of the prompt.
    width, hidden : int
        Of the residual stream, and of the MLP.
    batch : int
    dtype : torch.dtype
    device : torch.device
    large : bool
        For times: nothing is ragged, and inputs are drawn on the device.
    views : bool
        Whether inputs are views: axes are exchanged in memory, and there are gaps between rows.
    """

    heads: int
    kv_heads: int
    dim: int
    length: int
    width: int
    hidden: int
    batch: int = 2
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    large: bool = False
    views: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}, {self.length} tokens, {dtype}"

    @property
    def fifth(self) -> int:
        """A fifth of the tokens, at least one."""
        return max(self.length // 5, 1)


@dataclass(frozen=True)
class Call:
    """A call of a kernel.

    Parameters
    ----------
    function : callable
    args : tuple
    kwargs : dict
    terms : int
        Length of all sums up to one entry of the result, added up; 0 if results must be equal.
    bytes : int, optional
        What the task must move at least; by default, inputs and results once.
    flop : int
        Operations of its matrix products.
    allow : float
        Fraction of entries that near ties may change.
    written : tuple of int
        Arguments that the function writes to.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    terms: int = 0
    bytes: int | None = None
    flop: int = 0
    allow: float = 0.0
    written: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the first operand."""
        return next((x.dtype for x in tensors(self.args) if x.is_floating_point()), torch.float32)

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)

    def result(self) -> list[Any]:
        """What it returns, and what it writes to copies of `written`."""
        args = [x.clone() if i in self.written else x for i, x in enumerate(self.args)]
        return [self.function(*args, **self.kwargs), *(args[i] for i in self.written)]

    def reference(self) -> list[Any]:
        """`result` of the PyTorch reference."""
        with references():
            return self.result()

    def moved(self) -> int:
        """Bytes that the task must move; may call the function."""
        return nbytes((self.args, self.kwargs, self.run())) if self.bytes is None else self.bytes


def references() -> Any:
    """Inside the block, the PyTorch references run."""
    return mock.patch.dict(os.environ, VLMFAST_KERNELS="torch")


def tensors(of: Any) -> Iterator[Tensor]:
    """Tensors of arguments or a result, in order."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, Mapping):
        for key in sorted(of):
            yield from tensors(of[key])
    elif isinstance(of, list | tuple):
        for part in of:
            yield from tensors(part)
    elif is_dataclass(of):
        for each in fields(of):
            yield from tensors(getattr(of, each.name))


def nbytes(of: Any) -> int:
    """Bytes of all tensors; those that share memory count once."""
    storages = (x.untyped_storage() for x in tensors(of))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Draws:
    """Random inputs of one call."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.source = shape, shape.device if shape.large else _CPU
        self.generator = torch.Generator(self.source).manual_seed(seed)
        self._given: dict[str, Any] = {"generator": self.generator, "device": self.source}

    def normal(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        x = torch.randn(size, **self._given) * scale
        return self.placed(x.to(self.shape.device, dtype or self.shape.dtype))

    def placed(self, x: Tensor) -> Tensor:
        """``x``, or a view with the same values."""
        if not self.shape.views or x.dim() < 2:
            return x
        if x.dim() > 2:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.zeros(len(x), 2 * x.shape[1], dtype=x.dtype, device=x.device)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, **self._given).to(self.shape.device)

    def integers(self, low: int, high: int, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, size, dtype=dtype, **self._given).to(self.shape.device)

    def sixteenths(self, *size: int) -> Tensor:
        """Multiples of a sixteenth up to one: sums in any order are exact."""
        return self.placed(self.integers(0, 17, *size).float() / 16)

    def indices(self, total: int, count: int, *leading: int) -> Tensor:
        """``count`` of ``total`` indices, ascending, for each leading entry."""
        return self.uniform(*leading, total).argsort(-1)[..., :count].sort(-1).values

    def lengths(self, total: int, *size: int) -> Tensor:
        """1 to ``total``, which the last entry is, as are all of a large shape."""
        found = self.integers(min(total, 1), total + 1, *size)
        if self.shape.large:
            found.fill_(total)
        found.view(-1)[-1] = total
        return found

    def cache(self, batch: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, Hk, N, D) with their lengths (B, Hk), and NaN beyond them."""
        s = self.shape
        keys, values = (self.normal(batch, s.kv_heads, slots, s.dim) for _ in "kv")
        lengths = self.lengths(slots, batch, s.kv_heads)
        for x in (keys, values):
            x.masked_fill_(~within(slots, lengths)[..., None], torch.nan)
        return keys, values, lengths

    def segment(self, batch: int, slots: int, bits: int, group: int = 0) -> Segment:
        """Random codes: not those of `quantize_kv`, whose errors must not show up here."""
        s, top = self.shape, 2**bits - 1
        leading = batch, s.kv_heads
        groups, parts = 1, 1
        if group:
            groups, parts = -(-slots // group), s.dim // math.gcd(group, s.dim)

        def steps(*size: int) -> Tensor:
            return ((0.5 + self.uniform(*leading, *size)) * 3 / top).half()

        def codes() -> Tensor:
            return self.integers(0, 256, *leading, slots, s.dim * bits // 8, dtype=torch.uint8)

        return Segment(
            bits,
            group,
            key_codes=codes(),
            key_step=steps(groups, s.dim),
            key_min=-self.uniform(*leading, groups, s.dim).half() - 1,
            value_codes=codes(),
            value_step=steps(slots, parts),
            value_min=-self.uniform(*leading, slots, parts).half() - 1,
            value_scale=None if group else self.uniform(*leading, s.dim).half() + 0.5,
            lengths=self.lengths(slots, *leading),
            order=torch.arange(slots, dtype=torch.int32, device=s.device).expand(*leading, slots),
        )

    def codes(self, bits: int, every: int, axis: int, *size: int) -> Tensor:
        """What is quantized without rounding: every group along ``axis`` begins with both ends."""
        codes = self.integers(0, 2**bits, *size).movedim(axis, 0)
        codes[::every], codes[1::every] = 0, 2**bits - 1
        return self.placed((codes.movedim(0, axis) / 4 - 2).to(self.shape.dtype))


def within(total: int, lengths: Tensor) -> Tensor:
    """Which of ``total`` slots are valid: (...,) to (..., total)."""
    return torch.arange(total, device=lengths.device) < lengths[..., None]
