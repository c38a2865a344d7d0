"""Whether a schema compiles, found out in another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from vlmfast.errors import DeadlineExceeded

from .grammar_compiler import MAX_BYTES, MAX_CPU_S

_LATE = "the request reached its deadline while its schema was compiled"
_PROGRAM = Path(__file__).with_name("grammar_compiler.py")


class Trials:
    """Compiles schemas in a process that starts with the first one; threads may share it.

    Parameters
    ----------
    tokenizer : str
        Of the library tokenizers, as JSON.
    vocabulary : int
        Ids that the model scores.
    ends : list of int
        Ids that end an answer.
    """

    def __init__(self, tokenizer: str, vocabulary: int, ends: list[int]) -> None:
        self._about = {"tokenizer": tokenizer, "vocabulary": vocabulary, "ends": ends}
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def cost(self, schema: str, end: float) -> int:
        """Bytes that a schema takes when it is compiled.

        Parameters
        ----------
        schema : str
        end : float
            When the request is given up, by `time.monotonic`.

        Raises
        ------
        ValueError
            With the reason why it cannot be compiled.
        DeadlineExceeded
        MemoryError
            If the system has no memory left for it.
        """
        if not self._lock.acquire(timeout=_left(end)):
            raise DeadlineExceeded(_LATE)
        try:
            found = self._asked(schema, end)
        finally:
            self._lock.release()
        if "bytes" in found:
            return found["bytes"]
        match found.get("signal"):
            case None:
                raise ValueError(found["error"])
            case signal.SIGALRM:
                raise DeadlineExceeded(_LATE)
            case signal.SIGKILL:  # for want of memory, as this program does not
                raise MemoryError("schemas cannot be compiled")
            case signal.SIGXCPU:
                raise ValueError(f"it takes more than {MAX_CPU_S} s to compile")
            case signal.SIGABRT:
                raise ValueError(f"it takes more than {MAX_BYTES >> 20} MiB to compile")
            case _:
                raise ValueError("it is too complex to compile")

    def _asked(self, schema: str, end: float) -> dict[str, Any]:
        for again in (True, False):
            try:
                process = self._process  # which another thread may close
                if process is None:
                    process = self._process = _Process()
                    process.answer(self._about, end)
                return process.answer({"schema": schema}, end)
            except DeadlineExceeded:
                self.close()
                raise
            except (EOFError, OSError) as error:  # the system has ended it, or starts no process
                self.close()
                if not again:
                    raise MemoryError("schemas cannot be compiled") from error
        raise AssertionError

    def close(self) -> None:
        """End the process; the next schema starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """The running program, and the connection to it."""

    def __init__(self) -> None:
        self._own, theirs = Pipe()
        number = theirs.fileno()
        # Alone in its session: signals of a terminal are the server's. One thread, as it forks.
        popen = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        theirs.close()
        self.end = weakref.finalize(self, _end, popen, self._own)

    def answer(self, message: dict[str, Any], end: float) -> dict[str, Any]:
        left = _left(end)
        self._own.send_bytes(json.dumps(message | {"seconds": left}).encode())
        # It ends a compilation itself, so that it need not be started again.
        if not self._own.poll(left + 1):
            raise DeadlineExceeded(_LATE)
        return json.loads(self._own.recv_bytes())


def _left(end: float) -> float:
    return min(max(end - time.monotonic(), 0), 3600)


def _end(popen: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    popen.kill()
    with contextlib.suppress(ChildProcessError):
        popen.wait()
