"""`benchmarks/gpu_hour.py` runs on a CPU and reports its failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["probe", "smoke", "step", "serve"]


SCRIPT = """
import json, runpy, sys
import gpu_hour

whole, broken, codes = sys.argv[1:]
sys.argv = ["benchmarks/gpu_hour.py", "--dry", "--out", whole]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    first = end.code

def planted(bench):
    raise RuntimeError("planted")

gpu_hour.probe, gpu_hour.serve = planted, lambda bench: None
second = gpu_hour.main(["probe", "serve", "--dry", "--out", broken])
json.dump([first, second], open(codes, "w"))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, dict[str, Any]]]:
    """Exit code and result file of a whole run and of one with a part that fails."""
    folder = tmp_path_factory.mktemp("gpu_hour")
    files = [folder / name for name in ("whole.json", "broken.json", "codes.json")]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, files)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    *results, codes = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return list(zip(codes, results, strict=True))


def test_dry_run_covers_every_part(ran: list) -> None:
    code, result = ran[0]
    assert code == 0, result
    assert result["dry"] and result["device"] == "cpu" and result["date"]
    assert result["command"].startswith("python benchmarks/gpu_hour.py --dry")
    assert {"torch", "transformers"} <= set(result["environment"]["packages"])
    rows = result["rows"]
    whole = [row["part"] for row in rows if row["what"] == f"{row['part']}: whole time, s"]
    assert whole == PARTS
    told = {part: [row["what"] for row in rows if row["part"] == part] for part in PARTS}
    expected = {
        "probe": ["bandwidth", "third", "streaming"],
        "smoke": ["answers that are the CPU's", "ragged batch", "session", "thread that allocates"],
        "step": [
            "llava-next-7b | none | batch 2: step",
            "qwen2.5-vl-7b | zipcache | batch 1: step",
        ],
        "serve": ["equal lengths", "ragged lengths", "prefill"],
    }
    for part, words in expected.items():
        for word in words:
            assert any(word in what for what in told[part]), (part, word)
    # Answers are checked on a CPU too, times are not.
    assert {row["verdict"] for row in rows} == {"", "PASS"}
    assert sum(row["verdict"] == "PASS" for row in rows) == 3


def test_error_is_reported_and_the_next_part_runs(ran: list) -> None:
    code, result = ran[1]
    assert code == 1
    failed = [row for row in result["rows"] if row["verdict"] == "FAIL"]
    assert [(row["part"], row["value"]) for row in failed] == [("probe", "RuntimeError: planted")]
    assert result["rows"][-1]["what"] == "serve: whole time, s"
