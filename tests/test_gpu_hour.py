"""`benchmarks/gpu_hour.py` runs on a CPU, and its verdicts and exit code tell what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_script import script

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["smoke", "step", "serve"]
limits = script("gpu_limits")


def python(*words: str | Path) -> None:
    """Run Python with the benchmarks on its path; it must end with code 0."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_dry_run_covers_every_part(tmp_path: Path) -> None:
    out = tmp_path / "whole.json"
    python("benchmarks/gpu_hour.py", "--dry", "--out", out)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["dry"] and result["device"] == "cpu" and result["date"]
    assert result["command"].startswith("python benchmarks/gpu_hour.py --dry")
    assert {"torch", "transformers"} <= set(result["environment"]["packages"])
    rows = result["rows"]
    whole = [row["part"] for row in rows if row["what"] == f"{row['part']}: whole time, s"]
    assert whole == PARTS
    told = {part: [row["what"] for row in rows if row["part"] == part] for part in PARTS}
    expected = {
        "smoke": ("are the CPU's", "48 tokens that are", "join and leave", "session", "alloc"),
        "step": (
            "llava-next-7b | none | batch 2: step",
            "qwen2.5-vl-7b | zipcache | batch 1: another capture",
            "qwen3-vl-8b | none | batch 2: step",
            "captures of later steps",
            "step of none over snapkv:0.2",
        ),
        "serve": ("equal lengths", "ragged", "prompts counted", "steady state", "first token"),
    }
    for part, words in expected.items():
        for word in words:
            assert any(word in what for what in told[part]), (part, word)
    # Answers, agreement of kernels and captures are judged on a CPU too, times are not.
    judged = [row["what"] for row in rows if row["verdict"]]
    assert {row["verdict"] for row in rows} == {"", "PASS"}
    assert not any(what.endswith((", s", ", ms")) for what in judged)
    assert sum("capture" not in what for what in judged) == 3


# --- thresholds of kernels -----------------------------------------------------------------------


def row(time: float | None = 10e-6, **more: Any) -> dict[str, Any]:
    """A measured row whose floor is 10 us."""
    found = {"bytes": 40_000_000, "machine": {"copy": 4e12, "least": 2e-6}, "others": {}}
    found |= {"check": {"passed": True}} | more
    return found if time is None else found | {"time": time}


@pytest.mark.parametrize(
    ("limit", "passing", "missing"),
    [
        (limits.Limit("a", floors=1.5), {"a": row(14e-6)}, {"a": row(16e-6)}),
        (limits.Limit("a", seconds=60e-6), {"a": row(59e-6)}, {"a": row(61e-6)}),
        (limits.Limit("a", over_least=2e-6), {"a": row(3.9e-6)}, {"a": row(4.1e-6)}),
        (limits.Limit("a", faster_than="b", times=2.0), {"a": row(9e-6), "b": row(20e-6)},
         {"a": row(11e-6), "b": row(20e-6)}),
        (limits.Limit("a", faster_than="SDPA"), {"a": row(others={"SDPA": {"time": 11e-6}})},
         {"a": row(others={"SDPA": {"time": 9e-6}})}),
        (limits.Limit("a", faster_than="b | B, SDPA"),
         {"a": row(), "b | B": row(1e-9, others={"SDPA": {"time": 11e-6}})},
         {"a": row(), "b | B": row(1.0, others={"SDPA": {"time": 9e-6}})}),
    ],
    ids=["floors", "seconds", "over an empty graph", "row", "function", "function of a row"],
)  # fmt: skip
def test_verdict_of_a_threshold(limit: Any, passing: dict, missing: dict) -> None:
    value, text, verdict = limits.verdict(limit, passing)
    assert verdict == "PASS" and value > 0 and text
    assert limits.verdict(limit, missing)[2] == "MISS"
    assert limits.verdict(limit, {})[::2] == ("not measured", "MISS")
    assert limits.verdict(limit, {"a": row(None)})[::2] == ("not measured", "MISS")
    wrong = row(1e-9, check={"passed": False, "why": "tensor 0 differs"})
    assert limits.verdict(limit, passing | {"a": wrong})[::2] == ("tensor 0 differs", "FAIL")
    broken = {"error": "exited with -11"}
    assert limits.verdict(limit, passing | {"a": broken})[::2] == ("exited with -11", "FAIL")


def test_same_time_is_judged_by_the_measured_copy_rate() -> None:
    limit, slow = limits.Limit("a", floors=1.5), {"copy": 2e12, "least": 2e-6}
    assert limits.verdict(limit, {"a": row(20e-6)})[2] == "MISS"
    assert limits.verdict(limit, {"a": row(20e-6, machine=slow)})[2] == "PASS"


def test_limits_name_rows_of_the_benchmark() -> None:
    cases = {case.name: case.timed for case in script("kernels").CASES}
    rows = {f"{name} | {shape}" for name, shapes in cases.items() for shape in shapes}
    for limit in limits.LIMITS:
        assert limit.row in rows
        other = limit.faster_than
        if other is not None and " | " in other:
            assert other.removesuffix(", SDPA") in rows
