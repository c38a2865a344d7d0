"""`benchmarks/servers.py`: a paused server takes no CPU time, with the processes that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.bench_script import script

servers = script("servers")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def server():
    """A server whose process has started a busy one, and the number of that."""
    made = object.__new__(servers.Server)
    made.process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    made.child = int(made.process.stdout.readline())
    yield made
    with suppress(ProcessLookupError):
        os.killpg(made.process.pid, signal.SIGKILL)
    made.process.stdout.close()
    made.process.wait()


def state(process: int) -> str:
    """T: stopped, Z or empty: ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def reaches(process: int, states: str) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if (found := state(process)) in states or (not found and "Z" in states):
            return True
        time.sleep(0.01)
    return False


def test_pause_stops_all_processes_of_a_server(server) -> None:
    assert state(server.child) in "RS"
    server.pause()
    assert reaches(server.child, "T") and reaches(server.process.pid, "T")
    with server.awake():
        assert reaches(server.child, "RS")
    assert reaches(server.child, "T")


def test_close_ends_all_processes_of_a_server(server) -> None:
    server.pause()
    server.close()
    assert reaches(server.child, "Z")


def test_gap_ratio() -> None:
    times = [float(at) for at in range(10)] + [14.0, 15.0, 16.0]
    assert servers.gap_ratio(times, 8.5, 13.0) == 5.0
    # The controls: a gap outside the time counts for the median only, one that overlaps it does.
    assert servers.gap_ratio(times, 2.5, 4.0) == 1.0
    assert servers.gap_ratio(times, 13.9, 13.95) == 5.0
    assert servers.gap_ratio(times, 14.0, 15.0) == 1.0


def test_a_server_that_fails_under_load_is_named(
    server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last error of its output, whose later lines say nothing of it."""
    server.log_file, server.url = tmp_path / "log", "http://127.0.0.1"
    server.log_file.write_text("ready\nValueError: no such row\nstopped\n")
    server.spec = servers.Spec("none", (), "vllm serve", False)

    def load(*_: object) -> None:
        raise servers.ServerFailed("status 500")

    monkeypatch.setattr(servers, "load", load)
    message = "none, 2 clients: status 500; its output: ValueError: no such row"
    with pytest.raises(servers.ServerFailed, match=message):
        servers.in_rounds([server], 1, [2], lambda many: [])
    server.log_file.write_text("ready\n")
    assert server.last_line == "ready"
