"""Downloads: one deadline, one size limit, HTTP only, and no secrets in messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

import media_fixtures as fx
from vlmfast.errors import MediaError
from vlmfast.media import download, load_image, load_images, load_video, sources
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


@pytest.mark.parametrize(
    ("place", "scheme"),
    [
        ("ftp://127.0.0.1/picture.png", "ftp:"),
        ("file:///etc/hostname", "file:"),
        ("data:image/png;base64,AAAA", "data:"),
        ("gopher://127.0.0.1/", "gopher:"),
    ],
)
def test_redirects_to_other_schemes_are_rejected(server: str, place: str, scheme: str) -> None:
    refused(
        f"{server}/to?{quote(place)}", f"redirected to {scheme}, and only http and https", "/to: "
    )


def test_redirect_loops_are_rejected(server: str) -> None:
    # Each redirect unquotes once, so the URL is quoted once per redirect.
    url = f"{server}/moved"
    for _ in range(12):
        url = f"{server}/to?{quote(url)}"
    refused(url, "more than 10 redirects")


def test_endless_bodies_are_rejected(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_DOWNLOAD_BYTES", 1 << 20)
    refused(f"{server}/endless", "/endless", "too large to download: more than 1 MiB")


def test_invalid_http_responses_are_rejected(server: str) -> None:
    assert "secret" not in refused(f"{server}/garbage", "the server's answer cannot be read")


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


@pytest.mark.parametrize("loader", [load_image, load_images, load_video])
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
    assert download._MOST_MOVES == 10
