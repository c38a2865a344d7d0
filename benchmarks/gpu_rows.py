"""Rows and measurements of `gpu_hour.py` and its parts."""

from __future__ import annotations

import contextlib
import gc
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch

from vlmfast import VLM
from vlmfast.check.kernels import measure_copy
from vlmfast.engine.graphs import Graphs, State, cuda_graph
from vlmfast.engine.stats import clock
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

    def row(self, what: str, value: Any, aim: str = "", ok: bool | None = None) -> None:
        """Add a row; ``ok`` is whether the threshold was met, ``None`` without a threshold."""
        self.add(what, value, aim, "" if ok is None else "PASS" if ok else "MISS")

    def exact(self, what: str, value: Any, aim: str, ok: bool) -> None:
        """The same for results that must be correct: ``FAIL`` instead of ``MISS``."""
        self.add(what, value, aim, "PASS" if ok else "FAIL")

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Convert errors to rows; errors that break the CUDA context end the script."""
        try:
            yield
        except Exception as error:
            text = harness.line(error)
            traceback.print_exc(limit=4)
            self.add(what, text, "", "FAIL")
            if "CUDA error" in text or "illegal memory access" in text:
                raise SystemExit(1) from error

    def add(self, what: str, value: Any, aim: str, verdict: str) -> None:
        """Add a row, print it and write the file."""
        row = {"part": self.part, "what": what, "value": value, "aim": aim, "verdict": verdict}
        self.rows.append(row)
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{verdict:5} {what:64} {shown:>24}  {aim}", flush=True)
        write_json(self.path, {**self.about, "rows": self.rows})


@dataclass(frozen=True)
class Bench:
    """Device and size of the parts."""

    report: Report
    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def most(self, what: str, value: float, limit: float | None = None) -> None:
        """A measurement of at most ``limit``."""
        self._judged(what, value, "<=", limit, limit is not None and value <= limit)

    def least(self, what: str, value: float, limit: float | None = None) -> None:
        """A measurement of at least ``limit``."""
        self._judged(what, value, ">=", limit, limit is not None and value >= limit)

    def _judged(self, what: str, value: float, sign: str, limit: float | None, ok: bool) -> None:
        if self.dry or limit is None:
            self.report.row(what, value)
        else:
            self.report.row(what, value, f"{sign} {limit:g}", ok)

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

    def bandwidth(self) -> float:
        """Bytes per second of a large copy, reads plus writes; made up in a dry run."""
        return 1e10 if self.dry else measure_copy(self.device)

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Median time of a call including the device's work."""

        def once() -> float:
            begin = clock(self.device)
            call()
            return clock(self.device) - begin

        return statistics.median(harness.interleaved({"": once}, count, warmup=3)[""])


def repeated(step: Callable[[], None], state: Callable[[], State]) -> Callable[[], None]:
    """Stands in for `cuda_graph` on a CPU: repeats the step, and raises if its tensors move."""
    addresses = {key: x.data_ptr() for key, x in state().items()}

    def replay() -> None:
        if addresses != {key: x.data_ptr() for key, x in state().items()}:
            raise RuntimeError("a tensor of the captured step has moved")
        step()

    return replay
