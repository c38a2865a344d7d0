"""The servers that pages start, and what pages ask them: started, asked and stopped as written.

Commands and blocks of Python after ``vlmfast serve`` ask this server; only its port is another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from support.documented import (
    ROOT,
    Block,
    Command,
    Wrong,
    blocks,
    check_python,
    commands,
    pages,
    program,
    python_blocks,
    run_python,
)

if not (ROOT / "docs" / "serving.md").is_file():
    pytest.skip("the pages are not part of this distribution", allow_module_level=True)
pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

PAGE = "docs/serving.md"
TEXT = pages()[PAGE].partition("\n## Encoded features")[0]  # what follows needs no server
ADDRESS = "http://127.0.0.1:8000"
GUARD = 60.0  # seconds; only a test that fails waits as long


def servers(text: str) -> list[tuple[Command, list[Command | Block]]]:
    """Each command that starts a server, with what asks it."""
    found: list[tuple[Command, list[Command | Block]]] = []
    shown = [c for c in commands(PAGE, text) if not c.inline and program(c.text) != "pip install"]
    for part in sorted([*shown, *python_blocks(PAGE, text)], key=lambda part: part.line):
        if isinstance(part, Command) and part.text.startswith("vlmfast serve "):
            found.append((part, []))
        elif isinstance(part, Block) or part.text.startswith("curl "):
            found[-1][1].append(part)
    return found


SERVERS = servers(TEXT)


@contextlib.contextmanager
def started(command: Command, log: Path) -> Iterator[str]:
    """A server that is ready; yields its address. It must end with code 0 on SIGTERM."""
    words = command.words[1:]
    if "--port" in words:
        del words[words.index("--port") : words.index("--port") + 2]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlmfast", *words, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert address, log.read_text()
            yield address[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(GUARD) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def curl(text: str, address: str) -> str:
    """The output of a command; `Wrong` where it fails or the server refuses the request."""
    line = text.replace("curl ", "curl -sS --fail-with-body -m 60 ", 1).replace(ADDRESS, address)
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=GUARD
    )
    if done.returncode:
        raise Wrong(f"{text}: {done.stdout}{done.stderr}")
    return done.stdout


def answers(part: Command) -> str:
    """A text that only a complete response to a command contains."""
    if '"stream": true' in part.text:
        return "data: [DONE]"
    routes = {"/models": '"object":"list"', "/metrics": "vlmfast:num_requests_running"}
    return next((of for route, of in routes.items() if route in part.text), '"finish_reason"')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "parts"),
    [
        pytest.param(*server, id=str(server[0]), marks=[pytest.mark.slow] if number else [])
        for number, server in enumerate(SERVERS)
    ],
)
def test_page(
    command: Command, parts: list[Command | Block], tmp_path: Path, monkeypatch, tiny
) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {"__name__": "documented_page"}
    if shutil.which("curl") is None:
        parts = [part for part in parts if isinstance(part, Block)]
    with started(command, tmp_path / "log") as address:
        assert httpx2.get(f"{address}/ready").json() == {"status": "ready"}
        for part in parts:
            if isinstance(part, Command):
                assert answers(part) in curl(part.text, address)
                continue
            check_python(part, tiny)
            text = part.text.replace(ADDRESS, address)
            run_python(Block(part.page, part.line, part.language, text), namespace)
        if command is SERVERS[0][0]:
            _wrong_parts_are_found(address, namespace)
        if client := namespace.get("client"):
            client.close()


def _wrong_parts_are_found(address: str, namespace: dict[str, object]) -> None:
    """Controls, at a server that is running anyway."""
    asked = f"curl {ADDRESS}/v1/chat/completions -H 'Content-Type: application/json' -d "
    body = '{"model": "%s", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}'
    assert "choices" in curl(f"{asked}'{body % 'tiny'}'", address)
    for wrong in (f"{asked}'{body % 'tinny'}'", f"curl {ADDRESS}/v2"):
        if shutil.which("curl") is not None:
            with pytest.raises(Wrong, match=r"\b(404|exist)"):
                curl(wrong, address)
    text = 'client.chat.completions.create(model="tinny", messages=messages)'
    with pytest.raises(Wrong, match="does not exist"):
        run_python(Block(PAGE, 1, "python", text), namespace)
    with pytest.raises(Wrong, match="not 'blue'"):
        run_python(Block(PAGE, 1, "python", 'found.status  # "blue"'), namespace)


def test_the_page_is_read() -> None:
    assert len(SERVERS) == 2
    kinds = [[type(part).__name__ for part in parts] for _, parts in SERVERS]
    assert kinds[0].count("Command") == 1 and kinds[0].count("Block") == 3
    assert kinds[1] == ["Command"] * 2
    shown = [block for block in blocks(PAGE, TEXT) if block.language in ("python", "py")]
    assert len(shown) == kinds[0].count("Block")
