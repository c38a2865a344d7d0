"""Downloads: one deadline, one size limit, HTTP only, and no secrets in messages."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from support import media_fixtures as fx
from vlmfast.errors import MediaError
from vlmfast.media import download, load_image, load_video, sources
from vlmfast.media.sources import shown

IMAGE = fx.make_image()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        with fx.web_server(fx.encoded(Image.fromarray(IMAGE), "PNG")) as address:
            yield address


def refused(url: str, *parts: str, loader=load_image, **options) -> str:
    with pytest.raises(MediaError) as caught:
        loader(url, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


@pytest.mark.parametrize("path", ["/slow-headers", "/trickle"])
def test_the_deadline_covers_headers_and_body(server: str, path: str) -> None:
    """Each byte arrives within the time limit, but the whole download does not."""
    start = time.monotonic()
    refused(server + path, path, "took over 0.3 s", timeout_s=0.3)
    assert time.monotonic() - start < 1.5  # the servers would take 2 and 30 seconds


def test_the_deadline_covers_redirects(server: str) -> None:
    url = f"{server}/to?{quote(server + '/slow-headers')}"
    refused(url, "/to", "took over 0.3 s", timeout_s=0.3)


def test_redirects_are_followed(server: str) -> None:
    absolute, relative = f"{server}/to?{quote(server + '/moved')}", f"{server}/to?/image"
    for url in (absolute, relative):
        assert np.array_equal(np.asarray(load_image(url)), IMAGE)


def test_redirect_loops_are_rejected(server: str) -> None:
    # Each redirect unquotes once, so the URL is quoted once per redirect.
    url = f"{server}/moved"
    for _ in range(12):
        url = f"{server}/to?{quote(url)}"
    refused(url, "more than 10 redirects")


def test_bodies_of_another_length_are_rejected(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(f"{server}/huge", "/huge", "too large to download: more than 64 MiB")
    refused(f"{server}/cut", "/cut", " bytes received")
    monkeypatch.setattr(sources, "MAX_DOWNLOAD_BYTES", 1 << 20)
    refused(f"{server}/endless", "/endless", "too large to download: more than 1 MiB")


def test_invalid_http_responses_are_rejected(server: str) -> None:
    assert "secret" not in refused(f"{server}/garbage", "the server's answer cannot be read")


@pytest.mark.parametrize("url", ["http://", "http://[bad", "http://a.org:port/", "http://a.org/ä"])
def test_invalid_urls_are_rejected(url: str) -> None:
    refused(url, "cannot be fetched: is not a valid URL")


SECRETS = [
    "http://user:sesame@127.0.0.1:9/a.png",
    "http://user:ses@me@127.0.0.1:9/a.png",
    "http://user:sesame/@127.0.0.1:9/a.png",
    "http://user:sesame?@127.0.0.1:9/a.png",
    "http://user:sesame#@127.0.0.1:9/a.png",
    "http://sesame@127.0.0.1:9/a.png",
    "http://127.0.0.1:sesame/a.png?user@host",
    "http://127.0.0.1:9/a.png?key=sesame",
    "http://127.0.0.1:9/a.png?key=sesame\nmore",
    "http://127.0.0.1:9/a.png#sesame",
    "HTTPS://user:sesame@127.0.0.1:9/a.png?key=sesame",
    "http://[::1:sesame@host/",
]


@pytest.mark.parametrize("loader", [load_image, load_video])
@pytest.mark.parametrize("url", SECRETS)
def test_error_messages_contain_no_secrets(url: str, loader) -> None:
    message = refused(url, loader=loader)
    assert not any(word in message for word in ("sesame", "ses@me", "ses", "user:"))
    if "127.0.0.1:9/a.png" in url:
        assert "127.0.0.1:9/a.png: " in message  # the source is still identified


def test_redirect_errors_contain_no_secrets(server: str) -> None:
    for place in (
        "http://user:sesame@127.0.0.1/",
        "http://127.0.0.1:9/?key=sesame",
        "ftp://sesame",
    ):
        assert "sesame" not in refused(f"{server}/to?{quote(place)}", f"{server}/to: ")


def test_urls_with_passwords_are_rejected() -> None:
    refused("http://user:sesame@127.0.0.1:9/a.png", "a user name or password is not supported")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a.org/b/c.png", "http://a.org/b/c.png"),
        ("http://a.org:80/@b/c.png", "http://a.org:80/@b/c.png"),
        ("http://[::1]:80/@b", "http://[::1]:80/@b"),
        ("http://a.org?mail=a@b.org", "http://a.org"),
        ("https://me:pw@a.org/@b?x#y", "https://***@a.org/@b"),
    ],
)
def test_urls_shown_in_messages(url: str, name: str) -> None:
    assert shown(url) == name


def test_messages_contain_the_system_error(server: str) -> None:
    refused("http://127.0.0.1:9/a.png", "Connection refused")
    refused(f"{server}/missing", "HTTP 404 Not Found")


# --- addresses that the caller chooses -----------------------------------------------------------


def fetch(url: str, resolve) -> bytes:
    return download.download("it", url, 5.0, 1 << 20, resolve=resolve)


def test_connection_is_made_to_the_resolved_address(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name nor its proxy is looked up."""
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    asked, port = [], int(server.rpartition(":")[2])

    def resolve(host: str, port: int) -> str:
        asked.append((host, port))
        return "127.0.0.1"

    target = f"http://b.invalid:{port}/image"
    data = fetch(f"http://A.invalid:{port}/to?{quote(target)}", resolve)
    assert data == fx.encoded(Image.fromarray(IMAGE), "PNG")
    assert asked == [("a.invalid", port), ("b.invalid", port)]
    with pytest.raises(MediaError, match="Connection refused"):
        download.download("it", target, 5.0, 1 << 20)  # by the proxy
    monkeypatch.setenv("http_proxy", f"http://me:sesame@127.0.0.1:{port}")
    assert download.download("it", target, 5.0, 1 << 20) == data  # from the proxy
    monkeypatch.setenv("no_proxy", "invalid")
    with pytest.raises(MediaError, match=r"not known|resolution"):
        download.download("it", target, 5.0, 1 << 20)


def test_default_ports_are_resolved() -> None:
    asked = []

    def resolve(host: str, port: int) -> str:
        asked.append((host, port))
        raise MediaError("no")

    for url in ("http://a.org/", "https://a.org/", "https://[::1]:8/"):
        with pytest.raises(MediaError):
            fetch(url, resolve)
    assert asked == [("a.org", 80), ("a.org", 443), ("::1", 8)]


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[str]]]:
    """A TLS server of media.invalid: its port, and the names that clients asked for."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=media.invalid -addext subjectAltName=DNS:media.invalid "
        f"-keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    names: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.sni_callback = lambda connection, name, _: names.append(name)

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:  # closed
                return
            try:
                with context.wrap_socket(plain, server_side=True) as connection:
                    host = connection.recv(4096).split(b"Host: ")[1].split(b"\r")[0]
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(host)
                    connection.sendall(head + host)
            except OSError:  # the client does not trust the certificate
                plain.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], names
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_certificate_is_checked_for_the_host(tls: tuple[int, list[str]]) -> None:
    """Not for the address that is connected to."""
    port, names = tls
    data = fetch(f"https://media.invalid:{port}/a", lambda host, port: "127.0.0.1")
    assert data == f"media.invalid:{port}".encode() and names == ["media.invalid"]
    with pytest.raises(MediaError, match="its certificate is not trusted") as caught:
        fetch(f"https://other.invalid:{port}/a", lambda host, port: "127.0.0.1")
    assert "127.0.0.1" not in str(caught.value)
