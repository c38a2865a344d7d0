"""Media of requests: bounded, and read from nowhere else than the options allow."""

from __future__ import annotations

import base64
import http.server
import itertools
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from support import media_fixtures as fx
from support import tiny_families
from vlmfast import VLM
from vlmfast.errors import VLMFastError
from vlmfast.media import load_video
from vlmfast.serve import media_sources
from vlmfast.serve.config import MediaLimits
from vlmfast.serve.errors import RequestError
from vlmfast.serve.media import RequestMedia
from vlmfast.serve.media_sources import MediaSources, is_public

PARAM = "messages[0].content[1].image_url"
PIXELS = fx.make_image()
PNG = fx.encoded(Image.fromarray(PIXELS), "PNG")
DEFAULTS, REMOTE = MediaLimits(), MediaLimits(allow_remote=True)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def media(limits: MediaLimits = DEFAULTS, seconds: float = 60.0, **network: object):
    return RequestMedia(MediaSources(limits, **network), time.monotonic() + seconds)


def read(url: str, limits: MediaLimits = DEFAULTS, **network: object) -> Image.Image:
    return media(limits, **network).image(url, param=PARAM)


def watch(data: bytes, limits: MediaLimits = DEFAULTS, **frames: object) -> bytes:
    return media(limits).video(data_url(data, "video/mp4"), param=PARAM, **frames)


