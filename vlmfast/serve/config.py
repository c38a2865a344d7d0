"""Options of the server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from pathlib import Path

from vlmfast.errors import VLMFastError


@dataclass(frozen=True)
class MediaLimits:
    """Which images and videos a request may contain.

    Parameters
    ----------
    max_images : int
        Per request, over all turns.
    max_pixels : int
        Of an image, and of a frame of a video, checked by the header.
    max_frames : int
        Read from the videos of a request.
    max_video_pixels : int
        In all frames that are read from the videos of a request.
    max_video_seconds : float
        Of one video. One with more frames than 120 for each of these seconds, or with more pixels
        in all its frames than 1920x1080 at 60 frames per second, is refused too.
    max_bytes : int
        Of a file that is fetched or read; those in a request are bounded by its body.
    timeout_s : float
        Time of a download.
    allow_remote : bool
        Whether ``http`` and ``https`` URLs of any host may be fetched. Only global addresses are
        connected to.
    domains : tuple of str
        Hosts that may be fetched from, on any port, their subdomains included; all if empty and
        ``allow_remote``.
    local_path : Path, optional
        Folder whose files ``file:`` URLs may name.
    """

    max_images: int = 8
    max_pixels: int = 36_000_000
    max_frames: int = 64
    max_video_pixels: int = 300_000_000
    max_video_seconds: float = 600.0
    max_bytes: int = 64 << 20
    timeout_s: float = 20.0
    allow_remote: bool = False
    domains: tuple[str, ...] = ()
    local_path: Path | None = None


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Parameters
    ----------
    model : str
        Name of the model in the API.
    recipe : str
        Applied to requests that name none.
    aliases : dict of str to str
        Further model names, each with its recipe.
    host, port
        Where it listens; port 0 is any free one.
    api_keys : tuple of str
        Keys that clients may present; without any, clients need none.
    insecure : bool
        Whether it may listen on other addresses than this machine's without keys.
    allowed_hosts : tuple of str
        Values of the ``Host`` header that are accepted, beside those of ``host``.
    media : MediaLimits
    max_body_bytes : int
        Of one request.
    max_total_body_bytes : int
        Of all requests that are being answered.
    max_new_tokens, max_stops : int
    timeout_s : float
        Of a request, from its first byte to its last token.
    header_timeout_s : float
        Of the headers of a request; a connection that sends none in this time is closed.
    max_connections : int
        At the same time. Beyond, those are closed that have waited longest for a request.
    max_requests_per_key : int
        Answered at the same time.
    max_queue : int
        Requests that wait for the engine.
    grace_s : float
        Time that running answers have after SIGTERM.
    media_threads : int
        Threads that decode media and prepare prompts.
    shadow : float
        Share of requests that are answered again under ``none``, while nothing else runs.
    """

    model: str = "tiny"
    recipe: str = "none"
    aliases: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    media: MediaLimits = MediaLimits()
    max_body_bytes: int = 64 << 20
    max_total_body_bytes: int = 1 << 30
    max_new_tokens: int = 4096
    max_stops: int = 4
    timeout_s: float = 120.0
    header_timeout_s: float = 20.0
    max_connections: int = 1000
    max_requests_per_key: int = 64
    max_queue: int = 256
    grace_s: float = 30.0
    media_threads: int = 2
    shadow: float = 0.0

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.api_keys and not self.insecure:
            raise VLMFastError(
                f"host={self.host!r} lets other machines connect: give an API key, or --insecure "
                "to let anybody use the model"
            )
        if any(not key.strip() for key in self.api_keys):
            raise VLMFastError("api_keys contains an empty key")
        for name in (
            "max_body_bytes",
            "max_total_body_bytes",
            "max_new_tokens",
            "max_connections",
            "max_requests_per_key",
            "max_queue",
            "media_threads",
        ):
            at_least(name, getattr(self, name), 1)
        at_least("max_stops", self.max_stops, 0)
        for f in fields(MediaLimits):
            value = getattr(self.media, f.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                at_least(f.name, value, 1 if isinstance(f.default, int) else 0)
        for name in ("timeout_s", "header_timeout_s", "grace_s"):
            at_least(name, getattr(self, name), 0)
        if not 0 <= self.shadow <= 1:
            raise VLMFastError(f"shadow={self.shadow!r} must be a number from 0 to 1")
        if self.model in self.aliases:
            raise VLMFastError(f"alias {self.model!r} is the name of the model itself")

    @property
    def recipes(self) -> dict[str, str]:
        """The recipe of each model name."""
        return {self.model: self.recipe, **self.aliases}

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Accepted values of the ``Host`` header without port; ``None`` for any.

        Checking it keeps web pages from reaching a server on this machine by a name of theirs that
        resolves to it. A server with keys is safe from that.
        """
        bare = self.host.strip("[]").lower()
        own = tuple(dict.fromkeys((*_LOCAL, f"[{bare}]" if ":" in bare else bare)))
        if self.allowed_hosts:
            return (*self.allowed_hosts, *own)
        return own if is_loopback(self.host) else None


_LOCAL = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def at_least(name: str, value: float, least: float) -> None:
    """Raise `VLMFastError` for a smaller value, for infinity and for NaN."""
    if not least <= value < float("inf"):
        raise VLMFastError(f"{name}={value!r} must be a number of at least {least}")
