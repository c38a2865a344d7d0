"""``vlmfast serve`` as a process: how it starts, what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

from support import server_fuzz
from support.paths import ROOT
from vlmfast.cli import main
from vlmfast.serve.server import TRIM_S

GUARD = 120.0  # seconds; only a test that fails waits as long
# An answer that ends after many tokens, however many the model would write.
LONG = {
    "type": "json_schema",
    "json_schema": {
        "name": "long",
        "schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 60, "maxItems": 60},
    },
}


# The command, for which one address of this machine is public.
PUBLIC = "127.0.0.2"
WITH_A_PUBLIC_ADDRESS = f"""
from vlmfast.cli import main
from vlmfast.serve.media_sources import MediaSources, is_public
original = MediaSources.__init__

def changed(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self._is_public = lambda address: address == {PUBLIC!r} or is_public(address)

MediaSources.__init__ = changed
raise SystemExit(main())
"""


def started(
    *options: str, program: tuple[str, ...] = ("-m", "vlmfast"), **environment: str
) -> subprocess.Popen[str]:
    """A process of ``vlmfast serve``."""
    inherited = {key: value for key, value in os.environ.items() if key != "VLMFAST_API_KEY"}
    paths = os.pathsep.join([str(ROOT), inherited.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *program, "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=inherited | {"PYTHONPATH": paths} | environment,
    )


@dataclass
class Process:
    """A server that has told its URL.

    Parameters
    ----------
    popen : Popen
    port : int
    output : str
        Of stdout.
    errors : list of str
        Of stderr, as they come.
    """

    popen: subprocess.Popen[str]
    port: int
    output: str
    errors: list[str] = field(default_factory=list)

    def request(
        self, method: str, path: str, body: Any = None, key: str = "", **more: Any
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GUARD)
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body | more)
        connection.request(method, path, content, headers)
        return connection.getresponse()

    def chat(self, key: str = "", **more: Any) -> http.client.HTTPResponse:
        return self.request("POST", server_fuzz.CHAT, question(**more), key)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def idle_memory(self) -> int:
        """Resident bytes after free memory was returned to the system, which happens regularly."""
        end, least = time.monotonic() + 2 * TRIM_S, self.memory
        while time.monotonic() < end:
            time.sleep(0.1)
            least = min(least, self.memory)
        return least

    def ended(self) -> int:
        """The exit code, as soon as there is one."""
        return self.popen.wait(GUARD)


def question(text: str = "What is here?", **more: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": server_fuzz.data_url(server_fuzz.IMAGE)}}
    content = [image, {"type": "text", "text": text}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


@contextlib.contextmanager
def running(
    *options: str, program: tuple[str, ...] = ("-m", "vlmfast"), **environment: str
) -> Iterator[Process]:
    """A server that is ready."""
    if "--port" not in options:
        options = ("--port", "0", *options)
    popen = started("tiny", *options, program=program, **environment)
    errors: list[str] = []
    # Read all the time: a full pipe would stop the server.
    reader = threading.Thread(target=lambda: errors.extend(popen.stderr or ()), daemon=True)
    reader.start()
    try:
        line = popen.stdout.readline() if popen.stdout else ""
        assert "is served at http://" in line, (line, errors)
        port = int(line.partition("/v1")[0].rpartition(":")[2])
        yield Process(popen, port, line, errors)
    finally:
        popen.kill()
        popen.wait()
        reader.join(GUARD)
        for pipe in (popen.stdout, popen.stderr):
            if pipe:
                pipe.close()


def streamed(response: http.client.HTTPResponse) -> tuple[str, bool]:
    """The text of a stream, and whether it is complete."""
    text, done = "", False
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        for line in response:
            if line.strip() == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                text += _delta(line)
    return text, done


def first_text(response: http.client.HTTPResponse) -> str:
    """Read a stream up to its first text."""
    for line in response:
        if line.startswith(b"data: {") and (text := _delta(line)):
            return text
    raise AssertionError("the stream has no text")


def _delta(line: bytes) -> str:
    (choice,) = json.loads(line[6:])["choices"]
    return choice["delta"].get("content") or ""


# --- how it starts -------------------------------------------------------------------------------


def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is noticed before anything is loaded: this model is unknown, too."""
    assert main(["serve", "no-such-model", "--host", "0.0.0.0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vlmfast: error:") and "lets other machines connect" in line


@pytest.mark.slow
def test_servers_that_cannot_start_exit_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # In parallel, since most of the time is spent on imports.
        processes = {
            f"cannot listen on 127.0.0.1 port {port}": started("tiny", "--port", port),
            "no-such-model": started("no-such-model", "--port", "0", HF_HUB_OFFLINE="1"),
            # Before anything is loaded: the model is unknown, too.
            "lets other machines connect": started("no-such-model", "--host", "0.0.0.0"),
        }
        try:
            for reason, process in processes.items():
                output, errors = process.communicate(timeout=GUARD)
                assert process.returncode == 2, errors
                lines = [line for line in errors.splitlines() if "vlmfast: error:" in line]
                assert len(lines) == 1 and reason in lines[0], errors
                assert "Traceback" not in errors and not output
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


# --- how it ends ---------------------------------------------------------------------------------


# A busy machine takes many times longer, and nothing waits longer than it must.
PATIENT = ("--timeout", "600", "--grace", "600")


@pytest.mark.slow
def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    """Keys, the log, a request whose headers stall, and a signal while an answer is streamed."""
    file = tmp_path / "keys"
    file.write_text("key-in-file\n\nsecond-in-file\n")
    options = ("--api-key-file", str(file), *PATIENT)
    with running(*options, VLMFAST_API_KEY="key-in-environment,other-one") as server:
        keys = ("key-in-file", "second-in-file", "key-in-environment", "other-one")
        for key in keys:
            assert server.request("GET", "/v1/models", key=key).status == 200
        for key in ("", "key-in-environment,other-one", "key"):
            assert server.request("GET", "/v1/models", key=key).status == 401
        assert server.chat("key-in-file", text="hidden words", max_tokens=2).status == 200

        options = {"stream": True, "response_format": LONG, "temperature": 0}
        response = server.chat("other-one", **options)
        text = first_text(response)
        server.stop()
        status = 503
        with contextlib.suppress(ConnectionError):
            status = server.chat("other-one", max_tokens=1).status
        assert status == 503
        rest, done = streamed(response)
        assert done and len(json.loads(text + rest)) == 60
        assert server.ended() == 0
    printed = "".join([server.output, *server.errors])
    assert "completion_tokens" in printed  # the log is there
    for secret in (*keys, "hidden", "base64"):
        assert secret not in printed
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_ends_at_once(signals: int) -> None:
    with running(*PATIENT) as server:
        responses = [server.chat(stream=True, response_format=LONG, seed=n) for n in range(16)]
        for _ in range(signals):
            server.stop()
            with contextlib.suppress(ConnectionError):  # until the first one was noticed
                assert server.request("POST", server_fuzz.CHAT, {}).status == 503
        complete = [streamed(response)[1] for response in responses]
        assert server.ended() == 0
    assert all(complete) == (signals == 1)


@pytest.mark.slow
def test_the_grace_ends() -> None:
    with running("--grace", "1") as server:
        responses = [server.chat(stream=True, response_format=LONG, seed=n) for n in range(40)]
        server.stop()
        assert server.ended() == 0
        assert not all(streamed(response)[1] for response in responses)


@pytest.mark.slow
def test_a_killed_server_can_be_started_again() -> None:
    with running() as server:
        response = server.chat(stream=True, response_format=LONG)
        first_text(response)
        server.stop(signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL
        assert not streamed(response)[1]
    with running("--port", str(server.port)) as again:
        assert again.port == server.port
        assert again.chat(max_tokens=2).status == 200
        assert again.request("GET", "/health").status == 200


# --- how it lasts --------------------------------------------------------------------------------


BAD_REQUESTS = 10_000
DEADLINE, GRACE, SPARE = 6.0, 4.0, 8.0  # seconds; the last ones for a busy machine


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_after_many_bad_requests(tmp_path: Path) -> None:
    """10,000 requests: the server stays alive, fetches nothing forbidden, and does not grow.

    All the time more connections that ask nothing are opened than it keeps.
    """
    (tmp_path / "a.png").write_bytes(server_fuzz.IMAGE)
    (tmp_path / "out.png").symlink_to("/etc/passwd")
    options = (
        *("--allow-remote-media", "--allowed-local-media-path", str(tmp_path)),
        *("--max-new-tokens", "48", "--timeout", str(DEADLINE), "--grace", str(GRACE)),
        *("--prefix-cache-bytes", str(8 << 20)),
        *("--max-body-bytes", str(8 << 20), "--alias", "fast=hired:0.1"),
        *("--max-connections", "200"),
    )
    sizes, report, limit = [], server_fuzz.Report(), DEADLINE + GRACE + SPARE
    with (
        server_fuzz.canary() as canary,
        server_fuzz.canary(PUBLIC, answer=lambda path: path[1:]) as public,
        running(*options, program=("-c", WITH_A_PUBLIC_ADDRESS)) as server,
    ):
        models = ("tiny", "fast")
        fuzz = server_fuzz.Fuzz("process", models, canary.url, public.url, tmp_path)
        with (
            server_fuzz.watched(server.port, limit) as health,
            server_fuzz.idle(server.port, 250),
        ):
            for start in range(0, BAD_REQUESTS, 500):
                cases = (fuzz.case(number) for number in range(start, start + 500))
                report.add(server_fuzz.run(server.port, cases, 6, GUARD, limit))
                assert not report.violations, "\n".join(report.violations)
                if start + 500 in (BAD_REQUESTS // 5, BAD_REQUESTS):
                    sizes.append(server.idle_memory())
        assert health.count > 100 and not health.violations, "\n".join(health.violations)
        assert canary.count == 0 and public.count > 0
        assert server.chat(max_tokens=2).status == 200
        server.stop()
        assert server.ended() == 0
    assert "Traceback" not in "".join(server.errors)
    ratio = sizes[1] / sizes[0]
    print(f"memory: {ratio:.4f} of {sizes[0]:,} bytes; slowest: {report.slowest}")
    late = sum(seconds > 1 for seconds in health.seconds)
    print(f"/health: {late} of {health.count} took more than 1 s; {max(health.seconds):.2f} s")
    print(f"stalls of the machine: {report.stalled:.1f} s")
    print(f"statuses: {report.by_status}")
    assert max(report.by_status) < 500, report.statuses
    assert report.count(200) > BAD_REQUESTS // 10, report.statuses
    assert report.count(400) > BAD_REQUESTS // 5, report.statuses
    assert ratio < 1.05, f"memory grew to {ratio:.4f} of what it was, {sizes} bytes"
