"""Turns the URLs of a request into bytes, from sources that the options allow.

``data:`` URLs always; files of one folder and hosts of the internet where the operator allows them.
Every host is resolved once, all its addresses must be public, and the connection is made to the
address that was checked.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit, urlunsplit

from vlmfast.errors import MediaError, VLMFastError
from vlmfast.media.download import download
from vlmfast.media.sources import WHITESPACE, short

from .config import MediaLimits

Kind = Literal["image", "video"]

# Of a data: URL: decoding takes memory for each.
_MAX_PERCENT_SIGNS = 1 << 20


class Refused(MediaError):
    """Media that a request may not contain; the message is a predicate of "the image"."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


# --- hosts and addresses -------------------------------------------------------------------------


def find_addresses(host: str, port: int) -> list[str]:
    """All addresses of a host by the system's resolver, the preferred one first."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


_UNICAST6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Global by `ipaddress`, at least in some of its versions, but not hosts of the internet.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments; a cloud's metadata service
            "192.88.99.0/24",  # relays to 6to4
            "168.63.129.16/32",  # a cloud's host
            "2001::/32",  # Teredo: tunnels to an IPv4 address
            "3fff::/20",  # documentation
        ),
    )
)


def is_public(address: str) -> bool:
    """Whether an address is that of a host of the internet.

    IPv4 addresses in IPv6 ones (mapped, NAT64) are checked too. 6to4 is refused: some versions of
    Python call its addresses global.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip not in _UNICAST6 or ip.sixtofour is not None:
            return False
    special = any(ip in network for network in _SPECIAL)
    return ip.is_global and not ip.is_multicast and not special


def _host_name(host: str) -> str | None:
    """A host name in lower case and ASCII without a final dot, None if it is not valid."""
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        return None
    return name if re.fullmatch(r"[a-z0-9_.-]+|[0-9a-f:.]+", name) else None


def _domain(domain: str) -> str:
    name = _host_name(domain.strip())
    if name is None or ":" in name or name.startswith("."):
        raise VLMFastError(f"domains: {domain!r} must be a host name such as 'example.com'")
    return name


def _ascii(url: str) -> str:
    """Escape the characters of a URL that are not ASCII, as browsers do."""
    try:
        if re.search(r"[\x00-\x20\x7f\\]", url):
            raise ValueError
        if url.isascii():
            return url
        parts = urlsplit(url)
        host = _host_name(parts.hostname or "")
        if host is None or "@" in parts.netloc:
            raise ValueError
        netloc = host if parts.port is None else f"{host}:{parts.port}"
        rest = (quote(part, safe="/%:=&?~+!$,;'@()*[]") for part in (parts.path, parts.query))
        return urlunsplit((parts.scheme, netloc, *rest, ""))
    except ValueError as error:
        raise Refused("is not at a valid URL") from error


# --- URLs ----------------------------------------------------------------------------------------


