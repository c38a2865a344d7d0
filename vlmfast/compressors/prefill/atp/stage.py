"""The stage: soft masks in training, drops at inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.layout import marked_rows
from vlmfast.core.params import budget_param, param, positions_param, weights_param
from vlmfast.core.protocols import PrefillStage
from vlmfast.core.statistics import StatRequest
from vlmfast.errors import RecipeError

from ...budget import check_layers, drop_layers
from .module import (
    MEMORY,
    Module,
    Scores,
    budget_counts,
    hard_mask,
    ranking,
    soft_mask,
    spatial_score,
)


@dataclass(frozen=True)
class ATP(PrefillStage):
    """Drops tokens between layers by learned thresholds on redundancy and spatial scores."""

    name: ClassVar[str] = "atp"
    paper: ClassVar[str] = "CVPR 2025, arXiv 2412.00447"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "budget"
    trained: ClassVar[bool] = True
    query_dependent: ClassVar[bool] = True

    layers_: tuple[float, ...] = param(
        (1 / 8, 7 / 16, 3 / 4),
        "layers before each drop, among those that the weights were trained for; a value below 1 "
        "is a fraction of the model's depth",
        recipe_name="layers",
        gt=0.0,
    )
    grids: int | None = param(
        None, "nested grids of the spatial score; 0: none (default: as trained)", ge=0, le=8
    )
    temperature: float = param(
        10.0, "temperature of the soft masks; used in training only", gt=0.0, le=1000.0
    )
    positions: str = positions_param()
    budget: float | None = budget_param()
    weights: str = weights_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, self.layers_)

    @classmethod
    def build(cls, config: dict[str, Any]) -> Module:
        learned = config["head_weights"] == "learned"
        return Module(config["layers"], config["heads"], learned, config["grids"])

    def _module(self, context: PrefillContext) -> Module:
        return cast(Module, context.trained[self.name])

    def layers(self, depth: int) -> tuple[int, ...]:
        return drop_layers(self.name, self.layers_, depth, merge=True)

    def floor(self, depth: int) -> float:
        return self.layers(depth)[0] / depth

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        return {layer - 1: StatRequest("text", received=True) for layer in self.layers(depth)}

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        layout, module, layers = (
            context.layout,
            self._module(context),
            self.layers(context.depth),
        )
        if not set(layers) <= set(module.layers):
            raise RecipeError(
                f"atp: layers={'/'.join(f'{n:g}' for n in self.layers_)} means drops after "
                f"{', '.join(map(str, layers))} of {context.depth} layers; the weights were "
                f"trained for drops after {', '.join(map(str, module.layers))}"
            )
        visual = layout.visual_rows()
        attention = context.stats[layer - 1]
        if len(visual) == 0 or attention.shape[1] == 0:  # no image, or no text after it
            return None
        soft = context.soft
        if soft is None:
            soft = torch.ones(len(layout), device=layout.device)
        scores = module.point(layer)(
            attention.index_select(-1, visual).mean(1),
            context.received[layer - 1][:, 0].index_select(-1, visual),
            spatial_score(layout, module.grids if self.grids is None else self.grids)[visual],
            soft[visual],
        )
        if module.training:
            self._soften(context, layer, scores, visual, soft)
            return None
        if self.budget is None:
            kept, rows = hard_mask(scores), None
        elif (count := self._count(context, layer)) < len(visual):
            kept, rows = ranking(scores) < count, len(layout) - len(visual) + count
        else:
            return None
        return marked_rows((~layout.visual).index_put((visual,), kept), rows)

    def _soften(
        self, context: PrefillContext, layer: int, scores: Scores, visual: Tensor, soft: Tensor
    ) -> None:
        """Multiply the mask of this point into the masks of the previous points."""
        left = soft[visual] * soft_mask(scores, self.temperature)
        context.soft = soft.index_put((visual,), left)
        share = left.mean()
        context.notes.setdefault(self.name, {}).setdefault("shares", {})[layer] = share
        memory = self._module(context).point(layer).share
        # A sample that is not finite must not enter the running average.
        memory.lerp_(torch.where(share.isfinite(), share, memory).detach(), MEMORY)

    def _count(self, context: PrefillContext, layer: int) -> int:
        """Tokens left by the drop before ``layer``; solved once, at the first drop."""
        layers, note = self.layers(context.depth), context.notes.setdefault(self.name, {})
        if "counts" not in note:
            n, module = context.layout.visuals, self._module(context)
            assert self.budget is not None
            shares = torch.stack([module.point(later).share for later in layers]).tolist()
            note["counts"] = budget_counts(n, self.budget * n, layers, shares, context.depth)
        return note["counts"][layers.index(layer)]