def refused(status: int, *parts: str, what=read, args: tuple = (), **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        what(*args, **options)
    error = caught.value
    assert error.status == status, error.message
    assert error.param == PARAM and error.message.startswith(f"{PARAM}: ")
    assert "\n" not in error.message and len(error.message) < 400
    for part in parts:
        assert part in error.message
    return error.message


def accepted(image: Image.Image) -> None:
    assert image.mode == "RGB" and np.array_equal(np.asarray(image), PIXELS)


# --- data: URLs ----------------------------------------------------------------------------------


def test_data_urls_are_decoded() -> None:
    """The content decides, not the declared kind."""
    for kind in ("image/png", "image/jpeg", "", "application/octet-stream", "image/png;name=a"):
        accepted(read(data_url(PNG, kind)))
    lines, start = base64.encodebytes(PNG), "data:image/png;base64,"
    for url in (
        data_url(PNG).replace("data:", "DATA:"),
        "data:image/png," + quote(PNG),
        start + quote(base64.b64encode(PNG), safe=""),
        start + lines.decode(),
        start + "\r\n  " + quote(lines).replace("%0A", "%0D%0A"),
    ):
        accepted(read(url))


BAD_URLS = (
    (data_url(PNG)[:-1], 400, "base64 that is cut short"),
    (data_url(PNG)[:-400], 400, "the image is truncated or damaged"),
    (data_url(PNG)[:60] + "!" + data_url(PNG)[61:], 400, "base64 that is cut short or invalid"),
    (data_url(PNG)[:60] + "é" + data_url(PNG)[61:], 400, "not escaped"),
    (data_url(PNG) + "AAAA", 400, "base64"),
    ("data:image/png," + quote(PNG)[:-1] + "%8", 400, "cut short"),
    ("data:image/png;base64", 400, "no comma"),
    ("data:image/png;base64,", 400, "is empty"),
    ("data:,", 400, "is empty"),
    (data_url(PNG, "text/html"), 415, "declared as 'text/html'; it must be image/*"),
    (data_url(PNG, "application/pdf"), 415, "image/*"),
    (data_url(PNG, "video/mp4"), 415, "image/*"),
    ("data:image/png," + "%41" * ((1 << 20) + 1), 413, "use base64"),
)


# --- images --------------------------------------------------------------------------------------


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunk(kind: bytes, body: bytes) -> bytes:
    """The image with a chunk after its header."""
    return PNG[:33] + chunk(kind, body) + PNG[33:]


def gif(screen: tuple[int, int], frame: tuple[int, int], count: int = 1) -> bytes:
    """An animation of black frames of a stated size, whose data has only the first pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(6)
    one = b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00"
    return head + count * one + b";"


JPEG = fx.encoded(Image.fromarray(PIXELS), "JPEG", progressive=True)
ZEROS = zlib.compress(bytes(64 << 20))


def test_neighbors_of_refused_images_are_accepted() -> None:
    for data in (
        JPEG,
        gif((1, 1), (1, 1)),
        gif((1, 1), (1, 1), 10_000),
        with_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100))),
        fx.encoded(Image.new("RGB", (100, 90)), "BMP"),
        fx.encoded(Image.new("RGB", (100, 90)), "WEBP"),
    ):
        assert read(data_url(data)).mode == "RGB"


BAD_IMAGES = (
    (fx.png_header(20_000, 15_000), 413, "is too large: 20000x15000 is 300000000 pixels"),
    (gif((20_000, 15_000), (1, 1)), 413, "is too large: 20000x15000"),
    (gif((10, 10), (6001, 6001), 3), 413, "is too large: 6001x6001"),
    (gif((10, 10), (60_000, 60_000)), 413, "exceeds limit"),
    (with_chunk(b"zTXt", b"Comment\0\0" + ZEROS), 400, "cannot be read as PNG"),
    (with_chunk(b"iCCP", b"profile\0\0" + ZEROS), 400, "cannot be read as PNG"),
    (fx.png_header(5000, 7), 400, "is too narrow"),
    (JPEG[: len(JPEG) // 2], 400, "is truncated or damaged"),
    (JPEG[:4], 400, "cannot be read as JPEG"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400, "is not an image: its content is text"),
    (b"<html><img src=file:///etc/passwd></html>", 400, "is not an image"),
    (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", 400, "is not an image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n", 400, "is not an image"),
    (b"\0" * 100, 400, "no known format"),
    (b"\0\0\0\x18ftypisom" + bytes(100), 400, "is a video (MP4), not an image"),
    (fx.encoded(Image.new("RGB", (9, 9)), "TIFF"), 415, "is TIFF; accepted are PNG, JPEG"),
    (fx.encoded(Image.new("RGB", (9, 9)), "PPM"), 415, "is PPM"),
)


def test_bad_urls_and_images_are_refused() -> None:
    images = [(data_url(data), *rest) for data, *rest in BAD_IMAGES]
    for url, status, reason in (*BAD_URLS, *images):
        assert "bytes (" not in refused(status, reason, args=(url,))


def test_jpegs_of_many_scans_are_refused() -> None:
    """Each takes as long as the first, in a few bytes."""
    last = JPEG.rindex(b"\xff\xda")
    scan, end = JPEG[last:-2], JPEG[-2:]
    assert end == b"\xff\xd9"
    refused(400, "more than 100 scans", args=(data_url(JPEG[:-2] + 200 * scan + end),))
    # A restart marker has no length that would hide what follows.
    hidden = JPEG[:-2] + b"\xff\xd0\xfe\xff" + 110 * scan + end
    assert len(110 * scan) < 0xFEFF
    refused(400, "more than 100 scans", args=(data_url(hidden),))
    # Markers in what follows the end, such as a video that a phone appends, are not scans.
    assert read(data_url(JPEG + 200 * scan)).size == (40, 30)


def test_pixel_limit_is_inclusive() -> None:
    accepted(read(data_url(PNG), MediaLimits(max_pixels=1200)))
    refused(413, "the limit is 1199", args=(data_url(PNG), MediaLimits(max_pixels=1199)))


def test_images_are_counted_over_the_request() -> None:
    request = media(MediaLimits(max_images=2))
    for _ in range(2):
        accepted(request.image(data_url(PNG), param=PARAM))
    refused(413, "at most 2", what=request.image, args=(data_url(PNG),), param=PARAM)
    accepted(media(MediaLimits(max_images=2)).image(data_url(PNG), param=PARAM))


def test_deadline_that_has_passed() -> None:
    request = media(seconds=0.0)
    for what in (request.image, request.video):
        refused(408, "time limit", what=what, args=(data_url(PNG),), param=PARAM)


# --- paths and files -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image beside a folder that must not be read."""
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    for name in ("open/a.png", "open/deep/b b.png", "secret/c.png"):
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "open" / "inside.png").symlink_to("deep/b b.png")
    (tmp_path / "open" / "outside.png").symlink_to(tmp_path / "secret" / "c.png")
    (tmp_path / "open" / "outside").symlink_to("../secret")
    (tmp_path / "open" / "empty.png").touch()
    (tmp_path / "linked").symlink_to("open")
    os.mkfifo(tmp_path / "open" / "pipe")
    return tmp_path


