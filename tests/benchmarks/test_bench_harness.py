"""What the benchmarks share: rounds, ratios, bounds, and result files that a command resumes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support.bench_script import script

harness = script("harness")
ABOUT = {
    "device": "cpu",
    "date": "today",
    "environment": {"packages": {"torch": "2", "transformers": "5"}},
}


def test_options_have_the_defaults_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    parser = harness.parser("What it does.", recipe=None, repeats=3, new_tokens=8, out=None)
    args = parser.parse_args(["--new-tokens", "5", "--recipe", "none", "--recipe", "fast"])
    assert vars(args) == {"recipes": ["none", "fast"], "repeats": 3, "new_tokens": 5, "out": None}
    with pytest.raises(SystemExit):
        parser.parse_args(["--repeats", "0"])
    assert "--repeats: '0' is not a whole number above 0" in capsys.readouterr().err
    assert harness.path_of(args, "ask", "cuda:0", "NVIDIA H200").name == "ask-cuda-nvidia-h200.json"
    assert harness.path_of(argparse.Namespace(out=Path("x")), "ask") == Path("x")


def test_variants_are_interleaved() -> None:
    called: list[str] = []
    variants = {name: lambda name=name: called.append(name) or len(called) for name in "ABC"}
    found = harness.interleaved(variants, 2, warmup=1)
    assert called == list("ABCABCBCA")
    assert found == {"A": [4, 9], "B": [5, 7], "C": [6, 8]}


def test_ratio_is_of_sums() -> None:
    assert harness.ratio([[2.0, 1.0]] * 5) == {"value": 2.0, "low": 2.0, "high": 2.0}
    found = harness.ratio([[2.0, 1.0], [1.0, 1.0], [1.0, 2.0], [3.0, 1.0]])
    assert found["value"] == 7 / 5
    assert found["low"] < 7 / 5 < found["high"]
    assert harness.ratio([[0.0, 0.0]]) is None


def test_rows_as_a_table() -> None:
    spread = {"median": 0.25, "q1": 0.125, "q3": 1.0}
    rows = {
        "a | b": {"time": spread, "part": {"bytes": 7, "rate": 1.5}},
        "c": {"failed": "ValueError: x | y", "time": None},
        "d": {"time": None, "part": None},
    }
    assert harness.shown(rows, "time", "part.bytes", "part.rate").splitlines()[2:] == [
        "| a, b | 0.25 [0.125, 1] | 7 | 1.5 |",
        "| c | ValueError: x / y |",
        "| d |  |  |  |",
    ]


@pytest.mark.parametrize(
    ("ratio", "bound", "least", "verdict"),
    [
        (2.0, 2.0, False, "ok"),
        (2.0, 2.0, True, "ok"),
        (2.1, 2.0, False, "missed"),
        (1.9, 2.0, True, "missed"),
        (9.0, None, False, ""),
    ],
)
def test_verdicts(ratio: float, bound: float | None, least: bool, verdict: str) -> None:
    row = harness.Row("gap", "what", [ratio, ratio], bound, least)
    assert row.verdict == verdict and row.report()["median"] == ratio
    assert f"| gap: what | {ratio:.4g} | {ratio:.4g} | {ratio:.4g} | " in harness.table([row])


# --- result files --------------------------------------------------------------------------------


def parts(path: Path, settings: dict[str, Any], **more: Any) -> Any:
    return harness.Parts(path, ABOUT, settings, **more)


def test_run_resumes_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, asked = tmp_path / "out.json", []

    def run(key: str) -> dict[str, Any]:
        asked.append(key)
        if asked == ["a", "b"]:
            raise RuntimeError("did not\nwork")
        if len(asked) == 3:
            raise KeyboardInterrupt
        if key == "e":
            raise torch.OutOfMemoryError
        return {"value": key}

    later, wanted = time.perf_counter() + 60, ["a", "b", "c", "d", "e"]
    first = parts(path, {"model": "m"})
    with pytest.raises(KeyboardInterrupt):
        first.measure(first.missing(wanted), run, later)
    second = parts(path, {"model": "m"})
    assert second.rows["b"]["failed"] == "RuntimeError: did not work"
    assert second.rows["a"]["value"] == "a" and second.rows["a"]["date"] == "today"
    assert second.missing(wanted) == ["c", "d", "e", "b"]  # what failed comes last
    assert second.measure(second.missing(wanted), run, later) == 0
    assert asked == ["a", "b", "c", "c", "d", "e", "b"]
    # What does not fit into the memory is not tried again.
    report = json.loads(path.read_text())
    assert report["parts"]["e"]["failed"] == harness.FULL
    assert parts(path, {"model": "m"}).missing(wanted) == []
    assert {"device", "date", "environment", "settings"} <= set(report)
    with pytest.raises(SystemExit, match=r"was measured with .* use --fresh"):
        parts(path, {"model": "other"})
    assert parts(path, {"model": "other"}, fresh=True).rows == {}
    capsys.readouterr()
    assert second.ended(0, 0) == 0 and second.ended(0, 2) == 1
    assert second.ended(1, 0) == harness.UNFINISHED
    assert "repeat the command to resume" in capsys.readouterr().err


def test_run_ends_at_its_time_limit(tmp_path: Path) -> None:
    found = parts(tmp_path / "out.json", {})
    assert found.measure(["a", "b"], lambda key: {}, time.perf_counter() - 1) == 2
    assert found.rows == {}


# --- processes -----------------------------------------------------------------------------------

CHILD = """
import time
def child(pipe, start):
    if start == "late":
        time.sleep(60)
    pipe.send("ready")
    for message in iter(pipe.recv, None):
        pipe.send([message, start])
"""


@pytest.mark.slow
def test_child_answers_or_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_of_harness.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    from child_of_harness import child

    made = harness.Child(child, "now")
    assert made.ask("a") == ["a", "now"] and made.ask("b", 60) == ["b", "now"]
    made.close()
    with pytest.raises(harness.ChildFailed, match="no answer after 2 s"):
        harness.Child(child, "late", seconds=2)
