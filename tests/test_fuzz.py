"""Every call is answered or refused in one line, and the model still answers afterwards."""

from __future__ import annotations

from typing import Any

import pytest

import tiny_families
import tiny_models
from fuzz import Fuzz

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


def test_fuzzer_reports_planted_failures() -> None:
    """Control: other errors, several lines, late refusals and wrong answers are reported."""
    model, processor = tiny_models.build_llava()
    fuzz = Fuzz(model, processor)

    def failing(error: Exception, after: int = 0) -> list[str]:
        def call() -> Any:
            fuzz.passes = after
            raise error

        fuzz.wrong, fuzz.call = [], lambda rng: ("a call", True, call)  # type: ignore[method-assign]
        fuzz.one("0")
        return fuzz.wrong

    from vlmfast import MediaError, VLMFastError

    assert failing(MediaError("one line")) == []
    assert "KeyError" in failing(KeyError("x"))[0]
    assert "not one line" in failing(VLMFastError("two\nlines"))[0]
    assert "after 2 forward passes" in failing(VLMFastError("late"), 2)[0]
    fuzz.expected = [*fuzz.expected, 0]
    assert "answers otherwise" in failing(VLMFastError("one line"))[0]
