"""Training of `draft-vispec`: its second stage, on the target's probabilities.

The loss is ``10 sum |p - q| + 0.1 ListMLE`` of the target's ten likeliest tokens, without a feature
loss. It is summed with equal weights over an ordinary forward pass and one that reads the first
one's outputs (``--ttt 2``). The first stage is that of EAGLE: train ``--kind eagle`` and pass its
weights with ``--init``.
"""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._losses import distance_loss, ranking_loss
from .._training import DrafterTraining, Known, Lesson
from .module import VispecModule
from .stage import DraftVispec


class VispecTraining(DrafterTraining):
    """The kind ``vispec``."""

    stage = DraftVispec
    later: ClassVar[tuple[str, ...]] = ("imadpt.", "img_fc.")
    unused: ClassVar[tuple[str, ...]] = ("compressor.",)
    decay: ClassVar[float] = 1.0

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--adaptor-queries", type=int, default=2, help="vispec: vectors per image")
        add("--distance", type=float, default=10.0, help="vispec: weight of sum |p - q|")
        add("--ranking", type=float, default=0.1, help="vispec: weight of the ranking loss")

    def config(self) -> dict[str, Any]:
        return super().config() | {"queries": self.args.adaptor_queries}

    def known(self, module: VispecModule, lesson: Lesson, features: Tensor, view: str) -> Known:
        n, position, layout = lesson.prompt, lesson.layout.position[0], lesson.layout
        image = torch.where(layout.visual, layout.item.long(), -1)
        zeros = features.new_zeros(module.width)
        rows, source, seen = module.adapted(
            lesson.embeds[1:n], features[: n - 1], image[1:n], zeros
        )

        def answer_rows(embeds: Tensor, features: Tensor) -> Tensor:
            return module.text_rows(embeds, features, seen.expand_as(features))

        answer = answer_rows(lesson.embeds[n:-1], features[n - 1 : -2])
        return Known(
            torch.cat([rows, answer]),
            torch.cat([position[: n - 1][source], position[n - 1 : -2]]),
            len(rows),
            answer_rows,
        )

    def pass_loss(
        self,
        module: VispecModule,
        hidden: Tensor,
        student: Tensor,
        true: Tensor,
        teacher: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        every = torch.ones_like(student[:, 0])
        distance = distance_loss(student, teacher, every)
        ranking = ranking_loss(student, teacher, every)
        info = {"distance": float(distance.detach()), "ranking": float(ranking.detach())}
        return len(student) * (self.args.distance * distance + self.args.ranking * ranking), info


TRAINING = VispecTraining
