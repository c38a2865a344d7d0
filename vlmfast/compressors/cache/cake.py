"""CAKE: one cake of slots, cut by how widely and how restlessly each layer attends.

Layers differ in how many tokens they spread their attention over and in how it moves from token to
token. CAKE (ICLR 2025, arXiv 2503.12491) measures both on the last ``w`` rows, the observation
window. With ``P`` a layer's causal attention over its N slots, ``j < N - w``::

    H = - sum over h, i, j of P ln(P + 1e-10)           how widely
    V = sum over h, j of var over i of P[h, i, j]       how restlessly (unbiased)
    preference = H^(1 / tau1) V^(1 / tau2)

Besides its window a layer gets its part, by preference, of the ``(C - w) L`` slots of all L layers,
``C = int(share N)``; no layer more than it has, what is over going to the others evenly. It keeps
the best by attention and by its changes, which foretell that a key will be wanted later::

    s[h, j] = mean over i of P[h, i, j] + gamma var over i of P[h, i, j]
    z[h]    = pool(s[h])                    average of 5 neighbours, zeros beyond both ends

The cascade: parts are known when all layers have run, but as soon as one has, so is the most that
it can still get (see `most`), as its part by preference can only shrink when others join. What is
beyond that goes at once, and the memory of a prefill falls.

While the answer grows, a layer that exceeds its budget gives away one slot per step: the one to
which the newest token attends least, the last ``w`` tokens being safe.

Different from the authors' code, and why:

- The authors cut all earlier layers again whenever one has run. Here each is cut twice: when it has
  run, to the most that it can still get, and at the end. What stays is what cutting at the end
  alone leaves. Theirs may be less, where a part grows again as a later layer cannot take its own.
- What one layer cannot take is handed out until all of it is gone. The authors do so once, and a
  layer that then has more than its slots wastes the rest.
- The budget is a share of the prompt, and any share below 1 is met. The authors leave alone a
  prompt that is up to ``w`` longer than the budget.
- In decode they pool the newest row over neighbouring slots, which are sorted by score rather than
  by place; here nothing is pooled. A layer's budget there is what it kept of the prompt.
- ``tau1`` and ``tau2`` are tuned per model and budget, and do not transfer. Published for 1024 and
  128 slots per layer: Llama-2-7B 1.9, 1.8 and 0.9, 2.3; Llama-2-13B 0.5, 0.4 and 1.8, 2.0;
  Mistral-7B 0.8, 0.5 and 1.0, 0.8; Llama-3.1-8B 1.6, 0.4 and 1.6, 0.6; Qwen2.5-7B 1.5, 0.6 and 0.4,
  0.6. The default is the second pair of Llama-2-7B: the decoder of LLaVA-1.5, whose prompts of some
  600 slots leave about as many. Above 1 a tau evens out what layers get.
- Mean and variance come from sums over columns. Where prompts differ in length from layer to layer,
  each layer's limits are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import DecodeStage, Slots
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnRequest, ColumnStats

from ..layered import Layered, Scored
from ..part import Part
from .snapkv import SnapKV, votes


def moments(stats: ColumnStats) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of each key's attention over the rows: float32, (H, G, N)."""
    r = len(stats.rows)
    mean = stats.sum / r
    squares = (stats.sumsq - stats.sum * mean).clamp(min=0)
    return mean, squares / max(r - 1, 1)


def preference(entropy: Tensor, variance: Tensor, tau1: float, tau2: float) -> Tensor:
    """How much a layer deserves, from the entropy and the variance of all its keys: float64, ()."""
    return entropy.double().sum() ** (1 / tau1) * variance.double().sum() ** (1 / tau2)


def spread(budgets: list[int], amount: int, among: Sequence[int]) -> None:
    """Add ``amount`` (or take it, below zero) evenly; the first of ``among`` take the remainder."""
    if not among:
        return
    each, rest = divmod(abs(amount), len(among))
    sign = 1 if amount > 0 else -1
    for place, i in enumerate(among):
        budgets[i] += sign * (each + (place < rest))


