"""Downloads a file over HTTP, with a total time limit, a size limit and no secrets in errors.

``urllib`` limits each wait for the server but not their sum, follows redirects to FTP, and puts
whole URLs into its errors. Here headers and body share one deadline, redirects are followed
explicitly, and every message is written by vlmfast.
"""

from __future__ import annotations

import functools
import http.client
import io
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from vlmfast.errors import MediaError, MediaUnavailable, check_memory

__all__ = ["Resolve", "download"]

Resolve = Callable[[str, int], str]
"""Maps host and port to the address to connect to, or raises `MediaError`."""

_MOVED = (301, 302, 303, 307, 308)
_MOST_MOVES = 10
_CHUNK = 1 << 16


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
        if _is_timeout(error):
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
    if not parts.hostname:
        raise MediaError(f"{name}: cannot be fetched: is not a valid URL")


def _fetched(
    name: str, url: str, deadline: float, most_bytes: int, resolve: Resolve | None
) -> bytes | str:
    """Return the content of a URL, or the URL of a redirect."""
    address = None
    if resolve is not None:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = resolve(str(parts.hostname), port)
    # Not build_opener, which supports FTP, files and data: URLs and follows redirects itself.
    opener = urllib.request.OpenerDirector()
    for handler in (
        # A proxy would look the name up again.
        urllib.request.ProxyHandler(None if resolve is None else {}),
        urllib.request.UnknownHandler(),
        _HTTP(deadline, address),
        _HTTPS(deadline, address),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(url, headers={"User-Agent": "vlmfast"})
    try:
        response = opener.open(request, timeout=_left(deadline))
    except urllib.error.HTTPError as error:
        with error:
            location = error.headers.get("Location")
            if error.code in _MOVED and location:
                # As urllib does: headers are Latin-1, URLs are ASCII.
                safe = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
                return urljoin(url, quote(location, encoding="iso-8859-1", safe=safe))
        raise
    with response:
        return _body(name, response, most_bytes)


def _body(name: str, response: Any, most_bytes: int) -> bytes:
    too_large = f"{name}: is too large to download: more than {most_bytes >> 20} MiB"
    stated = response.headers.get("Content-Length", "")
    expected = int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 20 else None
    if expected is not None and expected > most_bytes:
        raise MediaError(too_large)
    chunks: list[bytes] = []
    received = 0
    while chunk := response.read1(_CHUNK):
        chunks.append(chunk)
        received += len(chunk)
        if received > most_bytes:
            raise MediaError(too_large)
    if expected is not None and received < expected:
        part = f"{received} of {expected} bytes received"
        raise MediaUnavailable(f"{name}: cannot be fetched: {part}")
    return b"".join(chunks)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Timed(io.RawIOBase):
    """Reads from a socket until the deadline, even if the data arrives slowly."""

    def __init__(self, sock: Any, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """Reads status, headers and body against the deadline."""

    def __init__(self, sock: Any, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, deadline))


class _HTTPConnection(http.client.HTTPConnection):
    """Connects to `address` instead of looking its host up, unless it is None."""

    address: str | None = None
    _create_connection: Callable[..., socket.socket]

    def connect(self) -> None:
        if self.address is None:
            super().connect()
        else:
            self.sock = self._create_connection((self.address, self.port))


class _HTTPSConnection(http.client.HTTPSConnection):
    """`_HTTPConnection` with TLS; the certificate must be that of the host."""

    address: str | None = None
    _create_connection: Callable[..., socket.socket]

    def __init__(self, host: str, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(host, context=context, **options)
        self._trust = context

    def connect(self) -> None:
        if self.address is None:
            super().connect()
        else:
            sock = self._create_connection((self.address, self.port))
            self.sock = self._trust.wrap_socket(sock, server_hostname=self.host)


class _HTTP(urllib.request.HTTPHandler):
    def __init__(self, deadline: float, address: str | None) -> None:
        super().__init__()
        self._limits = (deadline, address)

    def http_open(self, request: Any) -> Any:
        make = functools.partial(_connection, _HTTPConnection, *self._limits)
        return self.do_open(make, request)


class _HTTPS(urllib.request.HTTPSHandler):
    def __init__(self, deadline: float, address: str | None) -> None:
        super().__init__()
        self._limits, self._trust = (deadline, address), ssl.create_default_context()

    def https_open(self, request: Any) -> Any:
        make = functools.partial(_connection, _HTTPSConnection, *self._limits)
        return self.do_open(make, request, context=self._trust)


def _connection(kind: Any, deadline: float, address: str | None, host: str, **options: Any) -> Any:
    """A connection on which every wait ends at the deadline."""
    connection = kind(host, **options)
    connection.address = address
    connection._create_connection = functools.partial(_connected, deadline)
    connection.response_class = functools.partial(_Response, deadline=deadline)
    return connection


def _connected(deadline: float, address: tuple[str, int], *_: Any) -> socket.socket:
    """A socket to the first address of a host that answers, with the time that is left."""
    error: OSError = OSError("the host has no address")
    for found_address in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        host, port = found_address[4][:2]
        try:
            found = socket.create_connection((str(host), int(port)), _left(deadline))
        except OSError as own:
            error = own
        else:
            found.settimeout(_left(deadline))
            return found
    raise error


def _is_timeout(error: Exception) -> bool:
    reason = getattr(error, "reason", None)
    return isinstance(error, TimeoutError) or isinstance(reason, TimeoutError)


def _reason(error: Exception) -> str:
    """The reason of a failure, without text from the URL or the server."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            return f"HTTP {error.code} {HTTPStatus(error.code).phrase}"
        except ValueError:
            return f"HTTP {error.code}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {_plain(cause.verify_message)}"
    if isinstance(cause, OSError) and cause.strerror:
        return _plain(cause.strerror)
    if isinstance(cause, http.client.InvalidURL | ValueError):
        return "is not a valid URL"
    if isinstance(cause, http.client.HTTPException | OSError):
        return f"the server's answer cannot be read ({type(cause).__name__})"
    return _plain(str(cause)) if isinstance(cause, str) else type(cause).__name__


def _plain(text: str) -> str:
    return re.sub(r"[^ -~]+", " ", text)[:200]
