"""Training of the compressor: branches on the answer's loss, the gate on loss and cost."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlmfast.core.stage import Stage
from vlmfast.core.training import Outcome, Training
from vlmfast.errors import VLMFastError

from .module import BRANCHES, MODES, ElasticCompressor
from .stage import Elastic

LEARNING = ("conv", "resample")  # the branches with trainable parameters
RATES = (0.04, 0.35)


class ElasticTraining(Training):
    """First the branches, at a random rate per sample; then the gate as well.

    In the first part a sample goes through one trainable branch, drawn at random. From
    ``--gate-from`` on it goes through all branches, for half of the samples at their own, unequal
    costs.
    """

    stage: ClassVar[type[Stage]] = Elastic

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--hidden", type=int, default=256, help="units inside the parts")
        parser.add_argument("--queries", type=int, default=80, help="learned queries")
        parser.add_argument("--mode", choices=MODES, default="select", help="as in the recipe")
        parser.add_argument(
            "--gate-from", type=float, default=0.6, help="fraction of the training without the gate"
        )
        parser.add_argument(
            "--cost-weight",
            type=float,
            default=0.1,
            help="cost of keeping all tokens in the gate's loss",
        )
        parser.add_argument("--text", action="store_true", help="the gate may drop the image")

    def config(self) -> dict[str, Any]:
        check_queries(self.args.queries)
        return {key: getattr(self.args, key) for key in ("hidden", "queries", "text")}

    def stages(self, rng: random.Random, progress: float) -> list[Stage]:
        rate = math.exp(rng.uniform(*map(math.log, RATES)))
        if self.args.mode != "select":
            return [Elastic(rate, mode=self.args.mode)]
        if progress < self.args.gate_from:
            return [Elastic(rate, branch=rng.choice(LEARNING))]
        own = rng.random() < 0.5
        names = BRANCHES if own and self.args.text else BRANCHES[:-1]
        options: dict[str, Any] = {"text": self.args.text and own, "keep": None if own else rate}
        return [Elastic(branch=name, **options) for name in names]

    def groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        """The gate starts late, when the learning rate has decayed, so its rate is higher."""
        assert isinstance(module, ElasticCompressor)
        gate = list(module.gate.parameters())
        others = [*module.conv.parameters(), *module.resample.parameters()]
        return [{"params": others, "lr": lr}, {"params": gate, "lr": 2 * lr}]

    def loss(
        self, module: nn.Module, outcomes: list[Outcome], progress: float
    ) -> tuple[Tensor, dict[str, float]]:
        learned = [o.answer for o in outcomes if o.answer.requires_grad]
        total = torch.stack(learned).mean()
        if len(outcomes) == 1:
            return total, {}
        logits = outcomes[0].notes["logits"]
        index = [BRANCHES.index(o.stage.branch) for o in outcomes]
        losses = torch.stack([o.answer.detach() for o in outcomes])
        costs = losses.new_tensor([o.tokens for o in outcomes])
        gate, chance = expected(logits[index], losses, self.args.cost_weight * costs)
        named = zip(outcomes, chance.tolist(), losses.tolist(), strict=True)
        info = {"gate": float(gate.detach())}
        for outcome, p, loss in named:
            info |= {f"p_{outcome.stage.branch}": p, f"loss_{outcome.stage.branch}": loss}
        return total + gate, info


def check_queries(queries: int) -> None:
    """Check ``--queries``: weights serve the default of recipes, which is 2."""
    if queries < 2:
        raise VLMFastError(f"--queries is {queries}; it must be at least 2")


def expected(logits: Tensor, losses: Tensor, costs: Tensor) -> tuple[Tensor, Tensor]:
    """Expected loss of the gate, and the probability of each branch.

    Parameters
    ----------
    logits, losses, costs : Tensor, (n,)
        Of the branches that were run; a closed one has a logit of minus infinity.

    Returns
    -------
    loss : Tensor, ()
        ``sum of p_i (loss_i + cost_i)``, ``p`` the softmax of the logits.
    p : Tensor, (n,), detached
    """
    p = logits.softmax(0)
    return (p * (losses + costs)).sum(), p.detach()


TRAINING = ElasticTraining
