"""Training of PVC: ``vlmfast train pvc``.

The loss is that of the answer. Tower, projector and language model are frozen (the paper trains all
of them), so that the weights can be attached to a model and detached again. Every sample draws the
side of its cells, the repeats of images and frames and whether a frame's crops are encoded, so that
one module serves every choice of a budget.
"""

from __future__ import annotations

import argparse
import random
from typing import Any, ClassVar

from vlmfast.core.training import Training
from vlmfast.errors import RecipeError

from .stage import PVC, REPEATS, SIDES, Stage

# Sampling weights of `REPEATS`: images are mostly repeated, frames mostly not.
IMAGE_REPEATS, VIDEO_REPEATS = (1, 1, 2), (3, 2, 1)


class PVCTraining(Training):
    """Draws one choice per sample."""

    stage: ClassVar[type[Stage]] = PVC

    def __init__(self, args: argparse.Namespace, sizes: dict[str, Any]) -> None:
        super().__init__(args, sizes)
        for key, least in (("last", 0), ("hidden", 0), ("time_width", 1)):
            if getattr(args, key) < least:
                raise RecipeError(
                    f"pvc: --{key.replace('_', '-')} is {getattr(args, key)}; at least {least}"
                )
        if args.last > sizes["vision_depth"] - 2:
            raise RecipeError(
                f"pvc: --last is {args.last}; this vision tower allows temporal attention before "
                f"at most {sizes['vision_depth'] - 2} blocks"
            )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--last", type=int, default=2, help="vision blocks that get temporal attention"
        )
        parser.add_argument(
            "--hidden",
            type=int,
            default=0,
            help="width inside the compressors; 0: the vision tower's",
        )
        parser.add_argument(
            "--time-width", type=int, default=64, help="width of an embedded timestamp"
        )
        parser.add_argument(
            "--positions",
            default="keep",
            choices=("keep", "compact"),
            help="rotary ids of the kept tokens",
        )

    def config(self) -> dict[str, Any]:
        end = self.sizes["vision_depth"] - 1  # up to LLaVA's feature layer, -2
        return {
            "blocks": list(range(end - self.args.last, end)),
            "sides": list(SIDES),
            "repeats": list(REPEATS),
            "hidden": self.args.hidden or self.sizes["vision_width"],
            "time_width": self.args.time_width,
        }

    def stages(self, rng: random.Random, progress: float) -> list[Stage]:
        return [
            PVC(
                side=rng.choice(SIDES),
                image_repeat=rng.choices(REPEATS, IMAGE_REPEATS)[0],
                video_repeat=rng.choices(REPEATS, VIDEO_REPEATS)[0],
                views="all" if rng.random() < 0.2 else "base",
                positions=self.args.positions,
            )
        ]


TRAINING = PVCTraining
