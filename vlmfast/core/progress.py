"""Progress of long commands: a bar in a terminal, otherwise a line every 30 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO


class Progress:
    """Reports how many steps of work are done, and estimates the remaining time.

    In a terminal it is a bar of tqdm. Elsewhere, such as in the log of a batch job, it is a line at
    most every ``every`` seconds, none of them for work that takes less.

    Parameters
    ----------
    name : str
        What is running.
    total : int
        Number of steps, or of seconds; 0 if `plan` sets it.
    unit : str
        What a step is, in the plural.
    done : int
        Steps of earlier runs; they do not enter the estimate.
    show : bool
        False: report nothing.
    stream : text file, optional
        By default stderr.
    clock : callable
        Seconds, monotonic.
    every : float
        Seconds between two lines.
    """

    def __init__(
        self,
        name: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        show: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every: float = 30.0,
    ) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = self._before = done
        self._clock, self._every = clock, every
        self._stream = stream or sys.stderr
        self._started = self._reported = clock()
        self._bar: Any = None
        self._lines = show and not self._stream.isatty()
        if show and not self._lines:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=name, total=total or None, initial=done, unit=f" {unit}", file=self._stream
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def plan(self, more: int) -> None:
        """Expect this many more steps, where the work itself decides on their number."""
        self.total = self.done + more
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Write a line; it does not break the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._lines:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def update(self, done: int | None = None, note: str = "") -> None:
        """Count one more step, or set their number.

        Parameters
        ----------
        done : int, optional
            Steps that are done, those of earlier runs included.
        note : str
            Text that follows the counts, such as a loss.
        """
        self.done = self.done + 1 if done is None else done
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(self.done - self._bar.n)
        elif self._lines and self._clock() - self._reported >= self._every:
            self._reported = self._clock()
            self._stream.write(f"{self.line(note)}\n")
            self._stream.flush()

    def line(self, note: str = "") -> str:
        """One line with counts and times, such as ``hired: 120 of 840 questions (14%), ...``."""
        elapsed, new = self._clock() - self._started, self.done - self._before
        parts = [f"{self.done} {self.unit}"]
        if self.total:
            parts = [f"{self.done} of {self.total} {self.unit} ({self.done / self.total:.0%})"]
        parts.append(f"{_duration(elapsed)} elapsed")
        if new > 0 and self.total:
            left = elapsed / new * max(self.total - self.done, 0)
            parts.append(f"about {_duration(left)} left")
        return f"{self.name}: " + ", ".join(filter(None, [*parts, note]))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
