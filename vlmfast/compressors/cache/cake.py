"""CAKE: split a budget of slots among layers by the entropy and variance of their attention.

Layers differ in how many tokens they spread their attention over and in how it moves from token to
token. CAKE (ICLR 2025, arXiv 2503.12491) measures both on the last ``w`` rows, the observation
window. With ``P`` a layer's causal attention over its N slots, ``j < N - w``::

    H = - sum over h, i, j of P ln(P + 1e-10)           entropy: spread over tokens
    V = sum over h, j of var over i of P[h, i, j]       variance over rows (unbiased)
    preference = H^(1 / tau1) V^(1 / tau2)

In addition to its window a layer gets a part, by preference, of the ``(C - w) L`` slots of all L
layers, ``C = int(keep N)``. A layer gets at most its own slots; the excess is split evenly among
the others. It keeps
the best by attention and by its changes, which foretell that a key will be wanted later::

    s[h, j] = mean over i of P[h, i, j] + gamma var over i of P[h, i, j]
    z[h]    = pool(s[h])                    average of 5 neighbours, zeros beyond both ends

The cascade: parts are known only when all layers have run, but as soon as one has run, an upper
bound of its part is known (see `most`), as its part by preference can only shrink when others join.
After every `TOGETHER` layers, whose preferences are read at once, slots beyond that are dropped,
which reduces the memory of a prefill.

While the answer grows, a layer that exceeds its budget evicts one slot per step: the one that the
newest token attends to least, except for the last ``w`` tokens.

Different from the authors' code, and why:

- The authors cut all earlier layers again whenever one has run. Here each is cut twice: to its
  upper bound soon after it has run, and at the end. The result is that of cutting at the end alone.
  Theirs may keep fewer slots, where a part grows again as a later layer cannot take its own.
- What exceeds the slots of one layer is redistributed until nothing is left. The authors do so
  once, and a layer that then exceeds its slots wastes the rest.
- The budget is a fraction of the prompt, and any fraction below 1 is met. The authors do not
  compress a prompt that is up to ``w`` longer than the budget.
- In decode they pool the newest row over neighbouring slots, which are sorted by score rather than
  by position; here nothing is pooled. A layer's budget there is what it kept of the prompt.
- ``tau1`` and ``tau2`` are tuned per model and budget, and do not transfer. Published for 1024 and
  128 slots per layer: Llama-2-7B 1.9, 1.8 and 0.9, 2.3; Llama-2-13B 0.5, 0.4 and 1.8, 2.0;
  Mistral-7B 0.8, 0.5 and 1.0, 0.8; Llama-3.1-8B 1.6, 0.4 and 1.6, 0.6; Qwen2.5-7B 1.5, 0.6 and 0.4,
  0.6. The default is the second pair of Llama-2-7B: the decoder of LLaVA-1.5, whose prompts of
  about 600 slots leave about as many. A tau above 1 evens out the budgets of layers.
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

from ..evictor import kept_param
from ..layered import Layered, Scored
from ..part import Part
from .snapkv import SnapKV, votes

TOGETHER = 8  # layers that are cut at once: a read of the device for each would leave it idle


def moments(stats: ColumnStats) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of each key's attention over the rows: float32, (H, G, N)."""
    assert stats.sum is not None and stats.sumsq is not None
    r = len(stats.rows)
    mean = stats.sum / r
    squares = (stats.sumsq - stats.sum * mean).clamp(min=0)
    return mean, squares / max(r - 1, 1)


def preference(entropy: Tensor, variance: Tensor, tau1: float, tau2: float) -> Tensor:
    """Preference of a layer, from the entropy and the variance of all its keys: float64, ()."""
    return entropy.double().sum() ** (1 / tau1) * variance.double().sum() ** (1 / tau2)


