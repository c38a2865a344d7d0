"""Check every memory access of kernels that run in Triton's interpreter.

`checked` compares each address that a kernel reads or writes, masked ones excepted, with the
elements of the tensors passed to that launch: reading the gap between the rows of a view is an
error too, whether or not the value reaches the result. `narrow_products` finds addresses that
depend on a product computed in 32 bits from an argument of the launch, such as a stride or a size:
beyond 2^31 elements such a product overflows.

`banded` and `guarded` surround tensors with guard bands, which also work on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine.kernels import interpreted_arguments, interpreted_memory
from vlmfast.kernels.calls import Call, tensors

BAND = 4096  # elements on each side
TRITON = os.sep + "triton" + os.sep  # in the paths of Triton's own files


# --- addresses -----------------------------------------------------------------------------------


class Region:
    """The bytes of the elements of a strided tensor."""

    def __init__(self, x: Tensor) -> None:
        self.start, self.name = x.data_ptr(), f"{x.dtype} {tuple(x.shape)} {x.stride()}"
        size = x.element_size()
        axes = [(s * size, n) for s, n in zip(x.stride(), x.shape, strict=True) if s and n > 1]
        self.axes = [*sorted(axes, reverse=True), (1, size)]
        self.last = self.start + sum(stride * (n - 1) for stride, n in self.axes)

    def holds(self, address: np.ndarray) -> np.ndarray:
        """Whether each address (int64) is that of a byte of an element."""
        rest = address - self.start
        for stride, n in self.axes:
            rest = rest - np.clip(rest // stride, 0, n - 1) * stride
        return rest == 0


class Memory:
    """Addresses that the current launch may access; stands in for Triton's native loads."""

    def __init__(self, native: Any) -> None:
        self._native, self.regions = native, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def load(self, address: np.ndarray, mask: np.ndarray, other: Any, dtype: np.dtype) -> Any:
        self._check("read", address, mask, np.dtype(dtype).itemsize)
        return self._native.load(address, mask, other, dtype)

    def store(self, address: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self._check("write", address, mask, value.itemsize)
        return self._native.store(address, value, mask)

    def atomic_rmw(self, op: Any, address: np.ndarray, value: Any, mask: Any, order: Any) -> Any:
        self._check("write", address, mask, value.itemsize)
        return self._native.atomic_rmw(op, address, value, mask, order)

    def atomic_cas(self, address: np.ndarray, old: Any, value: np.ndarray, order: Any) -> Any:
        self._check("write", address, np.ones_like(address, bool), value.itemsize)
        return self._native.atomic_cas(address, old, value, order)

    def _check(self, what: str, address: np.ndarray, mask: np.ndarray, size: int) -> None:
        # Masks of which a part is a scalar are integers.
        used = address[np.broadcast_to(mask, address.shape).astype(bool)].astype(np.int64)
        for edge in (0, size - 1):  # first and last byte
            left = used + edge
            for region in self.regions:
                if not left.size:
                    break
                if region.start <= left.max() and left.min() <= region.last:
                    left = left[~region.holds(left)]
            if left.size:
                raise AssertionError(self._outside(what, int(left[0])))

    def _outside(self, what: str, address: int) -> str:
        near = min(self.regions, key=lambda r: max(r.start - address, address - r.last, 0))
        return f"{what} outside the tensors: byte {address - near.start} of {near.name}, {source()}"


def source() -> str:
    """Function, line and text of the kernel that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__ and TRITON not in code.co_filename:
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{code.co_name}: {line}"
        frame = frame.f_back
    return "unknown source"


# --- products ------------------------------------------------------------------------------------

ARGUMENT, INDEX = "argument", "index"  # of a launch; a program's, an entry's of a block, or loaded

INDICES = ("create_get_program_id", "create_make_range")


def origin(handle: Any) -> frozenset[str]:
    """What a value was computed from: `ARGUMENT`, `INDEX`, or a source line with a product."""
    return getattr(handle, "attr", {}).get("origin", frozenset())


def _traced(name: str, make: Callable[..., Any], products: set[str]) -> Callable[..., Any]:
    """A method of the interpreter's builder that passes on the origins of its operands."""

    @functools.wraps(make)
    def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
        out = make(builder, *args, **kwargs)
        found = frozenset().union(*map(origin, args))
        if name == "create_addptr":
            products.update(origin(args[1]) - {ARGUMENT, INDEX})
            return out
        if name in INDICES or "load" in name or "atomic" in name:
            found = frozenset({INDEX})
        if name == "create_mul" and args[0].dtype.scalar.int_bitwidth <= 32:
            a, b = map(origin, args)
            if (ARGUMENT in a and INDEX in b) or (ARGUMENT in b and INDEX in a):
                found |= {source()}
        for handle in out if isinstance(out, tuple) else (out,):
            if found and hasattr(handle, "attr"):
                handle.attr["origin"] = origin(handle) | found
        return out

    return call


# --- the interpreter -----------------------------------------------------------------------------


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Check the addresses of all launches.

    Raises ``AssertionError`` within a launch, which Triton reports as ``InterpreterError``.
    """

    def begin(memory: Memory, arguments: tuple[Any, ...]) -> None:
        memory.regions = [Region(x) for x in tensors(arguments) if x.numel()]

    with pytest.MonkeyPatch.context() as patch:
        interpreted_memory(patch, Memory, begin)
        yield


@contextlib.contextmanager
def narrow_products() -> Iterator[set[str]]:
    """Source lines of products in 32 bits that reach an address, of all launches within."""
    from triton.runtime import interpreter

    products: set[str] = set()
    builder = interpreter.InterpreterBuilder

    def converted(arg: Any, out: Any) -> Any:
        if isinstance(arg, int) and not isinstance(arg, bool):
            out.handle.attr["origin"] = frozenset({ARGUMENT})
        return out

    with pytest.MonkeyPatch.context() as patch:
        interpreted_arguments(patch, converted)
        for name in dir(builder):
            if name.startswith("create_"):
                patch.setattr(builder, name, _traced(name, getattr(builder, name), products))
        yield products


# --- guard bands ---------------------------------------------------------------------------------


def pattern(dtype: torch.dtype) -> Any:
    """NaN, or an integer near the maximum: as a value or an index it shows in the result."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max - 1


def _embedded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view with the shape and strides of ``x`` in the middle of a larger buffer, and both."""
    span = 1 + sum(s * (n - 1) for s, n in zip(x.stride(), x.shape, strict=True))
    whole = torch.full((span + 2 * BAND,), pattern(x.dtype), dtype=x.dtype, device=x.device)
    return whole.as_strided(x.shape, x.stride(), BAND), whole


def banded(x: Tensor) -> Tensor:
    """A copy of ``x`` with its strides, with guard bands on both sides and in its gaps."""
    if not x.numel():
        return x
    view, _ = _embedded(x)
    # Elements that an expanded axis repeats are one element.
    once = tuple(slice(0, 1) if not s else slice(None) for s in x.stride())
    view[once].copy_(x[once])
    return view


class Guarded:
    """Guard bands around what `torch.empty` and its like allocate; `check` compares them."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor]] = []

    def around(self, x: Tensor) -> Tensor:
        """``x`` itself if it is empty, else a poisoned tensor of its shape and strides."""
        if not x.numel():
            return x
        view, whole = _embedded(x)
        self._made.append((view, whole))
        return view

    def check(self) -> int:
        """Assert that nothing was written beside the tensors; returns their number."""
        for view, whole in self._made:
            apart = torch.ones(whole.shape, dtype=torch.bool, device=whole.device)
            apart.as_strided(view.shape, view.stride(), BAND).fill_(False)
            untouched = torch.full_like(whole, pattern(whole.dtype))
            same = (whole == untouched) | (whole.isnan() & untouched.isnan())
            assert bool(same[apart].all()), f"written beside {tuple(view.shape)} {view.dtype}"
        return len(self._made)


@contextlib.contextmanager
def guarded() -> Iterator[Guarded]:
    """Give uninitialized tensors guard bands; they are checked at the end."""
    found = Guarded()
    owners = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in owners:
            make = getattr(owner, name)

            @functools.wraps(make)
            def filled(*args: Any, _make: Any = make, **kwargs: Any) -> Tensor:
                return found.around(_make(*args, **kwargs))

            patch.setattr(owner, name, filled)
        yield found
        found.check()


def each_tensor(of: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with every tensor replaced, also those in lists, tuples, dicts and dataclasses."""
    if isinstance(of, Tensor):
        return change(of)
    if isinstance(of, dict):
        return {name: each_tensor(value, change) for name, value in of.items()}
    if isinstance(of, list | tuple):
        return type(of)(each_tensor(value, change) for value in of)
    if is_dataclass(of):
        parts = {each.name: getattr(of, each.name) for each in fields(of)}
        return replace(of, **each_tensor(parts, change))
    return of


def results(call: Call, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Tensors that a call with changed inputs returns, and those that it writes to."""
    args, kwargs = each_tensor((call.args, dict(call.kwargs)), change)
    return [*tensors(call.function(*args, **kwargs)), *(args[i] for i in call.written)]
