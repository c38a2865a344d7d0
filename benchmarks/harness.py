"""What the scripts of this folder share: arguments, rounds, statistics, result files, tables.

A script makes its parser with `parser`, sets threads and gets its provenance with `begin`, calls
what it compares in turn with `interleaved`, and writes a JSON file with `written`. `Parts` is a
result file whose parts are measured one by one, which the same command resumes. `Row` is one line
of a table of ratios with bounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from vlmfast.core.display import markdown_table
from vlmfast.core.help import count
from vlmfast.core.progress import Progress
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import provenance, spread, turns
from vlmfast.eval.results import write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNFINISHED = 3  # exit code
FULL = "out of memory"

Key = TypeVar("Key")
Result = TypeVar("Result")

# --- arguments -----------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "recipe": {"action": "append", "dest": "recipes", "help": "may be repeated"},
    "repeats": {"type": count, "help": "measured runs of each variant (%(default)s)"},
    "pairs": {"type": count, "help": "measured pairs (%(default)s)"},
    "warmup": {"type": int, "help": "runs before them (%(default)s)"},
    "new_tokens": {"type": count, "help": "tokens of an answer (%(default)s)"},
    "layers": {"type": int, "help": "of the language model (%(default)s)"},
    "decoding": {"choices": ("auto", "graph", "compile", "eager")},
    "dtype": {"choices": ("float32", "bfloat16")},
    "device": {"help": "(%(default)s)"},
    "threads": {"type": int, "help": "0: PyTorch's default (%(default)s)"},
    "minutes": {"type": float, "help": "start no part that may exceed this limit (%(default)s)"},
    "again": {"action": "store_true", "help": "measure these parts again, keep the others"},
    "fresh": {"action": "store_true", "help": "discard the contents of the result file"},
    "out": {"type": Path, "help": "result file (benchmarks/results/...json)"},
}


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with some of `OPTIONS`, by name, and their defaults."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        made.add_argument(f"--{name.replace('_', '-')}", default=default, **OPTIONS[name])
    return made


def begin(script: str, argv: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Set the number of threads; the provenance of a result."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if getattr(args, "threads", 0):
        torch.set_num_threads(args.threads)
    return provenance(script, argv, args.device)


# --- rounds and statistics -----------------------------------------------------------------------


def interleaved(
    variants: Mapping[Key, Callable[[], Result]], repeats: int, *, warmup: int = 0, name: str = ""
) -> dict[Key, list[Result]]:
    """The results of all variants, which are called in `turns`; ``name`` shows the progress."""
    found: dict[Key, list[Result]] = {key: [] for key in variants}
    total = (warmup + repeats) * len(variants)
    with Progress(name, total, "runs", show=bool(name)) as bar:
        for key, counts in turns(list(variants), repeats, warmup=warmup):
            gc.collect()
            result = variants[key]()
            if counts:
                found[key].append(result)
            bar.update()
    return found


def seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Wall time of a call, with the work that it leaves to the device."""
    begin = clock(device)
    call()
    return clock(device) - begin


def ratio(pairs: Sequence[Sequence[float]], draws: int = 4000) -> dict[str, float] | None:
    """Sum of the first values over the sum of the second values, with its 95 % interval.

    The interval is that of a bootstrap over pairs. ``None`` if a sum is 0.
    """
    times = np.array(pairs)
    if not times.sum(0).all():
        return None
    index = np.random.default_rng(0).integers(0, len(times), (draws, len(times)))
    first, second = times[index].sum(1).T
    low, high = np.quantile(first / second, [0.025, 0.975])
    value = times[:, 0].sum() / times[:, 1].sum()
    return {"value": float(value), "low": float(low), "high": float(high)}


# --- Hugging Face ---------------------------------------------------------------------------------


