"""MustDrop: merge similar tokens, protect key tokens, and drop the rest by the question.

MustDrop (arXiv 2411.10803) decides at three steps which visual tokens to drop; one method name runs
all three parts.

In the vision tower, after its first layer, the patches are cut into windows of ``m`` (3 x 3). A
window of similar patches becomes one token, their mean. Where a family makes one visual token of
several patches, a patch below is such a *cell*: the cells of a window merge patch by patch, so that
what follows the tower gets whole cells, and ``x`` is a cell's concatenated patches::

    sim(w) = mean over pairs i != j of cos(x_i, x_j)          merge w if sim(w) >= similarity

At the end of the tower the CLS row of the last layer, mean over heads, marks the *key set* of each
view: the ``ceil(key T)`` most attended of its ``T`` tokens. No later part drops them.

In the language model, after layers 2, 6, 10 and 14 (of 0 to 31), visual tokens are filtered by the
softmax attention ``A`` (mean over heads) of the text rows ``t`` after the last visual token::

    g_j = sum over t of A[t, j]         m_j = max over t of A[t, j]
    drop j  if  g_j < global_thr sum_i g_i  and  m_j < individual_thr  and  j is no key token

After the prefill, the cache of a layer still contains tokens that later filters dropped. The answer
needs only those that survived the last one: from the layer after which the first filter runs, all
layers keep these tokens alone (``cache``). Layers before it keep everything. The prefill does not
change.

``budget`` needs counts rather than thresholds. Raise both thresholds by one common factor: token j
is dropped at ``max(g_j / (global_thr sum_i g_i), m_j / individual_thr)``, and 1 is the rule above.
That factor ranks the tokens. A budget keeps the key set and the best of the rest, ``n lambda^s``
tokens after filter ``s``; ``n`` enter the language model, and ``lambda`` is solved so that the
average over the layers is met. Windows still merge, those of all views ranked together, while at
least the budget's fraction of the tower's patches is left.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Every view merges all of its similar windows. The authors merge as many in each view as in the one
  with the fewest, so that a call has rows of one length; ``merge="call"`` does so too. Here views
  are padded instead, and the tokens kept of an image do not depend on the other images.
- Merged tokens take the position of the middle of their window. The authors put them before all
  others, most similar first (so does `spatial_merge`; the tower is invariant to the order).
- Windows are 3 x 3 if that divides a view, else 2 x 2; other views need an explicit window. Where
  images keep their own size, in Qwen-VL, rows and columns outside of whole windows do not merge.
- In Qwen-VL's towers a merged cell takes the position, and the attention window, of its first
  member. The windows of each image are ranked alone there.
- Tokens that are not in the prompt (LLaVA-NeXT's letterbox) are no candidates for the key set.
- Newlines, which the authors do not insert, are visual tokens like others to the filter.
- Similarities and attention are compared in float32. Ties go to the lower index.
- Several images: their tokens are filtered together, by the text after the last one.
- On vision towers without CLS the attention that patches receive marks the key set. Where patches
  belong to no single token (see `tome`), no windows merge and the other parts run alone.
- A cached token keeps the rotary id that it has in its layer, and the answer continues the ids of
  each layer's prompt. In the authors' decode a layer's next id is the length of its cache, which is
  below the ids of its tokens.
- Any depth: the layers are given as the number of layers before each drop, 3, 7, 11 and 15; a value
  below 1 is a fraction of the depth. Thresholds are absolute, as published: with fewer tokens, the
  rule drops less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest, PrefillContext, VisionContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout, VisualTokens, marked_rows
from vlmfast.core.params import (
    budget_param,
    param,
    positions_param,
    proportional_attention_param,
    saliency_param,
)
from vlmfast.core.protocols import CacheStage, EncodeStage, InEncoderStage, PrefillStage
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ItemGeometry, StatRequest, VisionStats
from vlmfast.core.views import marked, per_token, slots
from vlmfast.errors import RecipeError

from ..budget import check_layers, drop_layers, moved_layers, solve_counts
from ..part import Part
from ..select import best

# Thresholds (global, individual) of the authors' scripts for LLaVA-1.5-7B, by the average tokens
# left of its 576: TextVQA's, and for 64 tokens also VizWiz's.
PUBLISHED = {
    "192": (0.001, 0.001),
    "128": (0.0012, 0.001),
    "64": (0.011, 0.01),
    "64-vizwiz": (0.005, 0.001),
}


# --- in the vision tower -------------------------------------------------------------------------


def window_members(
    grid: tuple[int, int], window: tuple[int, int], device: torch.device | None = None
) -> Tensor:
    """Raster indices of the patches in each whole window of a grid: int64, (W, m)."""
    (rows, columns), (down, across) = grid, window
    fit = rows // down * down, columns // across * across
    raster = torch.arange(rows * columns, device=device).view(rows, columns)
    raster = raster[: fit[0], : fit[1]]
    cells = raster.unflatten(1, (-1, across)).unflatten(0, (-1, down))
    return cells.transpose(1, 2).flatten(2).flatten(0, 1)


def window_similarity(cells: Tensor) -> Tensor:
    """Mean cosine over the pairs of different patches: (V, W, m, D) to float32 (V, W).

    All pairs at once: the squared length of the sum of unit vectors is the sum over all pairs.
    """
    m, units = cells.shape[2], normalize(cells.float(), dim=-1)
    pairs = units.sum(2).square().sum(-1) - units.square().sum((2, 3))
    return pairs / (m * (m - 1))


def spatial_merge(
    hidden: Tensor,
    members: Tensor,
    similarity: Tensor,
    counts: Tensor,
    cls: int = 1,
    fewest: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the ``counts[v]`` most similar windows of view ``v``.

    Parameters
    ----------
    hidden : Tensor, (V, cls + N, D)
        CLS, if the tower has one, and the patches of a view.
    members : Tensor, int64, (W, m)
        The patches of each window; others do not merge.
    similarity : Tensor, (V, W)
    counts : Tensor, int64, (V,)
    cls : int
        0 for a tower without CLS.
    fewest : int, optional
        The smallest of ``counts``, where the host knows it.

    Returns
    -------
    hidden : Tensor, (V, M, D)
        CLS, merged windows by falling similarity, other patches in their order, padding.
    source : Tensor, int64, (V, cls + N)
        Row of the new hidden states that each old row merges into.
    lengths : Tensor, int64, (V,)
        Rows of each view without the padding.
    """
    views, n, count = hidden.shape[0], hidden.shape[1] - cls, len(members)
    cells = hidden[:, cls + members]
    order = similarity.sort(dim=1, descending=True, stable=True).indices
    rank, index = order.argsort(1), torch.arange(cls + n, device=hidden.device)
    home = torch.full_like(index[:n], count)  # of patches in no window
    home[members] = torch.arange(count, device=hidden.device)[:, None].expand_as(members)
    place = torch.cat([rank, rank.new_full((views, 1), count)], dim=1)[:, home]

    merged = place < counts[:, None]
    alone = (~merged).cumsum(1) - 1 + counts[:, None]
    source = cls + torch.where(merged, place, alone)
    source = torch.cat([torch.zeros_like(source[:, :cls]), source], dim=1)
    lengths = source.amax(1) + 1
    fewest = int(counts.min()) if fewest is None else fewest
    most = cls + n - fewest * (members.shape[1] - 1)  # the largest of the lengths

    # Source of each new row: an old row or the mean of a window. Windows that do not merge write
    # into a last column that is cut off; padding is a copy of the first row.
    copied = torch.zeros(views, most + 1, dtype=torch.int64, device=hidden.device)
    copied = copied.scatter(1, source, index.expand(views, -1))
    target = torch.where(rank < counts[:, None], cls + rank, most)
    means = cls + n + torch.arange(count, device=hidden.device)
    copied = copied.scatter(1, target, means.expand(views, -1))
    rows = torch.cat([hidden, cells.mean(2)], dim=1)
    return rows.gather(1, copied[:, :most, None].expand(-1, -1, rows.shape[2])), source, lengths


