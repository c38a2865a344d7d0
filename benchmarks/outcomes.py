"""Record which questions each recipe answers correctly, and evaluate `vlmfast tune` on the record.

==========  ====================================================================================
``record``  answers one question about each of 4,000 generated scenes with the full model and under
            24 recipes; the same command continues an interrupted run
``prove``   runs the race of `vlmfast tune` on 20 draws of 400 scenes of the matrix, and measures
            the recipes that it chooses on all other scenes: `benchmarks/results/tune-tiny.json`
==========  ====================================================================================

``python benchmarks/outcomes.py record`` takes about two hours of one processor core.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import vlmfast
from vlmfast.core.env import environment
from vlmfast.core.files import make_folder, replacing
from vlmfast.scenes.examples import (
    EVAL_SEED_STOP,
    IMAGE_TYPES,
    VIDEO_TYPES,
    image_example,
    video_example,
)
from vlmfast.tune.outcomes import ModelSource, Outcome, Store
from vlmfast.tune.race import Settings, race

OUTCOME_SEED_START = EVAL_SEED_STOP
OUTCOME_SEED_STOP = OUTCOME_SEED_START + 2**20
"""Scenes of the matrix alone: neither training nor the evaluation draws these seeds."""
MATRIX = Path(__file__).parent / "results" / "outcomes-tiny.npz"
RECORDED = Path("runs") / "outcomes-tiny.npz"
TYPES = tuple([("image", name) for name in IMAGE_TYPES] + [("video", name) for name in VIDEO_TYPES])
SCENES, BLOCK = 4000, 40
# Seeds of one question: the first scene among them that has a question of its type is taken.
TRIES = (OUTCOME_SEED_STOP - OUTCOME_SEED_START) // (2 * SCENES)
FULL = "none"
BUDGETS = (0.33, 0.22, 0.11, 0.05)
RECIPES = (
    *(f"hired:budget={budget}" for budget in BUDGETS),
    "hired:0.2,positions=compact",
    *(f"divprune:budget={budget}" for budget in BUDGETS),
    "divprune:positions=compact,budget=0.22",
    *(f"elastic:budget={budget}" for budget in BUDGETS),
    "flashvid:budget=0.11",
    "atp:budget=0.33",
    "pyramiddrop:budget=0.5",
    "random:budget=0.22",
    "downsample:budget=0.22",
    "elastic:budget=0.22+atp:budget=0.5",
    "elastic:budget=0.22+snapkv:0.5,window=8",
    "hired:budget=0.22+kivi:4",
    "lookm:0.2",
    "zipcache",
)
CORRECT = 1  # the bit of a correct outcome
# Draws of the proof. Others were used while the race was written: 1000 and above.
DRAWS, DRAWN, MAX_LOSS, OBJECTIVES = range(20), 400, 0.02, ("ttft", "memory")


@dataclass(frozen=True)
class Drawn:
    """A question about a generated scene, as `vlmfast.tune.outcomes.ModelSource` asks it."""

    line: int
    type: tuple[str, str]
    question: str
    answers: tuple[str, ...]
    media: dict[str, Any]
    seed: int

    def arguments(self) -> dict[str, Any]:
        return self.media


@lru_cache(maxsize=BLOCK)
def scene(number: int) -> Drawn:
    """Question ``number``; the types of questions take turns. A function of the number alone."""
    modality, type_ = TYPES[number % len(TYPES)]
    draw = image_example if modality == "image" else video_example
    start = OUTCOME_SEED_START + number * TRIES
    for seed in range(start, start + TRIES):
        example = draw(seed)
        for qa in example.qa:
            if qa.type == type_:
                if modality == "image":
                    media = {"images": example.image}
                else:
                    media = {"video": example.frames, "num_frames": 4}
                return Drawn(number, (modality, type_), qa.question, (qa.answer,), media, seed)
    raise ValueError(f"no scene from {start} to {start + TRIES} has a question of type {type_}")


class Scenes:
    """Drawn when they are needed."""

    def __getitem__(self, number: int) -> Drawn:
        return scene(number)


def record(vlm: Any, path: Path, scenes: int, recipes: Sequence[str] = RECIPES) -> None:
    """Record outcomes; the answers so far are in a journal beside the file."""
    make_folder(path.parent)
    names = [FULL, *recipes]
    with Store(path.with_suffix(".jsonl"), {"recipes": names}) as store:
        source = ModelSource(vlm, Scenes(), store, batch_size=len(names), max_new_tokens=16)
        rows: dict[str, list[Outcome]] = {name: [] for name in names}
        for start in range(0, scenes, BLOCK):
            # The prefix cache has the features of a scene for all recipes that do not change them.
            block = range(start, min(start + BLOCK, scenes))
            for name, own in rows.items():
                own += source.outcomes(name, block)
            print(f"{block.stop} of {scenes} scenes", flush=True)
    about = {
        "model": "tiny",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/outcomes.py record",
        "recipes": names,
        "types": [f"{modality}-{name}" for modality, name in TYPES],
        "environment": environment(),
    }
    arrays = {
        "outcome": np.array(
            [[CORRECT * of.score for of in own] for own in rows.values()], np.uint8
        ),
        "equivalent_tokens": np.array([[of.tokens for of in own] for own in rows.values()], "f4"),
        "kv_bytes": np.array([[of.bytes for of in own] for own in rows.values()], np.int32),
        "seed": np.array([scene(number).seed for number in range(scenes)]),
    }
    with replacing(path) as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


@dataclass(frozen=True)
class Matrix:
    """The recorded outcomes: arrays of shape (recipes, scenes), the full model first."""

    recipes: tuple[str, ...]
    score: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    @classmethod
    def load(cls, path: Path) -> Matrix:
        with np.load(path) as file:
            about = json.loads(str(file["about"]))
            score = file["outcome"] & CORRECT
            return cls(tuple(about["recipes"]), score, file["equivalent_tokens"], file["kv_bytes"])

    def only(self, scenes: np.ndarray) -> Matrix:
        """Some of the scenes."""
        arrays = (self.score[:, scenes], self.tokens[:, scenes], self.bytes[:, scenes])
        return Matrix(self.recipes, *arrays)

    def outcomes(self, recipe: str, questions: Sequence[int]) -> list[Outcome]:
        """As `vlmfast.tune.outcomes.Source`."""
        row, at = self.recipes.index(recipe), list(questions)
        arrays = (self.score[row, at], self.tokens[row, at], self.bytes[row, at])
        return [Outcome(*values) for values in zip(*(a.tolist() for a in arrays), strict=True)]

    def losses(self) -> np.ndarray:
        """Loss of each recipe, shape (recipes,)."""
        accuracy = self.score.mean(1)
        return accuracy[0] - accuracy

    def costs(self, objective: str) -> np.ndarray:
        """Cost of each recipe as a fraction of the full model's, shape (recipes,)."""
        sums = (self.tokens if objective == "ttft" else self.bytes).sum(1, dtype=np.float64)
        return sums / sums[0]


