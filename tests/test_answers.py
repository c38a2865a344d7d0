"""Requests of `recorded` are answered as recorded: tokens, kept indices, cache bytes, drafts."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

import recorded

LINES = recorded.read()
QUICK = [line for line in LINES if line.get("quick")]


def replay(lines: list[dict[str, Any]], family: str) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words")  # its processor wants it
    wrong = []
    for line in lines:
        if line["case"]["family"] == family:
            found, _ = recorded.differences(line, recorded.answers(line["case"]))
            wrong += [f"{line['case']}: {what}" for what in found]
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize("family", recorded.FAMILIES)
def test_answers_are_the_recorded_ones(family: str) -> None:
    replay(QUICK, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", recorded.FAMILIES)
def test_all_answers_are_the_recorded_ones(family: str) -> None:
    replay([line for line in LINES if not line.get("quick")], family)


def test_the_record_covers_what_it_should() -> None:
    """Enough requests, small enough, and few places that another processor may decide otherwise."""
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


def test_a_difference_is_seen() -> None:
    """The control: one other token, one other visual token that went, one byte more."""
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


def test_a_perturbed_model_answers_otherwise_where_a_tie_is_made() -> None:
    """What `recorded.record` would note: weights moved far enough change an answer."""
    case = next(line["case"] for line in QUICK if line["case"]["family"] == "llava")
    before = recorded.NOISE
    recorded.perturbed.cache_clear()
    try:
        recorded.NOISE = 0.3
        moved = recorded.answers(case, recorded.perturbed("llava", 0))
    finally:
        recorded.NOISE = before
        recorded.perturbed.cache_clear()
    assert [of["tokens"] for of in moved] != [of["tokens"] for of in recorded.answers(case)]


def test_the_tool_runs() -> None:
    path = recorded.FILE.parents[2] / "tools" / "record_answers.py"
    spec = importlib.util.spec_from_file_location("record_answers", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    lines = [recorded.record(case) for case in list(recorded.cases())[:2]]
    assert all(line["answers"] for line in lines if line)
