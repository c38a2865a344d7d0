"""Change the code in small ways and see whether a test fails: ``python tools/mutants.py``.

A mutant is one change: another comparison, a constant one higher, a dropped statement. It is killed
when a test that covers its line fails. Survivors show what no test would notice; one that changes
nothing that can be observed is listed as equivalent in ``tools/mutants.toml``, with its reason.

The tests of every line are recorded once, with the processor time of each; ``--record`` with other
``--tests`` adds to the recording. A mutant runs against a few fast ones first, then against more,
up to a limit. It is killed only if the same tests pass without the change. Mutants run in a copy
of the tree. Results are appended to a file, one JSON line each, and a second run continues it.

Time is processor time, so other work on the machine kills no mutant.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutations import STRATA, Mutant, named, sample
from trials import LIBRARIES

ROOT = Path(__file__).resolve().parents[1]
KNOWN = Path("tools/mutants.toml")
FOLDER = Path("runs/mutants")
STARTS_S = 30.0  # until a test process has collected its tests and made their models
FIRST = 20  # tests of the first process
PER_FUNCTION = 3  # of them, cases of one test function
SLOWER = 10.0  # a mutant that takes this many times a test's own time hangs


# --- which tests run a line ----------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """Tests by file and line, and their seconds of processor time.

    ``digests`` holds the digest of each file as it was recorded.
    """

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    digests: dict[str, str] = field(default_factory=dict)

    def of(self, mutant: Mutant, end: int) -> list[str]:
        """Tests that run a line of a mutant; of one that runs on import, those of its file.

        The fastest first, at first few cases of one function.
        """
        file = self.lines.get(mutant.file, {})
        lines = range(mutant.first, end + 1)
        names = {name for line in lines for name in file.get(line, ())}
        if mutant.on_import:
            names = {name for line in file.values() for name in line}
        ranked = sorted(names, key=lambda name: (self.seconds.get(name, 0.0), name))
        early, late, cases = [], [], Counter[str]()
        for name in ranked:
            function = name.partition("[")[0]
            cases[function] += 1
            (early if cases[function] <= PER_FUNCTION else late).append(name)
        return early + late

    @classmethod
    def read(cls, path: Path) -> Coverage:
        stored = json.loads(path.read_text(encoding="utf-8"))
        tests = stored["tests"]
        lines = {
            file: {int(line): [tests[i] for i in index] for line, index in rows.items()}
            for file, rows in stored["lines"].items()
        }
        return cls(lines, dict(zip(tests, stored["seconds"], strict=True)), stored["digests"])

    def write(self, path: Path) -> None:
        tests = sorted(self.seconds)
        index = {name: i for i, name in enumerate(tests)}
        lines = {
            file: {line: sorted(index[name] for name in names) for line, names in rows.items()}
            for file, rows in sorted(self.lines.items())
        }
        seconds = [round(self.seconds[name], 4) for name in tests]
        stored = {"tests": tests, "seconds": seconds, "digests": self.digests, "lines": lines}
        write(path, stored, indent=None)

    def after(self, old: Coverage) -> Coverage:
        """With what ``old`` knows of other tests, apart from files that have changed since."""
        lines: dict[str, dict[int, list[str]]] = {file: {} for file in self.lines}
        same = {file for file, of in old.digests.items() if self.digests.get(file, of) == of}
        for rows, known in ((self.lines, set[str]()), (old.lines, set(self.seconds))):
            for file, found in rows.items():
                if rows is old.lines and file not in same:
                    continue
                to = lines.setdefault(file, {})
                for line, names in found.items():
                    to[line] = to.get(line, []) + [name for name in names if name not in known]
        return Coverage(lines, old.seconds | self.seconds, old.digests | self.digests)


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


class Recorder:
    """A pytest plug-in that records which lines each test runs, and how long it takes."""

    def __init__(self, root: Path, folders: Sequence[str], out: Path) -> None:
        import coverage

        self.root, self.out, self.started = root, out, 0.0
        self.seconds: dict[str, float] = {}
        self.passed: dict[str, bool] = {}
        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, source=[str(root / folder) for folder in folders]
        )

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.started = sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = sum(os.times()[:4]) - self.started
        self.coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        passed = {name for name, whole in self.passed.items() if whole}
        lines, digests = {}, {}
        for name in sorted(data.measured_files()):
            file = Path(name).relative_to(self.root).as_posix()
            digests[file] = digest(Path(name))
            lines[file] = {
                line: sorted(passed.intersection(names))
                for line, names in sorted(data.contexts_by_lineno(name).items())
            }
        found = Coverage(lines, {name: self.seconds[name] for name in passed}, digests)
        if self.out.is_file():
            found = found.after(Coverage.read(self.out))
        found.write(self.out)


def record(root: Path, strata: Iterable[str], arguments: Sequence[str], out: Path) -> int:
    """Run the tests once and store the tests of each line; returns pytest's status."""
    import pytest

    os.chdir(root)
    sys.path.insert(0, str(root))
    folders = [STRATA[name] for name in strata]
    flags = ["-q", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
    return int(pytest.main([*flags, *arguments], plugins=[Recorder(root, folders, out)]))


# --- running -------------------------------------------------------------------------------------


def copy_tree(root: Path, to: Path) -> None:
    """The files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = root / name, to / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


class Trials:
    """The process that runs tests in the copy: `tools/trials.py`."""

    def __init__(self, tree: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        variables = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trials.py")), *libraries],
            cwd=tree,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def failure(self, tests: Sequence[str], cpu_s: float) -> str:
        """The test that fails, or why there is none; empty if all pass."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"tests": list(tests), "cpu_s": cpu_s}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["failed"]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@dataclass
class Runner:
    """Runs tests on mutants in a copy of the tree."""

    tree: Path
    coverage: Coverage
    limit: float
    trials: Any
    starts: float = STARTS_S
    declarations: Sequence[str] = ()

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """``killed`` or ``survived``, by which tests, and how many of them ran."""
        path = self.tree / mutant.file
        if self.coverage.digests.get(mutant.file, digest(path)) != digest(path):
            raise SystemExit(f"mutants: {mutant.file} has changed since it was recorded: --record")
        original = path.read_bytes()
        end = mutant.line + original[mutant.start : mutant.end].count(b"\n")
        tests = list(mutant.tests) or self.coverage.of(mutant, end)
        if mutant.on_import:
            tests = [*self.declarations, *(name for name in tests if name not in self.declarations)]
        started, ran = time.monotonic(), 0
        for batch in self.batches(tests):
            reason = self.killed(mutant, path, original, batch)
            ran += len(batch)
            if reason:
                return self.row(mutant, "killed", reason, ran, len(tests), started)
        reason = "" if tests else "no test runs this line"
        return self.row(mutant, "survived", reason, ran, len(tests), started)

    def killed(self, mutant: Mutant, path: Path, original: bytes, tests: list[str]) -> str:
        """The test that fails with the change alone; empty if there is none."""
        while tests:
            path.write_bytes(mutant.apply(original))
            try:
                reason = self.failure(tests)
            finally:
                path.write_bytes(original)
            if not reason:
                return ""
            name = reason.partition(" ")[2]
            until = tests.index(name) + 1 if name in tests else len(tests)
            other = self.failure(tests[:until])
            if not other:
                return reason
            # Fails in this order without the change, too.
            without = other.partition(" ")[2]
            tests = [of for of in tests if of != without] if without in tests else []
        return ""

    def batches(self, tests: Sequence[str]) -> Iterator[list[str]]:
        """A few tests, then all others that fit into the limit."""
        yield from filter(None, [list(tests[:FIRST])])
        left, more = self.limit, []
        for name in tests[FIRST:]:
            left -= self.coverage.seconds.get(name, 0.0)
            if left < 0:
                break
            more.append(name)
        yield from filter(None, [more])

    def failure(self, tests: Sequence[str]) -> str:
        own = sum(self.coverage.seconds.get(name, 0.0) for name in tests)
        return self.trials.failure(tests, self.starts + SLOWER * own)

    @staticmethod
    def row(
        mutant: Mutant, result: str, by: str, ran: int, tests: int, started: float
    ) -> dict[str, Any]:
        told = {
            name: value
            for name, value in asdict(mutant).items()
            if name in ("file", "line", "text", "change", "stratum")
        }
        seconds = round(time.monotonic() - started, 1)
        more = {"result": result, "by": by, "ran": ran, "tests": tests, "seconds": seconds}
        return {"key": mutant.key} | told | more


def wilson(killed: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share."""
    if not total:
        return 0.0, 1.0
    p = killed / total
    middle = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def with_known(row: dict[str, Any], equivalent: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A survivor that is listed as equivalent, with the reason."""
    for entry in equivalent:
        same = all(entry[name] == row[of] for name, of in MATCHED.items())
        if row["result"] == "survived" and same:
            return row | {"result": "equivalent", "by": entry["reason"]}
    return row


MATCHED = {"file": "file", "line": "text", "change": "change"}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by result, and the share that is killed of those that are not equivalent."""
    counts = Counter(row["result"] for row in rows)
    total = counts["killed"] + counts["survived"]
    low, high = wilson(counts["killed"], total)
    return {
        **{name: counts[name] for name in ("killed", "survived", "equivalent")},
        "share": round(counts["killed"] / total, 4) if total else None,
        "interval": [round(low, 4), round(high, 4)],
    }


def report(rows: Sequence[dict[str, Any]], show: Callable[[str], None] = print) -> None:
    by_stratum = defaultdict(list)
    for row in rows:
        by_stratum[row["stratum"]].append(row)
    for row in rows:
        if row["result"] != "killed":
            show(f"{row['result']}: {row['file']}:{row['line']}: {row['change']}  {row['by']}")
    for name, part in [*by_stratum.items(), ("all", list(rows))]:
        s = summary(part)
        share = "-" if s["share"] is None else f"{s['share']:.1%}"
        low, high = s["interval"]
        show(
            f"{name}: {s['killed']} killed, {s['survived']} survived, {s['equivalent']} equivalent;"
            f" {share} ({low:.1%} to {high:.1%})"
        )


def write(path: Path, value: Any, indent: int | None = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    partial.replace(path)


def parsed(line: str) -> dict[str, Any] | None:
    """A row; none of a line that was interrupted."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def judged(out: Path) -> dict[str, dict[str, Any]]:
    """By key: the last row of each mutant in a file of results."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    return {row["key"]: row for row in map(parsed, lines) if row is not None}


def run(
    mutants: Sequence[Mutant],
    runner: Runner,
    out: Path,
    show: Callable[[str], None] = print,
    *,
    again: bool = False,
) -> list[dict[str, Any]]:
    """Judge the mutants that ``out`` does not contain yet; returns the rows of all.

    With ``again``, those that survived are judged once more, as tests may have been added.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    known = judged(out)
    if out.is_file():
        with out.open("a", encoding="utf-8") as file:
            file.write("\n")  # after the half of a line that was interrupted
    started, done = time.monotonic(), 0
    for number, mutant in enumerate(mutants, start=1):
        if mutant.key in known and not (again and known[mutant.key]["result"] == "survived"):
            continue
        row = known[mutant.key] = runner.judge(mutant)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        done += 1
        left = (len(mutants) - number) * (time.monotonic() - started) / done
        show(
            f"{number}/{len(mutants)} {row['result']} {row['file']}:{row['line']} {row['change']}"
            f" ({row['by'] or 'none'}; about {left / 60:.0f} min left)"
        )
    return [known[mutant.key] for mutant in mutants]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--count", type=int, default=120, help="sampled mutants, besides the named ones")
    add("--seed", type=int, default=0)
    add("--only", choices=tuple(STRATA), action="append", help="these parts of the code alone")
    add("--limit", type=float, default=120.0, help="seconds of tests for one mutant")
    add("--record", action="store_true", help="record tests of each line, besides those recorded")
    add("--tests", default="", help="arguments of pytest for the recording, such as files")
    add("--again", action="store_true", help="judge survivors again, after tests were added")
    add("--judged", action="store_true", help="report the mutants that were judged, judge no more")
    add("--folder", type=Path, default=FOLDER, help="recording and results")
    add("--report", type=Path, help="write the results with the environment to this file")
    add("--no-named", action="store_true", help="without the mutants of tools/mutants.toml")
    given = parser.parse_args(arguments)
    strata = given.only or list(STRATA)
    folder = (ROOT / given.folder).resolve()
    recording = folder / "coverage.json"
    if given.record or not recording.is_file():
        status = subprocess.run(
            [sys.executable, __file__, "--child", str(recording), ",".join(strata), given.tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        ).returncode
        if not recording.is_file():
            return status or 1
    coverage = Coverage.read(recording)
    known = tomllib.loads((ROOT / KNOWN).read_text(encoding="utf-8"))
    drawn = sample(ROOT, strata, given.count, given.seed)
    first = [] if given.no_named else named(ROOT, known.get("named", ()))
    results = folder / "results.jsonl"
    if given.judged:
        found = judged(results)
        first, drawn = ([m for m in part if m.key in found] for part in (first, drawn))
        rows = [found[mutant.key] for mutant in (*first, *drawn)]
    else:
        with tempfile.TemporaryDirectory(prefix="mutants-") as place:
            copy_tree(ROOT, Path(place))
            trials = Trials(Path(place))
            runner = Runner(Path(place), coverage, given.limit, trials)
            runner.declarations = known.get("declarations", {}).get("tests", ())
            try:
                rows = run([*first, *drawn], runner, results, again=given.again)
            finally:
                trials.close()
    rows = [with_known(row, known.get("equivalent", ())) for row in rows]
    rows, fixed = rows[len(first) :], rows[: len(first)]
    for row in fixed:
        print(f"named: {row['result']} {row['file']}:{row['line']}: {row['change']}")
    report(rows)
    if given.report:
        from vlmfast.core.env import environment

        parts = {name: [row for row in rows if row["stratum"] == name] for name in strata}
        write(
            given.report,
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": shlex.join(["python", "tools/mutants.py", *(arguments or sys.argv[1:])]),
                "environment": environment(),
                "seed": given.seed,
                "recorded_tests": len(coverage.seconds),
                "drawn": given.count,
                "judged": len(rows),
                "all": summary(rows),
                **{name: summary(part) for name, part in parts.items()},
                "named": fixed,
                "mutants": rows,
            },
        )
    return int(any(row["result"] != "killed" for row in fixed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        path, parts, words = sys.argv[2:]
        sys.exit(record(ROOT, parts.split(","), shlex.split(words), Path(path)))
    sys.exit(main())
