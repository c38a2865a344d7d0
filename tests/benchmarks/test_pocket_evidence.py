"""`benchmarks/pocket/evidence.py`: questions about unseen layouts, by ``vlmfast eval``."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.tiny_pocket import (
    SIZE,
    build,
    counting,
    evidence,
    make_objects,
    make_pocket,
    objects,
    save_parts,
    scenes,
)
from vlmfast.eval.report import write_report
from vlmfast.eval.results import Results


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_objects(tmp_path_factory.mktemp("objects"))


def test_questions_follow_from_unseen_layouts(drawn: Any) -> None:
    task = evidence.Scenes(drawn, SIZE, ("scene", "video"))
    docs = task.docs(3, 1)
    assert len({doc.doc_id for doc in docs}) == len(docs) == 3 * (5 + 3)
    assert [doc for doc in docs if doc in task.docs(2, 1)] == task.docs(2, 1)
    for doc in docs:
        kind, number = doc.media_id.split("-")
        assert int(number) >= evidence.STRIDE  # of this seed
        seed = scenes.seed_of("test", kind, int(number))
        of = scenes.layout(seed, kind, drawn.drawings("train"), SIZE)
        rng = random.Random(seed)
        answers = {scenes.question(of, type_, rng).answer for type_ in scenes.TYPES[kind]}
        assert doc.target in answers
        assert task.judge(doc, f" {doc.target}\n")["score"] == 1
        assert task.judge(doc, f"{doc.target} and more")["score"] == 0
        media, grey = task.media(doc, None), task.media(doc, "question-only")
        single = doc.modality == "image"
        assert media.keys() == ({"images"} if single else {"video", "num_frames"})
        image = media["images"] if single else media["video"][0]
        blank = grey["images"] if single else grey["video"][0]
        assert image.size == blank.size == (SIZE, SIZE)
        assert len(blank.getcolors()) == 1 < len(image.getcolors(SIZE**2))
    assert {doc.target for doc in docs} != {doc.target for doc in task.docs(3, 0)}


def test_recipes_are_evaluated_and_reported(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(objects, "read", lambda *_: drawn)
    folder, model, out = save_parts(tmp_path / "parts"), tmp_path / "model", tmp_path / "runs"
    build.save(make_pocket(), model, {"stage": "a", "step": 0}, folder, "float32")
    command = ["pocket", "--parts", str(folder), "--model", str(model), "--device", "cpu"]
    command += ["--dtype", "float32", "--kind", "scene", "--recipe", "random:0.5", "--draws", "1"]
    command += ["--limit", "1", "--out", str(out), "--json", str(tmp_path / "found.json")]
    assert evidence.main(command) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["task"] == "pocket" and set(found["recipes"]) == {"none", "random:0.5"}
    metas = [json.loads(path.read_text()) for path in out.rglob("meta.json")]
    assert metas and all(meta["options"]["kinds"] == ["scene"] for meta in metas)
    text, files = write_report(out, tmp_path / "report")
    assert "random:0.5" in text and all(file.exists() for file in files)
    capsys.readouterr()
    assert evidence.main([*command, "--mode", "official"]) == 2
    assert "task pocket has no option mode" in capsys.readouterr().err


# --- miscounting ----------------------------------------------------------------------------------


def counts(recipe: str, *answers: tuple[str, str]) -> Results:
    """Results with an answer to each number of objects, and one to another question."""
    rows = [
        {"doc_id": str(n), "type": "count", "target": target, "filtered_resps": [answer]}
        for n, (target, answer) in enumerate(answers)
    ]
    rows.append({"doc_id": "what", "type": "what", "target": "dog", "filtered_resps": ["4"]})
    return Results(Path(), {"recipe": recipe}, {row["doc_id"]: row for row in rows})


def test_wrong_numbers_are_too_high_or_too_low() -> None:
    every = [
        counts("random:budget=0.1", ("1", "1"), ("2", "1")),
        counts("hired:budget=0.1", ("1", "2"), ("2", "3"), ("4", "4"), ("3", "three"), ("3", "")),
        counts("random:budget=0.1,seed=1", ("3", "4"), ("10", "9")),
    ]
    kinds = {"right": 1, "high": 2, "low": 0, "other": 2}
    assert counting.counted(every) == [
        {"recipe": "hired:budget=0.1", "answers": 5} | kinds,
        {"recipe": "random:budget=0.1", "answers": 4, "right": 1, "high": 1, "low": 2, "other": 0},
    ]
