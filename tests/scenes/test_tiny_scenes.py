"""Generated scenes: reproducible, correctly labelled, and not answerable without the image."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
from tokenizers import Tokenizer

from support.paths import TESTS
from support.tiny_trainer import architecture, batches, bpe, labels, schedule
from vlmfast.scenes import examples as scenes
from vlmfast.scenes.captions import caption
from vlmfast.scenes.drawing import make_image_scene, paint, quadrant, shape_mask
from vlmfast.scenes.glyphs import CHARS, GLYPHS
from vlmfast.scenes.questions import ask_all
from vlmfast.scenes.vocabulary import COLOR_NAMES, SHAPES

image_prefix, turn, video_prefix = bpe.image_prefix, bpe.turn, bpe.video_prefix
Spec, make_batch, plan = batches.Spec, batches.make_batch, schedule.plan
START = scenes.EVAL_SEED_START


def _fingerprint(n: int = 12) -> str:
    h = hashlib.sha256()
    for i in range(n):
        a, b = scenes.image_example(START + i), scenes.video_example(START + i)
        h.update(np.asarray(a.image).tobytes() + a.foreground.tobytes())
        h.update(b"".join(np.asarray(f).tobytes() for f in b.frames))
        h.update(repr((a.qa, a.caption, a.caption_slots, b.qa, b.caption)).encode())
    return h.hexdigest()


@pytest.fixture(scope="module")
def images() -> list[scenes.ImageExample]:
    return [scenes.image_example(START + i) for i in range(1500)]


@pytest.fixture(scope="module")
def videos() -> list[scenes.VideoExample]:
    return [scenes.video_example(START + i) for i in range(900)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(architecture.SHIPPED / "tokenizer.json"))


@pytest.mark.slow
def test_examples_are_reproducible_across_processes():
    here = _fingerprint()
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - global state must not matter
    assert _fingerprint() == here
    code = (
        f"import importlib.util as u; s = u.spec_from_file_location('t', {__file__!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m._fingerprint())"
    )
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": paths}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == here


def test_shapes_and_dtypes(images, videos):
    e = images[0]
    assert e.image.size == (128, 128) and e.image.mode == "RGB"
    assert e.foreground.shape == (128, 128) and e.foreground.dtype == bool
    v = videos[0]
    assert len(v.frames) == 4 and v.frames[0].size == (64, 64)
    assert v.foreground.shape == (4, 64, 64)
    assert {qa.type for e in images for qa in e.qa} == set(scenes.IMAGE_TYPES)
    assert {qa.type for e in videos for qa in e.qa} == set(scenes.VIDEO_TYPES)
    for e in images[:200]:
        assert len({qa.type for qa in e.qa}) == len(e.qa)


def test_foreground_fraction(images):
    share = np.mean([e.foreground.reshape(16, 8, 16, 8).any((1, 3)).mean() for e in images])
    assert 0.08 < share < 0.2


def _find(e, name):
    return [t for t in e.scene.things if t.name == name]


def test_answers_recomputed_from_the_scene(images):
    for e in images:
        s = e.scene
        for qa in e.qa:
            words = qa.question.rstrip("?").split()
            if qa.type == "count":
                what = words[2]
                if what == "objects":
                    n = len(s.things)
                elif words[3] == "objects":
                    n = sum(what in (t.color, t.tex, t.size) for t in s.things)
                else:
                    shape = {"crosses": "cross"}.get(what, what.removesuffix("s"))
                    n = sum(t.shape == shape for t in s.things)
                assert qa.answer == str(n)
            elif qa.type == "exist":
                assert qa.answer == ("yes" if _find(e, " ".join(words[-2:])) else "no")
            elif qa.type == "where":
                (t,) = _find(e, " ".join(words[-2:]))
                assert quadrant(t, 128) == qa.answer
                left, below = t.x < 64, t.y > 64
                assert ("left" in qa.answer, "bottom" in qa.answer) == (left, below)
            elif qa.type == "rel":
                (a,), (b,) = _find(e, " ".join(words[2:4])), _find(e, " ".join(words[-2:]))
                truth = {
                    "left": a.x < b.x,
                    "right": a.x > b.x,
                    "above": a.y < b.y,
                    "below": a.y > b.y,
                }[words[4]]
                assert qa.answer == ("yes" if truth else "no")
            elif qa.type == "color":
                assert [t.color for t in s.things if t.shape == words[-1]] == [qa.answer]
            elif qa.type == "shape":
                assert [t.shape for t in s.things if t.color == words[-2]] == [qa.answer]
            elif qa.type in ("size", "tex"):
                (t,) = _find(e, " ".join(words[2:4]))
                assert qa.answer == (t.size if qa.type == "size" else t.tex)
            elif qa.type == "ocr":
                assert qa.answer == s.sign.text
            elif qa.type == "chart" and "tallest" in qa.question:
                assert qa.answer == min(s.bars, key=lambda b: b.top).color


def test_video_answers_recomputed(videos):
    for e in videos:
        for qa in e.qa:
            words = qa.question.rstrip("?").split()
            if qa.type == "frame":
                (t,) = _find(e, " ".join(words[5:7]))
                assert t.appear == int(qa.answer) > 1
            elif qa.type == "direction":
                (t,) = _find(e, " ".join(words[4:6]))
                (x0, y0), (x3, y3) = t.at(0), t.at(3)
                moved = {"left": x3 < x0, "right": x3 > x0, "up": y3 < y0, "down": y3 > y0}
                assert [k for k, v in moved.items() if v] == [qa.answer]
            elif qa.type == "before":
                (a,), (b,) = _find(e, " ".join(words[2:4])), _find(e, " ".join(words[-2:]))
                assert qa.answer == ("yes" if a.appear < b.appear else "no")
                assert a.appear != b.appear


def test_multiple_choice_offers_four_options_and_one_is_right(images):
    letters = Counter()
    for e in images:
        for qa in e.qa:
            if qa.type == "mc":
                options = [p.split(") ", 1)[1] for p in qa.question.split(" (")[1:]]
                assert len(set(options)) == 4
                letters[qa.answer] += 1
    assert set(letters) == set("ABCD")
    assert max(letters.values()) < 0.29 * sum(letters.values())


def test_answers_without_the_image_are_near_chance(images, videos):
    """The best constant answer per question text, fitted on one half and tested on the other."""
    limits = {
        "color": 0.22, "shape": 0.27, "posq": 0.1, "count": 0.5, "exist": 0.62, "rel": 0.6,
        "where": 0.36, "size": 0.6, "tex": 0.6, "ocr": 0.08, "chart": 0.45, "mc": 0.33,
        "direction": 0.38, "which": 0.12, "frame": 0.5, "appear": 0.12, "order": 0.25,
        "before": 0.62,
    }  # fmt: skip
    table: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    overall: dict[str, Counter] = defaultdict(Counter)
    hits: dict[str, list[bool]] = defaultdict(list)
    half = [e.qa for e in images[:1000]] + [e.qa for e in videos[:600]]
    for qa in (qa for qas in half for qa in qas):
        table[qa.type][qa.question][qa.answer] += 1
        overall[qa.type][qa.answer] += 1
    rest = [e.qa for e in images[1000:]] + [e.qa for e in videos[600:]]
    for qa in (qa for qas in rest for qa in qas):
        seen = table[qa.type].get(qa.question) or overall[qa.type]
        hits[qa.type].append(seen.most_common(1)[0][0] == qa.answer)
    for kind, limit in limits.items():
        assert np.mean(hits[kind]) < limit, (kind, np.mean(hits[kind]))


def test_negatives_of_exist_are_conjunctions(images):
    hard = total = 0
    for e in images:
        for qa in e.qa:
            if qa.type == "exist" and qa.answer == "no" and len(e.scene.things) >= 3:
                color, shape = qa.question.rstrip("?").split()[-2:]
                total += 1
                hard += any(t.color == color for t in e.scene.things) and any(
                    t.shape == shape for t in e.scene.things
                )
    assert hard / total > 0.7


def test_caption_scores(images, videos):
    for e in [*images[:300], *videos[:300]]:
        assert scenes.score_caption(e.caption, e.caption_slots) == 1.0
        assert scenes.score_caption("", e.caption_slots) == 0.0
    e = next(e for e in images if len(e.scene.things) >= 3)
    color = e.scene.things[0].color
    other = next(c for c in COLOR_NAMES if all(t.color != c for t in e.scene.things))
    assert scenes.score_caption(e.caption.replace(color, other), e.caption_slots) < 1.0
    more = e.caption.replace(": ", ": small red ring, large pink star, ")
    assert scenes.score_caption(more, e.caption_slots) < 0.9


def test_caption_names_every_object():
    for i in range(100):
        scene = make_image_scene(random.Random(i))
        text, _ = caption(scene, random.Random(i))
        for t in scene.things:
            assert f"{t.size} {t.name}" in text


def test_shapes_and_characters_differ():
    x = np.arange(-15, 16)[None, :]
    masks = [shape_mask(s, x, x.T, 11.0) for s in SHAPES]
    for i, a in enumerate(masks):
        assert a.any()
        for b in masks[:i]:
            assert (a ^ b).sum() > 30
    assert len({g.tobytes() for g in GLYPHS.values()}) == len(CHARS)
    with pytest.raises(ValueError, match="unknown shape"):
        shape_mask("blob", x, x.T, 5.0)


def test_patch_labels_agree_with_the_scene():
    for i in range(60):
        scene = make_image_scene(random.Random(i))
        label = labels.label_frame(scene, paint(scene)[0])
        assert label["fields"].shape == (5, 64, len(labels.FIELDS))
        assert (label["fields"].max((0, 1)) < np.array(list(labels.FIELDS.values()))).all()
        assert label["count"][0] == len(scene.things)
        assert label["fields"][0, :, 5].sum() <= len(scene.things)
        for t in scene.things:
            patch = int(t.y // 16) * 8 + int(t.x // 16)
            shape, color = label["fields"][0, patch, :2]
            assert SHAPES[shape - 1] in {o.shape for o in scene.things}
            assert color > 0


def test_training_never_draws_evaluation_seeds():
    assert (scenes.EVAL_SEED_START, scenes.EVAL_SEED_STOP) == (2**40, 2**40 + 2**20)
    for seed in (0, 1, 127, 128, 2**31):
        for step in (0, 10_000, 16_000_000, 2**24):
            spec = plan(step, 0.5, seed, 64).spec
            assert spec.seed >= 0 and spec.seed + spec.size <= START
    with pytest.raises(ValueError, match="reserved for evaluation"):
        make_batch(Spec("image", START, 1, (("color", 1.0),)))


def test_training_and_evaluation_images_differ():
    """The two streams have different seeds, even for equal indices."""
    batch = make_batch(Spec("image", 3, 1, (("color", 1.0),)))
    base = np.asarray(scenes.image_example(3).image)[:64, :64]
    assert not np.array_equal(batch["pixels"][0, 1], base)


def test_tokenizer_round_trip_and_whole_words(tokenizer, images):
    assert tokenizer.get_vocab_size() == 512
    special = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
    assert [tokenizer.token_to_id(t) for t in special] == list(range(5))
    assert special[bpe.BOS_ID] == "<s>" and special[bpe.IMAGE_ID] == "<image>"
    encode = bpe.FastEncoder(tokenizer)
    whole = [*COLOR_NAMES, *SHAPES, "yes", "no", "A", "B", "C", "D", "ASSISTANT", "striped"]
    for word in whole:
        assert len(tokenizer.encode(" " + word, add_special_tokens=False).ids) == 1, word
    for line in (f"USER: \n{turn(qa.question)} {qa.answer}" for e in images[:150] for qa in e.qa):
        ids = tokenizer.encode(line).ids
        assert ids[0] == bpe.BOS_ID and ids.count(bpe.BOS_ID) == 1
        assert tokenizer.decode(ids) == line
        assert encode(line) == ids[1:]
    strange = "Ein Bär 🐻 läuft, 12345 Meter\tweit"
    assert tokenizer.decode(tokenizer.encode(strange).ids) == strange
    for text in (image_prefix(3), video_prefix(2)):
        ids = encode(text + turn("What is red?", "2 cat"))
        assert ids == tokenizer.encode(text + turn("What is red?", "2 cat")).ids[1:]
        assert ids.count(bpe.IMAGE_ID) == text.count("<image>")


def test_batches_are_reproducible_and_packed(tokenizer):
    spec = plan(3, 0.5, 0, 4).spec
    a, b = make_batch(spec), make_batch(spec)
    assert all(np.array_equal(a[k], b[k]) for k in a)
    spec = Spec("image", 8, 6, (("color", 1.0), ("rel", 2.0)), keep=80, keep_foreground=True)
    batch = make_batch(spec)
    assert (np.diff(batch["positions"], axis=1)[:, :79] > 0).all()
    start = 0
    for k, length in enumerate(spec.slots):
        ids, target = batch["ids"][:, start : start + length], batch["targets"][:, start:]
        target = target[:, :length]
        for row in range(6):
            at = np.flatnonzero(target[row] >= 0)
            assert (len(at) > 0) == (batch["types"][row, k] >= 0)
            # the target at a position is the next token, up to </s>
            assert np.array_equal(target[row, at], ids[row, at + 1])
            if len(at):
                assert target[row, at[-1]] == tokenizer.token_to_id("</s>")
        start += length
    assert batches.N_SHORT == 8


def test_questions_use_their_own_generator():
    scene = make_image_scene(random.Random(1))
    state = random.getstate()
    ask_all(scene, random.Random(2))
    assert random.getstate() == state