def spread(budgets: list[int], amount: int, among: Sequence[int]) -> None:
    """Add ``amount`` (or take it, below zero) evenly; the first of ``among`` take the remainder."""
    if not among:
        return
    each, rest = divmod(abs(amount), len(among))
    sign = 1 if amount > 0 else -1
    for number, i in enumerate(among):
        budgets[i] += sign * (each + (number < rest))


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
    """Parts of the first ``layers`` of ``depth`` if they share the whole budget, and this budget.

    Later layers are counted with the length of the last, which is an upper bound.
    """
    scored = [layer.average - layer.window for layer in layers]
    total = sum(scored) + scored[-1] * (depth - len(layers))
    whole = sum(layer.claim for layer in layers)
    equal = 1 / len(layers)
    return [total * (layer.claim / whole if whole > 0 else equal) for layer in layers], total


def most(layers: list[Scored], depth: int) -> list[int]:
    """Upper bounds of the slots of the first ``layers`` when all ``depth`` have run.

    A part by preference can only shrink. The excess that a layer receives from full layers is at
    most the longest layer's average, since a full layer keeps at least its own average. Rounding
    adds at most one slot per round of redistribution, of which there are at most ``depth``.
    """
    ideal, _ = parts(layers, depth)
    redistributed = max(layer.average - layer.window for layer in layers) + depth
    return [
        int(part) + redistributed + layer.window for part, layer in zip(ideal, layers, strict=True)
    ]


@dataclass(frozen=True)
class CAKE(Layered, SnapKV):
    """Splits slots among layers by the entropy and variance of their attention."""

    name: ClassVar[str] = "cake"
    paper: ClassVar[str] = "ICLR 2025, arXiv 2503.12491"
    tier: ClassVar[str] = "experimental"

    keep: float = kept_param(0.2, per=", averaged over layers")
    kernel: int = param(5, "width of the pooling kernel, an odd number", ge=1, le=65535)
    pool: str = param("avg", "how neighbours are pooled", choices=("max", "avg"))
    gamma: float = param(200.0, "weight of the variance in a slot's score", ge=0.0)
    tau1: float = param(0.9, "temperature of the entropy; above 1 evens out budgets", gt=0.0)
    tau2: float = param(2.3, "temperature of the variance; above 1 evens out budgets", gt=0.0)

    def expand(self) -> tuple[Stage, ...]:
        return (self, Decode(self))

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        want = ("sum", "sumsq", "entropy")
        return {at: replace(asked, want=want) for at, asked in super().text_stats(depth).items()}

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        assert stats is not None
        mean, variance = moments(stats)
        return votes(mean + self.gamma * variance, ranked, self.agg, self.kernel, self.pool)

    def claim(self, stats: ColumnStats, ranked: Tensor) -> Tensor:
        seen = ranked[:, None]
        assert stats.entropy is not None
        _, variance = moments(stats)
        return preference(stats.entropy * seen, variance * seen, self.tau1, self.tau2)

    def counts(self, layers: list[Scored]) -> list[int]:
        ideal, total = parts(layers, len(layers))
        budgets = adjust_budgets(ideal, total, [layer.n - layer.window for layer in layers])
        return [budget + layer.window for budget, layer in zip(budgets, layers, strict=True)]

    def trim(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        seen, first = self.seen(context), len(cache) - TOGETHER
        if not seen or len(cache) % TOGETHER or len(cache) == context.depth:
            return cache
        self.read(context, list(seen.values()))
        bounds = dict(zip(seen, most(list(seen.values()), context.depth), strict=True))
        return [
            seen[layer].best(kv, bounds[layer]) if layer >= first and layer in seen else kv
            for layer, kv in enumerate(cache)
        ]


@dataclass(frozen=True)
class Decode(Part, DecodeStage):
    """During the answer: evicts one slot for each new one."""

    name: ClassVar[str] = CAKE.name
    attention_mass: ClassVar[bool] = True

    def step(self, slots: Slots, layer: int) -> None:
        note = slots.notes.get(self.name, {})
        if note.get("kept") and slots.max_length > note["kept"][layer]:
            slot = torch.arange(slots.attention_mass.shape[1], device=slots.attention_mass.device)
            safe = slots.order >= slots.seen - note["windows"][layer]
            safe = safe | (slot >= slots.length[:, None])
            slots.evict(slots.attention_mass.masked_fill(safe, torch.inf).argmin(1))
        slots.attention_mass.zero_()  # only the newest row counts
