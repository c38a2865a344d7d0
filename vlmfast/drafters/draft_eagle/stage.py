"""The stage: kind of drafter, size of the tree, and how visual rows are shortened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from vlmfast.core.drafting import Target
from vlmfast.core.params import param, weights_param
from vlmfast.core.protocols import DrafterStage
from vlmfast.errors import RecipeError

from .._loading import fitting, load_published, published
from .drafter import EagleDrafter
from .module import KINDS, EagleModule
from .visual import CHOICES, Visual, check


def layers_read(depth: int) -> tuple[int, int, int]:
    """The low, middle and high decoder layer, of ``depth``, whose inputs EAGLE-3 reads.

    Raises
    ------
    RecipeError
        When the model has fewer than three.
    """
    if depth < 3:
        raise RecipeError(f"draft-eagle: kind=eagle3 reads three layers, the model has {depth}")
    # Published drafters are for deep models; the first rule would give a layer twice below 7.
    return (2, depth // 2, depth - 3) if depth > 6 else (depth // 4, depth // 2, depth * 3 // 4)


class TrainedDrafter(DrafterStage):
    """Base of drafters with one trained layer, with fields for the size of their trees."""

    tier: ClassVar[str] = "core"
    trained: ClassVar[bool] = True
    module: ClassVar[type[EagleModule]] = EagleModule

    def __post_init__(self) -> None:
        super().__post_init__()
        k = self.top_k
        most = k + (self.depth - 1) * k * k
        if self.nodes - 1 > most:
            raise RecipeError(
                f"{self.name}: nodes={self.nodes} is out of range; top_k={k} and "
                f"depth={self.depth} give {most} candidates, so at most {most + 1} nodes"
            )

    @classmethod
    def build(cls, config: dict[str, Any]) -> EagleModule:
        """The untrained module; see its class."""
        return cls.module(config)

    def published(self, folder: Path, sizes: dict[str, Any]) -> nn.Module | None:
        """The module of a published drafter; see `drafters._loading`."""
        return load_published(self, folder, sizes) if published(folder) else None

    def largest(self) -> tuple[int, int]:
        """Most nodes of a tree, the root included, and most drafted tokens on one path."""
        return self.nodes, self.depth


@dataclass(frozen=True)
class DraftEagle(TrainedDrafter):
    """Drafts with one trained layer over shortened visual rows."""

    name: ClassVar[str] = "draft-eagle"
    paper: ClassVar[str] = "EAGLE-2, arXiv 2406.16858; EAGLE-3, 2503.01840; SpecVLM, 2509.11815"
    lead: ClassVar[str | None] = "visual"

    visual: str = param(
        "all",
        "how the drafter's visual rows are shortened: a branch, or a combination of them",
        choices=CHOICES,
    )
    keep: float | None = param(
        None,
        "fraction of an image's rows under every branch, not its own",
        gt=0.0,
        le=1.0,
        excludes=("queries",),
    )
    queries: int = param(2, "rows of the resampler for each image", ge=1)
    seed: int = param(0, "seed of random pruning", ge=0)
    top_k: int = param(8, "children of a node, and nodes that the drafter expands at once", ge=1)
    depth: int = param(4, "most drafted tokens on one path", ge=1)
    nodes: int = param(26, "most nodes of a tree, the root included", ge=2)
    kind: str = param("eagle", "kind of the weights", choices=KINDS)
    weights: str = weights_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.visual in ("all", "text"):
            raise RecipeError(
                f"draft-eagle: keep={self.keep:g} applies to a branch that shortens images, "
                f"not to visual={self.visual}"
            )

    @property
    def features(self) -> bool:  # type: ignore[override]  # by its kind
        """Whether it reads the target's last hidden states; EAGLE-3 reads earlier ones."""
        return self.kind != "eagle3"

    def aux_hidden_state_layers(self, depth: int) -> tuple[int, ...]:
        """Decoder layers (0 .. depth-1) whose input it reads."""
        return layers_read(depth) if self.kind == "eagle3" else ()

    def open(self, target: Target) -> EagleDrafter:
        """A drafter for one request."""
        module = fitting(self, target, EagleModule)
        if module.kind != self.kind:
            raise RecipeError(
                f"draft-eagle: the weights are of kind={module.kind}, not kind={self.kind}"
            )
        rule = Visual(self.visual, self.keep, self.queries, self.seed)
        check(rule, module.compressor)
        return EagleDrafter(target, module, self.top_k, self.depth, self.nodes, rule)
