"""Replays the requests of `recorded`: tokens, kept indices, cache bytes and drafts."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import recorded

LINES = recorded.read()
QUICK = [line for line in LINES if line.get("quick")]


def replay(lines: list[dict[str, Any]], family: str, *, cached: bool = True) -> None:
    wrong = []
    for line in lines:
        if line["case"]["family"] == family:
            found, _ = recorded.differences(line, recorded.answers(line["case"], cached=cached))
            if not cached:  # a session then prefills more
                found = [what for what in found if ": prompt " not in what]
            wrong += [f"{line['case']}: {what}" for what in found]
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", recorded.FAMILIES)
def test_answers_match_the_record(family: str) -> None:
    replay(QUICK, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", recorded.FAMILIES)
def test_all_answers_match_the_record(family: str) -> None:
    replay([line for line in LINES if not line.get("quick")], family)


@pytest.mark.slow
@pytest.mark.parametrize("family", recorded.FAMILIES)
def test_answers_match_the_record_without_the_prefix_cache(family: str) -> None:
    replay(QUICK, family, cached=False)


def test_record_is_large_enough_and_mostly_unambiguous() -> None:
    """Enough requests, small enough, and few answers that another processor may change."""
    answers = [answer for line in LINES for answer in line["answers"]]
    ties = sum("stable" in answer or "ties" in answer for answer in answers)
    assert len(answers) >= 2000
    assert ties < 0.02 * len(answers)
    assert sum(len(line["answers"]) for line in QUICK) >= recorded.QUICK
    assert recorded.FILE.stat().st_size < 2_000_000
    for lines in (LINES, QUICK):
        assert {line["case"]["family"] for line in lines} == set(recorded.FAMILIES)
        assert {line["case"]["way"] for line in lines} == {*recorded.WAYS, "long", "compare"}
        assert {line["case"]["sampler"] for line in lines} == set(recorded.SAMPLERS)


def test_difference_is_reported() -> None:
    """Control: one token changed, one visual token dropped, one byte more."""
    line = next(line for line in QUICK if line["answers"][0]["kept"] and len(line["answers"]) == 1)
    assert recorded.differences(line, copy.deepcopy(line["answers"])) == ([], 0)
    for name, other in (("tokens", [3]), ("kept", "x"), ("kv_bytes", 1), ("prompt", [0, 0, 0])):
        got = copy.deepcopy(line["answers"])
        got[0][name] = other
        wrong, _ = recorded.differences(line, got)
        assert len(wrong) == 1
        assert name in wrong[0]
    tied = copy.deepcopy(line)
    tied["answers"][0] |= {"stable": 0, "ties": ["kept", "kv_bytes", "prompt"]}
    got = copy.deepcopy(line["answers"])
    got[0] |= {"tokens": [3], "kept": "x"}
    assert recorded.differences(tied, got) == ([], 1)


def test_tie_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that move far enough change an answer; its record marks from which token on."""
    case = next(line["case"] for line in QUICK if line["case"]["family"] == "llava")
    monkeypatch.setattr(recorded, "NOISE", 0.3)
    recorded.perturbed.cache_clear()
    noted = recorded.record(case)
    recorded.perturbed.cache_clear()
    assert noted is not None
    assert any("stable" in answer for answer in noted["answers"])


def test_tool_writes_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = recorded.FILE.parents[2] / "tools" / "record_answers.py"
    spec = importlib.util.spec_from_file_location("record_answers", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    cases = [line["case"] for line in QUICK if line["case"]["family"] == "llava"][:2]
    lines = [recorded.record(case) for case in cases]
    other = copy.deepcopy(lines)
    other[0]["answers"][0]["kv_bytes"] += 1
    for name, written in (("one", lines), ("same", copy.deepcopy(lines)), ("other", other)):
        tool.write(tmp_path / name, written)
    capsys.readouterr()
    tool.compare(tmp_path / "one", tmp_path / "same")
    assert capsys.readouterr().out == ""
    tool.compare(tmp_path / "one", tmp_path / "other")
    said = capsys.readouterr().out
    assert said == f"differs: kv_bytes: llava {cases[0]['recipe']} (1)\n"


def test_answers_that_read_other_tokens_are_not_compared() -> None:
    answer, moved = ({"tokens": [1, 2], "kept": kept, "kv_bytes": 8} for kept in "ab")
    recorded._mark(answer, moved)
    line = {"case": {"way": "ask"}, "answers": [answer]}
    assert recorded.differences(line, [moved | {"tokens": [3]}]) == ([], 1)
    assert recorded.differences(line, [moved | {"kv_bytes": 9}])[0]
