"""Every call is answered or refused in one line, and the model still answers afterwards."""

from __future__ import annotations

import pytest

from support import tiny_families, tiny_models
from support.fuzz import Fuzz

BUILD = {
    "llava": tiny_models.build_llava,
    "llava_next": tiny_models.build_llava_next,
    "qwen2_5_vl": tiny_families.build_qwen2_5_vl,
}


@pytest.fixture(scope="module", params=BUILD)
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    return Fuzz(*BUILD[request.param]())


@pytest.mark.cases(1)
def test_calls_are_answered_or_refused_in_one_line(fuzz: Fuzz) -> None:
    assert fuzz.run(0, 100) == []
    assert fuzz.answered > 10 and fuzz.refused > 30


@pytest.mark.slow
def test_many_calls_are_answered_or_refused_in_one_line(fuzz: Fuzz) -> None:
    assert fuzz.run(1, 1000) == []