def local(folder: Path, **options: object) -> MediaLimits:
    return MediaLimits(local_path=folder, **options)


NO_URLS = (
    *("/etc/passwd", "open/a.png", "picture.png", "../a.png", "~/a.png", "//host/a.png", ""),
    *(r"C:\a.png", r"\\host\a.png", " data:image/png;base64,AAAA", "javascript:0", "concat:a|b"),
    *("ftp://127.0.0.1/a.png", "gopher://127.0.0.1/", "blob:https://a.org/1"),
    "jar:file:///a.png!/b",
)


def test_paths_and_other_schemes_are_refused(folder: Path) -> None:
    everything, path = local(folder, allow_remote=True), str(folder / "open" / "a.png")
    for limits in (MediaLimits(), everything):
        for source in (*NO_URLS, path):
            found = refused(400, "allowed are data: URLs", args=(source, limits))
            assert source != path or path not in found
            request = media(limits)
            refused(400, "allowed are data: URLs", what=request.video, args=(source,), param=PARAM)
    accepted(read((folder / "open/a.png").as_uri(), everything))


def test_files_of_the_folder_are_read(folder: Path) -> None:
    names = ("a.png", "deep/b b.png", "inside.png", "deep/../a.png")
    for host, name in itertools.product(("", "localhost"), names):
        url = f"file://{host}{quote(str(folder / 'open'))}/{quote(name)}"
        accepted(read(url, local(folder / "open")))
        for link in ("open", "linked"):
            accepted(read(url.replace("/open/", f"/{link}/"), local(folder / "linked")))
        refused(400, "the server reads no files", args=(url,))


OUTSIDE = (
    *("outside.png", "outside/c.png", "../secret/c.png", "..%2Fsecret/c.png", "a.png/b"),
    *("deep/../../secret/c.png", "missing.png", "", "..", "a.png%00"),
)


def test_files_outside_the_folder_are_refused(folder: Path) -> None:
    """In the same words as missing ones; links there are not looked at."""
    (folder / "opened").mkdir()  # the same beginning
    (folder / "opened" / "a.png").write_bytes(PNG)
    (folder / "shortcut.png").symlink_to("open/a.png")
    inside = local(folder / "open")
    others = [(folder / name).as_uri() for name in ("opened/a.png", "shortcut.png")]
    for url in (*(f"{(folder / 'open').as_uri()}/{name}" for name in OUTSIDE), *others):
        message = refused(400, args=(url, inside))
        about = f"{PARAM}: the image is not a file in the folder that the server reads from"
        assert message == about
    for url in others:
        accepted(read(url, local(folder)))
    for url, reason in (
        ("file:open/a.png", "file:///"),
        ("file://host.org/a.png", "file:///"),
        ("file:///a.png?b", "file:///"),
        ("file:///a.png#b", "file:///"),
        ("file://[/a.png", "is not valid"),
        ("file:///%ff.png", "is not valid"),
        ("FILE:///etc/passwd", "is not a file in the folder"),
        ("file:////etc/passwd", "is not a file in the folder"),
    ):
        refused(400, reason, args=(url, inside))


def test_only_regular_files_within_the_limit_are_read(folder: Path) -> None:
    with pytest.raises(VLMFastError, match="local_path"):
        MediaSources(local(folder / "missing"))
    start = (folder / "open").as_uri()
    for name in ("pipe", "deep"):
        refused(400, "is not a regular file", args=(f"{start}/{name}", local(folder / "open")))
    refused(400, "is empty", args=(f"{start}/empty.png", local(folder / "open")))
    small = local(folder / "open", max_bytes=len(PNG) - 1)
    refused(413, "is too large", args=(f"{start}/a.png", small))
    accepted(read(f"{start}/a.png", local(folder / "open", max_bytes=len(PNG))))


