"""Repeat the comparisons of floats with other instruction sets: ``python tools/test_cpus.py``.

The order of floating-point additions depends on the vector instructions and the number of threads.
The tests that compare floats (marker ``equality``) run with several settings of both. Reports the
fraction of its tolerance (`tests/support/closeness.py`) that every comparison used, and the
distance of the controls in tolerances. A fraction above a third indicates a wrong error model of
the tolerance, or a bug. A control nearer than 30 tolerances is too weak.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

LARGEST_SHARE, LEAST_CONTROL = 1 / 3, 30.0
SHOWN = 10

# Each library has its own variable; they change together, as a processor has one instruction set.
WORDS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OPENBLAS_CORETYPE")
INSTRUCTIONS = {
    "default": ("default", "SSE41", "COMPATIBLE", "Nehalem"),
    "avx2": ("avx2", "AVX2", "AVX2", "Haswell"),
    "native": (),
}


@dataclass(frozen=True)
class Setting:
    """Instructions and threads of one run."""

    instructions: str
    threads: int

    @property
    def name(self) -> str:
        return f"{self.instructions}-{self.threads}"

    def environment(self, folder: Path) -> dict[str, str]:
        """Environment of a run that writes its comparisons to ``folder``."""
        kept = {key: value for key, value in os.environ.items() if key not in WORDS}
        chosen = dict(zip(WORDS, INSTRUCTIONS[self.instructions], strict=False))
        more = {"VLMFAST_THREADS": str(self.threads), "VLMFAST_CLOSENESS": str(folder)}
        return kept | chosen | more


@dataclass
class Summary:
    """Result of one run: the largest fraction of a tolerance and the nearest control per test."""

    shares: dict[str, float] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    status: int = 0  # exit code of pytest

    def add(self, lines: Iterable[str]) -> None:
        for line in lines:
            found = json.loads(line)
            test = found["test"]
            if "share" in found:
                self.shares[test] = max(found["share"], self.shares.get(test, 0.0))
            if "control" in found:
                self.controls[test] = min(found["control"], self.controls.get(test, math.inf))

    def complaints(self) -> list[str]:
        """One line for each problem."""
        found = [f"pytest ended with status {self.status}"] if self.status else []
        found += [] if self.shares else ["nothing was compared"]
        found += [
            f"{test} uses {share:.2f} of its tolerance"
            for test, share in self.shares.items()
            if share > LARGEST_SHARE
        ]
        return found + [
            f"{test} has a control only {times:.3g} tolerances away"
            for test, times in self.controls.items()
            if times < LEAST_CONTROL
        ]

    def text(self) -> str:
        shares = sorted(self.shares.items(), key=lambda item: -item[1])[:SHOWN]
        controls = sorted(self.controls.items(), key=lambda item: item[1])[:SHOWN]
        lines = ["largest fractions of a tolerance", *(f"{x:7.3g}  {t}" for t, x in shares)]
        return "\n".join([*lines, "nearest controls", *(f"{x:7.3g}  {t}" for t, x in controls)])


def settings(capability: str) -> list[Setting]:
    """All instruction sets of a CPU combined with numbers of threads; at most five settings."""
    own = [Setting("native", threads) for threads in (1, 2, 4)]
    older = {"AVX512": ["default", "avx2"], "AVX2": ["default"]}.get(capability, [])
    return [Setting(name, threads) for name, threads in zip(older, (1, 2), strict=False)] + own


def run(setting: Setting, workers: int, which: str, more: list[str]) -> Summary:
    """Run the tests of the marker expression ``which`` with one setting."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Threads of several workers would block each other.
        processes = str(max(1, workers // setting.threads))
        command = [sys.executable, "-m", "pytest", "-q", "-m", which, "-n", processes]
        done = subprocess.run(
            [*command, "--dist", "worksteal", *more], env=setting.environment(folder), check=False
        )
        summary = Summary(status=done.returncode)
        for file in folder.glob("*.jsonl"):
            summary.add(file.read_text().splitlines())
        return summary


def main(arguments: list[str] | None = None) -> int:
    import torch

    known = {each.name: each for each in settings(torch.backends.cpu.get_cpu_capability())}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--setting", action="append", choices=list(known), help="run only this; may be repeated")
    add("--workers", type=int, default=2, help="pytest processes of one thread each (2)")
    add("--everything", action="store_true", help="all quick tests, not only those of floats")
    add("more", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args(arguments)
    which = "not slow" if given.everything else "equality and not slow"
    wrong = False
    for name in given.setting or known:
        print(f"== {name}", flush=True)
        summary = run(known[name], given.workers, which, given.more)
        print(summary.text())
        for complaint in summary.complaints():
            wrong = True
            print(f"wrong: {complaint}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
