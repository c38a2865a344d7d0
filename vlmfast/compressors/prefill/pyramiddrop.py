"""PyramidDrop: fewer visual tokens in deeper layers.

Shallow layers need the whole image, deeper ones fewer and fewer tokens of it. PyramidDrop (CVPR
2025, arXiv 2410.17247) splits a language model of L layers into stages and drops visual tokens
between them. With ``n_0`` visual tokens in the prompt and a ratio ``lambda``, stage s keeps::

    n_s = trunc(n_0 lambda^s)        always of the original count, so that rounding does not add up

those that the last token of the instruction attends to most (softmax attention in float32, mean
over heads). ``budget`` solves ``lambda`` so that the average of ``n_s`` over the layers is met.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- ``rule="next"`` is the authors' code: tokens are ranked by queries and keys of the layer after the
  drop, computed from its input. ``rule="last"`` is the paper: the attention of the layer before the
  drop, which is already computed.
- Grouped-query heads share their keys; the authors' code fails on such models.
- Tokens of every image of a prompt are ranked; theirs ranks the first image only. ``per_item``
  keeps the same fraction of each image instead of ranking all tokens together.
- Any depth: a value of ``layers`` below 1 is a fraction of the model's depth (8, 16, 24 of 32 by
  default).
- The prompt is not truncated to a tokenizer's maximum length.

The attention of early layers has to rank the tokens. Where it does not, as on `pocket`, whose
decoder is Gemma 3 270M, random tokens are better: 80 % of the answers are right at a third of the
tokens, and 92 % with `random` (2026-11-26).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.layout import TokenLayout, marked_rows
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import PrefillStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest
from vlmfast.errors import RecipeError

from ..budget import check_layers, drop_layers, moved_layers, solve_counts
from ..select import top


def stage_counts(n: int, ratios: Sequence[float]) -> list[int]:
    """Tokens kept by each stage, of ``n`` at the beginning; at least one."""
    return [max(int(n * ratio), 1) for ratio in ratios]


def rank(attention: Tensor) -> Tensor:
    """Score of each token: attention (H, R, S), mean over heads and query rows; (S,)."""
    return attention.float().mean(0).mean(0)


@dataclass(frozen=True)
class PyramidDrop(PrefillStage):
    """Drops visual tokens in stages, by the attention of the last instruction token."""

    name: ClassVar[str] = "pyramiddrop"
    paper: ClassVar[str] = "CVPR 2025, arXiv 2410.17247"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "keep"
    query_dependent: ClassVar[bool] = True

    keep: float = param(
        0.5,
        "lambda: fraction of its tokens that each drop keeps",
        gt=0.0,
        le=1.0,
    )
    ratios: tuple[float, ...] | None = param(
        None,
        "fractions of the original count, one per drop, instead of powers of lambda",
        gt=0.0,
        le=1.0,
        excludes=("keep",),
    )
    layers_: tuple[float, ...] = param(
        (0.25, 0.5, 0.75),
        "layers before each drop; a value below 1 is a fraction of the model's depth",
        recipe_name="layers",
        gt=0.0,
    )
    rule: str = param(
        "next",
        "layer whose attention ranks: the one after the drop (next) or before it (last)",
        choices=("next", "last"),
    )
    per_item: bool = param(False, "keep the same fraction of each image, each ranked separately")
    positions: str = positions_param()
    budget: float | None = budget_param("keep", "ratios")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, self.layers_)
        if self.ratios is not None and list(self.ratios) != sorted(self.ratios, reverse=True):
            raise RecipeError("pyramiddrop: ratios must not grow from one drop to the next")
        if self.ratios is not None and len(self.ratios) != len(self.layers_):
            raise RecipeError(
                f"pyramiddrop: ratios has {len(self.ratios)} entries, layers {len(self.layers_)}; "
                "there must be one ratio per drop"
            )

    def fitted(self, depth: int, first: int) -> Stage:
        if min(n * depth if n < 1 else n for n in self.layers_) >= first - 0.5:
            return self
        moved = moved_layers(self.layers_, depth, first)
        layers = tuple(float(count) for count in moved)
        if self.budget is not None:
            return replace(self, layers_=layers)
        ratios = self.ratios or tuple(self.keep ** (s + 1) for s in range(len(self.layers_)))
        ratios = tuple(ratios[s] for s in moved.values())
        return replace(self, layers_=layers, ratios=ratios, keep=PyramidDrop.keep)

    def layers(self, depth: int) -> tuple[int, ...]:
        return drop_layers(self.name, self.layers_, depth)

    def floor(self, depth: int) -> float:
        return self.layers(depth)[0] / depth

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        if self.rule == "last":
            return {layer - 1: StatRequest("last") for layer in self.layers(depth)}
        return {layer: StatRequest("last", ahead=True) for layer in self.layers(depth)}

    def counts(self, n: int, depth: int) -> tuple[int, ...]:
        """Tokens that each stage keeps, of ``n`` at the beginning."""
        layers = self.layers(depth)
        if self.budget is not None:
            return solve_counts(n, self.budget * n, layers, depth, whole=int)
        powers = tuple(self.keep**s for s in range(1, len(layers) + 1))
        return tuple(stage_counts(n, self.ratios or powers))

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        layout, layers = context.layout, self.layers(context.depth)
        if not layout.visuals:
            return None
        n = context.notes.setdefault(self.name, {}).setdefault("items", self._groups(layout))
        source = layer if self.rule == "next" else layer - 1
        score = rank(context.stats[source])
        kept, number = ~layout.visual, layers.index(layer)
        here, left = 0, 0  # visual tokens before and after, if no other stage has dropped any
        for item, total in n.items():
            mine = layout.visual & ((layout.item == item) | (not self.per_item))
            counts = self.counts(total, context.depth)
            kept = kept | top(score, mine, counts[number])
            before = min((total, *counts[:number]))
            here, left = here + before, left + min(before, counts[number])
        known = here == layout.visuals
        return marked_rows(kept, len(layout) - here + left if known else None)

    def _groups(self, layout: TokenLayout) -> dict[int, int]:
        """Tokens of each separately ranked group, before the first drop."""
        if not self.per_item:
            return {-1: layout.visuals}
        counts = Counter(torch.where(layout.visual, layout.item.long(), -2).tolist())
        return {item: counts[item] for item in sorted(counts) if item != -2}
