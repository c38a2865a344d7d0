"""The method ``pvc`` and its two parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest, VisionContext
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import (
    budget_param,
    param,
    positions_param,
    proportional_attention_param,
    weights_param,
)
from vlmfast.core.protocols import EncodeStage, InEncoderStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import covering, merged
from vlmfast.errors import RecipeError

from ...part import Part
from .module import ProgressiveEncoder, to_cells, to_patches
from .plan import Cells, Choice, Plan, make_plan, nearest

SIDES = (2, 4)
REPEATS = (1, 2, 4)


@dataclass(frozen=True)
class PVC(Stage):
    """Encodes images as static videos; every frame becomes a fixed number of tokens."""

    name: ClassVar[str] = "pvc"
    protocol: ClassVar[str] = "in-encoder"
    paper: ClassVar[str] = "CVPR 2025, arXiv 2412.09613"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "budget"
    trained: ClassVar[bool] = True

    side: int = param(2, "side of the cells, in visual tokens, that become one token", ge=2)
    image_repeat: int = param(4, "repeats of an image: number of tokens per cell", ge=1)
    video_repeat: int = param(1, "repeats of each frame of a video", ge=1)
    views: str = param(
        "base",
        "views of a video's frames: the base view alone, or all crops too",
        choices=("base", "all"),
    )
    positions: str = positions_param()
    proportional_attention: bool = proportional_attention_param()
    budget: float | None = budget_param("side", "image_repeat", "video_repeat", "views")
    weights: str = weights_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_repeat", "video_repeat"):
            if getattr(self, name) > self.side**2:
                raise RecipeError(
                    f"pvc: {name}={getattr(self, name)} is more than the {self.side**2} patches of "
                    f"a cell; with side={self.side}, 1 to {self.side**2} is allowed"
                )

    def expand(self) -> tuple[Stage, ...]:
        return (Progress(self), Compress(self))

    def floor(self, depth: int) -> float:
        """One token for each cell of the largest side, of an image without newlines."""
        return 1 / max(SIDES) ** 2

    @classmethod
    def build(cls, config: dict[str, Any]) -> ProgressiveEncoder:
        return ProgressiveEncoder(
            width=config["vision_width"],
            heads=config["vision_heads"],
            blocks=config["blocks"],
            sides=config["sides"],
            repeats=config["repeats"],
            hidden=config["hidden"],
            time_width=config["time_width"],
            token_width=config.get("token_width"),
        )

    def choose(self, scene: list[ItemGeometry], module: ProgressiveEncoder) -> Choice:
        """The setting for an image (a scene of one) or for the frames of a video."""
        if self.budget is not None:
            stitched = module.patches == 1  # LLaVA; others have no newlines and no letterbox
            return nearest(scene, self.budget, module.sides, module.repeats, stitched)
        if self.side not in module.sides:
            raise RecipeError(
                f"pvc: side={self.side} has no trained compressor; these weights have sides "
                + ", ".join(map(str, module.sides))
            )
        if scene[0].video < 0:
            return Choice(self.side, self.image_repeat)
        return Choice(self.side, self.video_repeat, self.views == "all")


@dataclass(frozen=True)
class Progress(Part, InEncoderStage):
    """Part 1: frames attend to earlier ones, and cells become tokens before the projector."""

    name: ClassVar[str] = PVC.name
    token_rows = True

    def blocks(self, depth: int) -> tuple[int, ...]:
        """All blocks up to LLaVA's feature layer, -2; the weights determine which are used."""
        return () if self.of.budget == 1 else tuple(range(1, depth - 1))

    def on_block(
        self, context: VisionContext, index: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        module = cast(ProgressiveEncoder, context.trained[self.name])
        if index not in module.blocks:
            return hidden, None
        hidden, plan = self._repeated(context, hidden, module.patches, module.width)
        attention = module.temporal[str(index)]
        for rows in plan.sequences:
            time = module.time(plan.time[rows[0]])
            seen = attention(hidden[rows].float(), time).to(hidden.dtype)
            hidden = hidden.index_copy(0, rows.flatten(), seen.flatten(0, 1))
        return hidden, None

    def on_output(self, context: VisionContext, hidden: Tensor) -> Tensor:
        """Replace every patch by the token that represents it, as input of the projector."""
        if self.of.budget == 1:
            return hidden
        module = cast(ProgressiveEncoder, context.trained[self.name])
        hidden, plan = self._repeated(context, hidden, 1, module.token_width)
        grid = context.items[0].patches
        cut = hidden.shape[1] - grid[0] * grid[1]  # a CLS row, if the family keeps it
        views = hidden[: max(item.views[1] for item in context.items)]
        for cells in plan.cells:
            patches = compressed(module, hidden[:, cut:], plan, cells, grid)
            rows = torch.cat([views[cells.views, :cut], patches], dim=1)
            views = views.index_copy(0, cells.views, rows)
        return views

    def _repeated(
        self, context: VisionContext, hidden: Tensor, patches: int, width: int
    ) -> tuple[Tensor, Plan]:
        """The hidden states, repeated at the first call, and the plan.

        ``hidden`` must have ``patches`` rows of ``width`` for each visual token.
        """
        module = cast(ProgressiveEncoder, context.trained[self.name])
        n = math.prod(context.items[0].patches) * patches
        if context.merged is not None or hidden.shape[1] - n not in (0, 1):
            raise RecipeError(
                f"pvc needs all {n} patches of a view, and the vision tower has "
                f"{hidden.shape[1]} rows here; it cannot be combined with a stage that merges them"
            )
        if hidden.shape[2] != width:
            raise RecipeError(
                f"pvc works on one layer of the vision tower, of width {width}; the model "
                f"gives rows of {hidden.shape[2]} to its projector"
            )
        note = context.notes.setdefault(self.name, {})
        if "plan" not in note:
            note["plan"] = make_plan(context.items, lambda scene: self.of.choose(scene, module))
            note["placed"] = note["plan"].to(hidden.device)
            hidden = hidden[note["placed"].source]
        return hidden, note["placed"]


def compressed(
    module: ProgressiveEncoder, patches: Tensor, plan: Plan, cells: Cells, grid: tuple[int, int]
) -> Tensor:
    """The tokens of the views of ``cells``, at every patch that they represent.

    Parameters
    ----------
    patches : Tensor, (V', N, D)
        Of the repeated batch.

    Returns
    -------
    Tensor, (n, N, D)
    """
    n, repeats = cells.rows.shape
    rows, number = cells.rows.flatten(), torch.arange(max(n, repeats), device=patches.device)
    # The patches of a cell are assigned to its repeats in turn, by rank; the first rank is home.
    rank = cells.rank
    shown, repeat = rank % repeats, number[:repeats, None]
    there = to_cells(patches.new_ones(1, patches.shape[1], 1), grid, cells.side)[0, :, :, 0] > 0
    tokens = module.compress[str(cells.side)](
        to_cells(patches[rows].float(), grid, cells.side),
        module.time(plan.time[rows]),
        (rank[:, None] == repeat).flatten(0, 1),
        (shown[:, None] == repeat).flatten(0, 1),
        there,
        rest=(cells.side**2 - repeats) / (cells.side**2 - 1),
    )
    spread = tokens.unflatten(0, (n, repeats))[number[:n, None], shown]  # (n, m, C, D)
    return to_patches(spread.transpose(1, 2), grid, cells.side).to(patches.dtype)


def members(
    view: Tensor, y: Tensor, x: Tensor, plan: Plan, cells: Cells, grid: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The tokens of the views of ``cells``: their rows, and a key that sorts them. On the host.

    Parameters
    ----------
    view, y, x : Tensor, int64, (S,)
        As in `TokenLayout`.

    Returns
    -------
    rows : Tensor, int64, (M,)
    key : Tensor, int64, (M,)
        ``group m + rank``: tokens of one group represent the same cell and repeat; the lowest rank
        among the ``m`` patches of the cell is the best representative.
    """
    s, (h, w), repeats = cells.side, grid, cells.rows.shape[1]
    number = torch.full_like(plan.source, -1)
    number[cells.views] = torch.arange(len(cells.views))
    n = torch.where(view >= 0, number[view.clamp(min=0)], -1)
    rows = (n >= 0).nonzero().flatten()
    n, y, x = n[rows], y[rows], x[rows]
    cell = (n * -(-h // s) + y // s) * -(-w // s) + x // s
    rank = cells.rank[n, y % s * s + x % s]
    return rows, (cell * repeats + rank % repeats) * s * s + rank


@dataclass(frozen=True)
class Compress(Part, EncodeStage):
    """Part 2: of all copies of a token one is kept."""

    name: ClassVar[str] = PVC.name

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        """One token for each cell and repeat, as far as the cell has patches in the prompt.

        ``weight`` counts the patches that it represents, ``box`` covers them. Crops that were not
        encoded are dropped, and so are the newlines of images with fewer tokens than patches.
        """
        if self.of.budget == 1:
            return tokens
        plan: Plan = request.notes[self.name]["plan"]
        layout = tokens.layout
        # On the host: tensor sizes depend on it, and it is a few numbers per token.
        item, _, view, y, x = layout.on_host[1:].long()
        own = torch.arange(len(tokens))
        stays = plan.whole[item] & (view < 0)
        home = torch.where(stays, own, -1)
        for cells in plan.cells:
            rows, key = members(view, y, x, plan, cells, stats.items[0].patches)
            key, order = key.sort()
            rows, group = rows[order], key // cells.side**2
            first = torch.ones_like(group, dtype=torch.bool)
            first[1:] = group[1:] != group[:-1]
            home[rows] = rows[first][first.cumsum(0) - 1]
        count = int((home == own).sum())
        home = home.to(layout.device)
        # Boxes of dropped tokens are in a group of their own, which is left out.
        group = torch.where(home >= 0, home, len(tokens))
        box = covering(layout.box, group, len(tokens) + 1)[:-1]
        spread = VisualTokens(tokens.features, layout.replace(box=box), tokens.extra)
        none, gone = home[:0], tokens.features[:0]
        return merged(spread, home, lambda features, _: features, none, gone, count)
