"""Runs the application: listens, stops on a signal, and tells how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import uvicorn

from vlmfast.errors import VLMFastError

from .app import Server, create_app
from .config import ServerConfig
from .connections import BACKLOG, Connections, Protocol, log_shortage, reserve_files
from .opening import Opener
from .runner import Runner

LOG = logging.getLogger("vlmfast.serve")
TRIM_S = 5.0  # between two returns of free memory
_WATCH_S = 0.5  # between two looks at the engine


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `_run`: uvicorn would end the process by the signal, with another code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServerConfig,
    load: Callable[[], Any],
    ready: Callable[[str], None] | None = None,
    runner: Callable[[Any, ServerConfig], Opener] = Runner,
) -> None:
    """Serve a model until SIGTERM or SIGINT.

    The address is bound at once, the model is loaded afterwards: ``/health`` answers meanwhile, and
    requests get 503. After the signal no new work is accepted, and answers that are being computed
    have ``config.grace_s`` seconds; a second signal ends them. Where the model is still loading, or
    a step does not end, the whole process ends.

    Parameters
    ----------
    config : ServerConfig
    load : callable
        Loads the model; called in a thread.
    ready : callable, optional
        Called with the URL when the model is loaded and warm.
    runner : callable
        As in `Server`.

    Raises
    ------
    VLMFastError
        When the address cannot be bound, or the model cannot be loaded.
    """
    _log_to_stderr()
    listening = _bound(config.host, config.port)
    port = listening.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host.strip("[]") else config.host
    server = Server(config, load, runner)
    with listening:
        asyncio.run(_run(server, listening, lambda: ready and ready(f"http://{host}:{port}")))
    if not server.stopped:
        # As while the model is loaded. Python aborts when it ends under a thread that computes.
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if server.failure is not None:
        raise server.failure


def _bound(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise VLMFastError(f"cannot listen on {host} port {port}: {reason}") from error
    return listening


def options_of(server: Server, most: int) -> uvicorn.Config:
    """How uvicorn runs the application, with at most ``most`` connections."""
    limits = Connections(most, server.config.header_timeout_s)
    return uvicorn.Config(
        create_app(server),
        http=partial(Protocol, limits=limits),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(server.config.grace_s)),
        timeout_keep_alive=75,
        limit_concurrency=None,
        ws="none",
        port=0,  # that it listens on where it is given no socket
        backlog=BACKLOG,
    )


async def _run(server: Server, listening: socket.socket, ready: Callable[[], object]) -> None:
    config = server.config
    running = _Uvicorn(options_of(server, reserve_files(config.max_connections)))

    def stop() -> None:
        if server.draining:
            running.force_exit = True
        server.draining = running.should_exit = True
        LOG.info("stopping: running answers have %g s", config.grace_s)

    loop = asyncio.get_running_loop()
    log_shortage(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    tasks = [
        asyncio.create_task(_watch(server, running, ready)),
        asyncio.create_task(_trim(server)),
    ]
    try:
        await running.serve(sockets=[listening])
    finally:
        for task in tasks:
            task.cancel()
        gc.unfreeze()


async def _watch(server: Server, running: uvicorn.Server, ready: Callable[[], object]) -> None:
    """Tell when the model is loaded; end when it cannot be, or when the engine has ended."""
    while not server.ready and server.failure is None:
        await asyncio.sleep(0.05)
    if server.failure is None:
        # Collections pass over the model and the modules from now on: they are short and frequent.
        gc.collect()
        gc.freeze()
        try:
            ready()
        except Exception as error:  # it cannot be told
            server.failure = error
    while server.failure is None:
        await asyncio.sleep(_WATCH_S)
    running.should_exit = True


async def _trim(server: Server) -> None:
    """Return free memory to the system regularly: glibc keeps it, in an arena for each thread."""
    trim = None
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent in other C libraries
    while True:
        await asyncio.sleep(TRIM_S)
        if server.runner is not None and server.runner.release():
            gc.collect()  # a request that failed is in a cycle with its traceback
        if trim is not None:
            await asyncio.to_thread(trim, 0)


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _log_to_stderr() -> None:
    if not LOG.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Json())
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
