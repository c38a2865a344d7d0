"""Processes that have imported torch alone: forks of one, in milliseconds rather than seconds."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .paths import ROOT

_PARENT = """
import json, os, sys, torch
for line in sys.stdin:
    code, environment, *files = json.loads(line)
    if not (child := os.fork()):
        os.environ.clear()
        os.environ.update(environment)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        exec(code, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """It ends when its input does, with the tests."""
    command, pipe = [sys.executable, "-c", _PARENT], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as the main module of a process; its exit code and what it has written."""
    parent = _parent()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        print(
            json.dumps([code, dict(os.environ), str(out), str(err)]), file=parent.stdin, flush=True
        )
        status = int(parent.stdout.readline())
        return subprocess.CompletedProcess([code], status, out.read_text(), err.read_text())
