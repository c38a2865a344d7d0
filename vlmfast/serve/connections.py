"""The connections of a server: how many there are, and how long each may wait for a request."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("vlmfast.serve")
# Accepted at once before any of them is closed, in a step of the event loop.
BACKLOG = 128
# Descriptors for all but connections: the queue, the libraries, media, and children.
SPARE_FILES = 256
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def reserve_files(most: int) -> int:
    """Let this process open enough files for ``most`` connections, and return for how many."""
    wanted = most + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            most = max(soft - SPARE_FILES, soft // 2)
            LOG.warning("at most %d connections: the process may open %d files", most, soft)
    return most


class Rare:
    """Logs a kind of event in one line, at most every ten seconds.

    Parameters
    ----------
    message : str
        With ``%d`` for the number of events since the last line.
    """

    _PERIOD_S = 10.0

    def __init__(self, message: str) -> None:
        self._message, self._count, self._last = message, 0, -self._PERIOD_S

    def happened(self) -> None:
        self._count += 1
        now = time.monotonic()
        if now - self._last >= self._PERIOD_S:
            LOG.warning(self._message, self._count)
            self._count, self._last = 0, now


def log_shortage(loop: asyncio.AbstractEventLoop) -> None:
    """Log rarely that no connection can be accepted; the loop would do so thousands of times."""
    shortage = Rare("connections were not accepted %d times: no file descriptors or memory")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
            shortage.happened()
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class Connections:
    """All connections of a server.

    Where there are too many, the one that has waited longest for a request is closed, so that those
    that ask nothing keep no other client out.

    Parameters
    ----------
    most : int
    head_s : float
        From the first byte of a request, or from the connection, to the end of its headers.
    """

    def __init__(self, most: int, head_s: float) -> None:
        self.head_s, self._most = head_s, most
        self._all: set[Protocol] = set()
        self._idle: dict[Protocol, None] = {}  # those without a request, the longest first
        self._shed = Rare(f"%d connections were closed: at most {most} are kept")

    def add(self, protocol: Protocol) -> None:
        if len(self._all) >= self._most:
            self._shed.happened()
            oldest = next(iter(self._idle), protocol)
            self.discard(oldest)
            oldest.transport.abort()
            if oldest is protocol:
                return
        self._all.add(protocol)
        self._idle[protocol] = None

    def discard(self, protocol: Protocol) -> None:
        self._all.discard(protocol)
        self._idle.pop(protocol, None)

    def update(self, protocol: Protocol) -> None:
        """Note whether a connection has a request that is being answered."""
        if protocol.busy:
            self._idle.pop(protocol, None)
        elif protocol in self._all:
            self._idle.setdefault(protocol)


class Protocol(H11Protocol):
    """Closes connections whose request does not begin in time; uvicorn waits without an end.

    Parameters
    ----------
    limits : Connections
    """

    def __init__(self, *args: Any, limits: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._waiting: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        self._limits.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._arrived()
        elif self._waiting is None and self.conn.trailing_data[0]:
            self._wait()
        self._limits.update(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limits.update(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.discard(self)
        self._arrived()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self._limits.head_s, self.transport.abort)

    def _arrived(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