def test_link_that_appears_after_the_check_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the links were put there after they had been resolved."""
    monkeypatch.setattr(media_sources.os.path, "realpath", os.path.normpath)
    start = (folder / "open").as_uri()
    for name in ("outside.png", "outside/c.png"):
        refused(400, "is not a file", args=(f"{start}/{name}", local(folder / "open")))
    accepted(read(f"{start}/a.png", local(folder / "open")))


# --- remote media --------------------------------------------------------------------------------


class Canary(http.server.ThreadingHTTPServer):
    """A server on this machine that counts connections and notes ``Host`` headers."""

    def __init__(self) -> None:
        self.connections, self.hosts = 0, []
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple:
        found = super().get_request()
        self.connections += 1
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the base class's name
        self.server.hosts.append(self.headers["Host"])
        path, _, query = self.path.partition("?")
        if path == "/missing":
            self.send_error(404)
            return
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", query)
            self.end_headers()
            return
        self.send_response(200)
        if path == "/huge":
            self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        for _ in range(50 if path == "/slow" else 0):
            self.wfile.write(b"\0")
            time.sleep(0.02)
        if path == "/html":
            self.wfile.write(b"<html></html>")
        elif path != "/huge":
            self.wfile.write(PNG)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def canary() -> Iterator[Canary]:
    with Canary() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Names:
    """A resolver that notes what it is asked; each name has lists of addresses, one per look-up."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answers[min(self.asked.count(host), len(answers)) - 1]


@pytest.fixture
def dialed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts of all connections that were begun; names are not looked up a second time."""
    found, connect = [], socket.create_connection

    def create_connection(address: tuple, *args: object, **options: object) -> socket.socket:
        found.append(address[0])
        assert address[0] == "127.0.0.1", "a connection to this address was begun"
        return connect(address, *args, **options)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return found


def is_canary(address: str) -> bool:
    """The policy of these tests: only the canary's address may be connected to."""
    return address == "127.0.0.1"


def test_remote_media_are_off_by_default(canary: Canary) -> None:
    url = f"http://127.0.0.1:{canary.server_port}/a.png"
    message = refused(400, "--allowed-media-domains", args=(url,), is_public=is_canary)
    assert "--allow-remote-media" in message and canary.connections == 0
    accepted(read(url, REMOTE, is_public=is_canary))
    assert canary.connections == 1


THIS_MACHINE = (
    "127.0.0.1 127.1 0x7f.1 0x7f000001 2130706433 017700000001 0177.0.0.1 localhost LOCALHOST "
    "localhost. １２７.0.0.1 0"
)


@pytest.mark.parametrize("host", THIS_MACHINE.split())
def test_this_machine_is_not_connected_to(canary: Canary, host: str) -> None:
    """However it is spelled; the control connects, so that each spelling leads to it."""
    url = f"http://{host}:{canary.server_port}/a.png"
    for limits in (REMOTE, MediaLimits(domains=("127.0.0.1", "localhost", host))):
        refused(400, "has no public address", args=(url, limits))
        refused(400, what=media(limits).video, args=(url,), param=PARAM)
    assert canary.connections == 0

    def find_ipv4(host: str, port: int) -> list[str]:
        return [entry[4][0] for entry in socket.getaddrinfo(host, port, socket.AF_INET)]

    accepted(read(url, REMOTE, is_public=lambda _: True, find_addresses=find_ipv4))
    assert canary.connections == 1


