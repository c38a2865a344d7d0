"""Base of the training of drafters, and how a drafter is unrolled over an answer.

Rows are aligned as in EAGLE: row t contains the embedding of token t + 1 (for an image, its
projected patch) and the target's hidden state of token t, and predicts the hidden state of token
t + 1 and with it token t + 2. Unlike there, feature noise and feature loss are in units of the
features' standard deviation, which differs between models by a factor of more than ten: loss
weights mean the same for all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from vlmfast.core.protocols import DrafterStage
from vlmfast.core.training import Training

from ._layer import causal

if TYPE_CHECKING:
    from vlmfast.core.layout import TokenLayout
    from vlmfast.models.base import Adapter


@dataclass(frozen=True)
class Lesson:
    """The target's results for a prompt of n tokens with its answer of A, S = n + A.

    Parameters
    ----------
    embeds : Tensor, (S, D)
        Inputs of the first layer.
    features : Tensor, (S, D)
        Hidden states after the last norm.
    aux_hidden_states : Tensor, (S, K, D), optional
        Inputs of the K layers that the drafter reads.
    layout : TokenLayout
        S rows.
    answer : Tensor, int64, (A,)
    logits : Tensor, float32, (A - 1, V)
        The target's, for the answer's tokens from the second on.
    """

    embeds: Tensor
    features: Tensor
    aux_hidden_states: Tensor | None
    layout: TokenLayout
    answer: Tensor
    logits: Tensor

    @property
    def scale(self) -> Tensor:
        """Standard deviation of the features: the unit of feature distances."""
        return self.features.std()

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, n."""
        return len(self.embeds) - len(self.answer)


class Drafting:
    """Attention of drafted rows over true ones: one object for all steps of one sequence.

    Step 0 has the S true rows. The rows of step s >= 1 are drafted s tokens after the positions
    ``first, first + 1, ...``. Each sees the true rows up to its position, the rows drafted after
    that position in earlier steps, and itself. EAGLE-3's training-time test does this for all
    positions, this class only for the few of an answer.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.steps.append((k, v))
        if len(self.steps) == 1:
            return causal(q, k, v)
        n = q.shape[2]
        cut = [self.steps[0], *((k[:, :, :n], v[:, :, :n]) for k, v in self.steps[1:])]
        keys, values = (torch.cat(each, dim=2) for each in zip(*cut, strict=True))
        position = self.first + torch.arange(n, device=q.device)
        true = torch.arange(self.steps[0][0].shape[2], device=q.device) <= position[:, None]
        own = torch.eye(n, dtype=torch.bool, device=q.device)
        seen = torch.cat([true, *(own for _ in self.steps[1:])], dim=1)
        return scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)


@dataclass(frozen=True)
class Known:
    """A drafter's true rows: the remaining rows of the prompt, followed by those of the answer.

    Parameters
    ----------
    rows : Tensor, (R, D or 2 D)
        The layer's input.
    position : Tensor, int64, (R,)
        Rotary ids.
    first : int
        The first row of the answer: it predicts the second token.
    to_input : callable
        Maps embeddings and features (..., D) of further answer rows to the layer's input.
    gate : Tensor, (branches,), optional
        Logits of the gate that chose how images are shortened.
    """

    rows: Tensor
    position: Tensor
    first: int
    to_input: Callable[[Tensor, Tensor], Tensor]
    gate: Tensor | None = None


def unroll(
    module: Any, known: Known, steps: int, embeds: Callable[[int, Tensor], Tensor]
) -> Iterator[Tensor]:
    """Outputs (positions, D) of each step: the drafter reads its own, as in drafting.

    ``embeds`` returns the embeddings of step s >= 1 from s and the outputs of the step before.
    They may be fewer in each step; unrolling ends where none remain.
    """
    attend = Drafting(known.first)
    hidden = module.run(known.rows[None], known.position[None], attend)[0, known.first :]
    yield hidden
    for step in range(1, steps):
        level = embeds(step, hidden)
        if not len(level):
            return
        rows = known.to_input(level, hidden[: len(level)])
        position = known.position[known.first :][: len(level)] + step
        hidden = module.run(rows[None], position[None], attend)[0]
        yield hidden


def accepted(drafted: Tensor, answer: Tensor) -> tuple[int, int]:
    """Rounds of a greedy answer, and the drafted tokens that are accepted in them.

    Parameters
    ----------
    drafted : Tensor, int64, (positions, depth)
        The draft at each position t: the tokens after token ``1 + t`` of the answer.
    answer : Tensor, int64, (positions + 1,)
    """
    tokens = pad(answer[1:], (0, drafted.shape[1]), value=-1)
    right = drafted == tokens.unfold(0, drafted.shape[1], 1)[: len(drafted)]
    length = right.int().cumprod(1).sum(1).tolist()
    rounds = total = position = 0
    while position < len(length):
        rounds, total = rounds + 1, total + length[position]
        position += length[position] + 1
    return rounds, total


# --- the training of one kind --------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """The target in a drafter's training: maps ids to embeddings and hidden states to logits."""

    adapter: Adapter

    def embed(self, ids: Tensor) -> Tensor:
        return self.adapter.embed(ids).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.adapter.logits(hidden.to(self.adapter.dtype)).float()


