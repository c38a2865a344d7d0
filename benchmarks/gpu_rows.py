"""Rows and measurements of `gpu_hour.py` and its parts."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch

from vlmfast import VLM
from vlmfast.engine.graphs import Graphs, State, cuda_graph
from vlmfast.eval.results import write_json

QUESTION = "What is in the bottom left?"
IMAGE = str(harness.ROOT / "examples" / "picture.png")


@dataclass
class Report:
    """Rows of the result file, written and printed immediately.

    Parameters
    ----------
    path : Path
    about : dict
        Command, device, versions, date.
    """

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""

    def row(
        self, what: str, value: Any, aim: str = "", ok: bool | None = None, bad: str = "MISS"
    ) -> None:
        """Add a row, print it and write the file.

        Parameters
        ----------
        ok : bool, optional
            Whether the threshold ``aim`` was met, where there is one.
        bad : {"MISS", "FAIL"}
            The verdict if not: too slow, or wrong.
        """
        verdict = "" if ok is None else "PASS" if ok else bad
        row = {"part": self.part, "what": what, "value": value, "aim": aim, "verdict": verdict}
        self.rows.append(row)
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{verdict:5} {what:64} {shown:>24}  {aim}", flush=True)
        write_json(self.path, {**self.about, "rows": self.rows})

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Convert errors to rows; errors that break the CUDA context end the script."""
        try:
            yield
        except Exception as error:
            text = harness.line(error)
            traceback.print_exc(limit=4)
            self.row(what, text, ok=False, bad="FAIL")
            if "CUDA error" in text or "illegal memory access" in text:
                raise SystemExit(1) from error


@dataclass(frozen=True)
class Bench:
    """Device and size of the parts."""

    report: Report
    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def within(
        self, what: str, value: float, *, most: float | None = None, least: float | None = None
    ) -> None:
        """A row with one of two thresholds, which a dry run does not judge."""
        if self.dry or most is least is None:
            self.report.row(what, value)
        elif most is not None:
            self.report.row(what, value, f"<= {most:g}", value <= most)
        else:
            self.report.row(what, value, f">= {least:g}", value >= least)

    def vlm(self, model: Any, processor: Any, **given: Any) -> VLM:
        """A model without prefix cache; in a dry run its steps are captured by `repeated`."""
        vlm = VLM(model, processor, prefix_cache_bytes=0, **given)
        if self.dry and "decoding" not in given:
            vlm.adapter.decoding = "graph"
            vlm.adapter.kept["graphs"] = Graphs(record=repeated)
        return vlm

    @property
    def record(self) -> Any:
        """What captures a step."""
        return repeated if self.dry else cuda_graph

    def cleaned(self) -> None:
        """Free what no model holds."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()


def repeated(step: Callable[[], None], state: Callable[[], State]) -> Callable[[], None]:
    """Stands in for `cuda_graph` on a CPU: repeats the step, and raises if its tensors move."""
    addresses = {key: x.data_ptr() for key, x in state().items()}

    def replay() -> None:
        if addresses != {key: x.data_ptr() for key, x in state().items()}:
            raise RuntimeError("a tensor of the captured step has moved")
        step()

    return replay
