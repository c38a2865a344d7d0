"""What the kinds of drafters say about their training, and how one is unrolled over an answer.

Rows are aligned as in EAGLE: row t holds the embedding of token t + 1 (of a picture: its projected
patch) and the target's hidden state of token t, and predicts the hidden state of token t + 1 and
with it token t + 2. Unlike there, noise and loss of features are counted in their standard
deviation, which differs between models by more than ten times: weights mean the same for all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from vlmfast.core.protocols import DrafterStage
from vlmfast.core.training import Training

from ._layer import causal

if TYPE_CHECKING:
    from vlmfast.core.layout import TokenLayout
    from vlmfast.models.base import Adapter


@dataclass(frozen=True)
class Lesson:
    """What the target makes of a prompt of n tokens and its answer of A, S = n + A.

    Parameters
    ----------
    embeds : Tensor, (S, D)
        What went into the first layer.
    features : Tensor, (S, D)
        Behind the last norm.
    taps : Tensor, (S, K, D), optional
        What went into the K layers that the drafter reads.
    layout : TokenLayout
        S rows.
    answer : Tensor, int64, (A,)
    logits : Tensor, float32, (A - 1, V)
        The target's, of the answer's tokens from the second on.
    """

    embeds: Tensor
    features: Tensor
    taps: Tensor | None
    layout: TokenLayout
    answer: Tensor
    logits: Tensor

    @property
    def scale(self) -> Tensor:
        """Standard deviation of the features: the unit of what is far from them."""
        return self.features.std()

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, n."""
        return len(self.embeds) - len(self.answer)


class Drafting:
    """Attention of drafted rows behind true ones: one object for all steps of one sequence.

    Step 0 are the S true rows. The rows of step s >= 1 stand s tokens behind the places
    ``first, first + 1, ...``, as many as there are: each sees the true rows up to its place, what
    was drafted behind that place in the steps before, and itself. What EAGLE-3's training-time test
    does for all places, this does for those of an answer, which are few.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.steps.append((k, v))
        if len(self.steps) == 1:
            return causal()(q, k, v)
        n = q.shape[2]
        cut = [self.steps[0], *((k[:, :, :n], v[:, :, :n]) for k, v in self.steps[1:])]
        keys, values = (torch.cat(each, dim=2) for each in zip(*cut, strict=True))
        place = self.first + torch.arange(n, device=q.device)
        true = torch.arange(self.steps[0][0].shape[2], device=q.device) <= place[:, None]
        own = torch.eye(n, dtype=torch.bool, device=q.device)
        seen = torch.cat([true, *(own for _ in self.steps[1:])], dim=1)
        return scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)


@dataclass(frozen=True)
class Known:
    """A drafter's true rows: what is left of the prompt, and those of the answer behind it.

    Parameters
    ----------
    rows : Tensor, (R, D or 2 D)
        What enters the layer.
    position : Tensor, int64, (R,)
        Rotary ids.
    first : int
        The first row of the answer: it predicts the second token.
    behind : callable
        Embeddings and features (..., D) of further rows of the answer to what enters the layer.
    gate : Tensor, (branches,), optional
        Logits of what chose among ways to shorten pictures.
    """

    rows: Tensor
    position: Tensor
    first: int
    behind: Callable[[Tensor, Tensor], Tensor]
    gate: Tensor | None = None


def unroll(
    module: Any, known: Known, steps: int, embeds: Callable[[int, Tensor], Tensor]
) -> Iterator[Tensor]:
    """Outputs (places, D) of each step: the drafter reads its own, as it will when it drafts.

    ``embeds`` gives the embeddings of step s >= 1 from s and the outputs before it; there may be
    fewer of them than there were, and it ends where there are none.
    """
    attend = Drafting(known.first)
    hidden = module.run(known.rows[None], known.position[None], attend)[0, known.first :]
    yield hidden
    for step in range(1, steps):
        level = embeds(step, hidden)
        if not len(level):
            return
        rows = known.behind(level, hidden[: len(level)])
        position = known.position[known.first :][: len(level)] + step
        hidden = module.run(rows[None], position[None], attend)[0]
        yield hidden


def accepted(drafted: Tensor, answer: Tensor) -> tuple[int, int]:
    """Rounds that a greedy answer takes, and drafted tokens that are accepted in them.

    Parameters
    ----------
    drafted : Tensor, int64, (places, depth)
        What follows token ``1 + place`` of the answer, as it was drafted in that place.
    answer : Tensor, int64, (places + 1,)
    """
    tokens = pad(answer[1:], (0, drafted.shape[1]), value=-1)
    right = drafted == tokens.unfold(0, drafted.shape[1], 1)[: len(drafted)]
    length = right.int().cumprod(1).sum(1).tolist()
    rounds = total = place = 0
    while place < len(length):
        rounds, total = rounds + 1, total + length[place]
        place += length[place] + 1
    return rounds, total


# --- one kind ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """The target, as a drafter's training uses it: ids to embeddings, hidden states to logits."""

    adapter: Adapter

    def embed(self, ids: Tensor) -> Tensor:
        return self.adapter.embed(ids).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.adapter.logits(hidden.to(self.adapter.dtype)).float()


