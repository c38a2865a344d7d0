"""Awkward answers, scored by lmms-eval's own functions (table by `make_lmms_scores.py`)."""

from __future__ import annotations

import json
import random

import pytest

from support import make_lmms_scores
from support.closeness import close
from support.paths import DATA
from vlmfast.eval.scorers import mmmu, pope, video_mme

FILE = DATA / "lmms_scores.json"
TABLE = json.loads(FILE.read_text(encoding="utf-8"))
ROWS = TABLE["rows"]


def scored(number: int, row: dict, mode: str) -> tuple[object, float]:
    if row["task"] == "mmmu":
        parsed, score = mmmu.judge(
            row["response"],
            row["options"],
            row["answer"],
            row["kind"],
            mode,
            guess=random.Random(number),
        )
        answer = parsed.answer
        return sorted(map(str, answer)) if isinstance(answer, list) else answer, score
    if row["task"] == "video-mme":
        answer = video_mme.parse_choice(row["response"], row["options"], mode).answer
    else:
        answer = pope.parse(row["response"], mode).answer
    return answer, float(answer == row["answer"])


def test_table_is_up_to_date():
    assert TABLE["lmms_eval"] == "0.7.3"
    made = make_lmms_scores.table()
    assert len(made) == len(ROWS) >= 500
    for row, again in zip(ROWS, made, strict=True):
        assert {key: row[key] for key in again} == again


@pytest.mark.parametrize("task", ["mmmu", "video-mme", "pope"])
def test_every_row_equals_lmms_eval(task):
    numbers = [n for n, row in enumerate(ROWS) if row["task"] == task]
    for number in numbers:
        row = ROWS[number]
        assert scored(number, row, "lmms-eval") == (row["parsed"], row["score"]), row
    # The other modes do not: the table distinguishes them.
    for mode in ("official", "vlmevalkit"):
        differ = [n for n in numbers if scored(n, ROWS[n], mode)[1] != ROWS[n]["score"]]
        assert len(differ) >= 5, mode
    scores = [ROWS[n]["score"] for n in numbers]
    assert 0.1 < sum(scores) / len(scores) < 0.9


def test_sums_equal_lmms_eval():
    found = {}
    for task, module in (("mmmu", mmmu), ("video-mme", video_mme), ("pope", pope)):
        samples = [
            {
                "doc_id": f"validation_Math_{number}",
                "score": row["score"],
                "answered": True,
                "target": row["answer"],
                "filtered_resps": [row["parsed"]],
            }
            for number, row in enumerate(ROWS)
            if row["task"] == task
        ]
        found |= module.metrics(samples, "lmms-eval")
    for name, value in TABLE["measures"].items():
        close(found[name], value, terms=len(ROWS))  # means, in another order
