"""Training of `tiny`: packing, resuming after a kill, export and generation."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import LlavaNextProcessor

from support.closeness import close
from support.paths import ROOT
from support.tiny_trainer import (
    FOLDER,
    architecture,
    batches,
    bpe,
    heads,
    labels,
    network,
    references,
    schedule,
    training,
)
from support.tower_terms import answer
from vlmfast.core.exit_codes import ExitCode
from vlmfast.scenes.drawing import make_image_scene
from vlmfast.scenes.examples import EVAL_SEED_START, image_example, video_example
from vlmfast.scenes.vocabulary import COLOR_NAMES, SHAPES

build_model, SHIPPED = architecture.build_model, architecture.SHIPPED
turn, video_prefix = bpe.turn, bpe.video_prefix
Spec, make_batch, FIELDS = batches.Spec, batches.make_batch, labels.FIELDS
ATTENTION, Packed, packed_mask = network.ATTENTION, network.Packed, network.packed_mask
FACTS, UNKNOWN, facts = references.FACTS, references.UNKNOWN, references.facts
APART, DECAY, phase_of, plan = schedule.APART, schedule.DECAY, schedule.phase_of, schedule.plan
DenseHeads, to_tensors = heads.DenseHeads, network.to_tensors


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def packed():
    return Packed(build_model(3), DenseHeads()).eval()


def test_configuration_is_the_documented_one():
    model = build_model()
    config = model.config
    assert 5.5e6 < sum(p.numel() for p in model.parameters()) < 7e6
    assert config.text_config.num_hidden_layers == 6 and config.text_config.head_dim == 64
    assert config.vision_feature_layer == -2
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_packed_mask_separates_questions():
    mask = packed_mask(4, (2, 3), torch.device("cpu")) == 0
    assert mask[:4, :4].equal(torch.ones(4, 4).tril().bool())
    assert mask[4:, :4].all()
    assert not mask[6:, 4:6].any() and not mask[4:6, 6:].any()
    assert mask.any(1).all()  # no row without a key


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "small", "video"])
def test_packed_forward_equals_the_stock_model(packed, tokenizer, kind):
    """The logits of a slot equal those of the whole prompt in the stock model."""
    spec = Spec(kind, 5, 1, (("exist", 1.0), ("where", 1.0), ("order", 1.0), ("count", 1.0)))
    batch = make_batch(spec)
    tensors = to_tensors(batch, torch.device("cpu"))
    processor = LlavaNextProcessor.from_pretrained(SHIPPED)
    with torch.no_grad():
        patches = packed.patches(tensors["pixels"], kind)[2]
        hidden = packed.text(tensors, spec.slots, patches, 0.0)
        own = hidden @ packed.model.lm_head.weight.T
        for slot in (0, len(spec.slots) - 1):
            start = sum(spec.slots[:slot])
            ids = batch["ids"][0, start : start + spec.slots[slot]]
            ids = ids[ids > 0].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            pixels = batch["pixels"][0]
            if kind == "image":
                canvas = np.concatenate(
                    [np.concatenate(pixels[1:3], 1), np.concatenate(pixels[3:5], 1)]
                )
                images = [Image.fromarray(canvas)]
                prompt = "USER: <image>\n" + text
            else:
                step = 2 if kind == "video" else len(pixels)
                images = [Image.fromarray(p) for p in pixels[::step]]
                prompt = (video_prefix(1) if kind == "video" else "USER: <image>\n") + text
            inputs = processor(images=images, text=prompt, return_tensors="pt")
            packed.model.set_attn_implementation("eager")
            out = packed.model(**inputs).logits[0, -len(ids) :]
            packed.model.set_attn_implementation(ATTENTION)
            assert inputs["input_ids"][0, -len(ids) :].tolist() == ids
            terms = answer(packed, inputs["input_ids"].shape[1])
            close(own[0, start : start + len(ids)], out, terms=terms)


def test_base_view_equals_single_crop():
    for kind, views in (("small", 2), ("video", 8)):
        pixels = make_batch(Spec(kind, 1, 1, (("exist", 1.0),)))["pixels"]
        assert pixels.shape[1] == views
        assert np.array_equal(pixels[:, ::2], pixels[:, 1::2])


def test_codes_are_orthogonal_and_decodable():
    heads = DenseHeads()
    gram = heads.codes @ heads.codes.T
    terms = 2 * heads.codes.shape[1]  # a product, and the basis it is computed from
    close(gram, torch.diag(gram.diag()), terms=terms)
    fields = torch.stack([torch.randint(0, n, (5, 64)) for n in FIELDS.values()], -1)
    coordinates = torch.rand(5, 64, 2) * 2 - 1
    code = heads.encode(fields, coordinates)
    loss, info = heads.dense_loss(code, fields, coordinates)
    off = float(info["fit"]) ** 0.5  # a mean of squares of numbers around 1
    close(off, 0.0, torch.float32, terms, scale=code.abs().max())
    assert all(float(info[name]) == 1.0 for name in FIELDS)
    noisy, _ = heads.dense_loss(code + torch.randn_like(code), fields, coordinates)
    assert noisy > loss


def test_schedule_is_deterministic_and_ends_at_rate_zero():
    assert [phase_of(x) for x in (0, APART, DECAY, 1)] == ["apart", "together", "decay", "decay"]
    assert plan(9, 0.5, 1, 8) == plan(9, 0.5, 1, 8)
    assert plan(900, 1.0, 1, 8).lr == 0
    late = [plan(i, 0.9, 1, 8) for i in range(200)]
    pixels = [p for p in late if not p.codes]
    assert len(pixels) > 0.7 * len(late)  # label codes stay as a small part
    assert all(p.spec.hint == 0 and p.spec.options == 4 for p in late)
    dropped = [p for p in pixels if p.spec.keep]
    assert dropped
    assert not any(p.spec.keep_foreground for p in dropped)
    assert {p.spec.kind for p in late} == {"image", "small", "video"}  # no longer text only


def test_names_point_at_their_objects(tokenizer):
    """The supervised tokens end names, and their bits mark the right objects."""
    weights = tuple((t, 1.0) for t in ("exist", "rel", "color", "shape", "where", "chart"))
    spec = Spec("image", 40, 24, weights)
    a = make_batch(spec)
    seen = 0
    for row in range(spec.size):
        for at, bits in zip(a["named_at"][row], a["named"][row], strict=True):
            if at < 0 or bits == 0:
                continue
            word = tokenizer.decode([int(a["ids"][row, at])]).strip()
            meant = (bits >> a["owner"][row].astype(int)) & 1 > 0
            shape, color = a["fields"][row][meant][:, :2].T
            if word in SHAPES:
                assert (shape == 1 + SHAPES.index(word)).all() and len(shape)
                before = tokenizer.decode([int(a["ids"][row, at - 1])]).strip()
                if before in COLOR_NAMES:
                    assert (color == 1 + COLOR_NAMES.index(before)).all()
                seen += 1
        for k in range(8):
            position, first, last = a["recall"][row, k]
            if position >= 0:
                assert tokenizer.decode([int(a["ids"][row, position])]) == ":"
                assert a["targets"][row, position] >= 0 and first <= last < position
    assert seen > 100


def test_options_and_letters_are_found(tokenizer):
    for spec in (
        Spec("text", 3, 12),
        Spec("image", 3, 12, (("color", 1.0),), hint=0.4, reverse=0.3),
    ):
        a = make_batch(spec)
        seen = 0
        for row, choices in enumerate(a["choice"]):
            for c in choices[choices[:, 8] >= 0]:
                words = [tokenizer.decode([int(a["ids"][row, i])]).strip() for i in c]
                live = [w for w, i in zip(words[:4], c[:4], strict=True) if i >= 0]
                assert sorted(live) == list("ABCD"[: len(live)]) and words[8] == ":"
                target = a["targets"][row, c[8]]
                answer = tokenizer.decode([int(target)]).strip()
                if len(answer) == 1 and answer in "ABCD":
                    assert live[0] == answer  # the right option comes first
                seen += 1
        assert seen > 8


def test_facts_about_named_objects():
    for i in range(50):
        scene = make_image_scene(random.Random(i))
        for k, thing in enumerate(scene.things):
            row = dict(zip(FACTS, facts(scene, 1 << (1 + k)), strict=True))
            assert SHAPES[int(row["shape"])] == thing.shape
            assert COLOR_NAMES[int(row["color"])] == thing.color
            close((float(row["x"]) + 1) * 64, float(thing.x), torch.float32, 2, scale=128)
            assert row["appear"] == row["move"] == UNKNOWN
        if len(scene.things) > 1:
            assert facts(scene, 0b110) == [UNKNOWN] * len(FACTS)  # two objects: facts are unknown
    assert facts(scene, 0)[0] == 0.0


def test_heads_follow_from_the_seed() -> None:
    first, again, other = (DenseHeads(seed=seed).state_dict() for seed in (4, 4, 5))
    for name in ("codes", "cls_last.weight", "relations.weight", "relations.bias"):
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


@pytest.mark.slow
def test_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """A run that is killed with SIGKILL ends with the same weights, bit for bit."""
    command = [
        sys.executable, str(FOLDER / "training.py"), "--batch", "1",
        "--max-steps", "9", "--seed", "4", "--save-every", "0",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run([*command, "--out", str(whole)], check=True, **quiet)
    run = subprocess.Popen([*command, "--out", str(cut)], **quiet)
    while not (cut / "checkpoint.pt").exists() and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    subprocess.run([*command, "--out", str(cut)], check=True, **quiet)
    a, b = (torch.load(d / "checkpoint.pt", weights_only=True) for d in (whole, cut))
    assert a["step"] == b["step"] == 9
    for part in ("weights", "average"):
        for name, value in a[part].items():
            assert torch.equal(value, b[part][name]), name


@pytest.mark.slow
def test_run_stops_resumes_and_exports(tmp_path, capsys, monkeypatch):
    """A complete run on the smallest scale, and the exported folder."""

    def stop(trainer: training.TinyTrainer) -> str:
        if trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return ""

    out = tmp_path / "run"
    short = ["--out", str(out), "--batch", "1", "--max-steps", "5"]
    with monkeypatch.context() as patched:
        patched.setattr(training.TinyTrainer, "stepped", stop)
        assert training.main(short) == ExitCode.CUT_SHORT
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 2
    assert not (out / "log.jsonl").exists()  # too short for a log line
    assert training.main(short) == 0
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 5
    assert training.main([*short, "--seed", "9"]) == ExitCode.USER_ERROR
    assert "seed=0, not 9" in capsys.readouterr().err
    names = {path.name for path in out.iterdir()}
    assert names == {"checkpoint.pt", "model"}
    _check_folder(out / "model")


def _check_folder(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert (folder / "model.safetensors").stat().st_size < 16e6
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    assert type(model).__name__ == "LlavaNextForConditionalGeneration"
    assert model.dtype == torch.bfloat16
    example = image_example(EVAL_SEED_START)
    question = example.qa[0].question
    messages = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": question}],
        }
    ]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == f"USER: <image>\n{turn(question)}"
    inputs = processor(images=example.image, text=prompt, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(1) == 1 and ids[0] == 1 and ids.count(4) == 336
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    new = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, len(ids) :]
    assert 1 <= len(new) <= 4
    parts = []
    for i in range(4):
        parts += [{"type": "text", "text": f"frame {i + 1} "}, {"type": "image"}]
    content = [*parts, {"type": "text", "text": "Which object moves?"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    assert prompt == video_prefix(1) + turn("Which object moves?")
    frames = video_example(EVAL_SEED_START).frames
    ids = processor(images=frames, text=prompt, return_tensors="pt")["input_ids"][0].tolist()
    assert ids.count(4) == 544 and ids.count(1) == 1


def test_invalid_arguments_are_refused(capsys):
    for given in ("--minutes 0", "--minutes nan", "--batch 129", "--max-steps -1"):
        with pytest.raises(SystemExit):
            training.parse(given.split())
        assert given.split()[0] in capsys.readouterr().err


def test_a_batch_whose_gradients_are_not_finite_changes_nothing(tmp_path, monkeypatch):
    trainer = training.TinyTrainer(training.parse(["--out", str(tmp_path), "--batch", "1"]))
    planned = plan(0, 0.0, 0, 1)
    batch = make_batch(planned.spec)

    def weights() -> list[torch.Tensor]:
        return [p.detach().clone() for p in trainer.packed.parameters()]

    before, norms = weights(), iter([float("nan"), 1.0])
    monkeypatch.setattr(training, "clip", lambda packed: next(norms))
    trainer.learn(planned, batch)
    assert all(map(torch.equal, weights(), before))
    trainer.learn(planned, batch)
    assert not all(map(torch.equal, weights(), before))


@pytest.mark.slow
def test_loss_falls_on_the_same_batch(tmp_path):
    """Also the losses of what attention and hidden states must know."""
    trainer = training.TinyTrainer(training.parse(["--out", str(tmp_path), "--batch", "2"]))
    spec = Spec("image", 3, 2, (("rel", 1.0), ("where", 1.0), ("color", 1.0)), pixels=False)
    planned = replace(plan(50, 0.5, 0, 2), spec=spec, codes=True)
    batch = make_batch(spec)
    lines = [trainer.learn(planned, batch) for _ in range(60)]
    for name in ("answer", "question", "look", "recall", "facts", "compared", "choose"):
        assert float(lines[-1][name]) < 0.8 * float(lines[0][name]), name


@pytest.mark.cases(1)
@pytest.mark.parametrize("state", [b"x", {}, {"settings": {"seed": 0}, "weights": {}}])
def test_file_of_another_training_is_refused(tmp_path, state, capsys):
    if isinstance(state, bytes):
        (tmp_path / "checkpoint.pt").write_bytes(state)
    else:
        torch.save(state, tmp_path / "checkpoint.pt")
    command = ["--out", str(tmp_path), "--max-steps", "1"]
    assert training.main(command) == ExitCode.USER_ERROR
    message = capsys.readouterr().err
    assert "checkpoint.pt is no checkpoint of this training" in message and "--fresh" in message


def test_shipped_folder_loads_and_generates():
    _check_folder(SHIPPED)
