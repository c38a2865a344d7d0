"""Options of the server."""

from __future__ import annotations

import ipaddress
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from vlmfast.errors import VLMFastError


def _limit(default: float, about: str, *, least: int | None = None, option: str = "") -> Any:
    """A number that an option of ``vlmfast serve`` sets; whole ones are 1 at least."""
    least = int(isinstance(default, int)) if least is None else least
    return field(default=default, metadata={"about": about, "least": least, "option": option})


def limits_of(options: Any) -> dict[str, Field[Any]]:
    """The fields that options of ``vlmfast serve`` set, by the names of these."""
    own = (f for f in fields(options) if f.metadata)
    named = {f.metadata["option"] or f.name.removesuffix("_s"): f for f in own}
    return {f"--{name.replace('_', '-')}": f for name, f in named.items()}


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

    max_images: int = _limit(8, "images of a request")
    max_pixels: int = _limit(36_000_000, "pixels of an image and of a frame, by the header")
    max_frames: int = _limit(64, "frames read from the videos of a request")
    max_video_pixels: int = _limit(300_000_000, "pixels of all frames that a request reads")
    max_video_seconds: float = _limit(600.0, "length of a video")
    max_bytes: int = _limit(
        64 << 20, "bytes of a file that is fetched or read", option="max_media_bytes"
    )
    timeout_s: float = _limit(20.0, "seconds of a download", option="media_timeout")
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
    max_body_bytes: int = _limit(64 << 20, "bytes of a request")
    max_total_body_bytes: int = _limit(1 << 30, "bytes of all requests that are being answered")
    max_new_tokens: int = _limit(4096, "tokens of an answer")
    max_stops: int = _limit(4, "stop strings of a request", least=0)
    timeout_s: float = _limit(120.0, "seconds of a request, from its first byte to its last token")
    header_timeout_s: float = _limit(
        20.0, "seconds in which the headers of a request arrive; other connections are closed"
    )
    max_connections: int = _limit(
        1000,
        "connections at the same time; beyond, those are closed that have waited longest for a "
        "request",
    )
    max_requests_per_key: int = _limit(64, "requests of a key that are answered at the same time")
    max_queue: int = _limit(256, "requests that wait")
    grace_s: float = _limit(30.0, "seconds that running answers have after SIGTERM")
    media_threads: int = _limit(2, "threads that decode media")
    shadow: float = _limit(0.0, "share of requests answered again under none, in idle time")

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.api_keys and not self.insecure:
            raise VLMFastError(
                f"host={self.host!r} lets other machines connect: give an API key, or --insecure "
                "to let anybody use the model"
            )
        if any(not key.strip() for key in self.api_keys):
            raise VLMFastError("api_keys contains an empty key")
        if not 0 <= self.shadow <= 1:
            raise VLMFastError(f"shadow={self.shadow!r} must be a number from 0 to 1")
        for options in (self, self.media):
            for f in limits_of(options).values():
                at_least(f.name, getattr(options, f.name), f.metadata["least"])
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
