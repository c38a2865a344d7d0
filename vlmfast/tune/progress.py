"""How far a race is, and how much time is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 30.0  # between lines, where stderr is not a terminal


class Progress:
    """Writes to stderr: one line that is rewritten, or in a file a line every 30 seconds.

    Parameters
    ----------
    stream : TextIO, optional
    clock : callable, optional
        Seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done = 0, 0
        self._stream, self._clock = stream or sys.stderr, clock
        self._terminal = self._stream.isatty()
        self._start = self._shown = clock()

    def step(self) -> None:
        """Count an answer."""
        self.done += 1
        now = self._clock()
        if now - self._shown >= (0.2 if self._terminal else EVERY_S):
            self._shown = now
            self._write(f"{self._text(now)}\r" if self._terminal else f"{self._text(now)}\n")

    def plan(self, answers: int) -> None:
        """Expect at most this many more answers."""
        self.total = self.done + answers

    def say(self, text: str) -> None:
        """Write a line."""
        self._write(f"{text:<70}\n" if self._terminal else f"{text}\n")

    def _text(self, now: float) -> str:
        left = (now - self._start) / self.done * max(0, self.total - self.done)
        return f"{self.done} answers; at most {duration(left)} left" + " " * 10 * self._terminal

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def duration(seconds: float) -> str:
    """Such as ``40 s``, ``12 min`` or ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
