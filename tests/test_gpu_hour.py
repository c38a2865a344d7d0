"""`benchmarks/gpu_hour.py` runs on a CPU and reports its failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["probe", "smoke", "step", "serve"]


def ran(out: Path, *words: str) -> tuple[subprocess.CompletedProcess, dict[str, Any]]:
    """The finished process and its result file."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, "--dry", "--out", str(out)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done, json.loads(out.read_text(encoding="utf-8"))


def test_dry_run_covers_every_part(tmp_path: Path) -> None:
    done, result = ran(tmp_path / "result.json", "benchmarks/gpu_hour.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
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


def test_error_is_reported_and_the_next_part_runs(tmp_path: Path) -> None:
    script = (
        "import sys, gpu_hour\n"
        "def broken(bench):\n"
        "    raise RuntimeError('planted')\n"
        "gpu_hour.probe, gpu_hour.serve = broken, lambda bench: None\n"
        "sys.exit(gpu_hour.main(['probe', 'serve', *sys.argv[1:]]))\n"
    )
    done, result = ran(tmp_path / "result.json", "-c", script)
    assert done.returncode == 1
    failed = [row for row in result["rows"] if row["verdict"] == "FAIL"]
    assert [(row["part"], row["value"]) for row in failed] == [("probe", "RuntimeError: planted")]
    assert result["rows"][-1]["what"] == "serve: whole time, s"