PRIVATE = (
    "[::1] [::] [::ffff:127.0.0.1] [::127.0.0.1] [64:ff9b::7f00:1] [2002:7f00:1::] [fe80::1] "
    "[fd00:ec2::254] 169.254.169.254 10.0.0.1 172.16.0.1 192.168.0.1 100.100.100.200 0.0.0.0 "
    "224.0.0.1 255.255.255.255"
)
NOT_PUBLIC = (
    "127.0.0.1 169.254.169.254 192.0.0.192 168.63.129.16 239.1.1.1 240.0.0.1 ::ffff:10.0.0.1 "
    "::ffff:0:8.8.8.8 64:ff9b::a00:1 64:ff9b:1::808:808 2002:808:808::1 2002:a00:1::1 "
    "2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:0:7f00:1:0:ffff:80ff:fffe fec0::1 fe80::1%eth0 "
    "ff0e::1 3fff::1 2001:db8::1 localhost"
)
PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"


def test_private_addresses_are_not_connected_to(dialed: list[str]) -> None:
    for host in PRIVATE.split():
        for url in (f"http://{host}/a.png", f"https://{host}:8443/a.png"):
            refused(400, "has no public address", args=(url, REMOTE))
    assert dialed == []
    names = f"{NOT_PUBLIC} {PUBLIC}".split()
    assert [name for name in names if is_public(name)] == PUBLIC.split()
    assert not is_public("")


def test_one_private_address_refuses_a_host(dialed: list[str]) -> None:
    names = Names(mixed_org=[["8.8.8.8", "10.0.0.1"]], none_org=[[]])
    for host in ("mixed.org", "none.org", "unknown.org"):
        message = refused(
            400, "no public address", args=(f"http://{host}/?s", REMOTE), find_addresses=names
        )
        assert "10.0.0.1" not in message and "8.8.8.8" not in message and "?s" not in message
    assert dialed == [] and names.asked == ["mixed.org", "none.org", "unknown.org"]


