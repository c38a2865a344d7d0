"""Memory that runs short, or is counted, while the engine works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from vlmfast import VLM

Mode = TypeVar("Mode", bound=AbstractContextManager)


@contextmanager
def steps_within(vlm: VLM, mode: Mode) -> Iterator[Mode]:
    """Run each step of the engine within ``mode``, whichever thread runs it."""
    step: Callable[[], bool] = vlm.engine.step

    def within() -> bool:
        with mode:
            return step()

    vlm.engine.step = within  # type: ignore[method-assign]
    try:
        yield mode
    finally:
        del vlm.engine.step
