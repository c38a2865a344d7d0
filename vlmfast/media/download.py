"""Downloads a file over HTTP, with a total time limit, a size limit and no secrets in errors.

HTTP clients limit each wait for the server but not their sum, follow redirects themselves, and put
whole URLs into their errors. Here connection, headers and body share one deadline, redirects are
followed explicitly, and every message is written by vlmfast. The client is the lower half of httpx,
which does not let its callers choose the address of a connection.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpcore2

from vlmfast.errors import MediaError, MediaUnavailable, check_memory

Resolve = Callable[[str, int], str]
"""Maps host and port to the address to connect to, or raises `MediaError`."""

_MOVED = (301, 302, 303, 307, 308)
_MOST_MOVES = 10
_ASCII = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def download(
    name: str,
    url: str,
    timeout_s: float,
    most_bytes: int,
    *,
    resolve: Resolve | None = None,
) -> bytes:
    """Fetch the content of an ``http`` or ``https`` URL.

    Parameters
    ----------
    name : str
        Its name in messages: without a password and without a query.
    url : str
    timeout_s : float
        Seconds from the first connection to the last byte, redirects included.
    most_bytes : int
    resolve : callable, optional
        Called once for each host, those of redirects included, with its name in lower case and the
        port. The connection is made to the address that it returns, without another look-up and
        without a proxy. By default the system's resolver and proxies are used.

    Raises
    ------
    MediaError
        For an invalid URL or one with a password, and for a server that redirects too often or to
        another protocol, or sends more than `most_bytes`. `MediaUnavailable` for one that cannot be
        reached, answers with an error, is too slow, or sends less than it announced. Errors of
        `resolve` are passed on.
    """
    deadline = time.monotonic() + timeout_s
    try:
        for _ in range(_MOST_MOVES + 1):
            _check(name, url)
            found = _fetched(name, url, deadline, most_bytes, resolve)
            if isinstance(found, bytes):
                return found
            url = found
        raise MediaError(f"{name}: cannot be fetched: more than {_MOST_MOVES} redirects")
    except MediaError:
        raise
    except Exception as error:
        check_memory(error)
        if isinstance(error, TimeoutError | httpcore2.TimeoutException):
            late = f"{name}: cannot be fetched: took over {timeout_s:g} s"
            raise MediaUnavailable(late) from error
        raise MediaUnavailable(f"{name}: cannot be fetched: {_reason(error)}") from error


def _check(name: str, url: str) -> None:
    """Reject URLs other than plain HTTP, also as the target of a redirect."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError as error:
        raise MediaError(f"{name}: cannot be fetched: is not a valid URL") from error
    if parts.scheme not in ("http", "https"):
        raise MediaError(
            f"{name}: cannot be fetched: is redirected to {parts.scheme[:20]}:, and only http and "
            "https are followed"
        )
    if "@" in parts.netloc:
        raise MediaError(
            f"{name}: cannot be fetched: a URL with a user name or password is not supported"
        )
    if not parts.hostname or not re.fullmatch("[!-~]+", url):
        raise MediaError(f"{name}: cannot be fetched: is not a valid URL")


def _fetched(
    name: str, url: str, deadline: float, most_bytes: int, resolve: Resolve | None
) -> bytes | str:
    """Return the content of a URL, or the URL of a redirect."""
    parts = urlsplit(url)
    address = None
    if resolve is not None:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = resolve(str(parts.hostname), port)
    pool = httpcore2.ConnectionPool(
        ssl_context=ssl.create_default_context() if parts.scheme == "https" else None,
        # A proxy would look the name up again.
        proxy=_proxy(parts.scheme, parts.netloc) if resolve is None else None,
        network_backend=_Network(deadline, address),
    )
    headers = [("Host", parts.netloc), ("User-Agent", "vlmfast"), ("Accept-Encoding", "identity")]
    with pool, pool.stream("GET", url, headers=headers) as response:
        found = {key.lower(): value for key, value in response.headers}
        if response.status in _MOVED and (location := found.get(b"location")):
            return urljoin(url, quote(location, safe=_ASCII))
        if not 200 <= response.status < 300:
            raise MediaUnavailable(f"{name}: cannot be fetched: HTTP {_status(response.status)}")
        return _body(name, response, int(found.get(b"content-length", -1)), most_bytes)


def _body(name: str, response: httpcore2.Response, stated: int, most_bytes: int) -> bytes:
    """The content of an answer of a stated length, which is -1 if it states none."""
    too_large = f"{name}: is too large to download: more than {most_bytes >> 20} MiB"
    if stated > most_bytes:
        raise MediaError(too_large)
    data = bytearray()
    try:
        for chunk in response.iter_stream():
            data += chunk
            if len(data) > most_bytes:
                raise MediaError(too_large)
    except httpcore2.RemoteProtocolError as error:
        if len(data) >= stated:
            raise
        part = f"{len(data)} of {stated} bytes received"
        raise MediaUnavailable(f"{name}: cannot be fetched: {part}") from error
    return bytes(data)


def _proxy(scheme: str, netloc: str) -> httpcore2.Proxy | None:
    """The proxy that the environment states for a host."""
    url = urllib.request.getproxies().get(scheme)
    if not url or urllib.request.proxy_bypass(netloc):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    login = None
    if parts.username is not None:
        login = (unquote(parts.username), unquote(parts.password or ""))
    return httpcore2.Proxy(parts.geturl(), login)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Network(httpcore2.SyncBackend):
    """Connects to `address` instead of looking the host up, unless it is None."""

    def __init__(self, deadline: float, address: str | None) -> None:
        self._deadline, self._address = deadline, address

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address that answers, with the time that is left."""
        error: Exception = OSError("the host has no address")
        for found in socket.getaddrinfo(self._address or host, port, type=socket.SOCK_STREAM):
            left, own = _left(self._deadline), str(found[4][0])
            try:
                stream = super().connect_tcp(own, port, left, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as failed:
                error = failed
            else:
                return _Timed(stream, self._deadline)
        raise error


class _Timed(httpcore2.NetworkStream):
    """Ends every wait at the deadline, even if data arrives slowly."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        left = _left(self._deadline)
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, left), self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _status(code: int) -> str:
    try:
        return f"{code} {HTTPStatus(code).phrase}"
    except ValueError:
        return str(code)


def _reason(error: Exception) -> str:
    """The reason of a failure, without text from the URL or the server."""
    # The client's errors contain those of the system.
    cause = next((part for part in error.args if isinstance(part, OSError)), error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {_plain(cause.verify_message)}"
    if isinstance(cause, OSError) and cause.strerror:
        return _plain(cause.strerror)
    if isinstance(cause, ValueError | httpcore2.LocalProtocolError):
        return "is not a valid URL"
    return f"the server's answer cannot be read ({type(cause).__name__})"


def _plain(text: str) -> str:
    return re.sub(r"[^ -~]+", " ", text)[:200]
