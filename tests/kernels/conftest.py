"""Fixtures of the kernel tests, which run on a GPU if available, else in Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator

import pytest
import torch

from support.engine.kernels import HAS_TRITON, INTERPRETED, quicken_interpreter
from support.kernel_memory import checked
from vlmfast.check.worker import interpreter_fails


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if HAS_TRITON and INTERPRETED:
            quicken_interpreter(patch)
        yield


@pytest.fixture
def triton(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: None,
    quick_interpreter: None,
) -> Iterator[None]:
    """Run kernels on Triton on any device, with poisoned output memory.

    In the interpreter every address is checked: in slow tests, in modules that set
    ``CHECKS_ADDRESSES``, and in a third of the others.
    """
    if not HAS_TRITON:
        pytest.skip("no Triton on this platform")
    if INTERPRETED and (reason := interpreter_fails()):
        pytest.skip(f"{reason}; 3.6 needs NumPy before 2.4")
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    chosen = (
        getattr(request.module, "CHECKS_ADDRESSES", False)
        or request.node.get_closest_marker("slow") is not None
        or zlib.crc32(request.node.nodeid.encode()) % 3 == 0
    )
    with checked() if INTERPRETED and chosen else contextlib.nullcontext():
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized memory with NaN, or an integer near the maximum of its dtype."""
    with torch.device("cpu"):
        torch.empty(0)  # PyTorch lists the functions that a device applies to at its first use
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        @functools.wraps(make)
        def filled(*args, _make=make, **kwargs) -> torch.Tensor:
            return poison(_make(*args, **kwargs))

        monkeypatch.setattr(owner, name, filled)


def poison(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max - 1)
