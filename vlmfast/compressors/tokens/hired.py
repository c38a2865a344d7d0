"""HiRED: a token budget for each view of an image, filled by CLS attention.

High-resolution models cut an image into crops and encode a small view of the whole as well. HiRED
(AAAI 2025, arXiv 2408.10945) keeps a fraction ``r`` of all these tokens. It uses two attention rows
of the vision tower, from CLS to the patches: that of the first layer locates the content of the
image, that of the layer that feeds the projector ranks patches by their meaning.

With ``V`` views of ``N`` patches each, view 0 being the whole image::

    B   = trunc(V N r)                        tokens for the image
    B_0 = min(trunc(B alpha), N)              of these for the whole view
    B_i = min(trunc((B - B_0) s_i / sum s), N)     and for crop i
    keep the B_i patches of view i with the largest sum over heads of the CLS row

``rule`` defines the content ``s_i`` of a crop. ``paper``: first-layer attention of view 0, summed
over the patches that crop i covers. ``code`` (what the authors run): the number of view 0's
``trunc(N (1 - alpha))`` most attended patches that fall in the i-th of equally long runs of the
raster order, which is a stripe of the image, not the area of the crop. An image without crops
keeps its ``trunc(N r)`` best patches.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- ``paper`` is the default rule: the stripes of ``code`` match the crops only when these are stacked
  vertically.
- Each image is ranked by its own attention; the authors' LLaVA-1.5 code applies the selection of
  the first image of a batch to all of them.
- Crops are where the model puts them. The authors swap rows and columns of the grid, so that
  non-square grids are stitched and unpadded wrongly and most of their tokens are dropped;
  ``grid_compat`` drops the same tokens (their order stays the prompt's).
- Ties go to the lower index. An image keeps at least one token.
- On vision towers without CLS, received attention replaces its row, and several patches that become
  one token count together (`vlmfast.core.saliency`).
- The authors never insert newlines; ``newline`` can keep them.
- ``budget`` counts the tokens that are in the prompt. ``keep`` counts all ``V N`` patches, so that
  patches selected in the letterbox padding are dropped and fewer tokens are kept.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import TokenCount, existing, inexact, newlines
from vlmfast.core.layout import Kind, TokenLayout, VisualTokens
from vlmfast.core.params import param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import cells, marked, open_rows, per_token, slots
from vlmfast.errors import RecipeError

from ..guard import GuardedRanking
from ..select import apportion, best, top


def view_budgets(views: int, n: int, rate: float, alpha: float) -> tuple[int, int]:
    """Tokens for the whole view and for all crops together (``B_0`` and ``B - B_0``)."""
    total = int(views * n * rate)  # in this order: trunc(2880 * 0.7) is 2015
    whole = min(int(total * alpha), n)
    return whole, min(total - whole, (views - 1) * n)


def content_by_area(content: Tensor, patches: tuple[int, int], tiles: tuple[int, int]) -> Tensor:
    """Attention mass of the whole view in the area of each crop (``rule="paper"``).

    The whole view is stretched onto the crops' grid; a patch belongs to the crop that contains its
    centre.

    Parameters
    ----------
    content : Tensor, (N,)
        First-layer CLS row of the whole view, summed over heads.

    Returns
    -------
    Tensor, float64, (crops,)
    """
    (h, w), (rows, columns) = patches, tiles
    crop = (cells(h, rows)[:, None] * columns + cells(w, columns)).flatten()
    return torch.zeros(rows * columns, dtype=torch.float64).index_add(0, crop, content.double())


def content_by_stripe(content: Tensor, crops: int, alpha: float) -> Tensor:
    """Number of the most attended patches in each raster stripe (``rule="code"``).

    Parameters
    ----------
    content : Tensor, (N,)
        First-layer CLS row of the whole view, summed over heads.

    Returns
    -------
    Tensor, float32, (crops,)
    """
    n = content.shape[0]
    attended = best(content[None], [int(n * (1 - alpha))])[0]
    stripe = torch.arange(n) * crops // n
    return torch.zeros(crops).index_add(0, stripe, attended.float())


def crop_budgets(content: Tensor, total: int, n: int) -> list[int]:
    """``B_i`` of the crops, truncated in the precision of ``content``; remainders are not used."""
    share = content / content.sum()
    if not bool(share.isfinite().all()):  # no content anywhere
        share = torch.full_like(content, 1 / len(content))
    return (share * total).long().clamp(max=n).tolist()


def packed(
    tiles: tuple[int, int], patches: tuple[int, int], size: tuple[int, int], transposed: bool
) -> Tensor:
    """Ids ``view * N + patch`` of an image's tokens in the order of the prompt, without padding.

    The whole view first, then the stitched crops, row by row across them.

    Parameters
    ----------
    tiles, patches : (int, int)
        Rows and columns of crops, and of patches in each.
    size : (int, int)
        Height and width of the image in pixels.
    transposed : bool
        Swap rows and columns of ``tiles``, as the authors do.

    Returns
    -------
    Tensor, int64, (tokens,)
    """
    rows, columns = reversed(tiles) if transposed else tiles
    h, w = patches
    ids = torch.arange((1 + rows * columns) * h * w)
    crops = ids[h * w :].view(rows, columns, h, w).transpose(1, 2).reshape(rows * h, columns * w)
    if size[1] / size[0] > crops.shape[1] / crops.shape[0]:
        cut = (crops.shape[0] - int(size[0] * (crops.shape[1] / size[1]))) // 2
        crops = crops[cut : crops.shape[0] - cut]
    else:
        cut = (crops.shape[1] - int(size[1] * (crops.shape[0] / size[0]))) // 2
        crops = crops[:, cut : crops.shape[1] - cut]
    return torch.cat([ids[: h * w], crops.flatten()])


@dataclass(frozen=True)
class HiRED(GuardedRanking):
    """Keeps the patches that CLS attends to most, with a budget for each view."""

    name: ClassVar[str] = "hired"
    paper: ClassVar[str] = "AAAI 2025, arXiv 2408.10945"
    tier: ClassVar[str] = "core"

    keep: float = param(0.2, "fraction of the patches of all views to select", gt=0.0, le=1.0)
    alpha: float = param(0.5, "fraction of the budget for the whole view", ge=0.0, le=1.0)
    rule: str = param("paper", "how a crop's content is measured", choices=("paper", "code"))
    grid_compat: bool = param(False, "also drop the tokens that the authors' swapped grid drops")
    newline: str = param(
        "drop",
        "learned row separators: drop all, keep all, or keep those of rows with a kept token",
        choices=("drop", "keep", "rows"),
    )
    saliency: str = saliency_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reserve and self.newline == "rows":
            raise RecipeError(
                "hired: reserve cannot be combined with newline=rows; use newline=drop or keep"
            )

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """Of the first block, and of the one whose output goes to the projector."""
        blocks = ("first", "features")
        first, features = (self.guarded(SaliencyRequest(b, self.saliency)) for b in blocks)
        return first, features

    def count_left(self, before: TokenCount) -> TokenCount:
        """Exact by ``budget``; by ``keep`` where there are no crops to divide it among."""
        tiled = before.image.geometry.tiles != (0, 0)
        separators = before.total - before.least
        if self.newline == "rows" and separators:
            raise inexact(self.name, "which rows have a kept token (newline=rows)")
        if self.newline == "keep" and not before.full:
            raise inexact(self.name, "how many newlines the stages before it keep")
        if not before.full and (self.budget is None or (self.grid_compat and tiled)):
            raise inexact(self.name, "which patches the stages before it keep")
        kept = newlines(before.image.layout) if self.newline == "keep" else 0
        if self.budget is not None:
            target = max(self.target(before) - kept, 1)
            if self.grid_compat and tiled:
                exists, geometry = existing(before.image), before.image.geometry
                seen = packed(geometry.tiles, geometry.patches, geometry.size, transposed=True)
                patches = exists & marked(seen, exists.flatten(1)).view_as(exists)
                k = min(target, int(patches.sum()))
            else:
                k = before.at_most(target, self.name)
        elif tiled:
            raise inexact(self.name, "the content of the crops (keep); use budget")
        else:
            k = max(int(before.most * self.keep), 1)
        return before.left(k + kept, k, k)

    def select_tokens(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor:
        """Rows kept of one image."""
        layout, tiled = tokens.layout, geometry.tiles != (0, 0)
        first, importance = (stats.salient(s, geometry).rows.sum(1) for s in self.saliencies())
        content = self._content(first[0].cpu(), geometry) if tiled else None

        slot = slots(layout, geometry)
        exists = marked(slot, importance)
        if self.grid_compat and tiled:
            seen = packed(geometry.tiles, geometry.patches, geometry.size, transposed=True)
            exists = exists & marked(seen.to(slot.device), importance)

        if self.budget is None:
            most = max(map(math.prod, geometry.grids), default=importance.shape[1])
            kept = per_token(self._by_keep(content, importance, exists, most), slot)
            kept = kept | self._newlines(kept, layout, tiled)
        else:
            kept = self._by_budget(content, importance, exists, slot, layout, self.target(tokens))
        return kept.nonzero().flatten()

    def _by_keep(
        self, content: Tensor | None, importance: Tensor, exists: Tensor, n: int
    ) -> Tensor:
        """The paper's rule: of all views of ``n`` patches, newlines not counted: bool, (V, N)."""
        views = len(importance)
        if content is None:
            counts = [int(n * self.keep)] * views
        else:
            whole, crops = view_budgets(views, n, self.keep, self.alpha)
            counts = [whole, *crop_budgets(content, crops, n)]
        chosen = self.best(importance, counts) & exists
        first = best(importance.masked_fill(~exists, -torch.inf).view(1, -1), [1])
        return torch.where(chosen.any(), chosen, first.view_as(importance))

    def _by_budget(
        self,
        content: Tensor | None,
        importance: Tensor,
        exists: Tensor,
        slot: Tensor,
        layout: TokenLayout,
        target: int,
    ) -> Tensor:
        """The budget's rule: ``target`` tokens, newlines counted: bool, (S,)."""
        tiled, caps = content is not None, exists.sum(1).tolist()
        importance = importance.masked_fill(~exists, -torch.inf)

        def keep_patches(k: int) -> Tensor:
            kept = per_token(self.best(importance, self._view_counts(content, k, caps)), slot)
            return kept | self._newlines(kept, layout, tiled)

        if self.newline != "rows":
            newlines = int((layout.kind == Kind.NEWLINE).sum()) if self.newline == "keep" else 0
            return keep_patches(min(max(target - newlines, 1), sum(caps)))

        # Each patch may add the newline of its row: the largest k for which both fit.
        fits = range(1, min(target, sum(caps)) + 1)
        k = bisect_right(fits, target, key=lambda k: int(keep_patches(k).sum()))
        kept = keep_patches(max(k, 1))
        # One more patch may add a newline that exceeds the target: fill open rows instead.
        score = per_token(importance, slot, -torch.inf)
        spare = layout.patches & ~kept & open_rows(kept, layout, tiled) & (score > -torch.inf)
        return kept | top(score, spare, target - int(kept.sum()))

    def _newlines(self, kept: Tensor, layout: TokenLayout, tiled: bool) -> Tensor:
        """Newlines to keep with the tokens ``kept`` (S,): bool, (S,)."""
        newline = layout.kind == Kind.NEWLINE
        if self.newline == "drop":
            return torch.zeros_like(newline)
        return newline & open_rows(kept, layout, tiled) if self.newline == "rows" else newline

    def _content(self, content: Tensor, geometry: ItemGeometry) -> Tensor:
        if self.rule == "code":
            return content_by_stripe(content, geometry.tiles[0] * geometry.tiles[1], self.alpha)
        return content_by_area(content, geometry.patches, geometry.tiles)

    def _view_counts(self, content: Tensor | None, k: int, caps: list[int]) -> list[int]:
        """Tokens per view that sum to ``k``; what exceeds a view's patches goes to the others."""
        if content is None:
            return apportion(k, [1.0] * len(caps), caps)
        crops = min(k - min(int(k * self.alpha), caps[0]), sum(caps[1:]))
        return [k - crops, *apportion(crops, content.tolist(), caps[1:])]
