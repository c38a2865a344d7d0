"""Progress: a line every 30 seconds where no terminal is."""

from __future__ import annotations

import io
from functools import partial

import pytest

from eval_fakes import FakeVLM
from vlmfast.core.progress import Progress
from vlmfast.eval import runner


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("step", [1, 7, 45])
def test_lines_are_at_least_30_seconds_apart(step: int) -> None:
    clock, out = Clock(), io.StringIO()
    moments = []
    with Progress("hired", 400, "questions", stream=out, clock=clock) as progress:
        for _ in range(400):
            clock.now += step
            before = out.getvalue()
            progress.update()
            if out.getvalue() != before:
                moments.append(clock.now)
    assert len(moments) == out.getvalue().count("\n") > 10
    gaps = [b - a for a, b in zip([100.0, *moments], moments, strict=False)]
    assert all(30 <= gap < 30 + step for gap in gaps)


def test_short_work_is_silent() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress("hired", 3, "questions", stream=out, clock=clock) as progress:
        for _ in range(3):
            clock.now += 9
            progress.update()
    assert out.getvalue() == ""


def test_total_may_change() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress("tune", 0, "answers", stream=out, clock=clock) as progress:
        progress.say("5 candidates")
        for _ in range(30):
            clock.now += 1
            progress.update()
        progress.plan(370)
        for _ in range(30):
            clock.now += 1
            progress.update()
        progress.plan(20)  # candidates have been left out
    assert out.getvalue().splitlines() == [
        "5 candidates",
        "tune: 30 answers, 0:30 elapsed",
        "tune: 60 of 400 answers (15%), 1:00 elapsed, about 5:40 left",
    ]
    assert progress.line().startswith("tune: 60 of 80 answers (75%)")


def test_bar_follows_a_changing_total() -> None:
    out = Terminal()
    with Progress("tune", 0, "answers", stream=out, clock=Clock()) as progress:
        progress.plan(40)
        progress.say("5 candidates")
        progress.update(20)
        progress.plan(20)
    assert "5 candidates\n" in out.getvalue() and "20/40" in out.getvalue()


def test_line_has_counts_and_an_estimate() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress("hired", 840, "questions", done=20, stream=out, clock=clock)
    clock.now += 100
    progress.update(120, "loss 0.5")  # 100 new ones, one a second; 720 are left
    assert out.getvalue() == (
        "hired: 120 of 840 questions (14%), 1:40 elapsed, about 12:00 left, loss 0.5\n"
    )
    clock.now += 7100
    progress.update(120)
    assert "2:00:00 elapsed, about 14:24:00 left\n" in out.getvalue()


def test_hidden_progress_prints_nothing() -> None:
    clock, out = Clock(), Terminal()
    progress = Progress("hired", 2, "questions", show=False, stream=out, clock=clock)
    clock.now += 60
    progress.update()
    progress.close()
    assert out.getvalue() == ""


def test_terminal_has_a_bar() -> None:
    clock, out = Clock(), Terminal()
    with Progress("hired", 2, "questions", stream=out, clock=clock) as progress:
        progress.update()
        progress.update(note="loss 0.5")
    assert "\r" in out.getvalue() and "2/2" in out.getvalue()


def test_eval_reports_every_30_seconds(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()

    class Slow(FakeVLM):
        def ask(self, *args, **kwargs):
            clock.now += 10
            return super().ask(*args, **kwargs)

    monkeypatch.setattr(runner, "Progress", partial(Progress, clock=clock))
    runner.evaluate(Slow(), "shapes", "random", tmp_path, 1, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "random: 3 of 21 questions (14%), 0:30 elapsed, about 3:00 left"
    assert len(lines) == 7
    runner.evaluate(Slow(), "shapes", "random", tmp_path, 2)
    assert capsys.readouterr().err == ""
