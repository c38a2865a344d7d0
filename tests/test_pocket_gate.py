"""``benchmarks/pocket/evaluate.py`` writes its result early, and has a gate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tiny_pocket import (
    SIZE,
    build,
    evaluate,
    make_objects,
    objects,
    parts,
    save_parts,
    scenes,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parts and drawings."""
    save_parts(tmp_path / "parts")
    (tmp_path / "objects").mkdir()
    drawn = make_objects(tmp_path / "objects")
    monkeypatch.setattr(objects, "read", lambda *_: drawn)
    return tmp_path


class Answering:
    """Answers every question with the same text."""

    def __init__(self, text: str = "no answer") -> None:
        self.text, self.asked = text, 0
        self.processor = SimpleNamespace(tokenizer=None)
        vision = SimpleNamespace(image_size=SIZE)
        config = SimpleNamespace(vision_config=vision)
        self.model = SimpleNamespace(config=config, device="cpu")

    def ask_many(self, requests: Any, batch_size: int) -> list[SimpleNamespace]:
        answers = [SimpleNamespace(text=self.text) for _ in requests]
        self.asked += len(answers)
        return answers


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Answering:
    answering = Answering()
    monkeypatch.setattr(
        evaluate, "VLM", SimpleNamespace(from_pretrained=lambda *_, **__: answering)
    )
    (folder / "pocket.json").write_text(json.dumps({"version": build.VERSION, "stage": "b"}))
    return answering


def test_result_is_written_before_answers_are_compared(
    model: Answering, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "new" / "a.json"
    command = [folder, folder / "parts", "--kind", "video", "--scenes", "2", "--out", out]
    command += ["--compare", "6"]

    def interrupted(*_: Any) -> int:
        raise parts.PocketError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "compare", interrupted)
        with pytest.raises(SystemExit, match="interrupted"):
            evaluate.main([str(of) for of in command])
    found = json.loads(out.read_text())
    assert found["types"]["way"]["asked"] == 2 and "compared" not in found
    monkeypatch.setattr(evaluate, "compare", lambda *_: 6)
    assert evaluate.main([str(of) for of in command]) == 0
    assert json.loads(out.read_text())["compared"] == {"equal": 6, "asked": 6}
    assert set(scenes.TYPES["video"]) == set(json.loads(out.read_text())["types"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 1),
        (["--no-gate"], 0),
        (["--recipe", "hired:0.5"], 0),
        (["--split", "style"], 0),
        (["--photographs", "photographs"], 0),
        (["--kind", "video"], 0),
        (["--kind", "video", "--kind", "word"], 1),
    ],
    ids=["default", "no-gate", "recipe", "split", "photographs", "video", "word"],
)
def test_gate_is_for_the_default_recipe_and_drawings(
    arguments: list[str],
    code: int,
    model: Answering,
    folder: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawings = objects.read().drawings("train")
    monkeypatch.setattr(objects.Objects, "drawings", lambda *_: drawings)
    (folder / "photographs").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "photographs" / "a.png")
    monkeypatch.chdir(folder)
    assert evaluate.main([".", "parts", "--scenes", "1", *arguments]) == code
    assert ("missed: what" in capsys.readouterr().out) == bool(code)
