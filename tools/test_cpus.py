"""Compare floats as other processors would: ``python tools/test_cpus.py``.

Another processor adds in another order: it has other vector instructions and another number of
threads. So the tests that compare floats (marker ``equality``) run under several settings of both,
and of each is told how much of its tolerance (`tests/closeness.py`) every comparison used, and how
many tolerances away the controls lie. A share above a third means that the arithmetic behind a
tolerance was misjudged, or that there is a bug; a control nearer than 30 proves little.
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

# Every library has its own word; a processor has one set of instructions, so they change together.
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
        """Of the run that leaves its comparisons in ``folder``."""
        kept = {key: value for key, value in os.environ.items() if key not in WORDS}
        chosen = dict(zip(WORDS, INSTRUCTIONS[self.instructions], strict=False))
        more = {"VLMFAST_THREADS": str(self.threads), "VLMFAST_CLOSENESS": str(folder)}
        return kept | chosen | more


@dataclass
class Summary:
    """What one run showed: per test its largest share and its nearest control."""

    shares: dict[str, float] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    status: int = 0  # that pytest ended with

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
        """One line for each thing that is not as it should be."""
        told = [f"{self.failed} tests failed"] if self.failed else []
        if not self.passed:
            told.append("no test passed")
        if self.status > 1:  # 0 and 1 are runs that came to their end
            told.append(f"pytest ended with status {self.status}")
        for test, share in self.shares.items():
            if share > LARGEST_SHARE:
                told.append(f"{test} uses {share:.2f} of its tolerance")
        for test, times in self.controls.items():
            if times < LEAST_CONTROL:
                told.append(f"{test} has a control only {times:.3g} tolerances away")
        return told

    def text(self) -> str:
        lines = [f"{len(self.shares)} tests compared, {self.passed} passed, {self.failed} failed"]
        shares = sorted(self.shares.items(), key=lambda item: -item[1])[:SHOWN]
        controls = sorted(self.controls.items(), key=lambda item: item[1])[:SHOWN]
        lines += ["largest shares of a tolerance", *(f"  {x:8.3f}  {test}" for test, x in shares)]
        lines += ["nearest controls", *(f"  {x:8.3g}  {test}" for test, x in controls)]
        return "\n".join(lines)


def settings(capability: str) -> list[Setting]:
    """Every set of instructions that a CPU has, and every number of threads; at most five runs."""
    own = [Setting("native", threads) for threads in (1, 2, 4)]
    older = {"AVX512": ["default", "avx2"], "AVX2": ["default"]}.get(capability, [])
    return [Setting(name, threads) for name, threads in zip(older, (1, 2), strict=False)] + own


def run(setting: Setting, workers: int, which: str, more: list[str]) -> Summary:
    """The tests that the expression ``which`` marks, under one setting."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", which]
        # Threads of several workers would only wait for each other.
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

    known = {of.name: of for of in settings(torch.backends.cpu.get_cpu_capability())}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--setting", action="append", choices=list(known), help="only this one; may be repeated"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of pytest, of one thread each (2)"
    )
    parser.add_argument("-k", dest="expression", help="only tests that match, as in pytest")
    parser.add_argument(
        "--everything",
        action="store_const",
        const="not slow",
        default="equality and not slow",
        help="the whole quick suite, not only the tests that compare floats",
    )
    parser.add_argument("--paths", nargs="+", default=[], help="only these files or folders")
    given = parser.parse_args(arguments)
    more = [*(["-k", given.expression] if given.expression else []), *given.paths]
    wrong = False
    for name in given.setting or known:
        print(f"== {name}", flush=True)
        summary = run(known[name], given.workers, given.everything, more)
        print(summary.text())
        for told in summary.complaints():
            wrong = True
            print(f"wrong: {told}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
