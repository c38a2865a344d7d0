"""`benchmarks/pocket/train.py` trains on answers alone, and resumes as if it had not stopped."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_pocket import (
    SIZE,
    PocketError,
    build,
    checkpoints,
    evaluate,
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

SETTINGS = train.Settings(size=SIZE, batch=2, questions=3)
ASKED = [
    [
        scenes.Question("what", "What is in the top?", "cat"),
        scenes.Question("count", "How many?", "2"),
    ],
    [scenes.Question("where", "Where is the dog?", "bottom left")],
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_objects(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def encoded(drawn: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patches of the tiny tower."""
    folder = tmp_path_factory.mktemp("patches")
    for part in ("train", "check"):
        made = patches.Patches(folder / part, part, make_pocket(), drawn)
        for kind in ("scene", "word", "video"):
            made.fill(kind, 32)
    return folder


def stage(kind: str, drawn: Any, encoded: Path, settings: train.Settings = SETTINGS) -> Any:
    pocket = make_pocket()
    pocket.decoder.bfloat16()
    made = {"a": train.StageA, "b": train.StageB}[kind]
    read = [patches.Patches(encoded / part, part, pocket, drawn) for part in ("train", "check")]
    return made(pocket, *read, settings)


def batch(pocket: Any, asked: list[list[Any]] = ASKED, keep_positions: bool = True) -> Any:
    rng = np.random.default_rng(0)
    features = [rng.standard_normal((36, 32)).astype(np.float16) for _ in asked]
    kept = [np.arange(0, 36, 4) + row for row in range(len(asked))]
    return train.batch_of(pocket, features, asked, kept, keep_positions)


def test_labels_cover_exactly_the_answers() -> None:
    pocket = make_pocket()
    made = batch(pocket)
    tokens = torch.cat([torch.full((2, 10), -1), made.ids], 1)
    for row, asked in enumerate(ASKED):
        assert (made.labels[row, :10] == train.IGNORED).all()
        for number, of in enumerate(asked, 1):
            own = made.segments[row] == number
            text = pocket.processor.tokenizer.decode(tokens[row][own])
            assert text == f"\nQuestion: {of.text}\nAnswer: {of.answer}\n"
            labels = made.labels[row][own]
            labelled = labels != train.IGNORED
            answer = pocket.processor.tokenizer.decode(labels[labelled])
            assert answer == f" {of.answer}\n"
            assert labelled.tolist() == sorted(labelled.tolist())  # at the end of the question
    padding = made.segments == -1
    assert padding.any() and (made.labels[padding] == train.IGNORED).all()


@pytest.mark.parametrize("keep_positions", [True, False])
def test_positions_are_those_of_a_prompt(keep_positions: bool) -> None:
    """Of the whole image, or of the patches that are left; each question starts after it."""
    pocket = make_pocket()
    made = batch(pocket, keep_positions=keep_positions)
    for row in range(2):
        image = made.positions[row, :10].tolist()
        some = [1 + at for at in range(row, 36, 4)]
        assert image == [0, *(some if keep_positions else range(1, 10))]
        for number in range(1, 1 + len(ASKED[row])):
            own = made.positions[row][made.segments[row] == number].tolist()
            start = 37 if keep_positions else 10
            assert own == list(range(start, start + len(own)))


def test_questions_do_not_attend_to_one_another() -> None:
    pocket = make_pocket()

    def loss_of_second(made: Any) -> torch.Tensor:
        made.labels[made.segments == 1] = train.IGNORED
        with torch.no_grad():
            return train.answer_loss(pocket, made)[0]

    asked = [ASKED[0]]
    first = loss_of_second(batch(pocket, asked))
    other = batch(pocket, asked)
    own = other.segments[0, 10:] == 1
    other.ids[0, own] = other.ids[0, own].flip(0)
    assert torch.equal(loss_of_second(other), first)
    other = batch(pocket, asked)  # control: the image is attended to
    other.features = -other.features
    assert not torch.equal(loss_of_second(other), first)


