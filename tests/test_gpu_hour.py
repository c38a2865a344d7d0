"""`benchmarks/gpu_hour.py` runs on a CPU, and its verdicts and exit code tell what failed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["probe", "smoke", "bfloat16", "kernels", "step", "serve"]


def script(name: str) -> Any:
    """A file of the benchmarks as a module; `tests` has a folder named as one of them."""
    file = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(ROOT / "benchmarks"))  # which import each other
limits = script("gpu_limits")

SCRIPT = """
import json, sys
import gpu_hour

broken, codes = sys.argv[1:]

def planted(bench):
    raise RuntimeError("planted")

gpu_hour.probe, gpu_hour.serve = planted, lambda bench: None
first = gpu_hour.main(["probe", "serve", "--dry", "--out", broken])
second = gpu_hour.main(["serve", "--dry", "--out", broken])
json.dump([first, second], open(codes, "w"))
"""


def python(*words: str | Path) -> None:
    """Run Python with the benchmarks on its path; it must end with code 0."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict[str, Any]]:
    """Exit codes and result file of a run whose first part fails, and of one that adds to it."""
    folder = tmp_path_factory.mktemp("gpu_hour")
    files = [folder / name for name in ("broken.json", "codes.json")]
    python("-c", SCRIPT, *files)
    result, codes = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return codes, result


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
        "probe": ["bandwidth", "third", "streaming"],
        "smoke": [
            "answers that are the CPU's",
            "48 tokens that are",
            "join and leave",
            "session",
            "thread that alloc",
        ],
        "bfloat16": ["tiny: answers in bfloat16 that are the CPU's"],
        "kernels": ["kernels that agree with their references"],
        "step": [
            "launches per layer, llava,",
            "launches per layer, gemma3,",
            "llava-next-7b | none | batch 2: step",
            "qwen2.5-vl-7b | zipcache | batch 1: another capture",
            "qwen3-vl-8b | none | batch 2: step",
            "captures of later steps",
            "step of none over snapkv:0.2",
        ],
        "serve": [
            "equal lengths",
            "ragged lengths",
            "prompts counted",
            "steady state",
            "first token",
        ],
    }
    for part, words in expected.items():
        for word in words:
            assert any(word in what for what in told[part]), (part, word)
    # Answers, agreement of kernels and captures are judged on a CPU too, times are not.
    judged = [row["what"] for row in rows if row["verdict"]]
    assert {row["verdict"] for row in rows} == {"", "PASS"}
    assert not any(what.endswith((", s", ", ms")) for what in judged)
    assert sum("capture" not in what for what in judged) == 4


@pytest.mark.slow
def test_error_is_reported_and_the_next_part_runs(ran: tuple) -> None:
    codes, result = ran
    assert codes[0] == 1
    failed = [row for row in result["rows"] if row["verdict"] == "FAIL"]
    assert [(row["part"], row["value"]) for row in failed] == [("probe", "RuntimeError: planted")]
    assert result["rows"][-1]["what"] == "serve: whole time, s"


@pytest.mark.slow
def test_run_of_one_part_keeps_the_rows_of_others(ran: tuple) -> None:
    codes, result = ran
    assert codes[1] == 0  # of its own rows: the failure is that of an earlier run
    parts = [row["part"] for row in result["rows"]]
    assert parts.count("serve") == 1 and "probe" in parts


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("failing", ["smoke", "pytest", "none"])
def test_make_gpu_runs_in_order_and_stops_at_the_first_failure(tmp_path, failing: str) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\necho "$PYTHONPATH $HF_HUB_OFFLINE $*" >> {log}\n'
        f'case "$*" in *{failing}*) exit 1;; esac\n'
    )
    python.chmod(0o755)
    command = ["make", "gpu", f"PYTHON={python}", "WORKERS=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = log.read_text().splitlines()
    assert all(line.startswith(f"{ROOT} 1 ") for line in lines)
    expected = ["probe", "smoke", "bfloat16", "pytest", "kernels", "step", "serve"]
    last = expected.index(failing) + 1 if failing in expected else len(expected)
    names = [
        next(name for name in expected if name in line.removeprefix(str(ROOT))) for line in lines
    ]
    assert names == expected[:last] and (done.returncode != 0) == (failing in expected)


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
    cases = {case.name: case.shapes for case in script("kernels").CASES}
    rows = {f"{name} | {shape}" for name, shapes in cases.items() for shape in shapes}
    for limit in limits.LIMITS:
        assert limit.row in rows
        other = limit.faster_than
        if other is not None and " | " in other:
            assert other.removesuffix(", SDPA") in rows
