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
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutations import STRATA, Mutant, named, sample
from recorder import digest
from trials import Trials

# Forks of `trials` import this file again: what is of vlmfast is imported in functions alone.

ROOT = Path(__file__).resolve().parents[1]
KNOWN = Path("tools/mutants.toml")
FOLDER = Path("runs/mutants")
STARTS_S = 30.0  # until a test process has collected its tests and made their models
FIRST = 20  # tests of the first process
PER_FUNCTION = 3  # of them, cases of one test function
SLOWER = 10.0  # a mutant that takes this many times a test's own time hangs


@dataclass(frozen=True)
class Recording:
    """The ``seconds`` of each test and its ``lines`` by file, as `recorder` writes them."""

    tests: dict[str, dict[str, Any]]
    digests: dict[str, str]

    def seconds(self, name: str) -> float:
        return self.tests.get(name, {}).get("seconds", 0.0)

    def of(self, mutant: Mutant, end: int) -> list[str]:
        """Tests that run a line of a mutant; of one that runs on import, those of its file.

        The fastest first, at first few cases of one function.
        """
        names = [
            name
            for name, test in self.tests.items()
            for lines in (test["lines"].get(mutant.file, ()),)
            if any(mutant.on_import or mutant.first <= line <= end for line in lines)
        ]
        cases: Counter[str] = Counter()
        late = {}
        for name in sorted(names, key=lambda name: (self.seconds(name), name)):
            function = name.partition("[")[0]
            cases[function] += 1
            late[name] = cases[function] > PER_FUNCTION
        return sorted(late, key=late.__getitem__)


