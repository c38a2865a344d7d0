"""Training of EAGLE drafters on the target's own logits and features, with training-time test.

``eagle`` learns as EAGLE-2 and SpecVLM do, ``SmoothL1(g_t, f_(t+1)) + 0.1 CE(p, q)``, and reads its
own outputs in ``--ttt`` forward passes, which EAGLE-2 does not. ``eagle3`` learns only the target's
probabilities, restricted to its vocabulary. Forward pass s has weight 0.8^s.

With ``--compressor`` each sample is learned twice: with all visual rows, and under a branch or mode
of the compressor that is drawn at random each time, so that one drafter serves them all. Towards
the end it is learned under all branches, and the gate learns from what each costs in rows and in
loss, as in `compressors.elastic`.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlmfast.compressors.tokens.elastic.module import BRANCHES
from vlmfast.compressors.tokens.elastic.training import check_queries, expected
from vlmfast.core.protocols import DrafterStage
from vlmfast.errors import VLMFastError

from .._losses import feature_loss, restricted, token_loss
from .._training import DrafterTraining, Known, Lesson, Teacher
from .module import EagleModule
from .stage import DraftEagle
from .visual import Visual, shortened

_COUNTED = 512  # answers from which the vocabulary of eagle3 is counted


class EagleTraining(DrafterTraining):
    """The kinds ``eagle`` and ``eagle3``, with and without a compressor."""

    stage = DraftEagle
    later: ClassVar[tuple[str, ...]] = ("compressor.",)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--feature", type=float, default=1.0, help="eagle: weight of the feature loss")
        add("--soft", type=float, default=0.1, help="eagle: weight of the logits loss")
        add(
            "--draft-vocabulary", type=int, default=0,
            help="eagle3: size of the draft vocabulary (0: three quarters of the target's)",
        )  # fmt: skip
        add("--compressor", action="store_true", help="eagle: also learn to shorten images")
        add("--compressor-units", type=int, default=128, help="hidden units of the compressor")
        add("--queries", type=int, default=16, help="learned queries of the resampler")
        add("--gate-from", type=float, default=0.6, help="fraction of the training before the gate")
        add("--cost-weight", type=float, default=0.1, help="loss that the gate counts for all rows")

    @property
    def three(self) -> bool:
        return self.args.kind == "eagle3"

    def config(self) -> dict[str, Any]:
        args, own = self.args, {}
        if self.three:
            vocabulary, drafted = self.sizes["vocabulary"], args.draft_vocabulary
            if not 0 <= drafted <= vocabulary:
                raise VLMFastError(
                    f"--draft-vocabulary is {drafted}; it must be from 1 to the target's "
                    f"{vocabulary}, or 0 for three quarters of it"
                )
            own["draft_vocabulary"] = drafted or vocabulary * 3 // 4
        if args.compressor:
            check_queries(args.queries)
            size = {"hidden": args.compressor_units, "queries": args.queries, "text": True}
            own["compressor"] = size
        return super().config() | own

    def readers(self) -> list[DrafterStage]:
        return [DraftEagle(), *([DraftEagle(kind="eagle3")] if self.three else [])]

    def views(self) -> tuple[str, ...]:
        return ("all", "select") if self.args.compressor else ("all",)

    def begin(self, module: EagleModule, answers: Callable[[int], list[int]]) -> None:
        """Set the vocabulary of eagle3: the most frequent tokens of the first answers."""
        if not self.three:
            return
        counts = Counter(range(self.sizes["vocabulary"]))  # each once, in ascending order
        for number in range(min(_COUNTED, self.args.samples)):
            counts.update(answers(number)[1:])
        chosen = [token for token, _ in counts.most_common(len(module.d2t))]
        module.restrict(torch.tensor(sorted(chosen)))

    def features(self, module: EagleModule, lesson: Lesson) -> Tensor:
        if not self.three:
            return lesson.features
        assert lesson.aux_hidden_states is not None
        return lesson.aux_hidden_states.flatten(1)

    def known(
        self, module: EagleModule, lesson: Lesson, features: Tensor, view: str | Visual
    ) -> Known:
        visual = Visual(view) if isinstance(view, str) else view
        n, features = lesson.prompt, module.project(features)
        position, layout = lesson.layout.position[0], lesson.layout
        rows, choice = shortened(
            visual,
            module.compressor,
            lesson.embeds[1:n],
            features[: n - 1],
            position[: n - 1],
            layout.select(torch.arange(1, n, device=position.device)),
            features[:n][~layout.visual[:n]],
        )
        prompt = module.rows(rows.embeds, rows.features, rows.image)
        answer = module.rows(lesson.embeds[n:-1], features[n - 1 : -2])
        return Known(
            torch.cat([prompt, answer]),
            torch.cat([rows.position, position[n - 1 : -2]]),
            len(prompt),
            module.rows,
            choice.logits,
        )

    def pass_loss(
        self,
        module: EagleModule,
        hidden: Tensor,
        student: Tensor,
        true: Tensor,
        teacher: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        teacher, inside = restricted(teacher, module.vocabulary())
        counts = torch.ones_like(student[:, 0]) if inside is None else inside.float()
        soft = token_loss(student, teacher, counts)
        info = {"soft": float(soft.detach())}
        if self.three:
            return counts.sum() * soft, info
        feature = feature_loss(hidden, true, counts)
        info["feature"] = float(feature.detach())
        return counts.sum() * (self.args.feature * feature + self.args.soft * soft), info

    def learn(
        self,
        module: EagleModule,
        lesson: Lesson,
        target: Teacher,
        rng: random.Random,
        progress: float,
    ) -> tuple[Tensor, dict[str, float]]:
        if not self.args.compressor or not bool(lesson.layout.visual.any()):
            return super().learn(module, lesson, target, rng, progress)
        features, seed = self.noisy(self.features(module, lesson)), rng.getrandbits(31)
        choose = progress >= self.args.gate_from
        if choose:
            views = [Visual(choice, seed=seed) for choice in ("select", *BRANCHES)]
        else:
            choice = rng.choice((*BRANCHES, "weighted", "concat"))
            assert module.compressor is not None
            most = module.compressor.queries
            queries = rng.randint(1, most) if rng.random() < 0.5 else min(2, most)
            views = [Visual(choice, queries=queries, seed=seed)]
        learned = [self.known(module, lesson, features, view) for view in (*views, Visual())]
        # The gate's own view repeats one of the branches.
        outcomes = [self.passes(module, lesson, target, known) for known in learned[choose:]]
        losses, info = torch.stack([loss for loss, _ in outcomes]), outcomes[-1][1]
        total = (losses[:-1].mean() + losses[-1]) / 2
        if not choose:
            return total, info
        count = len(lesson.answer) - 1
        each = losses[:-1].detach() / count
        rows = each.new_tensor([len(known.rows) for known in learned[1:-1]]) / len(learned[-1].rows)
        assert learned[0].gate is not None
        more, chance = expected(learned[0].gate, each, self.args.cost_weight * rows)
        info |= {f"p_{name}": p for name, p in zip(BRANCHES, chance.tolist(), strict=True)}
        info |= {f"loss_{name}": loss for name, loss in zip(BRANCHES, each.tolist(), strict=True)}
        return total + count * more, info


TRAINING = EagleTraining