def test_checked_address_is_connected_to(canary: Canary, dialed: list[str], monkeypatch) -> None:
    """Without another look-up or a proxy; the server sees the URL's host."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.9:9")
    names = Names(media_example_org=[["127.0.0.1"], ["127.0.0.2"]])
    url = f"http://Media.Example.org.:{canary.server_port}/a.png?key=sesame"
    accepted(read(url, REMOTE, find_addresses=names, is_public=is_canary))
    assert names.asked == ["media.example.org"] and dialed == ["127.0.0.1"]
    assert canary.hosts == [f"Media.Example.org.:{canary.server_port}"]
    # The second look-up gives an address that is not allowed: the check sees it.
    network = {"find_addresses": names, "is_public": is_canary}
    refused(400, "no public address", args=(url, REMOTE), **network)
    assert dialed == ["127.0.0.1"] and canary.connections == 1


def test_each_redirect_is_checked(canary: Canary, dialed: list[str]) -> None:
    port = canary.server_port
    names = Names(a_org=[["127.0.0.1"]], b_org=[["127.0.0.1"]], inside_org=[["127.0.0.2"]])
    network = {"find_addresses": names, "is_public": is_canary}
    start = f"http://a.org:{port}/to?"
    for target in (f"http://b.org:{port}/a.png", "/a.png", f"//b.org:{port}/a.png"):
        accepted(read(start + target, REMOTE, **network))
    for host in ("inside.org", "127.0.0.2", "[::1]", "169.254.169.254"):
        refused(400, args=(f"{start}http://{host}:{port}/a.png", REMOTE), **network)
    assert set(dialed) == {"127.0.0.1"}
    everything = MediaLimits(allow_remote=True, local_path=Path("/"))
    for url in ("file:///etc/hostname", "ftp://a.org/", "data:image/png,AAAA", "gopher://a/"):
        refused(400, "only http and https are followed", args=(start + url, everything), **network)
    # Hosts of redirects must be allowed ones too.
    seen = canary.connections
    only = MediaLimits(domains=("a.org",))
    refused(400, "not among", args=(f"{start}http://b.org:{port}/a.png", only), **network)
    assert canary.connections == seen + 1
    accepted(read(f"{start}http://a.org:{port}/a.png", only, **network))


ALLOWED = (
    "example.com EXAMPLE.com example.com. img.example.com a.b.example.com bücher.example "
    "xn--bcher-kva.example BÜCHER.example"
)
NOT_ALLOWED = (
    "evil-example.com example.com.evil.org example.comm xexample.com example com bucher.example "
    "ｅxample.com.evil.org"
)


def test_domains(canary: Canary) -> None:
    limits = MediaLimits(domains=("Example.com", "bücher.example."))
    network = {"find_addresses": lambda host, port: ["127.0.0.1"], "is_public": is_canary}
    for host in NOT_ALLOWED.split():
        url = f"http://{host}:{canary.server_port}/ä.png"
        refused(400, "--allowed-media-domains", args=(url, limits), **network)
    for count, host in enumerate(ALLOWED.split()):
        assert canary.connections == count
        accepted(read(f"http://{host}:{canary.server_port}/ä.png", limits, **network))
    for domain in ("", "*.example.com", ".example.com", "http://a.org", "a..b"):
        with pytest.raises(VLMFastError, match="domains"):
            MediaSources(MediaLimits(domains=(domain,)))


INVALID = (
    *("http://user:sesame@HOST/a.png", "http://sesame@HOST/a.png", "http://HOST\\@sesame/a.png"),
    *("http://HOST/a b.png", "http://HOST/a\r\nsesame: b", "http://HOST:sesame/"),
    *("http://%31sesame/", "http:///sesame.png", "http:HOST/sesame.png", "http://a..sesame/"),
    "http://[sesame/",
)


def test_invalid_urls_are_refused(canary: Canary) -> None:
    for url in INVALID:
        url = url.replace("HOST", f"127.0.0.1:{canary.server_port}")
        message = refused(400, args=(url, REMOTE), is_public=lambda address: True)
        assert "sesame" not in message and canary.connections == 0


def test_failed_downloads(canary: Canary) -> None:
    start = f"http://127.0.0.1:{canary.server_port}"
    network = {"is_public": is_canary}
    message = refused(
        400, "cannot be fetched: HTTP 404", args=(f"{start}/missing?k", REMOTE), **network
    )
    assert "127.0.0.1" not in message
    refused(413, "too large to download", args=(f"{start}/huge", REMOTE), **network)
    small = MediaLimits(allow_remote=True, max_bytes=len(PNG) - 1)
    refused(413, "too large to download", args=(f"{start}/a.png", small), **network)
    accepted(read(f"{start}/a.png", MediaLimits(allow_remote=True, max_bytes=len(PNG)), **network))
    refused(400, "is not an image", args=(f"{start}/html", REMOTE), **network)


def test_slow_downloads(canary: Canary) -> None:
    url = f"http://127.0.0.1:{canary.server_port}/slow"
    hurried = MediaLimits(allow_remote=True, timeout_s=0.1)
    refused(400, "took over 0.1 s", args=(url, hurried), is_public=is_canary)
    request = media(REMOTE, seconds=0.1, is_public=is_canary)
    refused(408, "time limit", what=request.image, args=(url,), param=PARAM)


# --- videos --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """40 frames, 4 seconds, 80x48."""
    return fx.write_video(tmp_path_factory.mktemp("video") / "a.mp4").read_bytes()


@pytest.mark.parametrize(
    ("frames", "count"),
    [({}, 8), ({"num_frames": 64}, 40), ({"num_frames": 3}, 3), ({"fps": 5}, 20)],
)
def test_videos_are_returned_as_bytes(clip: bytes, frames: dict, count: int) -> None:
    for kind in ("video/mp4", "video/quicktime", "", "application/octet-stream"):
        found = media().video(data_url(clip, kind), param=PARAM, **frames)
        assert found == clip and len(load_video(found, **frames)) == count


def test_the_model_is_told_the_times_of_the_file(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("num2words")  # needed by its processor
    minute = fx.still(12, Fraction(1, 5))
    vlm = VLM(*tiny_families.build_smolvlm())
    url = {"url": data_url(minute, "video/mp4")}
    content = [{"type": "video_url", "video_url": url}, {"type": "text", "text": "hi there"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "num_frames": 4}
    found = serve(vlm).post("/tokenize", body).json()["tokens"]
    text = vlm.processor.tokenizer.decode(found)
    assert re.findall(r"from a ([\d:]+)|Frame from ([\d:]+\d):", text) == [
        ("0:01:00", ""), ("", "00:00"), ("", "00:15"), ("", "00:35"), ("", "00:55"),
    ]  # fmt: skip


def test_videos_are_read_from_hosts_and_files(clip: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip)
    url = (tmp_path / "a.mp4").as_uri()
    assert media(local(tmp_path)).video(url, param=PARAM) == clip
    refused(400, "the video is a file: URL", what=media().video, args=(url,), param=PARAM)
    with fx.web_server(clip) as address:
        url, network = f"{address}/moved", {"is_public": is_canary}
        assert media(REMOTE, **network).video(url, param=PARAM) == clip
        for request in (media(**network), media(REMOTE)):
            refused(400, "the video is", what=request.video, args=(url,), param=PARAM)


def test_bad_videos_are_refused(clip: bytes) -> None:
    for data, reason in (
        (clip[: len(clip) // 2], "is truncated"),
        (PNG, "is an image (PNG), not a video"),
        (fx.encoded(Image.new("RGB", (9, 9)), "GIF"), "is an image (GIF), not a video"),
        (b"#EXTM3U\nhttp://127.0.0.1/a.ts\n", "is not a video: its content is text"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not a video"),
        (b"\x1a\x45\xdf\xa3" + bytes(500), "cannot be read as Matroska"),
        (b"RIFF\xff\0\0\0WAVE" + bytes(500), "is not a video"),
    ):
        refused(400, reason, what=watch, args=(data,))
    for frames in ({"num_frames": 0}, {"fps": -1.0}, {"num_frames": 2, "fps": 1}):
        refused(400, next(iter(frames)), what=watch, args=(clip,), **frames)
    refused(415, "video/*", what=media().video, args=(data_url(clip, "image/png"),), param=PARAM)
    refused(400, "is empty", what=media().video, args=("data:video/mp4,",), param=PARAM)


def test_formats_that_ffmpeg_finds_differently_are_refused(tmp_path: Path) -> None:
    stream = fx.write_video(tmp_path / "a.h264", 10, container="h264").read_bytes()
    disguised = b"G" * 377 + stream
    assert len(load_video(disguised)) == 8
    refused(400, "cannot be read as MPEG-TS", what=watch, args=(disguised,))
    for name, codec, container in (
        ("a.ts", "libx264", "mpegts"),
        ("a.mpg", "mpeg1video", "mpeg"),
        ("a.m1v", "mpeg1video", "mpeg1video"),
        ("a.flv", "flv1", "flv"),
        ("a.asf", "mpeg4", "asf"),
        ("a.mov", "libx264", "mov"),
    ):
        path = fx.write_video(tmp_path / name, 10, codec=codec, rate=25, container=container)
        assert watch(path.read_bytes()) == path.read_bytes()


def test_frames_are_counted_over_the_request(clip: bytes, canary: Canary) -> None:
    url = data_url(clip, "video/mp4")
    limits = MediaLimits(max_frames=28, allow_remote=True)
    request = media(limits, is_public=is_canary)
    for frames in ({}, {"fps": 2.5}, {"num_frames": 9}):  # 8 + 10 + 9
        request.video(url, param=PARAM, **frames)
    for frames in ({}, {"fps": 1}, {"num_frames": 2}):
        refused(413, "at most 28", what=request.video, args=(url,), param=PARAM, **frames)
    request.video(url, param=PARAM, num_frames=1)
    # Before anything is fetched.
    remote = f"http://127.0.0.1:{canary.server_port}/a.mp4"
    refused(413, "at most 28", what=request.video, args=(remote,), param=PARAM, num_frames=29)
    assert canary.connections == 0
    refused(413, "num_frames or fps", what=watch, args=(clip, limits), fps=10)
    assert watch(clip, limits, fps=7) == clip


def test_frame_sizes_are_limited(clip: bytes) -> None:
    pixels = 80 * 48
    assert watch(clip, MediaLimits(max_pixels=pixels)) == clip
    refused(413, "80x48", what=watch, args=(clip, MediaLimits(max_pixels=pixels - 1)))
    assert watch(clip, MediaLimits(max_video_pixels=8 * pixels)) == clip
    few = MediaLimits(max_video_pixels=8 * pixels - 1)
    refused(413, "8 frames of 3840 pixels", what=watch, args=(clip, few))
    assert watch(clip, few, num_frames=7) == clip


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A stream of frames of 80x48, which its header states, and then of 320x240."""
    folder = tmp_path_factory.mktemp("growing")
    parts = [
        fx.write_video(folder / f"{width}.ts", 12, width=width, height=height)
        for width, height in ((80, 48), (320, 240))
    ]
    return b"".join(part.read_bytes() for part in parts)


