"""Presence and frequency penalties against a reference that counts token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

import torch
from hypothesis import given
from hypothesis import strategies as st

from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.serve.penalties import OpenAIPenalties

VOCABULARY = 12
TOKENS = st.integers(0, VOCABULARY - 1)
PENALTY = st.floats(-2, 2, width=32)
SCORE = st.one_of(st.floats(-50, 50, width=32), st.just(-np.inf))


def reference(
    scores: list[float], answer: list[int], presence: float, frequency: float
) -> list[float]:
    found = [np.float32(score) for score in scores]
    for token in range(len(found)):
        count = sum(other == token for other in answer)
        if count:
            found[token] -= np.float32(count) * np.float32(frequency)
            found[token] -= np.float32(presence)
    return [float(score) for score in found]


@given(
    scores=st.lists(SCORE, min_size=VOCABULARY, max_size=VOCABULARY),
    prompt=st.lists(st.one_of(TOKENS, st.integers(-1, 10**6)), min_size=1, max_size=8),
    answer=st.lists(TOKENS, max_size=20),
    presence=PENALTY,
    frequency=PENALTY,
    again=st.booleans(),
)
def test_scores_equal_the_reference(
    scores: Any, prompt: Any, answer: Any, presence: float, frequency: float, again: bool
) -> None:
    """The prompt, whose ids may be of placeholders, does not count."""
    penalties = OpenAIPenalties(presence, frequency)
    given = torch.tensor([scores], dtype=torch.float32)
    kept = given.clone()
    for count in range(len(answer) + 1):
        ids = torch.tensor([prompt + answer[:count]])
        found = penalties(ids, given)
        assert found.dtype == torch.float32
        assert found[0].tolist() == reference(scores, answer[:count], presence, frequency)
        if again:
            assert torch.equal(penalties(ids, given), found)
    assert torch.equal(given, kept)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "draft-ngram"])
def test_penalties_change_an_answer(vlm: VLM, recipe: str) -> None:
    def answer(presence: float, frequency: float) -> list[int]:
        return vlm.ask(
            "Describe the image.",
            images=make_image(),
            recipe=recipe,
            max_new_tokens=40,
            eos_token_id=None,
            logits_processor=[OpenAIPenalties(presence, frequency)],
        ).token_ids

    plain, neutral = answer(0.0, 0.0), answer(-0.0, 0.0)
    assert plain == neutral
    penalized, encouraged = answer(2.0, 2.0), answer(-2.0, -2.0)
    assert len(set(encouraged)) < len(set(plain)) < len(set(penalized))