def draw(matrix: Matrix, seed: int, objective: str) -> dict[str, Any]:
    """Choose a recipe by `DRAWN` scenes, and measure it on all others."""
    scenes = matrix.score.shape[1]
    drawn = np.random.default_rng(seed).choice(scenes, DRAWN, replace=False)
    rest = matrix.only(np.setdiff1d(np.arange(scenes), drawn))
    settings = Settings(MAX_LOSS, objective, seed=seed)
    found = race(matrix.only(drawn), matrix.recipes[1:], range(DRAWN), settings)
    row, losses, costs = matrix.recipes.index(found.chosen), rest.losses(), rest.costs(objective)
    cheapest = float(costs[losses <= MAX_LOSS].min())
    return {
        "seed": seed,
        "objective": objective,
        "chosen": found.chosen,
        "certified": found.certified,
        "loss_on_rest": float(losses[row]),
        "cost": float(costs[row]),
        "cost_over_cheapest": float(costs[row]) / cheapest,
    }


def prove(matrix: Matrix, seeds: Sequence[int]) -> dict[str, Any]:
    """How often the chosen recipes stay within the bound on unused scenes, and at which cost."""
    found: dict[str, Any] = {"scenes": matrix.score.shape[1], "max_loss": MAX_LOSS}
    for objective in OBJECTIVES:
        draws = [draw(matrix, seed, objective) for seed in seeds]
        found[objective] = {
            "draws": len(draws),
            "within_bound": sum(d["loss_on_rest"] <= MAX_LOSS for d in draws),
            "certified": sum(d["certified"] for d in draws),
            "median_cost_over_cheapest": statistics.median(d["cost_over_cheapest"] for d in draws),
            "each": draws,
        }
    return found


def main(argv: list[str]) -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("what", choices=("record", "prove"))
    add("--json", type=Path, metavar="FILE", help="where prove writes its result")
    add("--first-seed", type=int, default=DRAWS.start, metavar="N", help="of prove's 20 draws")
    args = parser.parse_args(argv)
    if args.what == "record":
        torch.set_num_threads(1)
        record(vlmfast.VLM.from_pretrained("tiny", device="cpu"), RECORDED, SCENES)
    else:
        seeds = range(args.first_seed, args.first_seed + len(DRAWS))
        found = prove(Matrix.load(MATRIX), seeds)
        print(json.dumps(found, indent=1))
        if args.json is not None:
            harness.written(args.json, found)


if __name__ == "__main__":
    main(sys.argv[1:])