def adjust_budgets(ideal: Sequence[float], total: int, limits: Sequence[int]) -> list[int]:
    """Whole budgets near ``ideal``, none above its limit, of ``total`` (or all limits) in sum."""
    budgets = [int(part) for part in ideal]
    over = sum(max(k - limit, 0) for k, limit in zip(budgets, limits, strict=True))
    budgets = [min(k, limit) for k, limit in zip(budgets, limits, strict=True)]

    def hungry() -> list[int]:
        return [i for i, limit in enumerate(limits) if budgets[i] < limit]

    spread(budgets, over, hungry())
    short = total - sum(budgets)
    spread(budgets, short, hungry() if short > 0 else [i for i, k in enumerate(budgets) if k > 1])
    if all(k <= limit for k, limit in zip(budgets, limits, strict=True)):
        return budgets
    return adjust_budgets(budgets, total, limits)


def parts(layers: list[Scored], depth: int) -> tuple[list[float], int]:
    """What each of the first ``layers`` of ``depth`` gets if they share the whole cake, and that.

    Layers to come count as long as the last. They are no longer, so the cake can only shrink.
    """
    scored = [of.average - of.window for of in layers]
    total = sum(scored) + scored[-1] * (depth - len(layers))
    whole = sum(of.claim for of in layers)
    return [total * (of.claim / whole if whole > 0 else 1 / len(layers)) for of in layers], total


def most(layers: list[Scored], depth: int) -> int:
    """The most slots that the last of the first ``layers`` can have when all ``depth`` have run.

    Its part by preference can only shrink. What layers with more than they can hold leave to the
    others is no more for each of these than the longest layer's average, since a full layer holds
    at least its own; and a layer for each round of handing out bounds what rounding adds.
    """
    ideal, _ = parts(layers, depth)
    handed_out = max(of.average - of.window for of in layers) + depth
    return int(ideal[-1]) + handed_out + layers[-1].window


@dataclass(frozen=True)
class CAKE(Layered, SnapKV):
    """Shares slots among layers by entropy and variance of their attention, and keeps the share."""

    name: ClassVar[str] = "cake"
    paper: ClassVar[str] = "ICLR 2025, arXiv 2503.12491"

    share: float = param(
        0.2,
        "share of the prompt's keys and values that stays, averaged over layers",
        gt=0.0,
        le=1.0,
    )
    kernel: int = param(5, "neighbours that are pooled, an odd number", ge=1)
    pool: str = param("avg", "how neighbours are pooled", choices=("max", "avg"))
    gamma: float = param(200.0, "weight of the variance in a slot's score", ge=0.0)
    tau1: float = param(0.9, "evens out (above 1) or sharpens the entropy's say", gt=0.0)
    tau2: float = param(2.3, "evens out (above 1) or sharpens the variance's say", gt=0.0)

    def expand(self) -> tuple[Stage, ...]:
        return (self, Decode(self))

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        want = ("sum", "sumsq", "entropy")
        return {at: replace(asked, want=want) for at, asked in super().text_stats(depth).items()}

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        mean, variance = moments(stats)
        return votes(mean + self.gamma * variance, ranked, self.agg, self.kernel, self.pool)

    def claim(self, stats: ColumnStats, ranked: Tensor) -> Tensor:
        seen = ranked[:, None]
        _, variance = moments(stats)
        return preference(stats.entropy * seen, variance * seen, self.tau1, self.tau2)

    def counts(self, layers: list[Scored]) -> list[int]:
        ideal, total = parts(layers, len(layers))
        budgets = adjust_budgets(ideal, total, [of.n - of.window for of in layers])
        return [budget + of.window for budget, of in zip(budgets, layers, strict=True)]

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        kv, seen = super().compress(context, layer, kv, stats), self.seen(context)
        if layer not in seen:
            return kv
        return seen[layer].best(kv, most(list(seen.values()), context.depth))


@dataclass(frozen=True)
class Decode(Part, DecodeStage):
    """While an answer grows: one slot goes for each that comes."""

    name: ClassVar[str] = CAKE.name
    mass: ClassVar[bool] = True

    def step(self, slots: Slots, layer: int) -> None:
        note = slots.notes.get(self.name, {})
        if note.get("kept") and slots.held > note["kept"][layer]:
            places = torch.arange(slots.mass.shape[1], device=slots.mass.device)
            safe = slots.order >= slots.seen - note["windows"][layer]
            safe = safe | (places >= slots.length[:, None])
            slots.evict(slots.mass.masked_fill(safe, torch.inf).argmin(1))
        slots.mass.zero_()  # only the newest row counts
