"""Training with checkpoints: a run that was killed resumes with equal results."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from vlmfast.core.files import make_folder, open_to_append, replacing, writable
from vlmfast.core.progress import Progress
from vlmfast.errors import VLMFastError, check_memory


class TrainingError(VLMFastError):
    """The training cannot start or resume with these options."""


class Trainer:
    """Steps, clock and files of one run; a subclass makes the steps and says what is stored.

    Parameters
    ----------
    title : str
        Of the progress bar.
    out : str or Path
        Folder of checkpoint and log.
    steps : int
    minutes : float
        Length of the training, instead of ``steps``; 0: by steps.
    stop_after : int
        Step after which this process stops early; 0: none.
    save_every : float
        Seconds from one checkpoint to the next.
    """

    def __init__(
        self,
        title: str,
        out: str | Path,
        *,
        steps: int,
        minutes: float,
        stop_after: int,
        save_every: float,
    ) -> None:
        self.title, self.out, self.steps, self.minutes = title, Path(out), steps, minutes
        self.stop_after, self.save_every = stop_after, save_every
        self.step, self.elapsed, self.saved_at = 0, 0.0, 0.0
        make_folder(self.out)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def progress(self) -> float:
        """Completed fraction, 0 to 1."""
        if self.minutes:
            return min(1.0, self.elapsed / (60 * self.minutes))
        return min(1.0, self.step / self.steps)

    def settings(self) -> dict[str, Any]:
        """Settings that must not change when a run resumes; plain values."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a checkpoint contains besides settings, step and time."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        raise NotImplementedError

    def update(self) -> None:
        """Make one step; all that is random in it follows from `step`."""
        raise NotImplementedError

    def stepped(self) -> str:
        """Hook after each step; returns the text of the progress bar."""
        return ""

    def export(self) -> None:
        """Hook after each checkpoint."""

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one.

        Raises
        ------
        TrainingError
            If it is of other settings, or no checkpoint of this training.
        """
        import torch

        if not self.checkpoint.exists():
            return
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            for key, value in self.settings().items():
                if (written := state["settings"].get(key)) != value:
                    raise TrainingError(
                        f"{self.checkpoint} was written with {key}={written}, not {value}: use the "
                        "same value, or start again with --fresh"
                    )
            self.restore(state)
            self.step, self.elapsed = state["step"], state["elapsed"]
        except TrainingError:
            raise
        except Exception as error:  # any other file may raise anything
            check_memory(error)
            raise TrainingError(
                f"{self.checkpoint} is no checkpoint of this training ({type(error).__name__}); "
                "choose another --out, or start again with --fresh"
            ) from error
        self.saved_at = self.elapsed

    def save(self) -> None:
        """Write the checkpoint atomically, and what is exported with it."""
        import torch

        about = {"settings": self.settings(), "step": self.step, "elapsed": self.elapsed}
        with replacing(self.checkpoint) as file:
            torch.save(about | self.state(), file)
        self.export()
        self.saved_at = self.elapsed

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the log."""
        line = {"step": self.step, "minutes": round(self.elapsed / 60, 2), **line}
        log = self.out / "log.jsonl"
        with writable(log), open_to_append(log) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def train(self) -> None:
        """Train for the given steps or time, unless SIGTERM or ``stop_after`` end it earlier."""
        stop: list[int] = []
        old = signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
        goal, unit = (self.minutes * 60, "s") if self.minutes else (self.steps, "steps")

        def done() -> int:
            return round(self.elapsed) if self.minutes else self.step

        clock = time.monotonic()
        try:
            with Progress(self.title, round(goal), unit, done=done()) as bar:
                while self.progress < 1 and not stop:
                    if self.stop_after and self.step >= self.stop_after:
                        break
                    self.update()
                    self.step += 1
                    now = time.monotonic()
                    self.elapsed, clock = self.elapsed + now - clock, now
                    bar.update(done(), self.stepped())
                    if self.elapsed - self.saved_at > self.save_every:
                        self.save()
        finally:
            signal.signal(signal.SIGTERM, old)
        self.save()
