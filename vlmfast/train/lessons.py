"""Single questions about drawn scenes, for training stages around a frozen model.

As in the training of `tiny` itself, all seeds are below those of the evaluation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image

from vlmfast.errors import VLMFastError
from vlmfast.scenes.captions import CAPTION_QUESTION, VIDEO_QUESTION, caption
from vlmfast.scenes.drawing import make_image_scene, make_video_scene, paint
from vlmfast.scenes.questions import ask
from vlmfast.scenes.vocabulary import EVAL_SEED_START, IMAGE_TYPES, VIDEO_TYPES

_CAPTIONS = 0.1  # fraction of the questions that request a description


@dataclass
class Lesson:
    """An image (one frame) or a video with one question and its answer."""

    frames: list[Image.Image]
    question: str
    answer: str


def lesson(modality: str, seed: int) -> Lesson:
    """Draw lesson number ``seed``, of modality ``image`` or ``video``.

    All question types that a scene allows are equally likely, except descriptions.
    """
    if seed >= EVAL_SEED_START:
        raise VLMFastError(f"training seed {seed} is in the range reserved for evaluation")
    rng = random.Random(f"vlmfast-lesson-{modality}-{seed}")
    is_video = modality == "video"
    scene = make_video_scene(rng) if is_video else make_image_scene(rng)
    frames = [Image.fromarray(raster.rgb) for raster in paint(scene)]
    if rng.random() < _CAPTIONS:
        question = VIDEO_QUESTION if is_video else CAPTION_QUESTION
        return Lesson(frames, question, caption(scene, rng)[0])
    types = list(VIDEO_TYPES if is_video else IMAGE_TYPES)
    rng.shuffle(types)
    found = next(qa for qa in (ask(scene, type_, rng) for type_ in types) if qa is not None)
    return Lesson(frames, found.question, found.answer)
