"""Progress of long commands: a bar of tqdm."""

from __future__ import annotations

import sys

from tqdm import tqdm

_LOG_S = 30.0  # between two states of a bar that is no terminal's


class Progress(tqdm):
    """Reports how many steps of work are done, and estimates the remaining time.

    Where stderr is no terminal, such as in the log of a batch job, it writes at most every 30
    seconds, and nothing for work that takes less.

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
    """

    monitor_interval = 0  # no thread of tqdm's

    def __init__(
        self, name: str, total: int, unit: str, *, done: int = 0, show: bool = True
    ) -> None:
        every = 0.1 if sys.stderr.isatty() else _LOG_S
        super().__init__(
            desc=name,
            total=total or None,
            initial=done,
            unit=f" {unit}",
            file=sys.stderr,
            disable=not show,
            mininterval=every,
            miniters=1,
            delay=every,
        )

    def plan(self, more: int) -> None:
        """Expect this many more steps, where the work itself decides on their number."""
        self.total = self.n + more

    def say(self, text: str) -> None:
        """Write a line; it does not break the bar."""
        if not self.disable:
            self.write(text, file=self.fp)

    def update(self, done: int | None = None, note: str = "") -> None:
        """Count one more step, or set their number.

        Parameters
        ----------
        done : int, optional
            Steps that are done, those of earlier runs included.
        note : str
            Text that follows the counts, such as a loss.
        """
        if note:
            self.set_postfix_str(note, refresh=False)
        super().update(1 if done is None else done - self.n)