def padded(vlm: Any, question: str, images: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Inputs of ``generate``: a question about each image, padded on the left."""
    adapter, content = vlm.adapter, [{"type": "image"}, {"type": "text", "text": question}]
    text = vlm.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = vlm.processor(
        images=[[image] for image in images],
        text=[text] * len(images),
        padding=True,
        padding_side="left",
        return_tensors="pt",
        **adapter.on_device(),  # images are resized on the same device as by vlmfast
    )
    return {
        key: value.to(adapter.device, adapter.dtype if value.is_floating_point() else None)
        for key, value in inputs.items()
    }


# --- processes ------------------------------------------------------------------------------------


class ChildFailed(Exception):
    """A process did not answer."""


class Child:
    """Another process with a fresh Python.

    Parameters
    ----------
    target : callable
        ``target(pipe, *args)`` sends anything when it is ready, and then an answer to each message,
        until one is ``None``.
    seconds : float, optional
        In which it must be ready.

    Raises
    ------
    ChildFailed
    """

    def __init__(
        self, target: Callable[..., None], *args: Any, seconds: float | None = None
    ) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args))
        self._process.start()
        theirs.close()
        try:
            self._answer(seconds)
        except ChildFailed:
            self.close()
            raise

    def ask(self, message: Any, seconds: float | None = None) -> Any:
        """The answer to a message, which must come in time."""
        self._pipe.send(message)
        return self._answer(seconds)

    def _answer(self, seconds: float | None) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise ChildFailed(f"its process exited with {code}") from None
        raise ChildFailed(f"no answer after {seconds:.0f} s")

    def close(self) -> None:
        with suppress(OSError):  # it has ended
            self._pipe.send(None)
        self._process.join(5)
        self._process.kill()
        self._process.join()


# --- text ----------------------------------------------------------------------------------------


def quartiles(of: dict[str, float]) -> str:
    """Seconds as milliseconds: the median, and quartiles."""
    median, q1, q3 = (1e3 * of[key] for key in ("median", "q1", "q3"))
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ms [{q1:,.{digits}f}, {q3:,.{digits}f}]"


def line(error: BaseException, most: int = 200) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def shown(rows: Mapping[str, dict[str, Any]], *columns: str) -> str:
    """A table of some values of each row; ``a.b`` is the value ``b`` of the value ``a``.

    Times are in seconds and sizes in bytes. A row that failed has the reason instead.
    """
    lines = []
    for name, row in rows.items():
        cells = [row["failed"].replace("|", "/")] if "failed" in row else []
        cells = cells or [_cell(row, column) for column in columns]
        lines.append([name.replace(" | ", ", "), *cells])
    return markdown_table(["", *columns], lines)


def _cell(value: Any, column: str) -> str:
    for key in column.split("."):
        value = value.get(key) if value else None
    if isinstance(value, dict):  # a `spread` or a `ratio`
        return "{:.4g} [{:.4g}, {:.4g}]".format(*value.values())
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


# --- rows with bounds ----------------------------------------------------------------------------


@dataclass
class Row:
    """One line of a table of ratios.

    Parameters
    ----------
    name : str
        The part of the benchmark.
    what : str
    ratios : list of float
        One for each repeat.
    bound : float, optional
    least : bool
        Whether it is a lower bound.
    """

    name: str
    what: str
    ratios: list[float] = field(default_factory=list)
    bound: float | None = None
    least: bool = False

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return ""
        value = statistics.median(self.ratios)
        return "ok" if (value >= self.bound if self.least else value <= self.bound) else "missed"

    def report(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | spread(self.ratios) | {"verdict": self.verdict}


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    reports = {f"{row.name}: {row.what}": row.report() for row in rows}
    return shown(reports, "median", "q1", "q3", "bound", "verdict")


# --- result files --------------------------------------------------------------------------------


def path_of(args: argparse.Namespace, *parts: str) -> Path:
    """``--out``, or the usual file, whose name has these parts, a device without its index."""
    names = [part.partition(":")[0].replace(" ", "-").lower() for part in parts]
    return args.out or RESULTS / f"{'-'.join(names)}.json"


def written(path: Path, report: dict[str, Any]) -> None:
    """Write a result file, and say so."""
    write_json(path, report)
    print(f"\nwritten: {path}", file=sys.stderr)


class Parts:
    """A result file whose parts are written one by one.

    Parameters
    ----------
    path : Path
    about : dict
        As `begin` returns it.
    settings : dict
        What all parts have in common, in addition to the device and the versions.
    fresh : bool
        Discard the contents of the file.

    Raises
    ------
    SystemExit
        If the file was measured with other settings.
    """

    def __init__(
        self, path: Path, about: dict[str, Any], settings: dict[str, Any], fresh: bool = False
    ) -> None:
        packages = about["environment"]["packages"]
        settings = settings | {"device": about["device"]}
        settings |= {name: packages[name] for name in ("torch", "transformers")}
        self.path = path
        self.report: dict[str, Any] = {"settings": settings, "parts": {}}
        if path.is_file() and not fresh:
            self.report = json.loads(path.read_text(encoding="utf-8"))
            before = self.report.get("settings")
            if before != settings:
                raise SystemExit(
                    f"{path} was measured with {before}, not with {settings}; "
                    "use --fresh or another --out"
                )
        self.rows: dict[str, dict[str, Any]] = self.report["parts"]
        self.report |= about

    def missing(self, wanted: Sequence[str]) -> list[str]:
        """Parts to measure; those that failed come last, so that they do not block others."""
        failed = [k for k in wanted if self.rows.get(k, {}).get("failed", FULL) != FULL]
        return [key for key in wanted if key not in self.rows] + failed

    def measure(
        self,
        keys: Sequence[str],
        run: Callable[[str], dict[str, Any]],
        end: float,
        margin: float = 1.5,
    ) -> int:
        """Measure parts until the time ``end``; returns how many are left.

        None is started that would exceed it if it took ``margin`` times as long as the longest.
        """
        longest = 0.0
        for number, key in enumerate(keys):
            start = time.perf_counter()
            if start + margin * longest > end:
                return len(keys) - number
            try:
                row = run(key)
            except torch.OutOfMemoryError:
                row = {"failed": FULL}
            except Exception as error:  # other parts may work
                row = {"failed": line(error, 300)}
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            took = time.perf_counter() - start
            longest = max(longest, took)
            self.rows[key] = row | {"date": self.report["date"], "took": took}
            write_json(self.path, self.report)
            print(f"{key}: {row.get('failed', 'done')}, took {took:.0f} s", file=sys.stderr)
        return 0

    def ended(self, left: int, wrong: int) -> int:
        """The exit code."""
        print(f"\nwritten: {self.path}", file=sys.stderr)
        if left:
            print(f"{left} parts are missing; repeat the command to resume", file=sys.stderr)
            return UNFINISHED
        return int(bool(wrong))
