"""`benchmarks/pocket/evaluate.py` counts exact answers to questions about unseen layouts."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiny_pocket import SIZE, evaluate, evidence, make_objects, objects, scenes
from vlmfast.core.exit_codes import ExitCode


class Model:
    """Gives answers, all of which have one token."""

    def __init__(self, answers: Any) -> None:
        self.answers, self.requests, self.token = iter(answers), [], 1
        self.processor = SimpleNamespace(tokenizer=None)
        vision = SimpleNamespace(image_size=SIZE)
        config = SimpleNamespace(vision_config=vision)
        self.model = SimpleNamespace(config=config, device="cpu", generate=self.generate)

    def ask_many(self, requests: Any, batch_size: int) -> list[SimpleNamespace]:
        self.requests = list(requests)
        return [SimpleNamespace(text=next(self.answers)) for _ in self.requests]

    def ask(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(token_ids=[1])

    def inputs(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, 2)}

    def generate(self, **_: Any) -> torch.Tensor:
        return torch.tensor([[0, 0, self.token]])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_objects(tmp_path_factory.mktemp("objects"))


def test_right_answers_are_counted_by_type(drawn: Any) -> None:
    task = evidence.Scenes(drawn, SIZE, ["scene", "word"])
    docs = task.docs(10, 0)
    model = Model([f" {doc.target}\n" if doc.type != "count" else "9" for doc in docs])
    found = evaluate.evaluate(model, task, docs, "hired:0.5")
    assert set(found) == {*scenes.TYPES["scene"], *scenes.TYPES["word"]}
    assert found["what"]["right"] == found["what"]["asked"] == 20
    assert found["count"]["accuracy"] == 0 and found["read"]["asked"] == 10
    low, high = found["what"]["interval"]
    assert 0.8 < low < 1 and high == 1
    request = model.requests[0]
    assert request.recipe == "hired:0.5" and request.generation["do_sample"] is False


def test_tokens_that_differ_fail(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model = Model(repeat("no answer"))
    monkeypatch.setattr(objects, "read", lambda *_: drawn)
    monkeypatch.setattr(evaluate, "VLM", SimpleNamespace(from_pretrained=lambda *_, **__: model))
    (tmp_path / "pocket.json").write_text(json.dumps({"stage": "b"}))
    out = tmp_path / "new" / "a.json"
    command = [str(tmp_path), "parts", "--kind", "video", "--scenes", "2", "--out", str(out)]
    for model.token, code in ((1, ExitCode.FINISHED), (2, ExitCode.CHECK_FAILED)):
        assert evaluate.main([*command, "--compare", "6"]) == code
        found = json.loads(out.read_text())
        assert found["compared"] == {"equal": 6 if model.token == 1 else 0, "asked": 6}
    assert found["types"].keys() == scenes.TYPES["video"].keys()
    assert found["types"]["way"]["asked"] == 2 and found["model"] == {"stage": "b"}
    assert found["command"].startswith("python benchmarks/pocket/evaluate.py ")
    assert evaluate.main(command) == ExitCode.FINISHED
    assert "compared" not in json.loads(out.read_text())
