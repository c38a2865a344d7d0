"""A pytest plug-in that records which lines each test runs, and its processor time.

``pytest -p recorder --record-to FILE --record-of FOLDER``: `tools/mutants.py` runs this. What the
file knows of other tests stays, apart from that of source files that have changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--record-to", type=Path)
    parser.addoption("--record-of", action="append")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(config.option.record_to, config.option.record_of))


class Recorder:
    def __init__(self, out: Path, folders: list[str]) -> None:
        import coverage

        self.out, self.root, self.started = out, Path.cwd(), 0.0
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.coverage = coverage.Coverage(data_file=None, config_file=False, source=folders)

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.started = sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = round(sum(os.times()[:4]) - self.started, 4)
        self.coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests: dict[str, Any] = {
            name: {"seconds": seconds, "lines": {}}
            for name, seconds in self.seconds.items()
            if name not in self.failed
        }
        digests = {}
        for path in map(Path, data.measured_files()):
            file = path.relative_to(self.root).as_posix()
            digests[file] = digest(path)
            for line, names in data.contexts_by_lineno(str(path)).items():
                for name in tests.keys() & set(names):
                    tests[name]["lines"].setdefault(file, []).append(line)
        found = {"tests": tests, "digests": digests}
        if self.out.is_file():
            found = merged(json.loads(self.out.read_text(encoding="utf-8")), found)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(self.out)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new``, and what ``old`` knows of other tests and of files that have not changed since."""
    changed = {file for file, of in old["digests"].items() if new["digests"].get(file, of) != of}
    for test in old["tests"].values():
        test["lines"] = {file: of for file, of in test["lines"].items() if file not in changed}
    return {name: old[name] | new[name] for name in ("tests", "digests")}
