"""Every kernel against its PyTorch reference, and the guard of the current device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from vlmfast.errors import VLMFastError
from vlmfast.kernels.calls import Shape
from vlmfast.kernels.catalogue import CASES, Case

from .closeness import deviation
from .rows import Row, attempt

_CALLS, _REPLAYS = 10, 5  # calls per captured graph, and how often it is timed
_COPIED = 1 << 28  # bytes: several times the L2 cache
_BOUND = 1 << 24  # below this many bytes, launches bound the time

# For the interpreter, for a GPU, and for times.
SMALL = (Shape(4, 2, 16, 48, 64, 192), Shape(2, 2, 24, 37, 40, 120))
_MIDDLE = (
    Shape(8, 2, 64, 333, 512, 1536),
    Shape(4, 1, 80, 129, 320, 960),
    Shape(4, 4, 128, 200, 512, 1536),
    Shape(2, 1, 256, 130, 512, 1536),
)
LARGE = Shape(32, 8, 128, 16384, 4096, 4096, batch=1, large=True)

Pair = tuple[Case, Shape]


def shapes(device: torch.device, quick: bool) -> list[Shape]:
    """The grid of shapes and dtypes for a device: small ones for the interpreter."""
    if device.type == "cuda":
        dtypes = [torch.bfloat16, torch.float32, torch.float16]
        grid = [*_MIDDLE[: 2 if quick else None], LARGE]
    else:
        # The interpreter truncates instead of rounding to bfloat16.
        dtypes, grid = [torch.float32, torch.float16], list(SMALL)
    found = [
        replace(shape, dtype=dtype, device=device)
        for number, shape in enumerate(grid)
        # Quick checks take one dtype for each shape.
        for dtype in (dtypes if not quick else dtypes[number % 2 :][:1])
    ]
    return [shape for shape in found if not shape.large or shape.dtype == torch.bfloat16]


def pairs_of(kernel: str, grid: Iterable[Shape]) -> Iterator[Pair]:
    """The cases of a kernel on a grid of shapes; of large ones, those that are timed."""
    for shape in grid:
        for case in CASES:
            if case.kernel == kernel and case.checked and (case.streams or not shape.large):
                yield case, shape


def check_kernel(
    pairs: Iterable[Pair], *, copy_rate: float | None = None, synchronize: bool = False
) -> Iterator[Row]:
    """Compare each case with its reference.

    Parameters
    ----------
    pairs : iterable of (Case, Shape)
    copy_rate : float, optional
        Bytes per second of a large copy; with it, cases that are bounded by bytes are timed.
    synchronize : bool
        Wait for the device after each call, so that its errors are those of the case.
    """
    for case, shape in pairs:
        yield attempt(case.kernel, _compared, case, shape, copy_rate, synchronize)


def _compared(
    name: str, case: Case, shape: Shape, copy_rate: float | None, synchronize: bool
) -> Row:
    call, about = case.call(shape), f"{case.name}, {shape}"
    got = call.result()
    if synchronize:
        torch.cuda.synchronize()
    error = deviation(got, call.reference(), call)
    if not error <= 1:
        note = f"differs from its reference by {error:.3g} times the tolerance"
        return Row(name, False, about, note, error)
    if copy_rate is None or not case.streams or (moved := call.moved()) < _BOUND:
        return Row(name, True, about, error=error)
    seconds = timed(call.run)
    share = moved / seconds / copy_rate
    return Row(name, True, about, "", error, seconds, moved, share)


def timed(run: Callable[[], Any]) -> float:
    """Seconds per call on a GPU, as the replay of a CUDA graph: without the cost of launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            run()
    times = []
    for _ in range(_REPLAYS + 1):  # the first one is not counted
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:]) / _CALLS


def measure_copy(device: torch.device) -> float:
    """Bytes per second of a large copy on a GPU, read and written."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / timed(lambda: target.copy_(source))


def check_guard(name: str, dispatch: Callable[..., bool], current: int) -> Row:
    """Whether ``dispatch`` refuses tensors on another GPU than the current one.

    Parameters
    ----------
    dispatch : callable
        ``dispatch(name, *tensors) -> bool``, as `use_triton`.
    current : int
        Index of the current GPU. The other one need not exist.
    """
    about = "tensors on another GPU than the current one"
    tensor = SimpleNamespace(device=torch.device("cuda", current + 1))
    try:
        dispatch("swiglu", tensor)
    except VLMFastError:
        return Row(name, True, about)
    return Row(name, False, about, "a kernel would run on the current GPU")


def check_elsewhere(name: str, case: Case, shape: Shape, other: AbstractContextManager[Any]) -> Row:
    """Whether a kernel refuses, or computes the same, while another GPU is the current one.

    Parameters
    ----------
    other : context manager
        Inside, another device than that of the shape is the current one.
    """
    call, about = case.call(shape), f"under another current GPU: {case.name}, {shape}"
    try:
        with other:
            got = call.result()
    except VLMFastError:  # the guard
        return Row(name, True, about)
    error = deviation(got, call.reference(), call)
    note = "" if error <= 1 else "ran on the current GPU, not on that of its tensors"
    return Row(name, error <= 1, about, note, error)


def check_all(
    kernel: str, device: torch.device, *, quick: bool, copy_rate: float | None
) -> Iterator[Row]:
    """All checks of a kernel file on a device."""
    cuda = device.type == "cuda"
    pairs = list(pairs_of(kernel, shapes(device, quick)))
    yield from check_kernel(pairs, copy_rate=copy_rate, synchronize=cuda)
    if cuda and torch.cuda.device_count() > 1:
        other = (device.index + 1) % torch.cuda.device_count()
        yield attempt(kernel, check_elsewhere, *pairs[0], torch.cuda.device(other))