class MediaSources:
    """Reads the content of URLs.

    Parameters
    ----------
    limits : MediaLimits
    find_addresses : callable, optional
        Maps a host name and a port to all addresses of the host; by default the system's resolver.
        Called once for each connection.
    is_public : callable, optional
        Whether an address may be connected to.

    Raises
    ------
    VLMFastError
        If a domain of `limits` is not a host name, or its folder is not a directory.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        find_addresses: Callable[[str, int], list[str]] = find_addresses,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        self.limits = limits
        self._find_addresses, self._is_public = find_addresses, is_public
        self._domains = tuple(_domain(domain) for domain in limits.domains)
        if limits.local_path is not None and not Path(limits.local_path).is_dir():
            raise VLMFastError(f"local_path={str(limits.local_path)!r} must be a directory")

    def read(self, url: str, kind: Kind, deadline: float) -> bytes:
        """Return the content of a URL.

        Raises
        ------
        MediaError
            The message contains neither the URL nor a path or address of the server.
        """
        scheme = url[:20].partition(":")[0].lower() if ":" in url[:20] else ""
        if scheme == "data":
            return _decoded(url, kind)
        if scheme in ("http", "https"):
            return self._fetched(url, kind, deadline)
        if scheme == "file":
            if self.limits.local_path is None:
                raise Refused(
                    "is a file: URL, and the server reads no files; send a data: URL. The "
                    "operator allows a folder with --allowed-local-media-path"
                )
            return _read_file(url, self.limits.local_path, self.limits.max_bytes)
        # One letter is a drive.
        what = f"has the scheme {scheme}:" if re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme) else ""
        raise Refused(
            f"{what or 'is not given by a URL'}; allowed are data: URLs, and http, https and file: "
            "URLs where the operator allows them. Paths are never read"
        )

    def _fetched(self, url: str, kind: Kind, deadline: float) -> bytes:
        limits = self.limits
        if not (limits.allow_remote or self._domains):
            raise Refused(
                "is remote, and the server fetches nothing; send a data: URL. The operator allows "
                "hosts with --allowed-media-domains, or all with --allow-remote-media"
            )
        timeout_s = max(min(limits.timeout_s, deadline - time.monotonic()), 0.0)
        name = f"the {kind}"
        return download(name, _ascii(url), timeout_s, limits.max_bytes, resolve=self._resolve)

    def _resolve(self, host: str, port: int) -> str:
        """The address of a host to connect to, if the host and all its addresses are allowed."""
        name = _host_name(host)
        if name is None:
            raise Refused("is at a URL without a valid host name")
        if self._domains and not any(
            name == domain or name.endswith(f".{domain}") for domain in self._domains
        ):
            raise Refused("is at a host that is not among those of --allowed-media-domains")
        try:
            found = self._find_addresses(name, port)
        except (OSError, UnicodeError):
            found = []
        # One message for both, so that names of the server's network cannot be found out.
        if not found or not all(map(self._is_public, found)):
            raise Refused("is at a host that has no public address")
        return found[0]


# --- data: URLs ----------------------------------------------------------------------------------


def _decoded(url: str, kind: Kind) -> bytes:
    """Return the content of a ``data:`` URL of a declared type that can be of this kind."""
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise Refused("has a data: URL that is cut short: no comma is in it")
    declared, *options = (part.strip().lower() for part in header.split(";"))
    if declared not in ("", "application/octet-stream") and not declared.startswith(f"{kind}/"):
        raise Refused(f"is declared as {short(declared)[:40]!r}; it must be {kind}/*", 415)
    if payload.count("%") > _MAX_PERCENT_SIGNS:
        raise Refused("has a data: URL with too many escaped characters; use base64", 413)
    if not payload.isascii() or re.search("%(?![0-9A-Fa-f]{2})", payload):
        raise Refused("has a data: URL that is cut short, or has characters that are not escaped")
    data = unquote_to_bytes(payload)
    if options[-1:] == ["base64"]:
        try:
            data = base64.b64decode(data.translate(None, WHITESPACE), validate=True)
        except binascii.Error as error:
            raise Refused("has base64 that is cut short or invalid; padding is needed") from error
    if not data:
        raise Refused("is empty")
    return data


# --- files ---------------------------------------------------------------------------------------


def _read_file(url: str, folder: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file in a folder, links resolved."""
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError as error:
        raise Refused("has a file: URL that is not valid") from error
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or path[:1] != "/":
        raise Refused("has a file: URL that is not of the form file:///folder/name")
    try:
        descriptor = _opened_inside(folder, os.path.normpath(path))
    except (OSError, ValueError) as error:  # ValueError: outside, or a null character
        # One message for all, so that files outside cannot be found out.
        raise Refused("is not a file in the folder that the server reads from") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Refused("is not a regular file")
    with open(descriptor, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise Refused(f"is too large: a file has at most {most_bytes} bytes", 413)
    if not data:
        raise Refused("is empty")
    return data


def _opened_inside(folder: Path, path: str) -> int:
    """Open a file in a folder; raise ValueError if it is outside, OSError if it cannot be opened.

    The path without links is opened folder by folder without following links, so that one that is
    put there meanwhile is not followed.
    """
    root = os.path.realpath(folder)
    if not any(Path(path).is_relative_to(start) for start in (root, os.path.abspath(folder))):
        raise ValueError  # do not even look at links outside
    names = Path(os.path.realpath(path)).relative_to(root).parts
    if not names:
        raise ValueError
    kept = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.ExitStack() as stack:
        at = os.open(root, kept | os.O_DIRECTORY)
        stack.callback(os.close, at)
        for name in names[:-1]:
            at = os.open(name, kept | os.O_DIRECTORY, dir_fd=at)
            stack.callback(os.close, at)
        # Opening a pipe would wait for its other end.
        return os.open(names[-1], kept | os.O_NONBLOCK, dir_fd=at)
