"""What every request passes: its host, its key, limits, an id, a line in the log.

Written as ASGI middleware, so that a request is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .errors import RequestError, as_request_error, busy
from .stream import ClientGone

LOG = logging.getLogger("vlmfast.serve")
OPEN = ("/health", "/ready")  # without a key
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_GONE = 499  # in the log, of a client that left before its answer


class Gate:
    """Admits requests to an application.

    Parameters
    ----------
    app : ASGI application
        Finds ``request_id``, ``key`` and ``end`` (`time.monotonic`) in ``scope["state"]``, and may
        add what the log line shall contain to ``scope["state"]["log"]``.
    config : ServerConfig
    draining : callable
        Whether new work is refused, since the server is about to stop.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, draining: Callable[[], bool] = lambda: False
    ) -> None:
        self._app, self._config, self._draining = app, config, draining
        self._digests = [(_digest(key.encode()), key) for key in config.api_keys]
        self._running: Counter[str] = Counter()
        self._body_bytes = 0  # bytes of bodies of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        start = time.monotonic()
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(headers.get("x-request-id", b""))
        state["end"], state["log"] = start + self._config.timeout_s, {}
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                identity = (b"x-request-id", state["request_id"].encode())
                plain = (b"x-content-type-options", b"nosniff")
                message = {**message, "headers": [*message["headers"], identity, plain]}
            await send(message)

        try:
            await self._admit(scope, headers, receive, answer)
        except ClientGone:
            status = _GONE
        except Exception as error:
            if not isinstance(error, RequestError):
                LOG.exception("request %s failed", state["request_id"])
            if status == 0:
                found = as_request_error(error)
                # What is left of the body is not read.
                headers = {**found.headers, "connection": "close"}
                await JSONResponse(found.body, found.status, headers)(scope, receive, answer)
        finally:
            self._log(scope, status or _GONE, time.monotonic() - start)

    async def _admit(
        self, scope: Scope, headers: Mapping[str, bytes], receive: Receive, send: Send
    ) -> None:
        self._check_host(headers.get("host", b""))
        if scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        key = self._key(headers.get("authorization", b""))
        scope["state"]["key"] = key
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._draining():
            raise RequestError("the server is stopping", 503, code="stopping", retry_after=5)
        if self._running[key] >= self._config.max_requests_per_key:
            raise busy(f"{self._running[key]} requests of this key are being answered")
        body = _Body(receive, headers, self._config, scope["state"]["end"], self._reserve)
        self._running[key] += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._reserve(-body.received)
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def _check_host(self, value: bytes) -> None:
        hosts = self._config.hosts
        if hosts is None:
            return
        name = re.sub(rb":\d*$", b"", value).decode("latin-1").lower().rstrip(".")
        if name not in hosts:
            raise RequestError("the Host header names another server", code="invalid_host")

    def _key(self, value: bytes) -> str:
        """The key that a request presents; empty where none is needed."""
        if not self._digests:
            return ""
        scheme, _, given = value.partition(b" ")
        digest = _digest(given.strip())
        # All are compared, and digests of equal length: times tell nothing about the keys.
        found = [key for known, key in self._digests if hmac.compare_digest(known, digest)]
        if scheme.lower() != b"bearer" or not found:
            raise RequestError(
                "the Authorization header must be 'Bearer' and a key of this server",
                401,
                code="invalid_api_key",
            )
        return found[0]

    def _reserve(self, size: int) -> None:
        """Count bytes of bodies; they are in memory until their requests are answered."""
        if size > 0 and self._body_bytes + size > self._config.max_total_body_bytes:
            raise busy("the bodies of all requests are too large together")
        self._body_bytes += size

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        line = {
            "request_id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            **state["log"],
        }
        LOG.info("request", extra={"fields": line})


class _Body:
    """The body of a request, as it arrives, within the limits."""

    def __init__(
        self,
        receive: Receive,
        headers: Mapping[str, bytes],
        config: ServerConfig,
        end: float,
        reserve: Any,
    ) -> None:
        self._receive, self._end, self._most = receive, end, config.max_body_bytes
        self._reserve, self.received, self._complete = reserve, 0, False
        kind = headers.get("content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise RequestError("the Content-Type must be application/json", 415)
        stated = headers.get("content-length", b"")
        if stated.isdigit() and int(stated) > self._most:
            raise self._too_large()

    def _too_large(self) -> RequestError:
        return RequestError(f"the body must have at most {self._most} bytes", 413)

    async def receive(self) -> Message:
        if self._complete:  # the client's leaving
            return await self._receive()
        try:
            async with asyncio.timeout(self._end - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise RequestError("the body did not arrive in time", 408, code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        size = len(message.get("body", b""))
        if self.received + size > self._most:
            raise self._too_large()
        self._reserve(size)
        self.received += size
        self._complete = not message.get("more_body", False)
        return message


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if _ID.fullmatch(text) else uuid.uuid4().hex
