"""Progress: a bar in a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from vlmfast.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of tqdm, that the test sets."""
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


@pytest.mark.parametrize("step", [1, 7, 45])
def test_log_has_a_line_at_most_every_30_seconds(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    out, moments = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", out)
    with Progress("hired", 400, "questions", done=20) as progress:
        for done in range(21, 401):
            clock[0] += step
            before = out.getvalue()
            progress.update(done, "loss 0.5")
            if out.getvalue() != before:
                moments.append(clock[0])
    assert len(moments) > 10
    gaps = [b - a for a, b in zip([100.0, *moments], moments, strict=False)]
    assert all(30 <= gap < 30 + step for gap in gaps)
    last = out.getvalue().rpartition("\r")[2]
    assert "hired: 100%" in last and "400/400" in last and "loss 0.5" in last


def test_short_work_is_silent(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with Progress("hired", 3, "questions") as progress:
        for _ in range(3):
            clock[0] += 9
            progress.update()
    assert out.getvalue() == ""


@pytest.mark.parametrize("show", [True, False])
def test_terminal_has_a_bar_with_a_total_that_may_change(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, show: bool
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with Progress("tune", 0, "answers", show=show) as progress:
        progress.plan(80)
        progress.say("5 candidates")
        clock[0] += 60
        progress.update(20)
        progress.plan(20)
    if show:
        assert "5 candidates\n" in out.getvalue() and "20/40" in out.getvalue()
    else:
        assert out.getvalue() == ""
