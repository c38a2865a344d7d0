"""Interrupts at chosen lines of the engine, and what they must leave as it was."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from support.engine.turns import SOURCES
from vlmfast import VLM

ENGINE = str(SOURCES)
GUARD = 120  # seconds; only a call that hangs waits as long

Line = tuple[str, int]


class Hangs(BaseException):
    """A call did not return."""


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise `Hangs` where the block does not end."""

    def alarm(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(GUARD)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT interrupts this process, which a shell without job control has switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def traced(at: Callable[[Line], None], files: tuple[str, ...] = (ENGINE,)) -> Iterator[None]:
    """Call ``at`` before each line of the engine, or other files, that this thread runs."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(files) else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)


def lines_of(call: Callable[[], Any], *files: str) -> list[Line]:
    """The lines of the engine, or other files, that a call runs in this thread."""
    found: dict[Line, None] = {}
    with traced(found.setdefault, files or (ENGINE,)):
        call()
    return list(found)


def interrupted(call: Callable[[], Any], line: Line) -> Any:
    """The result of a call that is interrupted when it first reaches a line."""

    def at(now: Line) -> None:
        if now == line:
            raise KeyboardInterrupt

    with traced(at, (line[0],)):
        return call()


def state(vlm: VLM) -> tuple:
    """What a call must leave as it was: of the model, the thread and the engine."""
    load = vlm.engine.load()  # a request that was not begun may still wait
    modules = [
        (
            name,
            module.training,
            "forward" in vars(module),
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
        )
        for name, module in vlm.model.named_modules()
    ]
    text, vision = (getattr(vlm.model.config, f"{part}_config") for part in ("text", "vision"))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        text._attn_implementation,
        vision._attn_implementation,
        modules,
        (load.prefilling, load.decoding),
    )
