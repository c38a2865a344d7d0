"""Bad input to a running server: refused with an error of OpenAI's form, without any harm."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

import server_fuzz
from server_fuzz import Fuzz
from vlmfast.serve.config import MediaLimits
from vlmfast.serve.media_sources import is_public

MODELS = ("tiny", "full", "fast")
GUARD = 60.0  # seconds; only a test that fails waits as long
CONNECTIONS = 6


class Target:
    """A server that may fetch from public hosts and read one folder, and what it must not reach.

    Parameters
    ----------
    served : Served
    canary : Canary
        On an address that is not public.
    public : Canary
        Whose address is taken for a public one; it redirects to the URL in a path.
    folder : Path
    records : list of LogRecord
        The server's log.
    """

    def __init__(self, served: Any, canary: Any, public: Any, folder: Path, records: Any) -> None:
        self.served, self.canary, self.public = served, canary, public
        self.folder, self.records = folder, records
        self.port = int(served.url.rpartition(":")[2])

    def fuzz(self, seed: str) -> Fuzz:
        return Fuzz(seed, MODELS, self.canary.url, self.public.url, self.folder)

    def check(self) -> list[str]:
        """What is wrong with the server itself."""
        found = []
        with self.served.client() as client:
            if client.get("/health").status_code != 200:
                found.append("it is not alive")
        if self.canary.count:
            found.append(f"{self.canary.count} connections to a forbidden address")
        failed = [record for record in self.records if record.levelno >= logging.ERROR]
        return found + [
            f"log: {record.getMessage()}: {record.exc_info and record.exc_info[1]!r}"
            for record in failed
        ]

    @property
    def idle(self) -> bool:
        names = ("preparing", "running", "decoding", "waiting")
        return not any(self.served.metric(f"num_requests_{name}") for name in names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image, a link out of it, and a pipe."""
    inside = tmp_path / "media"
    inside.mkdir()
    for path in (inside / "a.png", tmp_path / "secret.png"):
        path.write_bytes(server_fuzz.IMAGE)
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(inside / "pipe")
    return inside


@pytest.fixture
def target(
    serve: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    media = MediaLimits(
        allow_remote=True, local_path=folder, max_bytes=1 << 20, max_pixels=1 << 22, timeout_s=2.0
    )
    served = serve(
        aliases={"full": "none", "fast": "hired:0.1"},
        recipe="balanced",
        media=media,
        max_body_bytes=8 << 20,
        max_new_tokens=48,
        timeout_s=6.0,
        grace_s=4.0,
    )
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("vlmfast.serve"), Handler()
    logger.addHandler(handler)
    sources = served.server.runner._reader.sources
    resolve = sources._find_addresses
    known = {
        "loopback.test": ["127.0.0.1"],
        "both.test": ["127.0.0.2", "127.0.0.1"],
        "nowhere.test": [],
        "metadata.google.internal": ["169.254.169.254"],
    }
    sources._find_addresses = lambda host, port: (
        known[host] if host in known else resolve(host, port)
    )
    sources._is_public = lambda address: address == "127.0.0.2" or is_public(address)
    with (
        server_fuzz.canary() as canary,
        server_fuzz.canary("127.0.0.2", lambda path: path[1:]) as public,
    ):
        yield Target(served, canary, public, folder, records)
    logger.removeHandler(handler)


# --- requests of the own fuzzer ------------------------------------------------------------------


def run(
    target: Target, seed: str, count: int, batch: int, keep_on: bool = True
) -> server_fuzz.Report:
    """Send many requests, and check the server between them."""
    fuzz, report = target.fuzz(seed), server_fuzz.Report()
    for start in range(0, count, batch):
        cases = (fuzz.case(number) for number in range(start, min(start + batch, count)))
        found = server_fuzz.run(target.port, cases, CONNECTIONS, GUARD)
        report.statuses += found.statuses
        report.violations += found.violations + target.check()
        if not keep_on and report.violations:
            break
    assert not report.violations, "\n".join(report.violations)
    target.served.until(lambda: target.idle)
    return report


def test_bad_input_is_refused(target: Target) -> None:
    report = run(target, "quick", 300, 100)
    assert report.count(200) > 40 and report.count(400) > 60
    assert target.public.count > 0  # what may be fetched is
    assert target.served.chat(max_tokens=1).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_bad_input_is_refused(target: Target) -> None:
    report = run(target, os.environ.get("SEED", "long"), int(os.environ.get("COUNT", "10000")), 500)
    print(sorted(report.statuses.items()))
