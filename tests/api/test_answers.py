"""Replays the requests of `recorded`: tokens, kept indices, cache bytes and drafts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support import recorded

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


def test_answers_that_read_other_tokens_are_not_compared() -> None:
    answer, moved = ({"tokens": [1, 2], "kept": kept, "kv_bytes": 8} for kept in "ab")
    recorded.mark(answer, moved)
    line = {"case": {"way": "ask"}, "answers": [answer]}
    assert recorded.differences(line, [moved | {"tokens": [3]}]) == ([], 1)
    assert recorded.differences(line, [moved | {"kv_bytes": 9}])[0]
