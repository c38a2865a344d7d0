"""Procedural images and videos with questions, answers and captions.

Only Pillow and numpy are needed. Every example is a pure function of its seed: no global random
state is read or written, and the same seed draws the same example in every process.

Evaluation seeds live in ``[2**40, 2**40 + 2**20)`` (:data:`EVAL_SEED_START`,
:data:`EVAL_SEED_STOP`); training draws from below ``2**40`` only.

>>> from vlmfast.scenes.examples import EVAL_SEED_START, image_example
>>> image_example(EVAL_SEED_START).image.size
(128, 128)
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from .captions import CAPTION_QUESTION, VIDEO_QUESTION, caption, score_caption
from .drawing import Scene, make_image_scene, make_video_scene, paint
from .questions import QA, ask_all
from .vocabulary import EVAL_SEED_START, EVAL_SEED_STOP, IMAGE_TYPES, VIDEO_TYPES

__all__ = [
    "CAPTION_QUESTION",
    "EVAL_SEED_START",
    "EVAL_SEED_STOP",
    "IMAGE_TYPES",
    "QA",
    "VIDEO_QUESTION",
    "VIDEO_TYPES",
    "ImageExample",
    "VideoExample",
    "image_example",
    "score_caption",
    "video_example",
]


@dataclass
class ImageExample:
    """One image.

    Attributes
    ----------
    image : PIL.Image.Image
        RGB, 128 x 128.
    qa : list of QA
        One question of every type in :data:`IMAGE_TYPES` that applies to the scene.
    caption, caption_slots
        The reference caption (the answer to :data:`CAPTION_QUESTION`) and its slots for
        :func:`score_caption`.
    foreground : numpy.ndarray
        Bool, shape (128, 128): pixels of objects, bars and signs.
    """

    image: Image.Image
    qa: list[QA]
    caption: str
    caption_slots: dict[str, str]
    foreground: np.ndarray
    scene: Scene = field(repr=False)


@dataclass
class VideoExample:
    """One video: four RGB frames of 64 x 64; ``foreground`` is bool, shape (4, 64, 64)."""

    frames: list[Image.Image]
    qa: list[QA]
    caption: str
    caption_slots: dict[str, str]
    foreground: np.ndarray
    scene: Scene = field(repr=False)


def _rng(seed: int, what: str) -> random.Random:
    # A string seed is hashed by SHA-512 inside random: images and videos of equal seed differ.
    return random.Random(f"vlmfast-tiny-{what}-{seed}")


def image_example(seed: int) -> ImageExample:
    """Draw image number ``seed`` with its questions."""
    rng = _rng(seed, "image")
    scene = make_image_scene(rng)
    qa = ask_all(scene, rng)
    text, slots = caption(scene, rng)
    raster = paint(scene)[0]
    return ImageExample(Image.fromarray(raster.rgb), qa, text, slots, raster.ids > 0, scene)


def video_example(seed: int) -> VideoExample:
    """Draw video number ``seed`` with its questions."""
    rng = _rng(seed, "video")
    scene = make_video_scene(rng)
    qa = ask_all(scene, rng)
    text, slots = caption(scene, rng)
    rasters = paint(scene)
    frames = [Image.fromarray(r.rgb) for r in rasters]
    foreground = np.stack([r.ids > 0 for r in rasters])
    return VideoExample(frames, qa, text, slots, foreground, scene)
