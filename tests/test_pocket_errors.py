"""The commands of ``benchmarks/pocket`` report bad input in one line, before any long work."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tiny_pocket import (
    SIZE,
    build,
    checkpoints,
    evaluate,
    evidence,
    export,
    make_objects,
    make_pocket,
    objects,
    parts,
    patches,
    save_parts,
    scenes,
    train,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Parts, trainings and drawings, which no test changes."""
    folder = tmp_path_factory.mktemp("pocket")
    made = save_parts(folder / "parts")
    (folder / "objects").mkdir()
    drawn = make_objects(folder / "objects")
    pocket = make_pocket()
    state = {"step": 1, "settings": asdict(train.Settings(size=SIZE))}
    projector = pocket.projector.state_dict()
    trainings = {
        "run": {"projector": projector},
        "narrow": {"projector": dict.fromkeys(projector, torch.zeros(2, 2))},
        "deep": {
            "projector": projector,
            "adapter": {"layers.9.mlp.up_proj.lora_A.weight": torch.zeros(16, 32)},
        },
    }
    for name, weights in trainings.items():
        checkpoints.save_weights(folder / name, {**state, **weights})
    return SimpleNamespace(folder=folder, parts=made, drawn=drawn)


@pytest.fixture
def folder(shared: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies for one test, and a file where a folder is expected."""
    for name in ("parts", "run", "narrow", "deep"):
        shutil.copytree(shared.folder / name, tmp_path / name)
    (tmp_path / "file").touch()
    monkeypatch.setattr(objects, "read", lambda *_: shared.drawn)
    return tmp_path


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def message(
    main: Callable[[list[str]], int], arguments: list[Any], capsys: pytest.CaptureFixture
) -> str:
    """The one line that a command ends with, without ``error: ``."""
    capsys.readouterr()
    try:
        code: Any = main([str(of) for of in arguments])
    except SystemExit as error:
        code = error.code
    text = code if isinstance(code, str) else capsys.readouterr().err.rstrip("\n")
    assert code != 0 and text.startswith("error: ") and "\n" not in text
    return text.removeprefix("error: ")


# --- files that are damaged or missing ------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda of: truncate(of / "tower" / "model.safetensors"), "tower cannot be read: "),
        (lambda of: truncate(of / "tower" / "config.json"), "tower cannot be read: "),
        (lambda of: (of / "decoder" / "model.safetensors").unlink(), "decoder cannot be read: "),
        (lambda of: truncate(of / "decoder" / "tokenizer.json"), "decoder cannot be read: "),
        (lambda of: truncate(of / "pocket.json"), r"pocket\.json cannot be read: "),
        (lambda of: (of / "pocket.json").write_text("[]"), r"pocket\.json has no JSON object"),
    ],
    ids=["tower", "config", "decoder", "tokenizer", "note", "list"],
)
def test_damaged_parts_are_named(
    damage: Callable[[Path], Any], problem: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    damage(folder / "parts")
    command = [folder / "parts", folder / "out", "--run", folder / "run"]
    assert re.search(problem, message(build.main, command, capsys))
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("run", "reason"),
    [("narrow", "size mismatch for linear_"), ("deep", "the adapter has ")],
    ids=["projector", "adapter"],
)
def test_trainings_of_other_parts_are_refused(
    run: str, reason: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    command = [folder / "parts", folder / "out", "--run", folder / run]
    found = message(build.main, command, capsys)
    assert found.startswith(f"{folder / run} is no training of the parts in {folder / 'parts'}: ")
    assert reason in found


def test_damaged_trainings_are_named(folder: Path, capsys: pytest.CaptureFixture) -> None:
    truncate(folder / "run" / checkpoints.WEIGHTS)
    command = [folder / "parts", folder / "out", "--run", folder / "run"]
    assert "trained.safetensors cannot be read: " in message(build.main, command, capsys)


def test_damaged_patches_are_named(folder: Path, capsys: pytest.CaptureFixture) -> None:
    command = [folder / "parts", folder / "new", "--device", "cpu", "--size", SIZE]
    command += ["--scenes", "32", "--words", "0", "--videos", "0"]
    assert train.main([*map(str, command), "--minutes", "0"]) == 0
    note = folder / "new" / "patches" / "train" / "patches.json"
    whole = note.read_text()
    truncate(note)
    assert "patches.json cannot be read: " in message(train.main, command, capsys)
    note.write_text(whole)
    (note.parent / "scene-00000-labels.npy").write_bytes(b"no array")
    (note.parent / "scene-00000-features.npy").touch()
    assert "features.npy or its labels cannot be read: " in message(train.main, command, capsys)


def test_checkpoints_of_other_parts_are_refused(
    shared: SimpleNamespace, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(patches, "SHARD", 4)
    state = {"step": 1, "settings": asdict(train.Settings(size=SIZE)), "optimizer": {}}
    narrow = {"linear_1.weight": torch.zeros(2, 2)}
    checkpoints.save_checkpoint(folder / "run" / "a.pt", {**state, "projector": narrow})
    command = [folder / "parts", folder / "run", "--device", "cpu", "--size", SIZE]
    command += ["--scenes", "4", "--words", "0", "--videos", "0"]
    for stage in ("a", "b"):
        found = message(train.main, [*command, "--stage", stage], capsys)
        assert "a.pt is no training of these parts: " in found


def test_damaged_drawings_are_named(tmp_path: Path) -> None:
    drawn = make_objects(tmp_path)
    truncate(tmp_path / "cat-google.png")
    with pytest.raises(parts.PocketError, match=r"cat-google\.png cannot be read: "):
        drawn.drawing("cat", "google")
    (tmp_path / "objects.json").write_text(json.dumps({"version": objects.VERSION}))
    with pytest.raises(parts.PocketError, match=r"emoji\.json cannot be read: No such file"):
        objects.read(tmp_path, None)


def test_damaged_photographs_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with pytest.raises(parts.PocketError, match=r"photographs: .*a\.jpg cannot be read: cannot"):
        evaluate.read_photographs(tmp_path)
    Image.effect_noise((64, 64), 9).save(tmp_path / "a.jpg")
    truncate(tmp_path / "a.jpg")
    with pytest.raises(parts.PocketError, match=r"photographs: .*a\.jpg cannot be read: .*trunc"):
        evaluate.read_photographs(tmp_path)


# --- files where folders are expected -------------------------------------------------------------


@pytest.mark.parametrize(
    ("main", "arguments", "problem"),
    [
        (parts.main, ["file", "--accept-gemma-terms"], "file cannot be read: "),
        (build.main, ["file", "out", "--run", "run"], "file cannot be read: "),
        (build.main, ["parts", "file/out", "--run", "run"], "file cannot be written: "),
        (export.main, ["run", "parts", "file"], "file cannot be written: "),
        (objects.main, ["file"], r"file.objects\.part cannot be written: "),
        (
            train.main,
            ["parts", "file", "--device", "cpu", "--size", SIZE],
            "file cannot be written: ",
        ),
    ],
    ids=["parts", "build-parts", "build-out", "export", "objects", "train"],
)
def test_files_in_place_of_folders_are_named(
    main: Callable[[list[str]], int],
    arguments: list[Any],
    problem: str,
    folder: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = folder / "parts" / "decoder" / parts.TERMS
    page.write_text("<p>Gemma Terms of Use</p>")
    monkeypatch.chdir(folder)
    assert re.search(problem, message(main, arguments, capsys))


def test_parts_below_a_file_are_named(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "located", lambda *_: folder / "file")
    monkeypatch.setattr(parts, "check_sum", lambda *_: None)
    command = [folder / "file" / "new", "--accept-gemma-terms"]
    assert "decoder.part cannot be written: " in message(parts.main, command, capsys)


# --- models of `evidence.py` ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("note", "problem"),
    [
        (None, r"has no model; `build\.py` makes it"),
        ({"version": 0, "stage": "b"}, "is of version 0, expected is 1; build it again"),
        ({"version": 1, "stage": "b"}, "cannot be read: "),
    ],
    ids=["none", "older", "no-tokenizer"],
)
@pytest.mark.parametrize("model", ["tiny", "folder"])
def test_evidence_needs_a_built_model(
    note: dict | None,
    problem: str,
    model: str,
    folder: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    if note is not None:
        (folder / model).mkdir()
        (folder / model / "pocket.json").write_text(json.dumps(note))
    command = ["pocket", "--parts", folder / "parts", "--model", model, "--out", folder / "runs"]
    assert re.search(f"{model} {problem}", message(evidence.main, command, capsys))


# --- evaluations ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--compare", "11"], "compare=11 is more than the 10 questions; raise --scenes"),
        (["--compare", "-1"], "compare=-1 must be at least 0"),
        (["--out", "file/a.json"], "file cannot be written: "),
        (["--out", "run"], "out: run is a folder; it must be a file"),
    ],
    ids=["more", "negative", "out-below-file", "out-folder"],
)
def test_arguments_are_checked_before_the_evaluation(
    arguments: list[str],
    problem: str,
    model: Answering,
    folder: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    command = [".", "parts", "--kind", "scene", "--scenes", "2", *arguments]
    assert message(evaluate.main, command, capsys).startswith(problem)
    assert model.asked == 0


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
        assert message(evaluate.main, command, capsys) == "interrupted"
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
