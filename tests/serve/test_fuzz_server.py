"""Bad input to a running server: refused with an error of OpenAI's form, without any harm."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

import httpx2
import hypothesis

from support import server_fuzz
from support.engine.sources import name_addresses
from support.server_fuzz import Case, Fuzz, post
from vlmfast.errors import VLMFastError
from vlmfast.serve.config import MediaLimits
from vlmfast.serve.runner import Running

MODELS = ("tiny", "full", "fast")
GUARD = 60.0  # seconds; only a test that fails waits as long
# Seconds of `target`: the deadline of a request, the time after it for an answer that is streamed,
# and some for a busy machine.
DEADLINE, GRACE, SPARE = 6.0, 4.0, 8.0
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
    log : LogCaptureFixture
    """

    def __init__(self, served: Any, canary: Any, public: Any, folder: Path, log: Any) -> None:
        self.served, self.canary, self.public = served, canary, public
        self.folder, self.log, self.port = folder, log, served.port

    def fuzz(self, seed: str) -> Fuzz:
        return Fuzz(seed, MODELS, self.canary.url, self.public.url, self.folder)

    @property
    def records(self) -> list[logging.LogRecord]:
        """The server's log."""
        return [record for record in self.log.records if record.name == "vlmfast.serve"]

    def check(self) -> list[str]:
        """What is wrong with the server itself."""
        found = []
        if self.served.get("/health").status_code != 200:
            found.append("it is not alive")
        if self.canary.count:
            found.append(f"{self.canary.count} connections to a forbidden address")
        failed = [record for record in self.records if record.levelno >= logging.ERROR]
        return found + [
            f"log: {record.getMessage()}: {record.exc_info and record.exc_info[1]!r}"
            for record in failed
        ]


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
def target(serve: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Target]:
    media = MediaLimits(
        allow_remote=True, local_path=folder, max_bytes=1 << 20, max_pixels=1 << 22, timeout_s=2.0
    )
    served = serve(
        aliases={"full": "none", "fast": "hired:0.1"},
        recipe="balanced",
        media=media,
        max_body_bytes=8 << 20,
        max_new_tokens=48,
        timeout_s=DEADLINE,
        grace_s=GRACE,
    )
    caplog.set_level(logging.INFO, "vlmfast.serve")
    known = {
        "loopback.test": ["127.0.0.1"],
        "both.test": ["127.0.0.2", "127.0.0.1"],
        "nowhere.test": [],
        "metadata.google.internal": ["169.254.169.254"],
    }
    name_addresses(served.server, known, public="127.0.0.2")
    with (
        server_fuzz.canary() as canary,
        server_fuzz.canary("127.0.0.2", answer=lambda path: path[1:]) as public,
    ):
        yield Target(served, canary, public, folder, caplog)


# --- requests of the own fuzzer ------------------------------------------------------------------


def run(target: Target, seed: str, count: int, batch: int) -> server_fuzz.Report:
    """Send many requests, and check the server between them."""
    fuzz, report = target.fuzz(seed), server_fuzz.Report()
    limit = DEADLINE + GRACE + SPARE
    with server_fuzz.watched(target.port, limit) as health:
        for start in range(0, count, batch):
            cases = (fuzz.case(number) for number in range(start, min(start + batch, count)))
            report.add(server_fuzz.run(target.port, cases, CONNECTIONS, GUARD, limit))
            report.violations += target.check()
    report.violations += health.violations
    assert not report.violations, "\n".join(report.violations)
    assert health.count > 1
    target.served.until(lambda: target.served.idle)
    return report


def test_bad_input_is_refused(target: Target) -> None:
    report = run(target, "quick", 300, 100)
    assert report.count(200) > 40 and report.count(400) > 60
    for kind in ("fields", "media", "recipe", "settings", "http", "schema", "echo"):
        assert report.count(400, kind) and report.count(200, kind), kind
    assert target.public.count > 0  # what may be fetched is
    assert target.served.chat(max_tokens=1).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_bad_input_is_refused(target: Target) -> None:
    run(target, "long", 3000, 500)


