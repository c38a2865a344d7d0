"""Every kernel against its PyTorch reference, and the guard of the current device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from vlmfast.errors import VLMFastError

from .cases import Case, cases_of, shapes
from .closeness import deviation
from .rows import Row, attempt

_CALLS, _REPLAYS = 10, 5  # calls per captured graph, and how often it is timed
_COPIED = 1 << 28  # bytes: several times the L2 cache
_BOUND = 1 << 24  # below this many bytes, launches bound the time


def check_kernel(
    cases: Iterable[Case], *, copy_rate: float | None = None, synchronize: bool = False
) -> Iterator[Row]:
    """Compare each case with its reference.

    Parameters
    ----------
    cases : iterable of Case
    copy_rate : float, optional
        Bytes per second of a large copy; with it, cases that are bounded by bytes are timed.
    synchronize : bool
        Wait for the device after each call, so that its errors are those of the case.
    """
    for case in cases:
        yield attempt(case.kernel, _compared, case, copy_rate, synchronize)


def _compared(name: str, case: Case, copy_rate: float | None, synchronize: bool) -> Row:
    got = case.run()
    if synchronize:
        torch.cuda.synchronize()
    error = deviation(got, case.reference(), case.dtype, case.terms)
    if not error <= 1:
        note = f"differs from its reference by {error:.3g} times the tolerance"
        return Row(name, False, case.about, note, error)
    if copy_rate is None or case.bytes < _BOUND:
        return Row(name, True, case.about, error=error)
    seconds = timed(case.run)
    share = case.bytes / seconds / copy_rate
    return Row(name, True, case.about, "", error, seconds, case.bytes, share)


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


def check_elsewhere(name: str, case: Case, other: AbstractContextManager[Any]) -> Row:
    """Whether a kernel refuses, or computes the same, while another GPU is the current one.

    Parameters
    ----------
    other : context manager
        Inside, another device than that of the case's tensors is the current one.
    """
    about = f"under another current GPU: {case.about}"
    try:
        with other:
            got = case.run()
    except VLMFastError:  # the guard
        return Row(name, True, about)
    error = deviation(got, case.reference(), case.dtype, case.terms)
    note = "" if error <= 1 else "ran on the current GPU, not on that of its tensors"
    return Row(name, error <= 1, about, note, error)


def check_all(
    kernel: str, device: torch.device, *, quick: bool, copy_rate: float | None
) -> Iterator[Row]:
    """All checks of a kernel file on a device."""
    cuda = device.type == "cuda"
    grid = shapes(device, quick)
    yield from check_kernel(cases_of(kernel, grid), copy_rate=copy_rate, synchronize=cuda)
    if cuda and torch.cuda.device_count() > 1:
        first = next(iter(cases_of(kernel, grid)))
        other = (device.index + 1) % torch.cuda.device_count()
        yield attempt(kernel, check_elsewhere, first, torch.cuda.device(other))
