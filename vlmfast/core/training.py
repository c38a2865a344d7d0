"""How a trained method describes its training; `vlmfast.train.stages` runs the loop."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .contexts import PrefillContext
from .stage import Stage


@dataclass
class TrainingContext(PrefillContext):
    """A forward pass of a prompt with its training answer.

    Parameters
    ----------
    answer : int
        Rows at the end that are the answer; they are no query rows of statistics.
    soft : Tensor, float32, (S,), optional
        Weight of each row of ``layout`` in the following layers, in (0, 1].
    """

    answer: int = 0
    soft: Tensor | None = None

    def select(self, index: Tensor) -> None:
        super().select(index)
        if self.soft is not None:
            self.soft = self.soft.index_select(0, index)

    def key_bias(self) -> Tensor | None:
        bias = super().key_bias()
        if self.soft is None:
            return bias
        return self.soft.log() if bias is None else bias + self.soft.log()

    def share(self, rows: Tensor) -> Tensor | None:
        return None if self.soft is None else self.soft[rows]


@dataclass
class Outcome:
    """One forward pass over a sample under one stage.

    Parameters
    ----------
    stage : Stage
    answer : Tensor, float32, ()
        Loss of the answer's tokens, with the gradient.
    notes : dict
        The stage's ``notes[name]``.
    tokens : float
        Visual tokens that entered a layer of the language model, averaged over its layers, as a
        fraction of those from the vision tower. Soft masks do not count.
    """

    stage: Stage
    answer: Tensor
    notes: dict[str, Any]
    tokens: float


class Training:
    """Base of every method's training: one file next to the module, one subclass in it.

    The language model and the vision tower are frozen; the module that `Stage.build` makes is what
    is trained. A stage recognizes training by ``module.training`` of the module that it
    finds in ``context.trained[name]`` or ``request.trained[name]``.

    Parameters
    ----------
    args : argparse.Namespace
        With the method's own options, see `add_arguments`.
    sizes : dict
        The model's, as `Stage.build` documents them.
    """

    stage: ClassVar[type[Stage]]
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def __init__(self, args: argparse.Namespace, sizes: dict[str, Any]) -> None:
        self.args, self.sizes = args, sizes

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The method's own options."""

    def about(self) -> dict[str, Any]:
        """The method's own options, stored with the weights."""
        parser = argparse.ArgumentParser()
        self.add_arguments(parser)
        return {key: getattr(self.args, key) for key in vars(parser.parse_args([]))}

    def config(self) -> dict[str, Any]:
        """What `Stage.build` needs besides the sizes; plain values, stored with the weights."""
        return {}

    def stages(self, rng: random.Random, progress: float) -> list[Stage]:
        """The stages under which a sample is run, with one forward pass each.

        Parameters
        ----------
        rng : random.Random
            Of this sample; the same in a resumed run.
        progress : float
            Completed fraction of the training, 0 to 1.
        """
        return [self.stage()]

    def loss(
        self, module: nn.Module, outcomes: list[Outcome], progress: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one sample, and further values to log."""
        return outcomes[0].answer, {}

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return [{"params": list(module.parameters()), "lr": lr}]
