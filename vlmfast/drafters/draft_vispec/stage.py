"""The stage: an EAGLE drafter that sees an image as a few rows and a global feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.drafting import Target
from vlmfast.core.layout import TokenLayout
from vlmfast.core.params import param, weights_param

from .._loading import fitting
from ..draft_eagle.drafter import EagleDrafter
from ..draft_eagle.module import EagleModule
from ..draft_eagle.stage import TrainedDrafter
from .module import VispecModule


class VispecDrafter(EagleDrafter):
    """Drafts of one request; `seen` is the global feature of the latest image."""

    module: VispecModule
    seen: Tensor | None = None

    def prompt_rows(
        self, embeds: Tensor, features: Tensor, position: Tensor, layout: TokenLayout
    ) -> tuple[Tensor, Tensor]:
        """The layer's input for S rows of a prompt, and its rotary ids."""
        image = torch.where(layout.visual, layout.item.long(), -1)
        seen = self._latest(features)
        rows, source, self.seen = self.module.adapted(embeds, features, image, seen)
        return rows, position[source]

    def answer_rows(self, embeds: Tensor, features: Tensor) -> Tensor:
        """The layer's input for rows of an answer."""
        seen = self._latest(features).expand_as(features)
        return self.module.text_rows(embeds, features, seen)

    def _latest(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[-1]) if self.seen is None else self.seen


@dataclass(frozen=True)
class DraftVispec(TrainedDrafter):
    """Drafts with a trained layer that sees each image as one row and a global feature."""

    name: ClassVar[str] = "draft-vispec"
    paper: ClassVar[str] = "ViSpec, NeurIPS 2025, arXiv 2509.15235"
    features: ClassVar[bool] = True
    module: ClassVar[type[EagleModule]] = VispecModule

    top_k: int = param(8, "children of a node, and nodes that the drafter expands at once", ge=1)
    depth: int = param(4, "most drafted tokens on one path", ge=1)
    nodes: int = param(30, "most nodes of a tree, the root included", ge=2)
    weights: str = weights_param()

    def open(self, target: Target) -> VispecDrafter:
        """A drafter for one request."""
        module = fitting(self, target, VispecModule)
        return VispecDrafter(target, module, self.top_k, self.depth, self.nodes)