def test_frames_are_limited_by_their_own_size(
    growing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmfast.serve import media as module

    assert watch(growing, MediaLimits(max_pixels=320 * 240)) == growing
    for most in (320 * 240 - 1, 80 * 48):
        with pytest.raises(RequestError, match=r"320x240|cannot be decoded"):
            watch(growing, MediaLimits(max_pixels=most))
    # All of them might be of the largest size.
    monkeypatch.setattr(module, "MAX_DECODED_PIXELS", 24 * 320 * 240 // 4)
    assert watch(growing, MediaLimits(max_video_seconds=4)) == growing
    monkeypatch.setattr(module, "MAX_DECODED_PIXELS", 24 * 320 * 240 // 4 - 8)
    refused(413, "320x240", what=watch, args=(growing, MediaLimits(max_video_seconds=4)))


def test_frames_that_cannot_be_decoded_are_reported_with_their_field(
    served: Any, tmp_path: Path
) -> None:
    """They are found when the file has been accepted already."""
    path = fx.write_video(tmp_path / "clip.mp4", 24, height=48, width=80)
    for data, status in ((path.read_bytes(), 200), (fx.damaged(path, 11), 400)):
        assert watch(data, num_frames=3) == data
        video = {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}
        content = [{"type": "text", "text": "What is here?"}, video]
        body = {"messages": [{"role": "user", "content": content}], "num_frames": 3}
        found = served.post("/v1/chat/completions", {"model": "tiny", "max_tokens": 1, **body})
        assert found.status_code == status, found.text
    error, param = found.json()["error"], "messages[0].content[1].video_url.url"
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: the video cannot be decoded: ")


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi", "mpegts"])
def test_long_videos_are_refused(container: str) -> None:
    """By the length that they state, or by their frames."""
    data = fx.still(100, 25, container)
    assert watch(data, MediaLimits(max_video_seconds=4.1)) == data
    refused(413, "is too long", what=watch, args=(data, MediaLimits(max_video_seconds=3)))


def test_videos_of_many_frames_are_refused() -> None:
    slow, fast = fx.still(1000, 1), fx.still(7300, 1000)
    refused(413, "is too long: 1000 s, the limit is 600 s", what=watch, args=(slow,))
    minute = MediaLimits(max_video_seconds=60)
    refused(413, "with at most 7200 frames", what=watch, args=(fast, minute))
    short = fx.still(1000, 1000)
    assert watch(short) == short and watch(fast) == fast
    assert watch(slow, MediaLimits(max_video_seconds=float("inf"))) == slow
    assert watch(fast, MediaLimits(max_video_seconds=float("inf"))) == fast


def test_videos_that_take_long_to_decode_are_refused(
    clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmfast.serve import media as module

    monkeypatch.setattr(module, "MAX_DECODED_PIXELS", 40 * 80 * 48 // 4)
    assert watch(clip, MediaLimits(max_video_seconds=4)) == clip
    monkeypatch.setattr(module, "MAX_DECODED_PIXELS", 40 * 80 * 48 // 4 - 1)
    refused(413, "80x48", what=watch, args=(clip, MediaLimits(max_video_seconds=4)))
