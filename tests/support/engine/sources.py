"""What a server reads: media, the addresses of their hosts, and its keys."""

from __future__ import annotations

from typing import Any

from vlmfast.serve.app import Server
from vlmfast.serve.commands import _keys as keys_of
from vlmfast.serve.media_sources import is_public

__all__ = ["keys_of", "name_addresses", "sources_of"]


def sources_of(server: Server) -> Any:
    """What reads the media of a server's requests, by ``read(url, ...)``."""
    return server.runner._sources


def name_addresses(server: Server, known: dict[str, list[str]], public: str) -> None:
    """Give hosts other addresses for a server, and take one address for a public one."""
    sources = sources_of(server)
    resolve = sources._find_addresses
    sources._find_addresses = lambda host, port: (
        known[host] if host in known else resolve(host, port)
    )
    sources._is_public = lambda address: address == public or is_public(address)
