"""Training of ATP: the answer's loss, and two terms on the number of kept tokens."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from vlmfast.core.stage import Stage
from vlmfast.core.training import Outcome, Training
from vlmfast.errors import RecipeError

from ...budget import equivalent
from .stage import ATP


def depth_term(shares: Mapping[int, Tensor], depth: int) -> Tensor:
    """``sum over l of (n_l / n) (l / L)``: a kept token costs more in deeper layers."""
    terms = (share * (layer / depth) for layer, share in shares.items())
    return cast(Tensor, sum(terms))


def target_term(shares: Mapping[int, Tensor], depth: int, target: float) -> Tensor:
    """``|n' / n - target|`` with n' the tokens of a layer, averaged over the L layers."""
    # Of tensors it is a tensor.
    average = equivalent(1, tuple(shares), cast(Sequence[float], tuple(shares.values())), depth)
    return cast(Tensor, average - target).abs()


class ATPTraining(Training):
    """Soft masks that harden: their temperature rises from ``FIRST`` to ``LAST``."""

    stage: ClassVar[type[Stage]] = ATP

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--target",
            type=float,
            default=0.25,
            help="fraction of the visual tokens kept, averaged over the layers",
        )
        parser.add_argument(
            "--layers",
            default="/".join(f"{n:g}" for n in ATP().layers_),
            help="layers before each drop, as in the recipe",
        )
        parser.add_argument("--grids", type=int, default=3, help="as in the recipe")
        parser.add_argument(
            "--heads",
            choices=("learned", "mean"),
            default="learned",
            help="learned weights of the attention heads, or their mean, as in the paper",
        )
        parser.add_argument(
            "--temperature",
            type=float,
            nargs=2,
            default=(10.0, 40.0),
            metavar=("FIRST", "LAST"),
            help="temperature of the soft masks",
        )
        parser.add_argument(
            "--depth-weight", type=float, default=0.05, help="the paper's lambda_atp"
        )
        parser.add_argument(
            "--target-weight", type=float, default=5.0, help="the paper's lambda_target"
        )

    def __init__(self, args: argparse.Namespace, sizes: dict[str, Any]) -> None:
        super().__init__(args, sizes)
        self.recipe = ATP.from_texts({"layers": args.layers, "grids": str(args.grids)})
        floor = self.recipe.floor(sizes["depth"])
        if not floor < args.target < 1:
            raise RecipeError(
                f"atp: --target is {args.target:g}; with a first drop after "
                f"{self.recipe.layers(sizes['depth'])[0]} of {sizes['depth']} layers it must be "
                f"between {floor:.3g} and 1"
            )
        if not min(args.temperature) > 0:
            raise RecipeError(f"atp: --temperature is {min(args.temperature):g}; it must be > 0")

    def config(self) -> dict[str, Any]:
        layers = list(self.recipe.layers(self.sizes["depth"]))
        return {"layers": layers, "head_weights": self.args.heads, "grids": self.args.grids}

    def stages(self, rng: random.Random, progress: float) -> list[Stage]:
        first, last = self.args.temperature
        temperature = first * (last / first) ** progress
        return [ATP(self.recipe.layers_, self.recipe.grids, temperature)]

    def loss(
        self, module: nn.Module, outcomes: list[Outcome], progress: float
    ) -> tuple[Tensor, dict[str, float]]:
        (outcome,), depth = outcomes, self.sizes["depth"]
        shares = outcome.notes["shares"]
        spread = depth_term(shares, depth)
        off = target_term(shares, depth, self.args.target)
        total = outcome.answer + self.args.depth_weight * spread + self.args.target_weight * off
        info = {f"share_{layer}": float(share.detach()) for layer, share in shares.items()}
        return total, {"off_target": float(off.detach()), **info}

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        """About a hundred parameters in nats: a high learning rate and no weight decay."""
        learned = [p for p in module.parameters() if p.requires_grad]
        return [{"params": learned, "lr": 20 * lr, "weight_decay": 0.0}]


TRAINING = ATPTraining
