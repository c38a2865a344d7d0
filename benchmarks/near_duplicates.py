"""Count the scenes of an evaluation that resemble a scene of the training.

Training and evaluation draw scenes from disjoint seeds of one generator, so two of them can still
look alike. `tiny` was trained on about 90,000 images. Each image of ``vlmfast eval shapes`` is
compared with as many training scenes:

=============  =====================================================================================
``contents``   the same objects (shape, color, size, texture) in the same quadrants, the same word
               and the same bars; pixels may differ
``pixels``     a root mean square difference of thumbnails of 16 x 16 below 8 of 255
=============  =====================================================================================

``python benchmarks/near_duplicates.py`` takes a few minutes and writes
``benchmarks/results/near-duplicates.json``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import harness
import numpy as np

from vlmfast.eval.shapes import Shapes
from vlmfast.scenes.drawing import Scene, make_image_scene, paint, quadrant
from vlmfast.scenes.examples import image_example

SIDE, NEAR = 16, 8.0
SCENES, LIMIT, SEED = 90_000, 100, 15
_AT_ONCE = 2000


def contents(scene: Scene) -> tuple:
    """What questions about an image can ask, apart from exact places."""
    things = sorted(
        (t.shape, t.color, t.size, t.tex, quadrant(t, scene.canvas) or "") for t in scene.things
    )
    word = scene.sign.text if scene.sign else None
    bars = tuple((bar.color, round((bar.bottom - bar.top) / 8)) for bar in scene.bars)
    return tuple(things), word, bars


def thumbnail(rgb: np.ndarray) -> np.ndarray:
    """Mean colors of the cells of an image (H, W, 3): float32, (SIDE * SIDE * 3,)."""
    step = rgb.shape[0] // SIDE
    cells = rgb.reshape(SIDE, step, SIDE, step, 3).mean((1, 3), dtype=np.float32)
    return cells.reshape(-1)


def training_scene(seed: int) -> Scene:
    """A scene as the training of `tiny` draws it."""
    return make_image_scene(random.Random(f"vlmfast-tiny-train-image-{seed}"))


def count(scenes: int, limit: int, seed: int) -> dict[str, Any]:
    """Compare the images of an evaluation with training scenes."""
    docs = [doc for doc in Shapes().docs(limit, seed) if doc.modality == "image"]
    examples = [image_example(number) for number in sorted({doc.seed for doc in docs})]
    own = np.stack([thumbnail(np.asarray(example.image)) for example in examples])
    known: Counter[tuple] = Counter()
    nearest = np.full(len(own), np.inf)
    for start in range(0, scenes, _AT_ONCE):
        drawn = [training_scene(n) for n in range(start, min(start + _AT_ONCE, scenes))]
        known.update(contents(scene) for scene in drawn)
        others = np.stack([thumbnail(paint(scene)[0].rgb) for scene in drawn])
        squares = (own**2).sum(1)[:, None] + (others**2).sum(1) - 2 * own @ others.T
        nearest = np.minimum(nearest, squares.min(1) / own.shape[1])
    distance = np.sqrt(nearest.clip(0))
    alike = [known[contents(example.scene)] > 0 for example in examples]
    sizes = [len(e.scene.things) + len(e.scene.bars) + bool(e.scene.sign) for e in examples]
    return {
        "training_scenes": scenes,
        "images": len(examples),
        "contents": sum(alike),
        "contents_of_several_objects": sum(
            same and n > 1 for same, n in zip(alike, sizes, strict=True)
        ),
        "pixels": int((distance < NEAR).sum()),
        "both": int((np.array(alike) & (distance < NEAR)).sum()),
        "nearest_rms": [round(float(q), 1) for q in np.quantile(distance, [0, 0.05, 0.5])],
    }


def main(argv: list[str]) -> None:
    parser = harness.parser(__doc__, out=harness.RESULTS / "near-duplicates.json")
    add = parser.add_argument
    add("--limit", type=int, default=LIMIT, metavar="N", help="questions of a type")
    add("--seed", type=int, default=SEED, help="of the evaluation")
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    found = count(SCENES, args.limit, args.seed)
    harness.written(args.out, harness.begin("near_duplicates.py", argv, args) | found)
    print(found)


if __name__ == "__main__":
    main(sys.argv[1:])