def test_uploads_that_are_cut_are_no_defects(target: Target) -> None:
    """They are not logged as such, whether the client leaves or sends what is not HTTP."""
    whole = post(server_fuzz.CHAT, b"{" + b" " * 999)
    head = whole.partition(b"Content-Length")[0]
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    for content in (whole[:-9], chunked, chunked + b"zz\r\n"):
        server_fuzz.send(target.port, Case("http", content, ends=True), GUARD)
    target.served.until(lambda: len(target.records) >= 3)
    assert [record.fields["status"] for record in target.records] == [499] * 3
    assert not target.check()


def test_messages_are_one_printable_line(target: Target) -> None:
    for recipe in ("hired\n\x1b[31m", "draft-ngram:match=a\0b", "hired\u2028x"):
        response = target.served.chat(recipe=recipe)
        assert response.status_code == 400
        assert server_fuzz.wrong_error(response.text) is None


def test_failed_streams_of_responses_blame_the_request(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the first event is the server's only if it is a defect."""
    for error, code in ((VLMFastError("no"), "invalid_prompt"), (KeyError(), "internal_error")):
        monkeypatch.setattr(Running, "result", AsyncMock(side_effect=error))
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 2, "stream": True}
        text = target.served.post(server_fuzz.RESPONSES, body).text
        event = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert event["type"] == "response.failed"
        assert event["response"]["error"]["code"] == code


def test_large_drafts_are_refused(target: Target) -> None:
    """Buffers of the whole batch would be allocated for them."""
    for values in ("tokens=100000", "paths=1000000000", "tokens=16,paths=16"):
        response = target.served.chat(recipe=f"draft-ngram:{values}", max_tokens=4)
        assert response.status_code == 400 and response.json()["error"]["param"] == "recipe"
        assert "at most 256" in response.json()["error"]["message"]
    largest = target.served.chat(recipe="draft-ngram:tokens=15,paths=17", max_tokens=4)
    assert largest.status_code == 200


# --- the OpenAPI document ------------------------------------------------------------------------

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


def document(url: str) -> dict[str, Any]:
    """The OpenAPI document, with the name of a model, which is rarely guessed."""
    found = httpx2.get(f"{url}/openapi.json").json()
    for name in ("ChatRequest", "ResponsesRequest", "TokenizeRequest"):
        fields = found["components"]["schemas"][name]["properties"]
        fields["model"] = {"const": MODELS[0]}
        fields["recipe"] = {"enum": ["none", "hired:0.1"]}
    return found


def conforms(
    url: str, described: dict[str, Any], examples: int, path: str = ""
) -> dict[str, set[int]]:
    """Send what the server's OpenAPI document allows and what it does not; check the responses.

    Returns
    -------
    dict of str to set of int
        Statuses of each path.
    """
    import schemathesis  # takes seconds, in each process that collects tests

    schemathesis.checks.load_all_checks()
    checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=url)
    seen: dict[str, set[int]] = {}
    quiet = hypothesis.settings(
        max_examples=examples,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    for result in schema.get_all_operations():
        operation = result.ok()
        if path and operation.path != path:
            continue
        for mode in schemathesis.GenerationMode:

            @quiet
            @hypothesis.given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                response = case.call_and_validate(checks=checks, timeout=GUARD)
                seen.setdefault(case.path, set()).add(response.status_code)

            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing to negate
                send()
    return seen


@pytest.mark.parametrize("examples", [3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_responses_are_those_of_the_document(target: Target, examples: int) -> None:
    seen = conforms(target.served.url, document(target.served.url), examples)
    assert len(seen) == 8 and all(seen.values())
    assert seen[server_fuzz.CHAT] & {400, 404} and seen["/v1/models"] >= {200}
    assert not target.check()
