"""Runs lists of tests, each in a fork of a process that has imported the libraries.

A fork sees the code of the project as it is on the disk at that time. Needs Linux.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# None of them imports the project, so each fork imports its own.
LIBRARIES = (
    *("pytest", "_hypothesis_pytestplugin", "pytest_timeout", "anyio.pytest_plugin"),
    "torch",
    "safetensors.torch",
    "PIL.Image",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.clip.modeling_clip",
    "transformers.models.llava_next.modeling_llava_next",
    "transformers.models.llava_next.processing_llava_next",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
)
PYTEST = ("-q", "-x", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider")
WALL = 20  # times the limit of processor time, in which a process that waits for nothing ends


class Trials:
    """Runs tests in a copy of the tree.

    Parameters
    ----------
    tree : Path
    libraries : sequence of str
        What is imported before the forks, with the settings of ``tests/conftest.py``.
    """

    def __init__(self, tree: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self.tree = tree
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(libraries))

    def failure(self, tests: Sequence[str], cpu_s: float) -> str:
        """The test that fails, or why there is none; empty if all pass."""
        with tempfile.NamedTemporaryFile("w") as listed, tempfile.NamedTemporaryFile() as out:
            # Names of parameters may be long; a file has no limit.
            listed.write("\n".join(tests))
            listed.flush()
            given = (str(self.tree), listed.name, out.name, int(cpu_s) + 1)
            process = self.context.Process(target=_run, args=given)
            process.start()
            process.join(WALL * cpu_s)
            ended = not process.is_alive()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started and not ended
            process.join()
            lines = out.read().decode(errors="replace").splitlines()
        if not ended or process.exitcode == -signal.SIGXCPU:
            return "time"
        if process.exitcode == 0:
            return ""
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"status {process.exitcode}"


def _run(tree: str, listed: str, out: str, cpu_s: int) -> None:
    """Run the listed tests until one fails; what they print goes to ``out``."""
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, tree)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"}
    file = os.open(out, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(file, number)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    import pytest

    status = int(pytest.main([*PYTEST, f"@{listed}"]))
    sys.stdout.flush()
    os._exit(status)
