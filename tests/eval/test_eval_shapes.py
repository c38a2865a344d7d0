"""The task ``shapes``."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from support.engine.commands import scenes_per_seed
from support.paths import ROOT
from vlmfast.errors import VLMFastError
from vlmfast.eval.shapes import Shapes, without_foreground
from vlmfast.scenes.examples import (
    EVAL_SEED_START,
    EVAL_SEED_STOP,
    IMAGE_TYPES,
    VIDEO_TYPES,
    image_example,
    video_example,
)

sys.path.insert(0, str(ROOT / "benchmarks"))

import near_duplicates

task = Shapes()


def test_every_type_has_the_same_number_of_questions():
    docs = task.docs(7, 0)
    types = Counter((doc.modality, doc.type) for doc in docs)
    assert set(types) == {
        *(("image", t) for t in (*IMAGE_TYPES, "image-caption")),
        *(("video", t) for t in (*VIDEO_TYPES, "video-caption")),
    }
    assert set(types.values()) == {7}
    assert len({doc.doc_id for doc in docs}) == len(docs)


def test_docs_are_deterministic_and_held_out():
    docs = task.docs(5, 3)
    assert docs == Shapes().docs(5, 3)
    assert all(EVAL_SEED_START <= doc.seed < EVAL_SEED_STOP for doc in docs)
    examples = {"image": image_example, "video": video_example}
    for doc in docs:
        example = examples[doc.modality](doc.seed)
        if doc.kind == "caption":
            assert doc.target == example.caption
        else:
            assert (doc.type, doc.question, doc.target) in [
                (qa.type, qa.question, qa.answer) for qa in example.qa
            ]


def test_larger_limit_extends_a_smaller_one():
    assert set(task.docs(3, 0)) < set(task.docs(8, 0))


def test_other_seeds_ask_about_other_scenes():
    images = [{doc.media_id for doc in task.docs(3, seed)} for seed in (0, 1, 15)]
    assert not set.intersection(*images)
    assert len(set.union(*images)) == sum(map(len, images))


@pytest.mark.parametrize(
    ("limit", "seed", "words"),
    [
        (0, 0, "limit is 0"),
        (-3, 0, "limit is -3"),
        (1, -1, "seed is -1"),
        (1, 16, "seeds 0 to 15"),
    ],
)
def test_invalid_limits_and_seeds_are_refused(limit, seed, words):
    with pytest.raises(VLMFastError, match=words):
        task.docs(limit, seed)


def test_limit_beyond_the_held_out_scenes_is_refused(monkeypatch):
    scenes_per_seed(monkeypatch, 3)
    with pytest.raises(VLMFastError, match="fewer questions of type"):
        task.docs(4, 0)


def test_media():
    for doc in task.docs(1, 0):
        media = task.media(doc)
        if doc.modality == "image":
            assert media["images"].size == (128, 128)
        else:
            assert [frame.size for frame in media["video"]] == [(64, 64)] * 4
            assert media["num_frames"] == 4


def pixels(media: dict) -> list[np.ndarray]:
    return [np.asarray(f) for f in media.get("video", [media.get("images")])]


def test_question_only_shows_blank_frames():
    for doc in task.docs(1, 0):
        shown = pixels(task.media(doc, "question-only"))
        assert [s.shape for s in shown] == [s.shape for s in pixels(task.media(doc))]
        assert all((s == 128).all() for s in shown)


def test_background_only_hides_only_the_foreground():
    for doc in task.docs(2, 0):
        example = (image_example if doc.modality == "image" else video_example)(doc.seed)
        masks = np.atleast_3d(example.foreground.T).T
        for before, after, mask in zip(
            pixels(task.media(doc)), pixels(task.media(doc, "background-only")), masks, strict=True
        ):
            assert (before[~mask] == after[~mask]).all()
            if mask.any():
                # Backgrounds are muted, objects are not.
                spread = np.ptp(after[mask].astype(int), axis=-1).max()
                assert spread <= np.ptp(before[~mask].astype(int), axis=-1).max() + 8


def test_background_only_leaves_no_outline_on_a_gradient():
    from PIL import Image

    rows, columns = np.indices((64, 64))
    smooth = np.repeat((60 + rows + columns)[..., None], 3, axis=-1).astype(np.uint8)
    mask = (rows - 20) ** 2 + (columns - 40) ** 2 < 100
    painted = smooth.copy()
    painted[mask] = (255, 0, 0)
    after = np.asarray(without_foreground(Image.fromarray(painted), mask, 0))
    assert np.abs(after.astype(int) - smooth).max() <= 1


def test_background_only_of_an_image_without_background():
    from PIL import Image

    red = Image.new("RGB", (8, 8), (255, 0, 0))
    everything = np.ones((8, 8), bool)
    assert (np.asarray(without_foreground(red, everything, 0)) == 128).all()
    assert without_foreground(red, ~everything, 0) is red


def test_only_right_answers_score_one():
    for doc in task.docs(3, 0):
        assert task.score(doc, task.filter(doc, f" {doc.target} ")) == 1.0
        assert task.score(doc, task.filter(doc, "nothing of the sort")) < 0.5
        if doc.kind == "question":
            assert task.score(doc, task.filter(doc, doc.target.upper() + ".")) == 1.0


def test_near_duplicates_of_training_scenes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = near_duplicates.count(40, 2, 0)
    assert apart["pixels"] == 0 < apart["images"]
    seeds = sorted({doc.seed for doc in task.docs(2, 0) if doc.modality == "image"})
    planted = [image_example(seed).scene for seed in seeds[: len(seeds) // 2]]
    monkeypatch.setattr(near_duplicates, "training_scene", lambda n: planted[n % len(planted)])
    found = near_duplicates.count(40, 2, 0)
    assert found["pixels"] == found["both"] == len(planted)
    assert found["images"] > found["contents"] >= len(planted)
