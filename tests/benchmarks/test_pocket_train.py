"""`benchmarks/pocket/train.py` trains on answers alone, and resumes as if it had not stopped."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.tiny_pocket import (
    SIZE,
    build,
    evidence,
    make_objects,
    make_pocket,
    objects,
    patches,
    save_parts,
    scenes,
    train,
)
from vlmfast import VLM

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


def stage(kind: str, drawn: Any, encoded: Path, run: Path, steps: int, **more: Any) -> Any:
    pocket = make_pocket()
    pocket.decoder.bfloat16()
    made = {"a": train.StageA, "b": train.StageB}[kind]
    read = [patches.Patches(encoded / part, part, pocket, drawn) for part in ("train", "check")]
    return made(pocket, *read, SETTINGS, run, steps, **more)


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    text = (run / kind / "log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


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
    made.fill("scene", 8)
    assert all((made.features("scene", n) == expected[n]).all() for n in range(8))
    with pytest.raises(SystemExit, match="has patches of other images"):
        patches.Patches(tmp_path, "check", make_pocket(), drawn)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a", "b"])
def test_resuming_equals_an_uninterrupted_run(
    kind: str, drawn: Any, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in (train.StageA, train.StageB):
        monkeypatch.setattr(made, "log", 1)
        monkeypatch.setattr(made, "check_each", 3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    stage(kind, drawn, encoded, whole, 6).train()
    for most in (2, 3, 0):
        stage(kind, drawn, encoded, parts, 6, stop_after=most).train()
    one, other = (
        torch.load(run / kind / "checkpoint.pt", weights_only=True) for run in (whole, parts)
    )
    assert one["step"] == other["step"] == 6
    for part in ("projector", *(["adapter"] if kind == "b" else [])):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert torch.equal(value, other[part][name]), name
    found = [[line | {"minutes": 0} for line in lines(run, kind)] for run in (whole, parts)]
    assert [line["step"] for line in found[0]] == [1, 2, 3, 4, 5, 6]
    assert found[0] == found[1]
    assert ["check_what" in line for line in found[0]][2::3] == [kind == "b"] * 2
    start = stage(kind, drawn, encoded, whole, 6, fresh=True)  # control: the weights have changed
    assert not torch.equal(
        one["projector"]["linear_2.weight"], start.pocket.projector.linear_2.weight
    )


def test_stage_a_learns_the_names(drawn: Any, encoded: Path, tmp_path: Path) -> None:
    stage("a", drawn, encoded, tmp_path, 200).train()
    first, *_, last = lines(tmp_path, "a")
    assert last["loss"] < first["loss"] / 2 and last["right"] > 0.6


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
    command += ["--steps-a", "4", "--steps-b", "3"]
    for _ in range(2):  # the second time from the checkpoints
        assert train.main(command) == 0
        assert "stage b: 3 of 3 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"was written with seed=0, not 1: .* --fresh"):
        train.main([*command, "--seed", "1"])
    assert build.main([str(folder), str(out), "--run", str(run), "--dtype", "float32"]) == 0
    about = json.loads((out / "pocket.json").read_text())
    assert about["stage"] == "b" and about["step"] == 3
    vlm, task = (
        VLM.from_pretrained(str(out), device="cpu"),
        evidence.Scenes(drawn, SIZE, ("scene", "video")),
    )
    docs = task.docs(2, 0)
    assert Counter(doc.type for doc in docs) == dict.fromkeys(
        ("what", "where", "list", "count", "empty", "video-way", "video-moves", "video-count"), 2
    )
    for doc in docs:
        images = task.frames(doc)
        own = vlm.ask(doc.question, images=images, recipe="none", **evidence.GREEDY).token_ids
        inputs = vlm.inputs(doc.question, images=images)
        ids = vlm.model.generate(**inputs, **evidence.GREEDY)
        assert own == ids[0, inputs["input_ids"].shape[1] :].tolist()


def test_built_weights_are_the_trained_ones(
    drawn: Any, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_parts(tmp_path / "parts")
    pocket = build.read(folder, SIZE)
    read = [patches.Patches(encoded / part, part, pocket, drawn) for part in ("train", "check")]
    monkeypatch.setattr(train.StageB, "rates", (1e-2, 1e-2))
    made = train.StageB(pocket, *read, SETTINGS, tmp_path, 3)
    made.train()
    built, about = build.trained(folder, tmp_path)
    assert about == {"stage": "b", "step": 3, "settings": made.settings()}
    pocket.model.model.language_model = made.adapted.merge_and_unload()
    start = build.read(folder, SIZE)
    changed = 0
    for (name, value), other, first in zip(
        pocket.model.named_parameters(),
        built.model.parameters(),
        start.model.parameters(),
        strict=True,
    ):
        # The trained weights are stored in bfloat16, with eight bits of mantissa.
        most = (value - first).abs().max()
        changed += bool(most)
        least = 2**-7 * most if "language" in name else 0
        torch.testing.assert_close(other, value, rtol=2**-7, atol=float(least))
    assert changed > 4


@pytest.mark.skipif(sys.platform == "win32", reason="workers are forked")
def test_workers_change_nothing(drawn: Any, encoded: Path, tmp_path: Path) -> None:
    """Batches and patches are those of one process, in the same order."""
    made = stage("b", drawn, encoded, tmp_path / "run", 7)
    own = list(made.batches(range(3, 7)))
    made.workers = 2
    ahead = list(made.batches(range(3, 7)))
    assert len(own) == len(ahead) == 4
    for one, other in zip(own, ahead, strict=True):
        assert one.asked == other.asked
        for name in ("features", "ids", "positions", "segments", "labels"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert own[0].asked != own[1].asked  # control
    filled = patches.Patches(tmp_path / "patches", "train", make_pocket(), drawn)
    filled.fill("word", 40, workers=2)
    assert filled.count("word") == 64
    first = patches.Patches(encoded / "train", "train", make_pocket(), drawn)
    for number in range(32):
        assert (filled.labels("word", number) == first.labels("word", number)).all()
        assert (filled.features("word", number) == first.features("word", number)).all()
    assert (filled.features("word", 32) != first.features("word", 0)).any()
