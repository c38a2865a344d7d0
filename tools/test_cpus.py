"""Repeat the comparisons of floats with other instruction sets: ``python tools/test_cpus.py``.

The order of floating-point additions depends on the vector instructions and the number of threads.
The tests that compare floats (marker ``equality``) run with several settings of both. Reports the
fraction of its tolerance (`tests/closeness.py`) that every comparison used, and the distance of the
controls in tolerances. A fraction above a third indicates a wrong error model of the tolerance, or
a bug. A control nearer than 30 tolerances is too weak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

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
    passed: int = 0
    failed: int = 0
    status: int = 0  # exit code of pytest

    def add(self, lines: Iterable[str]) -> None:
        for line in lines:
            found = json.loads(line)
            test = found["test"]
            if "share" in found:
                self.shares[test] = max(found["share"], self.shares.get(test, 0.0))
            if "control" in found:
                least = self.controls.get(test, float("inf"))
                self.controls[test] = min(found["control"], least)

    def complaints(self) -> list[str]:
        """One line for each problem."""
        found = [f"{self.failed} tests failed"] if self.failed else []
        if not self.passed:
            found.append("no test passed")
        if self.status > 1:  # 0 and 1: the run completed
            found.append(f"pytest ended with status {self.status}")
        for test, share in self.shares.items():
            if share > LARGEST_SHARE:
                found.append(f"{test} uses {share:.2f} of its tolerance")
        for test, times in self.controls.items():
            if times < LEAST_CONTROL:
                found.append(f"{test} has a control only {times:.3g} tolerances away")
        return found

    def text(self) -> str:
        lines = [f"{len(self.shares)} tests compared, {self.passed} passed, {self.failed} failed"]
        shares = sorted(self.shares.items(), key=lambda item: -item[1])[:SHOWN]
        controls = sorted(self.controls.items(), key=lambda item: item[1])[:SHOWN]
        lines += [
            "largest fractions of a tolerance",
            *(f"  {x:8.3f}  {test}" for test, x in shares),
        ]
        lines += ["nearest controls", *(f"  {x:8.3g}  {test}" for test, x in controls)]
        return "\n".join(lines)


def settings(capability: str) -> list[Setting]:
    """All instruction sets of a CPU combined with numbers of threads; at most five settings."""
    own = [Setting("native", threads) for threads in (1, 2, 4)]
    older = {"AVX512": ["default", "avx2"], "AVX2": ["default"]}.get(capability, [])
    return [Setting(name, threads) for name, threads in zip(older, (1, 2), strict=False)] + own


def run(setting: Setting, workers: int, which: str, more: list[str]) -> Summary:
    """Run the tests of the marker expression ``which`` with one setting."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", which]
        # Threads of several workers would block each other.
        processes = max(1, workers // setting.threads)
        command += ["-n", str(processes), "--dist", "worksteal", f"--junit-xml={report}", *more]
        done = subprocess.run(command, env=setting.environment(folder), check=False)
        summary = Summary(status=done.returncode)
        for file in folder.glob("*.jsonl"):
            summary.add(file.read_text().splitlines())
        if report.exists():
            suite = next(ElementTree.parse(report).iter("testsuite"))
            count = {key: int(suite.get(key, 0)) for key in ("tests", "skipped")}
            summary.failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            summary.passed = count["tests"] - count["skipped"] - summary.failed
        return summary


def main(arguments: list[str] | None = None) -> int:
    import torch

    known = {each.name: each for each in settings(torch.backends.cpu.get_cpu_capability())}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--setting", action="append", choices=list(known), help="run only this; may be repeated"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="pytest processes of one thread each (2)"
    )
    parser.add_argument("-k", dest="expression", help="only tests that match, as in pytest")
    parser.add_argument(
        "--everything",
        action="store_const",
        const="not slow",
        default="equality and not slow",
        help="run all tests that are not slow, not only those that compare floats",
    )
    parser.add_argument("--paths", nargs="+", default=[], help="only these files or folders")
    given = parser.parse_args(arguments)
    more = [*(["-k", given.expression] if given.expression else []), *given.paths]
    wrong = False
    for name in given.setting or known:
        print(f"== {name}", flush=True)
        summary = run(known[name], given.workers, given.everything, more)
        print(summary.text())
        for complaint in summary.complaints():
            wrong = True
            print(f"wrong: {complaint}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