class DrafterTraining(Training):
    """Base of what the kinds of drafters say about their training.

    Class attributes
    ----------------
    later : tuple of str
        Names of parts begin with these that weights given by ``--init`` may lack.
    """

    later: ClassVar[tuple[str, ...]] = ()

    def config(self) -> dict[str, Any]:
        """Its kind; what the layer is made of is among the sizes."""
        return {"kind": self.args.kind}

    def readers(self) -> list[DrafterStage]:
        """Stages that read what is needed of the target; its features are needed by all."""
        return [self.stage()]

    def begin(self, module: nn.Module, answers: Callable[[int], list[int]]) -> None:
        """What is to be set from the answers before the first step."""

    def views(self) -> tuple[str, ...]:
        """Ways to shorten pictures under which the accepted length is measured."""
        return ("all",)

    def features(self, module: Any, lesson: Lesson) -> Tensor:
        """What a drafter reads of the target: hidden states (S, D)."""
        return lesson.features

    def known(self, module: Any, lesson: Lesson, features: Tensor, view: Any) -> Known:
        """The true rows of a sample, pictures shortened as ``view`` says."""
        raise NotImplementedError(f"{type(self).__name__}.known")

    def loss(
        self, module: Any, hidden: Tensor, student: Tensor, true: Tensor, teacher: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one pass, summed over its rows, and what is logged beside it.

        Parameters
        ----------
        hidden, true : Tensor, (m, D)
            Outputs, and the target's features that they stand for, in units of `Lesson.scale`.
        student, teacher : Tensor, (m, V)
            Logits.
        """
        raise NotImplementedError(f"{type(self).__name__}.loss")

    decay: ClassVar[float] = 0.8  # weight of each pass against the one before, as in EAGLE-3

    def passes(
        self, module: Any, lesson: Lesson, target: Teacher, known: Known
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of all passes over a sample, summed over its rows: tokens are the true ones."""
        n, last, scale = lesson.prompt, len(lesson.embeds) - 1, lesson.scale

        def embeds(step: int, hidden: Tensor) -> Tensor:
            return lesson.embeds[n + step : last]

        total, info = lesson.embeds.new_zeros(()), {}
        for step, hidden in enumerate(unroll(module, known, self.args.ttt, embeds)):
            true = lesson.features[n + step : last] / scale
            student = module.output(hidden, target.logits)
            loss, more = self.loss(module, hidden / scale, student, true, lesson.logits[step:])
            total = total + self.decay**step * loss
            info |= {f"{key}_{step}": value for key, value in more.items()}
        return total, info

    def learn(
        self, module: Any, lesson: Lesson, target: Teacher, rng: random.Random, progress: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one sample, summed over its A - 1 rows, and what is logged beside it."""
        features = self.noisy(self.features(module, lesson))
        return self.passes(module, lesson, target, self.known(module, lesson, features, "all"))

    def draft(self, module: Any, lesson: Lesson, target: Teacher, depth: int, view: Any) -> Tensor:
        """Greedy drafts of every place of the answer, int64, (A - 1, depth)."""
        ids, drafted = module.vocabulary(), []

        def note(hidden: Tensor) -> Tensor:
            token = module.output(hidden, target.logits).argmax(-1)
            drafted.append(token if ids is None else ids[token])
            return drafted[-1]

        known = self.known(module, lesson, self.features(module, lesson), view)
        steps = unroll(module, known, depth, lambda step, hidden: target.embed(note(hidden)))
        *_, hidden = steps
        note(hidden)
        return torch.stack(drafted, dim=1)

    def noisy(self, features: Tensor) -> Tensor:
        """Features (S, F) with EAGLE's noise: uniform, less of it the longer the sequence.

        It is counted in their standard deviation.
        """
        scale = self.args.noise * 512 / len(features) * features.std()
        return features + (torch.rand_like(features) - 0.5) * scale