def test_loss_is_that_of_the_model_on_the_whole_prompt(
    drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All patches at their positions: the answers' probabilities are those of the LLaVA."""
    pocket, of = make_pocket(), ASKED[1][0]
    image = next(iter(drawn.files))
    picked = drawn.drawing(image, "google").convert("RGB").resize((SIZE, SIZE))
    given = pocket.processor(text="<unused0>", images=picked, return_tensors="pt")
    text = pocket.ids(build.prompt(of.text)) + pocket.ids(f" {of.answer}\n")
    ids = torch.cat([given.input_ids, torch.tensor([text])], 1)
    answer = len(pocket.ids(f" {of.answer}\n"))
    monkeypatch.setattr(torch, "autocast", lambda *_: torch.enable_grad())
    with torch.no_grad():
        logits = pocket.model(input_ids=ids, pixel_values=given.pixel_values).logits
        rows = pocket.tower(given.pixel_values, output_hidden_states=True).hidden_states[-1][0, 1:]
        made = train.batch_of(pocket, [rows.numpy()], [[of]], [np.arange(36)], True)
        loss, _ = train.answer_loss(pocket, made)
    expected = torch.nn.functional.cross_entropy(
        logits[0, -answer - 1 : -1], ids[0, -answer:], reduction="mean"
    )
    torch.testing.assert_close(loss, expected)


def test_an_answer_is_right_if_all_of_its_tokens_are() -> None:
    pocket = make_pocket()
    made = batch(pocket)
    newline = pocket.ids("\n")[0]
    with torch.no_grad():  # a head that always predicts a newline
        hidden = pocket.model.get_input_embeddings().weight
        pocket.model.lm_head = torch.nn.Linear(hidden.shape[1], len(hidden))
        pocket.model.lm_head.weight.zero_()
        pocket.model.lm_head.bias.copy_(torch.arange(len(hidden)) == newline)
        assert train.answer_loss(pocket, made)[1].tolist() == [False, False, False]
        made.labels[(made.labels != train.IGNORED) & (made.segments == 1)] = newline
        assert train.answer_loss(pocket, made)[1].tolist() == [True, False, True]


def test_labels_of_patches_are_what_covers_them(drawn: Any, encoded: Path) -> None:
    made = patches.Patches(encoded / "train", "train", make_pocket(), drawn)
    for number in range(8):
        of = made.layout("scene", number)
        labels = made.labels("scene", number).reshape(6, 6)
        for at in of.frames[0]:
            row, column = divmod(at.cell, 3)
            middle = labels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert (middle == made.classes.index(at.name)).any()
        names = {made.classes[label] for label in labels.flatten() if label >= 0}
        assert names == set(of.cells.values())
    assert made.features("video", 0).shape == (4 * 36, 32)
    assert made.labels("video", 0).shape == (4 * 36,)


def test_encoding_continues_after_the_last_complete_file(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "SHARD", 4)
    made = patches.Patches(tmp_path, "train", make_pocket(), drawn)
    made.fill("scene", 8)
    expected = [made.features("scene", n).copy() for n in range(8)]
    (tmp_path / "scene-00001-features.npy").unlink()  # interrupted after the labels
    made = patches.Patches(tmp_path, "train", make_pocket(), drawn)
    assert made.count("scene") == 4
    made.fill("scene", 8, deadline=0)
    assert made.count("scene") == 4
    made.fill("scene", 8)
    assert all((made.features("scene", n) == expected[n]).all() for n in range(8))
    with pytest.raises(PocketError, match="has patches of other images or of another version"):
        patches.Patches(tmp_path, "check", make_pocket(), drawn)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a", "b"])
def test_resuming_equals_an_uninterrupted_run(
    kind: str, drawn: Any, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in (train.StageA, train.StageB):
        monkeypatch.setattr(made, "log", 1)
        monkeypatch.setattr(made, "check_each", 3)
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    assert train.fit(stage(kind, drawn, encoded), folders[0], 6) == 6
    for most in (2, 3, 9):  # steps until the time is over
        clock = itertools.count()  # read once before the first step
        made = stage(kind, drawn, encoded)
        done = train.fit(made, folders[1], 6, 2 * most, 100, clock.__next__)
    assert done == 6
    whole, resumed = (checkpoints.load_checkpoint(folder / f"{kind}.pt") for folder in folders)
    assert whole["step"] == resumed["step"] == 6
    for part in ("projector", *(["adapter"] if kind == "b" else [])):
        assert whole[part].keys() == resumed[part].keys()
        for name, value in whole[part].items():
            assert torch.equal(value, resumed[part][name]), name
    lines = [
        [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert [line["step"] for line in lines[0]] == [1, 2, 3, 4, 5, 6]
    for line in itertools.chain(*lines):
        del line["seconds"]
    assert lines[0] == lines[1]
    assert kind == "b" or any("check_scene" in line for line in lines[0])
    start = stage(kind, drawn, encoded)  # control: the weights have changed
    assert not torch.equal(
        whole["projector"]["linear_2.weight"], start.pocket.projector.linear_2.weight
    )


def test_stage_a_learns_the_names(drawn: Any, encoded: Path, tmp_path: Path) -> None:
    made = stage("a", drawn, encoded)
    train.fit(made, tmp_path, 200)
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2 and lines[-1]["right"] > 0.6


def test_curve_drops_lines_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    curve = checkpoints.Curve(path, "a", 0)
    for step in (10, 20, 30):
        curve.append(step, loss=1.0)
    with path.open("a") as file:
        file.write('{"stage": "a", "st')
    checkpoints.Curve(path, "b", 0).append(10, loss=2.0)
    checkpoints.Curve(path, "a", 20)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in found] == [("a", 10), ("a", 20), ("b", 10)]


def test_rate_warms_up_and_decays() -> None:
    rates = [train.rate(step, 1000) for step in range(1000)]
    assert rates[0] == 1 / 40 and rates[39] == rates[800] == 1 and 0 < rates[999] < 0.01
    assert rates == sorted(rates[:40]) + rates[40:800] + sorted(rates[800:], reverse=True)


@pytest.mark.slow
def test_from_parts_to_answers(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All commands in turn: the answers of the built folder are those of Hugging Face."""
    monkeypatch.setattr(objects, "read", lambda *_: drawn)
    folder, run, out = save_parts(tmp_path / "parts"), tmp_path / "run", tmp_path / "out"
    command = [str(folder), str(run), "--device", "cpu", "--batch", "2", "--questions", "2"]
    command += ["--size", str(SIZE), "--scenes", "32", "--words", "0", "--videos", "32"]
    monkeypatch.setattr(train.StageB, "check_each", 100)
    assert train.main([*command, "--minutes", "0"]) == 0
    assert "repeat the command to continue" in capsys.readouterr().out
    assert train.main([*command, "--steps-a", "4", "--steps-b", "3"]) == 0
    assert "stage b: 3 of 3 steps" in capsys.readouterr().out
    assert build.main([str(folder), str(out), "--run", str(run), "--dtype", "float32"]) == 0
    about = json.loads((out / "pocket.json").read_text())
    assert about["stage"] == "b" and about["step"] == 3
    asked = ["--device", "cpu", "--scenes", "2", "--kind", "scene", "--kind", "video"]
    result = tmp_path / "result.json"
    asked += ["--compare", "12", "--out", str(result)]
    assert evaluate.main([str(out), str(folder), *asked]) == 1  # below the gate
    assert evaluate.main([str(out), str(folder), *asked, "--no-gate"]) == 0
    found = json.loads(result.read_text())
    assert found["compared"] == {"equal": 12, "asked": 12}
    assert {name: of["asked"] for name, of in found["types"].items()} == dict.fromkeys(
        ("what", "where", "list", "count", "empty", "way", "moves"), 2
    ) | {"count": 4}
    assert found["model"]["step"] == 3 and found["recipe"] == "none"
    printed = capsys.readouterr().out
    assert "missed: what" in printed and "12 of 12 greedy answers" in printed


def test_merged_weights_are_the_trained_ones(
    drawn: Any, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_parts(tmp_path / "parts")
    pocket = build.read(folder, SIZE)
    read = [patches.Patches(encoded / part, part, pocket, drawn) for part in ("train", "check")]
    made = train.StageB(pocket, *read, SETTINGS)
    monkeypatch.setattr(train.StageB, "rates", (1e-2, 1e-2))
    train.fit(made, tmp_path, 3)
    merged, about = build.trained(folder, tmp_path)
    assert about["stage"] == "b"
    given = batch(pocket)
    monkeypatch.setattr(torch, "autocast", lambda *_: torch.enable_grad())
    with torch.no_grad():
        trained, found = (train.answer_loss(of, given)[0] for of in (pocket, merged))
        before = train.answer_loss(build.read(folder, SIZE), given)[0]
    torch.testing.assert_close(found, trained)
    assert abs(found - before) > 0.01


@pytest.mark.skipif(sys.platform == "win32", reason="workers are forked")
def test_workers_change_nothing(drawn: Any, encoded: Path, tmp_path: Path) -> None:
    """Batches and patches are those of one process, in the same order."""
    made = stage("b", drawn, encoded)
    own = list(made.batches(3, 7))
    made.workers = 2
    ahead = list(made.batches(3, 7))
    assert len(own) == len(ahead) == 4
    for one, other in zip(own, ahead, strict=True):
        assert one.asked == other.asked
        for name in ("features", "ids", "positions", "segments", "labels"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert own[0].asked != own[1].asked  # control
    filled = patches.Patches(tmp_path, "train", make_pocket(), drawn)
    filled.fill("word", 40, workers=2)
    assert filled.count("word") == 64
    first = patches.Patches(encoded / "train", "train", make_pocket(), drawn)
    for number in range(32):
        assert (filled.labels("word", number) == first.labels("word", number)).all()
        assert (filled.features("word", number) == first.features("word", number)).all()
    assert (filled.features("word", 32) != first.features("word", 0)).any()


@pytest.mark.slow
def test_exported_weights_build_the_same_model(
    drawn: Any, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, weights = save_parts(tmp_path / "parts"), tmp_path / "weights"
    page = "<p>Sign in</p>\n<h1>\nGemma Terms of Use\n</h1>\n<p>3.2\n</p>\n<b>\nSend feedback\n</b>"
    (folder / "decoder" / parts.TERMS).write_text(page)
    made = stage("b", drawn, encoded)
    monkeypatch.setattr(train.StageB, "rates", (1e-2, 1e-2))
    monkeypatch.setattr(train.StageB, "log", 1)
    train.fit(made, tmp_path, 3)
    assert export.main([str(tmp_path), str(folder), str(weights)]) == 0
    assert (weights / "GEMMA_TERMS.txt").read_text() == "Gemma Terms of Use\n3.2\n"
    assert "ai.google.dev/gemma/terms" in (weights / "NOTICE.md").read_text()
    assert (weights / "curve.jsonl").read_text() == (tmp_path / "curve.jsonl").read_text()
    pocket, about = build.trained(folder, tmp_path)
    other, same = build.trained(folder, weights)
    assert about == same
    start = build.read(folder, SIZE)
    for (name, value), exported, first in zip(
        pocket.model.named_parameters(),
        other.model.parameters(),
        start.model.parameters(),
        strict=True,
    ):
        # The changes are rounded to bfloat16, with eight bits of mantissa.
        least = 2**-7 * (value - first).abs().max() if "language" in name else 0
        torch.testing.assert_close(exported, value, rtol=2**-7, atol=float(least))
