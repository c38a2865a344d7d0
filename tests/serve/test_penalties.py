"""Presence and frequency penalties by OpenAI's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_models import make_image
from vlmfast import VLM
from vlmfast.serve.penalties import OpenAIPenalties

PENALTY = st.floats(-2, 2, width=32)


def reference(
    scores: list[float], answer: list[int], presence: float, frequency: float
) -> list[float]:
    """Token by token: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    found = []
    for token, score in enumerate(scores):
        count = answer.count(token)
        found.append(score - count * frequency - (presence if count > 0 else 0.0))
    return found


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    answer=st.lists(st.integers(0, 9), max_size=12),
    presence=PENALTY,
    frequency=PENALTY,
)
@settings(max_examples=150, deadline=None)
def test_definition(
    prompt: list[int], answer: list[int], presence: float, frequency: float
) -> None:
    penalties = OpenAIPenalties(presence, frequency)
    scores = torch.linspace(-3, 3, 10, dtype=torch.float64)[None]
    assert torch.equal(penalties(torch.tensor([prompt]), scores), scores)  # nothing is generated
    for count in range(1, len(answer) + 1):
        ids = torch.tensor([prompt + answer[:count]])
        found = penalties(ids, scores)
        expected = reference(scores[0].tolist(), answer[:count], presence, frequency)
        assert found[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert torch.equal(found, penalties(ids, scores))  # asked twice
    assert float(scores.sum()) == pytest.approx(0, abs=1e-9)  # not modified


def test_penalties_change_an_answer(shipped: VLM) -> None:
    def answer(**more: float) -> list[int]:
        found = shipped.ask(
            "Describe it.",
            make_image(seed=2),
            max_new_tokens=24,
            eos_token_id=None,
            logits_processor=[OpenAIPenalties(**more)],
        )
        return found.token_ids

    plain = shipped.ask("Describe it.", make_image(seed=2), max_new_tokens=24, eos_token_id=None)
    assert answer(presence=0.0, frequency=0.0) == plain.token_ids
    assert len(set(answer(presence=2.0, frequency=2.0))) > len(set(plain.token_ids))


def test_penalties_reach_the_engine(served: Any, shipped: VLM) -> None:
    changed = 0
    for seed in range(5):
        given = {"logits_processor": [OpenAIPenalties(2.0, 2.0)], "max_new_tokens": 24}
        expected = shipped.ask("Describe it.", make_image(seed=seed), **given).text
        body = {"max_tokens": 24, "model": "full"}
        plain = served.chat("Describe it.", seed, **body).json()
        body |= {"frequency_penalty": 2, "presence_penalty": 2}
        found = served.chat("Describe it.", seed, **body).json()
        assert found["choices"][0]["message"]["content"] == expected
        changed += expected != plain["choices"][0]["message"]["content"]
    assert changed  # the control
