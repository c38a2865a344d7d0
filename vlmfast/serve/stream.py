"""Server-sent events, and requests whose clients leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import as_request_error

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client has closed its connection."""


async def unless_gone(receive: Receive, work: Awaitable[_T], most_s: float | None = None) -> _T:
    """Wait for ``work``, and cancel it when the client leaves.

    Parameters
    ----------
    receive : callable
        Of a request whose body has been read.
    work : awaitable
    most_s : float, optional
        After which the client counts as gone.

    Raises
    ------
    ClientGone
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_text(value: Any) -> str:
    """JSON in ASCII: some clients take U+0085, U+2028 and U+2029 for the end of an event's line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class EventStream(Response):
    """A response of server-sent events that ends when its client leaves.

    Parameters
    ----------
    events : async iterator of str
        Each a whole event. It is closed in any case.
    deadline_s : float
        After which the connection is given up, even if the client does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], deadline_s: float) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._events, self._deadline_s = events, deadline_s
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send), self._deadline_s)
        except ClientGone:
            scope["state"]["log"]["gone"] = True

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            await send(start)
            async for event in events:
                body = {"type": "http.response.body", "body": event.encode(), "more_body": True}
                await send(body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def data(value: Any) -> str:
    """An event without a name, as chat completions are streamed."""
    return f"data: {json_text(value)}\n\n"


def named(name: str, value: Any) -> str:
    """An event with a name, as responses are streamed."""
    return f"event: {name}\ndata: {json_text(value)}\n\n"


def error_event(error: Exception) -> str:
    """An error after the first event, when there is no status to tell it by."""
    return data(as_request_error(error).body)
