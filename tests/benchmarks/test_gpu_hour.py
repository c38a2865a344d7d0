"""`benchmarks/gpu_hour.py` runs on a CPU, and its verdicts and exit code tell what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.bench_script import script
from support.paths import ROOT

PARTS = ["smoke", "bfloat16", "step", "serve"]


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
        "bfloat16": ("tiny: answers in bfloat16 that are the CPU's",),
        "step": (
            "llava-next-7b | none | batch 2: step",
            "qwen2.5-vl-7b | zipcache | batch 1: another capture",
            "qwen3-vl-8b | none | batch 2: step",
            "captures of later steps",
            "step of none over snapkv:0.2",
        ),
        "serve": ("equal lengths", "ragged", "prompts counted", "steady state"),
    }
    for part, words in expected.items():
        for word in words:
            assert any(word in what for what in told[part]), (part, word)
    # Answers, agreement of kernels and captures are judged on a CPU too, times are not.
    judged = [row["what"] for row in rows if row["verdict"]]
    assert {row["verdict"] for row in rows} == {"", "PASS"}
    assert not any(what.endswith((", s", ", ms")) for what in judged)
    assert sum("capture" not in what for what in judged) == 3


@pytest.mark.slow
def test_dry_run_of_the_first_minutes(tmp_path: Path) -> None:
    """A step that is ended is tried again, one that ended well is not."""
    out = tmp_path / "first.json"
    words = ("benchmarks/gpu_first.py", "--dry", "--only", "first token", "--only", "guard bands")
    python(*words, "--out", out)
    first = json.loads(out.read_text(encoding="utf-8"))
    assert all("last" in step for step in first["parts"].values()) and len(first["parts"]) == 2
    first["parts"]["guard bands"] = {"failed": "exit code 124"}
    out.write_text(json.dumps(first), encoding="utf-8")
    python(*words, "--out", out)
    second = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert second["first token"] == first["parts"]["first token"]
    assert "last" in second["guard bands"]
    found = json.loads((tmp_path / "gpu_first" / "ttft.json").read_text(encoding="utf-8"))
    parts = found["parts"]
    assert set(parts) == set(script("ttft").WORK) and not any("failed" in p for p in parts.values())
    for name in ("answers: llava-next-7b", "answers: qwen2.5-vl-7b"):
        rows = parts[name]
        assert min(rows["none"]["launches"], rows["hf sdpa"]["launches"]) > 100
        assert rows["hired:0.2"]["visual_tokens"] < rows["none"]["visual_tokens"]
        assert all(row["time"]["median"] > 0 and row["busy"] is None for row in rows.values()
                   if isinstance(row, dict))  # fmt: skip


def test_steps_of_the_first_minutes(tmp_path: Path) -> None:
    first = script("gpu_first")
    assert sum(step.seconds for step in first.STEPS) <= 12 * 60 + 80
    for words, seconds, code in (
        ("-c while(True):pass", 1, 124),
        ("-c raise(SystemExit(5))", 60, 5),
    ):
        with pytest.raises(RuntimeError, match=f"exit code {code}"):
            first.run(first.Step("a", seconds, "", words), seconds, True, tmp_path)
    assert first.run(first.Step("b", 60, "", "-c print(7)"), 60, True, tmp_path)["last"] == ["7"]
    for words in (words for step in first.STEPS for words in (step.words, step.dry) if words):
        file, *arguments = words.format(folder=tmp_path).split()
        if file != "-m":
            script(Path(file).stem).parse(arguments)


def test_time_that_is_covered() -> None:
    ttft = script("ttft")
    assert ttft.union([]) == 0
    assert ttft.union([(0, 2), (1, 3), (5, 6), (5.25, 5.5)]) == 4
