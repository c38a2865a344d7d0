"""Compiles JSON schemas; as a program, in processes that a hostile schema may end.

llguidance can overflow its stack, and take minutes and gigabytes, and cannot be interrupted. The
server runs this file as a process of its own that forks for each schema. What compiles there within
the limits compiles in the server too, where the stack is larger: compilation depends on nothing
else than the schema and the tokenizer.

A message is JSON. The first one describes the tokenizer, and is answered when it is built; each
further one is a schema with the seconds that are left for it, and is answered by its outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CPU_S = 2  # of a compilation
MAX_BYTES = 128 << 20  # that a compilation allocates
MAX_TOKEN_S = 0.25  # of processor time, to find the tokens that may come first
_STACK = 2 << 20  # the smallest of a thread that Python starts, on the systems that are supported
# At most one space after a separator and no other whitespace, which small models may repeat
# without end.
OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}


def compiled(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    """The matcher of a schema, at the beginning of an answer.

    Raises
    ------
    ValueError
        With llguidance's reason.
    """
    limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def check_first(matcher: LLMatcher) -> None:
    """Find the tokens that may come first, as the engine does later on, where it waits for it.

    Raises
    ------
    ValueError
        Where there are none, or they take too long.
    """
    trial, start = matcher.deep_copy(), time.process_time()
    trial.compute_bitmask()
    if trial.is_error():
        raise ValueError("it allows no value, or is too complex")
    if time.process_time() - start > MAX_TOKEN_S:
        raise ValueError(f"its tokens take more than {MAX_TOKEN_S} s each")


def _main(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server ends this process
    given = json.loads(connection.recv_bytes())
    tokenizer = LLTokenizer(given["tokenizer"], given["vocabulary"], given["ends"])
    _send(connection, {})
    with contextlib.suppress(EOFError):
        while True:
            asked = json.loads(connection.recv_bytes())
            _send(connection, _outcome(tokenizer, asked["schema"], asked["seconds"]))


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _outcome(tokenizer: LLTokenizer, schema: str, seconds: float) -> dict[str, Any]:
    """``bytes`` that the compilation took, or the ``error``, or the ``signal`` that ended it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _limit(seconds)
            os.write(write, json.dumps(_tried(tokenizer, schema)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"signal": -os.waitstatus_to_exitcode(status)}


def _tried(tokenizer: LLTokenizer, schema: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        check_first(compiled(tokenizer, schema))
    except ValueError as error:
        return {"error": str(error)[:1000]}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit}


def _limit(seconds: float) -> None:
    """Let this process end where it exceeds the time, the memory or the stack of a schema."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # last words of what ends it
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
    resource.setrlimit(
        resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1])
    )
    size = Path("/proc/self/statm")
    if size.exists():  # elsewhere, the time alone bounds the memory
        own = int(size.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MAX_BYTES, own + MAX_BYTES))


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])))