def record(path: Path, strata: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the tests once and store the lines of each; returns pytest's status."""
    flags = ["-q", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
    flags += ["-p", "recorder", "--record-to", str(path)]
    for name in strata:
        flags += ["--record-of", STRATA[name]]
    places = os.pathsep.join(map(str, (ROOT, ROOT / "tools")))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": places},
        check=False,
    ).returncode


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


@dataclass
class Runner:
    """Runs tests on mutants in a copy of the tree."""

    tree: Path
    recording: Recording
    limit: float
    trials: Trials
    starts: float = STARTS_S
    declarations: Sequence[str] = ()

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """``killed`` or ``survived``, by which tests, and how many of them ran."""
        path = self.tree / mutant.file
        if self.recording.digests.get(mutant.file, digest(path)) != digest(path):
            raise SystemExit(f"mutants: {mutant.file} has changed since it was recorded: --record")
        original = path.read_bytes()
        end = mutant.line + original[mutant.start : mutant.end].count(b"\n")
        tests = list(mutant.tests) or self.recording.of(mutant, end)
        if mutant.on_import:
            tests = [*self.declarations, *(name for name in tests if name not in self.declarations)]
        row = {
            name: getattr(mutant, name)
            for name in ("key", "file", "line", "text", "change", "stratum")
        }
        row |= {"result": "survived", "by": "" if tests else "no test runs this line"}
        started, ran = time.monotonic(), 0
        for batch in self.batches(tests):
            reason = self.killed(mutant, path, original, batch)
            ran += len(batch)
            if reason:
                row |= {"result": "killed", "by": reason}
                break
        seconds = round(time.monotonic() - started, 1)
        return row | {"ran": ran, "tests": len(tests), "seconds": seconds}

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
            left -= self.recording.seconds(name)
            if left < 0:
                break
            more.append(name)
        yield from filter(None, [more])

    def failure(self, tests: Sequence[str]) -> str:
        own = sum(map(self.recording.seconds, tests))
        return self.trials.failure(tests, self.starts + SLOWER * own)


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
    from vlmfast.core.journal import Journal

    out.parent.mkdir(parents=True, exist_ok=True)
    with Journal(out, needed=("key", "result")) as journal:
        known = {row["key"]: row for row in journal.lines}
        started, done = time.monotonic(), 0
        for number, mutant in enumerate(mutants, start=1):
            if mutant.key in known and not (again and known[mutant.key]["result"] == "survived"):
                continue
            row = known[mutant.key] = runner.judge(mutant)
            journal.append(row)
            done += 1
            left = (len(mutants) - number) * (time.monotonic() - started) / done
            show(
                f"{number}/{len(mutants)} {row['result']} {row['file']}:{row['line']} "
                f"{row['change']} ({row['by'] or 'none'}; about {left / 60:.0f} min left)"
            )
    return [known[mutant.key] for mutant in mutants]


def with_known(row: dict[str, Any], equivalent: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A survivor that is listed as equivalent, with the reason."""
    for entry in equivalent:
        same = [entry[name] for name in ("file", "line", "change")]
        if row["result"] == "survived" and same == [row["file"], row["text"], row["change"]]:
            return row | {"result": "equivalent", "by": entry["reason"]}
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by result, and the share that is killed of those that are not equivalent."""
    from vlmfast.eval.scores import wilson

    counts = Counter(row["result"] for row in rows)
    total = counts["killed"] + counts["survived"]
    share, *interval = wilson(counts["killed"], total) if total else (None, 0.0, 1.0)
    return {
        **{name: counts[name] for name in ("killed", "survived", "equivalent")},
        "share": share if share is None else round(share, 4),
        "interval": [round(end, 4) for end in interval],
    }


def report(rows: Sequence[dict[str, Any]], strata: Sequence[str]) -> dict[str, Any]:
    """Print what was not killed and the shares; returns these of all and by stratum."""
    for row in rows:
        if row["result"] != "killed":
            print(f"{row['result']}: {row['file']}:{row['line']}: {row['change']}  {row['by']}")
    parts = {name: [row for row in rows if row["stratum"] == name] for name in strata}
    found = {name: summary(part) for name, part in [*parts.items(), ("all", rows)]}
    for name, s in found.items():
        share = "-" if s["share"] is None else f"{s['share']:.1%}"
        low, high = s["interval"]
        print(
            f"{name}: {s['killed']} killed, {s['survived']} survived, {s['equivalent']} equivalent;"
            f" {share} ({low:.1%} to {high:.1%})"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    drawn = 20 * len(STRATA)
    add("--count", type=int, default=drawn, help="sampled mutants, besides the named ones")
    add("--seed", type=int, default=0)
    add("--only", choices=tuple(STRATA), action="append", help="these parts of the code alone")
    add("--limit", type=float, default=120.0, help="seconds of tests for one mutant")
    add("--record", action="store_true", help="record tests of each line, besides those recorded")
    add("--tests", default="", help="arguments of pytest for the recording, such as files")
    add("--again", action="store_true", help="judge survivors again, after tests were added")
    add("--folder", type=Path, default=FOLDER, help="recording and results")
    add("--report", type=Path, help="write the results with the environment to this file")
    given = parser.parse_args(arguments)
    strata = given.only or list(STRATA)
    folder = (ROOT / given.folder).resolve()
    path = folder / "recording.json"
    if given.record or not path.is_file():
        status = record(path, strata, shlex.split(given.tests))
        if not path.is_file():
            return status or 1
    recording = Recording(**json.loads(path.read_text(encoding="utf-8")))
    known = tomllib.loads((ROOT / KNOWN).read_text(encoding="utf-8"))
    first = named(ROOT, known.get("named", ()))
    drawn = sample(ROOT, strata, given.count, given.seed)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copy_tree(ROOT, Path(place))
        runner = Runner(Path(place), recording, given.limit, Trials(Path(place)))
        runner.declarations = known.get("declarations", {}).get("tests", ())
        rows = run([*first, *drawn], runner, folder / "results.jsonl", again=given.again)
    rows = [with_known(row, known.get("equivalent", ())) for row in rows]
    fixed, rows = rows[: len(first)], rows[len(first) :]
    for row in fixed:
        print(f"named: {row['result']} {row['file']}:{row['line']}: {row['change']}")
    found = report(rows, strata)
    if given.report:
        from vlmfast.core.env import environment
        from vlmfast.eval.results import write_json

        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "tools/mutants.py", *arguments]),
            "environment": environment(),
            "seed": given.seed,
            "recorded_tests": len(recording.tests),
            "judged": len(rows),
        }
        write_json(given.report, {**about, **found, "named": fixed, "mutants": rows})
    return int(any(row["result"] != "killed" for row in fixed))


if __name__ == "__main__":
    sys.exit(main())