def key_tokens(attention: Tensor, layout: TokenLayout, item: ItemGeometry, share: float) -> Tensor:
    """The most attended ``ceil(share T)`` of the ``T`` tokens of each view of one image.

    Parameters
    ----------
    attention : Tensor, (V, N)
        Saliency of the tokens of each view, the whole view first.

    Returns
    -------
    Tensor, bool, (S,)
    """
    slot = slots(layout, item)
    here = marked(slot, attention)
    score = attention.masked_fill(~here, -torch.inf)
    chosen = best(score, (here.sum(1).double() * share).ceil().long())
    return per_token(chosen, slot)


# --- in the language model -----------------------------------------------------------------------


def text_attention(attention: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and maximum over text rows of attention (H, R, N), mean over heads: ``g``, ``m`` (N,)."""
    mean = attention.float().mean(0)
    return mean.sum(0), mean.amax(0)


def dual_attention(g: Tensor, m: Tensor, global_thr: float, individual_thr: float) -> Tensor:
    """Tokens that reach one of both thresholds: bool (N,)."""
    return ~((g < global_thr * g.sum()) & (m < individual_thr))


def dual_attention_rank(g: Tensor, m: Tensor, global_thr: float, individual_thr: float) -> Tensor:
    """Factor by which both thresholds must be raised until a token is dropped: (N,)."""
    return torch.maximum(g / (global_thr * g.sum()), m / individual_thr)


# --- the method and its parts --------------------------------------------------------------------


@dataclass(frozen=True)
class MustDrop(Stage):
    """Merges similar windows, protects key tokens, drops what the question does not attend to."""

    name: ClassVar[str] = "mustdrop"
    protocol: ClassVar[str] = "in-encoder"
    paper: ClassVar[str] = "arXiv 2411.10803"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "budget"
    query_dependent: ClassVar[bool] = True

    window: int = param(
        0,
        "side of the windows in patches; 0: 3 if that divides a view, else 2; 1: no merging",
        ge=0,
    )
    similarity: float = param(0.8, "lowest mean cosine of merged windows; 2: no merging", ge=-1.0)
    merge: str = param(
        "view",
        "windows merged: all similar ones of each view, or as many as in the view with the fewest",
        choices=("view", "call"),
    )
    key: float = param(0.08, "fraction of each view's tokens that is never dropped", gt=0.0, le=1.0)
    layers: tuple[float, ...] = param(
        (3 / 32, 7 / 32, 11 / 32, 15 / 32),
        "layers before each filter; a value below 1 is a fraction of the model's depth",
        gt=0.0,
    )
    # Not trained: without published weights.
    published: str = param(  # type: ignore[assignment]
        "192",
        "the authors' thresholds, by the average tokens left of 576",
        choices=tuple(PUBLISHED),
    )
    global_thr: float | None = param(
        None,
        "minimum fraction of the text's attention; replaces the published one",
        ge=0.0,
        le=1.0,
        excludes=("published",),
    )
    individual_thr: float | None = param(
        None,
        "minimum attention of one text token; replaces the published one",
        ge=0.0,
        le=1.0,
        excludes=("published",),
    )
    saliency: str = saliency_param()
    cache: bool = param(True, "from the first filter on, cache only what the last filter keeps")
    positions: str = positions_param()
    proportional_attention: bool = proportional_attention_param(False)
    budget: float | None = budget_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, self.layers)
        names = ("global_thr", "individual_thr")
        for name, value in zip(names, self.thresholds, strict=True):
            if self.budget is not None and value == 0:
                raise RecipeError(
                    f"mustdrop: {name}=0 cannot be combined with budget, which ranks tokens by "
                    "their attention in units of the thresholds; it must be > 0"
                )

    @property
    def thresholds(self) -> tuple[float, float]:
        """``global_thr`` and ``individual_thr``."""
        pair = zip((self.global_thr, self.individual_thr), PUBLISHED[self.published], strict=True)
        global_thr, individual_thr = (usual if own is None else own for own, usual in pair)
        return global_thr, individual_thr

    def expand(self) -> tuple[Stage, ...]:
        prefill = (Merge(self), KeySet(self), Filter(self))
        return (*prefill, Cache(self)) if self.cache else prefill

    def fitted(self, depth: int, first: int) -> Stage:
        if self.filters(depth)[0] >= first:
            return self
        return replace(self, layers=tuple(map(float, moved_layers(self.layers, depth, first))))

    def floor(self, depth: int) -> float:
        """For an image in which nothing merges: all tokens, then the key set alone."""
        first = self.filters(depth)[0] / depth
        return first + (1 - first) * self.key

    def filters(self, depth: int) -> tuple[int, ...]:
        """Number of layers before each filter."""
        return drop_layers(self.name, self.layers, depth, merge=True)

    def window_of(self, grid: tuple[int, int], border: bool = False) -> tuple[int, int]:
        """Rows and columns of a window in views of ``grid`` rows and columns of patches.

        Parameters
        ----------
        border : bool
            Whether patches may be outside of whole windows.
        """
        for window in (self.window,) if self.window else (3, 2):
            if all(side % window == 0 for side in grid):
                return window, window
        if border:
            return (self.window or 2,) * 2
        fitting = [w for w in range(1, min(grid) + 1) if all(side % w == 0 for side in grid)]
        raise RecipeError(
            f"mustdrop: window={self.window} does not divide the {grid[0]}x{grid[1]} patches of a "
            f"view; allowed are {', '.join(map(str, fitting))}"
        )


@dataclass(frozen=True)
class Merge(Part, InEncoderStage):
    """Part 1: similar windows become one token after the first layer of the tower."""

    name: ClassVar[str] = MustDrop.name
    cells = True

    @property
    def optional(self) -> bool:  # type: ignore[override]  # by its settings, not its class
        """Whether the filters drop anything without it."""
        return self.of.budget is not None or min(self.of.thresholds) > 0

    def blocks(self, depth: int) -> tuple[int, ...]:
        return (1,)

    def on_block(
        self, context: VisionContext, index: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        cls, grid = context.specials, context.items[0].patches
        n = hidden.shape[1] - cls
        if n != grid[0] * grid[1]:
            raise RecipeError(
                f"mustdrop needs a grid of patches that no earlier stage has merged; the vision "
                f"tower has {n} of {grid[0]}x{grid[1]} here"
            )
        window = self.of.window_of(grid, border=context.chunks is not None)
        members = window_members(grid, window, hidden.device)
        if window == (1, 1) or len(members) == 0:
            return hidden, None
        if context.raster is not None:
            members = context.raster[members]
        similarity = window_similarity(hidden[:, cls + members])
        similar = similarity >= self.of.similarity
        limit = similar.numel()
        if self.of.budget is not None:
            limit = int(len(hidden) * n * (1 - self.of.budget) / (members.shape[1] - 1))
        if self.of.merge == "view":
            counts = (similar & best(similarity.view(1, -1), [limit]).view_as(similar)).sum(1)
        else:
            counts = similar.sum(1).min().clamp(max=limit // len(hidden)).expand(len(hidden))
        known = counts.tolist()  # the only read
        if not any(known):
            return hidden, None
        given = members, similarity, counts, cls, min(known)
        hidden, source, lengths = spatial_merge(hidden, *given)
        if max(known) > min(known):
            context.lengths = lengths
        return hidden, source


@dataclass(frozen=True)
class KeySet(Part, EncodeStage):
    """Marks in ``layout.protected`` the tokens that no later part may drop."""

    name: ClassVar[str] = MustDrop.name

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """Of the last block, whose output LLaVA does not use."""
        return (SaliencyRequest("last", self.of.saliency),)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        protected = tokens.layout.protected
        for number, index in tokens.items():
            item = stats.items[number]
            (asked,) = self.saliencies()
            rows = stats.salient(asked, item).rows.mean(1)
            key = key_tokens(rows, tokens.layout.select(index), item, self.of.key)
            protected = protected.index_copy(0, index, protected[index] | key)
        layout = tokens.layout.replace(protected=protected)
        return VisualTokens(tokens.features, layout, tokens.extra)


@dataclass(frozen=True)
class Filter(Part, PrefillStage):
    """Part 2: drops tokens outside the key set that no text token attends to."""

    name: ClassVar[str] = MustDrop.name

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.of.filters(depth)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        return {layer - 1: StatRequest("text") for layer in self.layers(depth)}

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        layout, attention = context.layout, context.stats[layer - 1]
        visual = layout.visual_rows()
        if len(visual) == 0 or attention.shape[1] == 0:  # no image, or no text after it
            return None
        protected = layout.protected[visual]
        g, m = text_attention(attention.index_select(-1, visual))
        if self.of.budget is None:
            kept = dual_attention(g, m, *self.of.thresholds) | protected
            count = int(kept.sum())
        else:
            rank = dual_attention_rank(g, m, *self.of.thresholds)
            rank = rank.masked_fill(protected, torch.inf)
            count = self._count(context, layer)
            kept = best(rank[None], [count])[0]
        gone = len(visual) - count
        if gone <= 0:
            return None
        return marked_rows((~layout.visual).index_copy(0, visual, kept), len(layout) - gone)

    def _count(self, context: PrefillContext, layer: int) -> int:
        """Tokens left by the filter before ``layer``, solved once, at the first filter."""
        layers, visual = self.layers(context.depth), context.layout.visual
        note = context.notes.setdefault(self.name, {})
        if "counts" not in note:
            # A row's weight is the number of tokens merged into it: the sum is the input length.
            came_in = (context.layout.weight.double() * visual).sum()
            key = (context.layout.protected & visual).sum()
            weight, least = torch.stack([came_in, key]).tolist()
            n, target = context.layout.visuals, self.of.budget * weight
            note["counts"] = solve_counts(n, target, layers, context.depth, least=int(least))
        return note["counts"][layers.index(layer)]


@dataclass(frozen=True)
class Cache(Part, CacheStage):
    """Part 3: from the first filter on, layers cache only what survived the last filter."""

    name: ClassVar[str] = MustDrop.name

    def finish(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        first = self.of.filters(context.depth)[0] - 1
        if any(kv.segments for kv in cache[first:]):
            raise RecipeError(
                "mustdrop: a later stage of the recipe quantizes the cache before the last filter "
                "has run; use cache=false"
            )
        # Another stage may have dropped tokens from the cache: which of them is on the device.
        whole = [kv.layout is not None for kv in cache[first:]]
        masks = [
            self._survivors(context, kv)
            for kv, all_of_them in zip(cache[first:], whole, strict=True)
            if not all_of_them
        ]
        parts = zip(masks, _counts(masks, context.layout.device), strict=True)
        kept = [
            self._chosen(context, kv) if all_of_them else _selected(kv, *next(parts))
            for kv, all_of_them in zip(cache[first:], whole, strict=True)
        ]
        return [*cache[:first], *kept]

    def _chosen(self, context: PrefillContext, kv: KV) -> KV:
        """The survivors in a layer that has all tokens which entered it."""
        if len(kv) == len(context.layout):
            return kv
        # Tokens are identified by their order in the prompt, so indices of one filter need not be
        # mapped to those of another.
        order = context.layout.order.to(kv.order.device)  # of a model on several devices
        return kv.select(torch.searchsorted(kv.order[0].contiguous(), order))

    def _survivors(self, context: PrefillContext, kv: KV) -> Tensor:
        """Slots of a layer whose tokens survived: bool, (H, N)."""
        order = context.layout.order.to(kv.order.device)
        at = torch.searchsorted(order, kv.order.contiguous()).clamp(max=len(order) - 1)
        return (order[at] == kv.order) & kv.valid


def _counts(masks: list[Tensor], device: torch.device) -> list[list[int]]:
    """How many slots each mask (H, N) marks in each of its rows, read together."""
    if not masks:
        return []
    sums = [mask.sum(1).to(device) for mask in masks]
    found = iter(torch.cat(sums).tolist())
    return [[next(found) for _ in range(len(mask))] for mask in masks]


def _selected(kv: KV, keep: Tensor, counts: list[int]) -> KV:
    """The slots that a mask marks; ``counts`` of each head."""
    return kv if tuple(counts) == kv.counts else kv.select_mask(keep, counts)
