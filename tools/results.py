"""Measure the figures of README and the documentation again: ``make results``.

``python tools/results.py`` runs the commands of ``results.toml`` and then writes the tables. A full
run takes many hours. Commands that have finished are listed in ``runs/results`` and are not run
again, so repeat the command after an interruption. Without the folder ``runs``, everything is
measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.files import make_folder, replace_text
from vlmfast.core.help import names
from vlmfast.errors import VLMFastError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tools" / "results.toml"
# Pages that are written from the results, last.
PAGES = ("python tools/tables.py", "python tools/cards.py")


@dataclass(frozen=True)
class Entry:
    """Result files and the commands that write them.

    Attributes
    ----------
    gpu : bool
        Whether the commands need a GPU.
    after : str
        What has to be run by hand before, as where terms are accepted. The entry runs when named.
    """

    name: str
    writes: Sequence[str]
    commands: Sequence[str]
    gpu: bool = False
    after: str = ""


def read(path: Path = DATA) -> list[Entry]:
    """The entries of the list."""
    return [Entry(**of) for of in tomllib.loads(path.read_text(encoding="utf-8"))["results"]]


def has_gpu() -> bool:
    import torch  # takes a second

    return torch.cuda.is_available()


def missing(entry: Entry) -> str:
    """Why an entry runs only when it is named; empty if it always does."""
    if entry.gpu and not has_gpu():
        return "it needs a GPU"
    return f"first {entry.after}; then --only {entry.name}" if entry.after else ""


class Runner:
    """Runs entries in a repository, and records in ``runs/results`` what has finished.

    Parameters
    ----------
    root : Path
        The repository.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._folder = root / "runs" / "results"

    def left(self, entry: Entry) -> list[str]:
        """The commands that have not finished; one that has changed is run with those after it."""
        return list(entry.commands[len(self._done(entry)) :])

    def run(self, entry: Entry) -> None:
        """Run what is left of an entry.

        Raises
        ------
        VLMFastError
            If a command fails, or the files have not been written.
        """
        done, left = self._done(entry), self.left(entry)
        started = self._state(entry)["started"] if done else time.time()
        for command in left:
            print(f"{entry.name}: {command}", flush=True)
            self._save(entry, done, started)
            self.call(command)
            done.append(command)
        for name in entry.writes if left else ():
            path = self.root / name
            if not path.is_file() or path.stat().st_mtime < started - 1:
                raise VLMFastError(f"{entry.name}: its commands did not write {name}")
        self._save(entry, done, started)

    def call(self, command: str) -> None:
        """Run one command in the repository: vlmfast, python, make or cp."""
        first, *words = shlex.split(command)
        own = {"vlmfast": [sys.executable, "-m", "vlmfast"], "python": [sys.executable]}
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH")]))
        code = subprocess.run(
            [*own.get(first, [first]), *words],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": path},
        ).returncode
        if code in (-signal.SIGINT, ExitCode.INTERRUPTED):
            raise KeyboardInterrupt
        if code:
            raise VLMFastError(f"exit code {code}: {command}")

    def _done(self, entry: Entry) -> list[str]:
        pairs = zip(self._state(entry)["done"], entry.commands, strict=False)
        return [command for command, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _path(self, entry: Entry) -> Path:
        return self._folder / f"{entry.name}.json"

    def _state(self, entry: Entry) -> dict[str, Any]:
        path = self._path(entry)
        empty = {"done": [], "started": 0.0}
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty

    def _save(self, entry: Entry, done: list[str], started: float) -> None:
        make_folder(self._folder)
        replace_text(self._path(entry), json.dumps({"done": done, "started": started}))


def main(
    argv: list[str] | None = None, entries: list[Entry] | None = None, root: Path = ROOT
) -> int:
    """Run the entries; the others also run if one fails. 1 if one has failed."""
    parser = argparse.ArgumentParser(description="Measure the figures of the documentation again.")
    parser.add_argument("--only", type=names, default=(), metavar="NAME,NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="show what is left, and run nothing")
    args, runner = parser.parse_args(argv), Runner(root)
    entries = read() if entries is None else entries
    known = [entry.name for entry in entries]
    for name in args.only:
        if name not in known:
            print(f"results: unknown result {name!r}; results: {', '.join(known)}", file=sys.stderr)
            return ExitCode.USER_ERROR
    chosen = [entry for entry in entries if not args.only or entry.name in args.only]
    if args.list:
        for entry in chosen:
            print(f"{entry.name}: {len(runner.left(entry))} of {len(entry.commands)} commands left")
        return ExitCode.FINISHED
    failed = False
    try:
        for entry in chosen:
            if not args.only and (needed := missing(entry)):
                print(f"{entry.name}: left out, {needed}", file=sys.stderr)
                continue
            try:
                runner.run(entry)
            except VLMFastError as error:
                failed = True
                print(f"results: {error}", file=sys.stderr)
        for command in () if failed else PAGES:
            runner.call(command)
    except KeyboardInterrupt:
        print("results: interrupted; repeat the command to continue", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except VLMFastError as error:
        failed = True
        print(f"results: {error}", file=sys.stderr)
    return ExitCode.CHECK_FAILED if failed else ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
