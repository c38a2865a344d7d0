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
from dataclasses import dataclass
from pathlib import Path

from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.files import make_folder, replace_bytes, replace_text
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
    writes: tuple[str, ...]
    commands: tuple[str, ...]
    gpu: bool = False
    after: str = ""


def read(path: Path = DATA) -> list[Entry]:
    """The entries of the list."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))["results"]
    return [
        Entry(
            e["name"],
            tuple(e["writes"]),
            tuple(e["commands"]),
            e.get("gpu", False),
            e.get("after", ""),
        )
        for e in found
    ]


def has_gpu() -> bool:
    import torch  # takes a second

    return torch.cuda.is_available()


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
        done = self._state(entry)["done"]
        same = 0
        while same < min(len(done), len(entry.commands)) and done[same] == entry.commands[same]:
            same += 1
        return list(entry.commands[same:])

    def run(self, entry: Entry) -> None:
        """Run what is left of an entry.

        Raises
        ------
        VLMFastError
            If a command fails, or the files have not been written.
        """
        left = self.left(entry)
        if not left:
            return
        done = list(entry.commands[: len(entry.commands) - len(left)])
        started = self._state(entry)["started"] if done else time.time()
        self._save(entry, done, started)
        for command in left:
            print(f"{entry.name}: {command}", flush=True)
            self.call(command)
            done.append(command)
            if len(done) == len(entry.commands):
                self._check(entry, started)
            self._save(entry, done, started)

    def call(self, command: str) -> None:
        """Run one command in the repository: vlmfast, python, make, or cp with two files."""
        words = shlex.split(command)
        if words[0] == "cp":
            replace_bytes(self.root / words[2], [(self.root / words[1]).read_bytes()])
            return
        first = {
            "vlmfast": [sys.executable, "-m", "vlmfast"],
            "python": [sys.executable],
            "make": ["make"],
        }
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH")]))
        code = subprocess.run(
            [*first[words[0]], *words[1:]], cwd=self.root, env={**os.environ, "PYTHONPATH": path}
        ).returncode
        if code in (-signal.SIGINT, ExitCode.INTERRUPTED):
            raise KeyboardInterrupt
        if code:
            raise VLMFastError(f"exit code {code}: {command}")

    def _check(self, entry: Entry, started: float) -> None:
        for name in entry.writes:
            path = self.root / name
            if not path.is_file() or path.stat().st_mtime < started - 1:
                raise VLMFastError(f"{entry.name}: its commands did not write {name}")

    def _path(self, entry: Entry) -> Path:
        return self._folder / f"{entry.name}.json"

    def _state(self, entry: Entry) -> dict:
        path = self._path(entry)
        if not path.exists():
            return {"done": [], "started": 0.0}
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise VLMFastError(f"{path} cannot be read: {error}; remove it") from error

    def _save(self, entry: Entry, done: list[str], started: float) -> None:
        make_folder(self._folder)
        replace_text(self._path(entry), json.dumps({"done": done, "started": started}))


def selected(entries: list[Entry], chosen: tuple[str, ...]) -> list[Entry]:
    """
    Raises
    ------
    VLMFastError
        For an unknown name.
    """
    known = [entry.name for entry in entries]
    for name in chosen:
        if name not in known:
            raise VLMFastError(f"unknown result {name!r}; results: {', '.join(known)}")
    return [entry for entry in entries if not chosen or entry.name in chosen]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the figures of the documentation again.")
    parser.add_argument("--only", type=names, default=(), metavar="NAME,NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="show what is left, and run nothing")
    return parser.parse_args(argv)


def main(
    argv: list[str] | None = None, entries: list[Entry] | None = None, root: Path = ROOT
) -> int:
    """Run the entries; the others also run if one fails. 1 if one has failed."""
    args, runner = parse(argv), Runner(root)
    try:
        entries = selected(read() if entries is None else entries, args.only)
    except VLMFastError as error:
        print(f"results: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    if args.list:
        for entry in entries:
            print(f"{entry.name}: {len(runner.left(entry))} of {len(entry.commands)} commands left")
        return ExitCode.FINISHED
    failed = []
    try:
        for entry in entries:
            if entry.gpu and not args.only and not has_gpu():
                print(f"{entry.name}: left out, it needs a GPU", file=sys.stderr)
                continue
            if entry.after and not args.only:
                how = f"first {entry.after}; then --only {entry.name}"
                print(f"{entry.name}: left out, {how}", file=sys.stderr)
                continue
            try:
                runner.run(entry)
            except VLMFastError as error:
                failed.append(entry.name)
                print(f"results: {error}", file=sys.stderr)
        if not failed:
            for command in PAGES:
                runner.call(command)
    except KeyboardInterrupt:
        print("results: interrupted; repeat the command to continue", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except VLMFastError as error:
        failed.append("pages")
        print(f"results: {error}", file=sys.stderr)
    return ExitCode.CHECK_FAILED if failed else ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
