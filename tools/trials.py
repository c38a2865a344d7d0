"""Run lists of tests, each in a fork of a process that has imported the libraries.

`tools/mutants.py` starts it in a copy of the tree. A request is one line of JSON with ``tests`` and
``cpu_s``, the reply one line with ``failed``: the test that failed, or why none ended, or nothing.
A fork of its own sees the code as it is on the disk at that time. Needs Linux.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# None of them imports the project, so each fork imports its own.
LIBRARIES = (
    "numpy",
    "torch",
    "safetensors.torch",
    "PIL.Image",
    "transformers",
    "transformers.cache_utils",
    "transformers.image_utils",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
    "transformers.models.llava_next.modeling_llava_next",
    "transformers.models.llava_next.processing_llava_next",
    "transformers.models.llava_next.image_processing_llava_next",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
)
PYTEST = ("-q", "-x", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider")
STALLED_S = 120.0  # wall time in which a process that runs at all uses some of a core


def preload(libraries: Sequence[str]) -> None:
    """Import libraries with the settings of ``tests/conftest.py``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("MPLBACKEND", "agg")
    if "torch" in libraries and not importlib.import_module("torch").cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import pytest

    # Imports its plug-ins; there are no tests in the folder.
    with tempfile.TemporaryDirectory() as empty:
        pytest.main(["--co", "-q", "--rootdir", empty, "-c", os.devnull, empty])


def trial(tests: Sequence[str], cpu_s: float) -> str:
    """Run ``tests`` until one fails; returns it, ``"time"``, or an empty string if all pass."""
    with tempfile.NamedTemporaryFile("w") as listed, tempfile.TemporaryFile() as out:
        # Names of parameters may be long; a file has no limit.
        listed.write("\n".join(tests))
        listed.flush()
        pid = os.fork()
        if pid == 0:
            _child(listed.name, cpu_s, out.fileno())
        status = _ended(pid, cpu_s)
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "time"
    if os.waitstatus_to_exitcode(status) == 0:
        return ""
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"status {os.waitstatus_to_exitcode(status)}"


def _child(listed: str, cpu_s: float, out: int) -> None:
    status = 99
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for to, number in ((null, 0), (out, 1), (out, 2)):
            os.dup2(to, number)
        limit = int(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        import pytest

        status = int(pytest.main([*PYTEST, f"@{listed}"]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _ended(pid: int, cpu_s: float) -> int | None:
    """Status of the process; none of one that waited for nothing, or that had to be killed."""
    used, since = 0.0, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
        if (now := _used(pid)) > used + 0.2:
            used, since = now, time.monotonic()
        if now > 2 * cpu_s + 10 or time.monotonic() - since > STALLED_S:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has started and not ended
    return status


def _used(pid: int) -> float:
    """Seconds of processor time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    preload(sys.argv[1:])
    for line in sys.stdin:
        asked = json.loads(line)
        replies.write(json.dumps({"failed": trial(asked["tests"], asked["cpu_s"])}) + "\n")


if __name__ == "__main__":
    main()
