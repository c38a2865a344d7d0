"""Count the frames of videos that ``static-frames`` encodes on `tiny`, and what they change.

Held-out videos of `tiny`, each with its questions, in three versions:

==========  ========================================================================================
``scene``   the four frames of the scene, in which an object moves
``slow``    each frame twice, as if the video were sampled at twice the rate; noise on each copy
``still``   the first frame eight times, with noise on each copy
==========  ========================================================================================

The noise is that of a camera, a standard deviation of 2 of 255. The model answers with the full
recipe and with each threshold. ``python benchmarks/static_frames.py`` takes some minutes and writes
``benchmarks/results/static-frames-tiny.json``. It measures no times.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import harness
import numpy as np
from PIL import Image

import vlmfast
from vlmfast.eval.scores import normalise
from vlmfast.scenes.examples import EVAL_SEED_START, EVAL_SEED_STOP, video_example

THRESHOLDS = (0.0, 0.1, 0.3, 1.0)
NOISE = 2.0  # standard deviation, of 255
START, VIDEOS = EVAL_SEED_START + 14 * ((EVAL_SEED_STOP - EVAL_SEED_START) // 16), 30
VERSIONS = ("scene", "slow", "still")


def version(frames: list[Any], name: str, seed: int) -> list[Any]:
    """The frames of one version of a video."""
    if name == "scene":
        return frames
    rng = np.random.default_rng(seed)
    shown = [frame for frame in frames for _ in range(2)] if name == "slow" else [frames[0]] * 8
    pixels = np.stack([np.asarray(frame, dtype=np.float64) for frame in shown])
    pixels += rng.normal(0, NOISE, pixels.shape)
    return list(map(Image.fromarray, pixels.round().clip(0, 255).astype(np.uint8)))


def measure(vlm: vlmfast.VLM) -> list[dict[str, Any]]:
    """One row for each version and recipe."""
    recipes = ["none", *(f"static-frames:{threshold:g}" for threshold in THRESHOLDS)]
    rows = []
    for name in VERSIONS:
        found: dict[str, list[tuple[int, int, str, bool]]] = {recipe: [] for recipe in recipes}
        for number in range(START, START + VIDEOS):
            example = video_example(number)
            frames = version(list(example.frames), name, number)
            qa = example.qa[number % len(example.qa)]
            for recipe in recipes:
                answer = vlm.ask(
                    qa.question, video=frames, num_frames=len(frames), recipe=recipe,
                    max_new_tokens=16, do_sample=False,
                )  # fmt: skip
                said = normalise(answer.text)
                right = said == normalise(qa.answer)
                stats = answer.stats
                found[recipe].append((stats.views, stats.views_encoded, said, right))
        for recipe, of in found.items():
            views, encoded = (sum(one[at] for one in of) for at in (0, 1))
            same = sum(a[2] == b[2] for a, b in zip(of, found["none"], strict=True))
            rows.append(
                {
                    "version": name,
                    "recipe": recipe,
                    "videos": len(of),
                    "encoded": encoded / views,
                    "same": same / len(of),
                    "right": sum(one[3] for one in of) / len(of),
                }
            )
    return rows


def main(argv: list[str]) -> None:
    parser = harness.parser(__doc__, out=harness.RESULTS / "static-frames-tiny.json")
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    vlm = vlmfast.VLM.from_pretrained("tiny", device="cpu", prefix_cache_bytes=0)
    rows = measure(vlm)
    about = harness.begin("static_frames.py", argv, args)
    harness.written(args.out, about | {"noise": NOISE, "rows": rows})
    print(*rows, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
