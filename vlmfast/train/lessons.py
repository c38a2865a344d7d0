"""Single questions about drawn scenes, for training stages around a frozen model.

As in the training of `tiny` itself, all seeds are below those of the evaluation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image

from vlmfast.errors import VLMFastError
from vlmfast.scenes.captions import CAPTION_QUESTION, VIDEO_QUESTION, caption
from vlmfast.scenes.drawing import Scene, make_image_scene, make_video_scene, paint
from vlmfast.scenes.questions import QA, ask
from vlmfast.scenes.vocabulary import EVAL_SEED_START, IMAGE_TYPES, VIDEO_TYPES

_CAPTIONS = 0.1  # fraction of the questions that request a description


@dataclass
class Lesson:
    """An image (one frame) or a video with one question and its answer."""

    frames: list[Image.Image]
    question: str
    answer: str


def painted(rng: random.Random, is_video: bool, seed: int) -> tuple[Scene, list[Image.Image], str]:
    """A scene, its frames, and the request to describe it.

    Raises
    ------
    VLMFastError
        If ``seed`` is reserved for the evaluation.
    """
    if seed >= EVAL_SEED_START:
        raise VLMFastError(f"training seed {seed} is in the range reserved for evaluation")
    scene = make_video_scene(rng) if is_video else make_image_scene(rng)
    frames = [Image.fromarray(raster.rgb) for raster in paint(scene)]
    return scene, frames, VIDEO_QUESTION if is_video else CAPTION_QUESTION


def question_about(scene: Scene, rng: random.Random, is_video: bool) -> QA:
    """A question about a scene; all types that it allows are equally likely."""
    types = list(VIDEO_TYPES if is_video else IMAGE_TYPES)
    rng.shuffle(types)
    return next(qa for qa in (ask(scene, type_, rng) for type_ in types) if qa is not None)


def lesson(modality: str, seed: int) -> Lesson:
    """Draw lesson number ``seed``, of modality ``image`` or ``video``."""
    rng = random.Random(f"vlmfast-lesson-{modality}-{seed}")
    is_video = modality == "video"
    scene, frames, describe = painted(rng, is_video, seed)
    if rng.random() < _CAPTIONS:
        return Lesson(frames, describe, caption(scene, rng)[0])
    found = question_about(scene, rng, is_video)
    return Lesson(frames, found.question, found.answer)