class DrafterTraining(Training):
    """Base of the training of each kind of drafter.

    Class attributes
    ----------------
    later : tuple of str
        Prefixes of weights that ``--init`` may lack.
    unused : tuple of str
        Prefixes of weights in ``--init`` that this kind has no use for.
    decay : float
        Weight of each forward pass relative to the one before, as in EAGLE-3.
    """

    stage: ClassVar[type[DrafterStage]]
    later: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ()

    def config(self) -> dict[str, Any]:
        """The kind; the layer's dimensions are among the sizes."""
        return {"kind": self.args.kind}

    def readers(self) -> list[DrafterStage]:
        """Stages that request the target's hidden states; all need its features."""
        return [self.stage()]

    def begin(self, module: Any, answers: Callable[[int], list[int]]) -> None:
        """Set what depends on the answers, before the first step."""

    def views(self) -> tuple[str, ...]:
        """Ways to shorten images under which the accepted length is measured."""
        return ("all",)

    def features(self, module: Any, lesson: Lesson) -> Tensor:
        """The target's features that the drafter reads: hidden states (S, D)."""
        return lesson.features

    def known(self, module: Any, lesson: Lesson, features: Tensor, view: Any) -> Known:
        """The true rows of a sample, with images shortened by ``view``."""
        raise NotImplementedError(f"{type(self).__name__}.known")

    def pass_loss(
        self, module: Any, hidden: Tensor, student: Tensor, true: Tensor, teacher: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one forward pass, summed over its rows, and further values to log.

        Parameters
        ----------
        hidden, true : Tensor, (m, D)
            Outputs, and the target's features that they predict, in units of `Lesson.scale`.
        student, teacher : Tensor, (m, V)
            Logits.
        """
        raise NotImplementedError(f"{type(self).__name__}.pass_loss")

    decay: ClassVar[float] = 0.8

    def passes(
        self, module: Any, lesson: Lesson, target: Teacher, known: Known
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of all forward passes over a sample on its true tokens, summed over its rows."""
        n, last, scale = lesson.prompt, len(lesson.embeds) - 1, lesson.scale

        def embeds(step: int, hidden: Tensor) -> Tensor:
            return lesson.embeds[n + step : last]

        total = lesson.embeds.new_zeros(())
        info: dict[str, float] = {}
        for step, hidden in enumerate(unroll(module, known, self.args.ttt, embeds)):
            true = lesson.features[n + step : last] / scale
            student = module.output(hidden, target.logits)
            loss, more = self.pass_loss(module, hidden / scale, student, true, lesson.logits[step:])
            total = total + self.decay**step * loss
            info |= {f"{key}_{step}": value for key, value in more.items()}
        return total, info

    def learn(
        self, module: Any, lesson: Lesson, target: Teacher, rng: random.Random, progress: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of one sample, summed over its A - 1 rows, and further values to log."""
        features = self.noisy(self.features(module, lesson))
        return self.passes(module, lesson, target, self.known(module, lesson, features, "all"))

    def draft(self, module: Any, lesson: Lesson, target: Teacher, depth: int, view: Any) -> Tensor:
        """Greedy drafts at every position of the answer, int64, (A - 1, depth)."""
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
        """Features (S, F) with EAGLE's uniform noise, which shrinks with the sequence length.

        It is in units of the features' standard deviation.
        """
        scale = self.args.noise * 512 / len(features) * features.std()
        return features + (torch.rand_like(features) - 0.5) * scale
