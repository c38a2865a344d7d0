"""`benchmarks/pocket/evaluate.py` counts exact answers to questions about unseen layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiny_pocket import SIZE, PocketError, evaluate, make_objects, scenes


class Answering:
    """Answers in place of a model."""

    def __init__(self, answers: list[str]) -> None:
        self.answers, self.requests = answers, []

    def ask_many(self, requests: Any, batch_size: int) -> list[SimpleNamespace]:
        self.requests = list(requests)
        return [SimpleNamespace(text=text) for text in self.answers]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list:
    drawn = make_objects(tmp_path_factory.mktemp("objects"))
    return list(evaluate.examples(drawn, "train", ["scene", "word"], 10, SIZE))


def test_right_answers_are_counted_by_type(asked: list) -> None:
    flat = [of for _, questions in asked for of in questions]
    given = [f" {of.answer}\n" if of.type != "count" else "9" for of in flat]
    model = Answering(given)
    found = evaluate.evaluate(model, asked, "hired:0.5")
    assert set(found) == {*scenes.TYPES["scene"], *scenes.TYPES["word"]}
    assert found["what"]["right"] == found["what"]["asked"] == 20
    assert found["count"]["accuracy"] == 0 and found["read"]["asked"] == 10
    low, high = found["what"]["interval"]
    assert 0.8 < low < 1 and high == 1
    request = model.requests[0]
    assert request.recipe == "hired:0.5" and request.generation["do_sample"] is False
    assert not evaluate.gate(found)


def test_gate_needs_both_types(asked: list) -> None:
    right = {"accuracy": 0.8}
    assert evaluate.gate({"what": right, "where": right}) == []
    assert evaluate.gate({"what": right, "where": {"accuracy": 0.79}}) == ["where"]
    assert evaluate.gate({"where": right}) == ["what"]


def test_more_comparisons_than_questions_are_refused(
    asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(ask=lambda *_, **__: SimpleNamespace(token_ids=[1]))
    monkeypatch.setattr(evaluate, "reference", lambda *_: [1])
    assert evaluate.compare(model, asked[:1], 3) == 3
    with pytest.raises(PocketError, match="compare=9 is more than the 5 questions"):
        evaluate.compare(model, asked[:1], 9)
    monkeypatch.setattr(evaluate, "reference", lambda *_: [2])
    assert evaluate.compare(model, asked[:1], 3) == 0
