"""SparseVLM: words that mean the picture say which tokens stay, and what goes is recycled.

Most words of a question have nothing to do with what there is to see. SparseVLM (ICML 2025, arXiv
2410.04417; here its version 1.5) first finds the *raters*, on the input embeddings of the language
model, of the text ``t`` behind the last visual token and all visual tokens ``v``::

    s_t = mean over v of softmax over t of <v, t>          raters: s_t > mean of s

Behind layers 2, 6 and 15 (of 0 to 31) these rows of the attention that has just run, mean over
heads, score the visual tokens; the best stay. Of the ``d`` others::

    the trunc(0.3 d) + 1 best are clustered in c = trunc((trunc(0.3 d) + 1) / 10) + 1 groups
    (density peaks over the c nearest; distances by sqrt(width)), and each becomes its mean

``published`` names the authors' counts by the tokens that they leave on average of LLaVA-1.5's 576;
other prompts keep the same shares. ``rate`` keeps one share of all tokens behind every drop, and
``budget`` solves ``n lambda^s`` behind drop s; what is recycled is part of both.

Different from the authors' code, and why:

- A recycled token takes the place of the centre of its group; theirs follow the kept ones. Its
  weight is that of the group, for ``repair``.
- Densities are compared as they are, the lower index first; theirs adds random noise.
- Every picture counts, newlines included: theirs knows one span. Only the rows that are asked for
  are computed, not a map.
- Its first version chose counts by the rank of the raters' attention, and version 2 neither
  recycles nor renumbers; both are not offered.
- Any depth: ``layers`` are numbers of layers before each drop; below 1 they are shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest, PrefillContext
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import budget_param, param, positions_param, repair_param
from vlmfast.core.protocols import EncodeStage, PrefillStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest, VisionStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.diversity import density_peaks

from ..budget import check_layers, drop_layers, moved_layers, solve_counts
from ..part import Part
from ..select import count, top

# Tokens kept behind each drop of the authors' 576, without recycled ones, by the average they name.
PUBLISHED = {"192": (300, 200, 110), "128": (303, 110, 36), "96": (238, 48, 26), "64": (66, 30, 17)}
RECYCLED, GROUP = 0.3, 10


def raters(visual: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Which text rows rate, bool (T,), and the score of each, float32 (T,).

    Parameters
    ----------
    visual : Tensor, (N, D)
    text : Tensor, (T, D)
    """
    score = (visual.float() @ text.float().T).softmax(-1).mean(0)
    rate = score > score.mean()
    return rate | (not bool(rate.any())), score  # all alike, or there is one only


def recycled(gone: int) -> tuple[int, int]:
    """Of ``gone`` tokens, how many are recycled, and how many groups they form."""
    if gone <= 0:
        return 0, 0
    some = min(int(RECYCLED * gone) + 1, gone)
    return some, min(int(some / GROUP) + 1, some)


def split(n: int, total: int) -> tuple[int, int]:
    """How many of ``n`` tokens stay, and groups of others, so that ``total`` are left."""
    for kept in range(min(n, total), -1, -1):
        if kept + (groups := recycled(n - kept)[1]) <= total:
            return kept, groups
    return 0, total


def clusters(rows: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means (C, D) of ``groups`` of rows (N, D), their centres (C,), and the group of each (N,)."""
    rows = rows.float()
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    centres, label = density_peaks(distance * rows.shape[1] ** -0.5, groups, groups)
    member = (label == torch.arange(groups, device=rows.device)[:, None]).float()
    return member @ rows / member.sum(1, keepdim=True), centres, label


@dataclass(frozen=True)
class SparseVLM(Stage):
    """Keeps what the words that mean the picture look at, and recycles some of the rest."""

    name: ClassVar[str] = "sparsevlm"
    protocol: ClassVar[str] = "encode"
    paper: ClassVar[str] = "ICML 2025, arXiv 2410.04417"
    lead: ClassVar[str | None] = "rate"
    asks_question: ClassVar[bool] = True

    rate: float | None = param(
        None, "share of the visual tokens left behind every drop", gt=0.0, le=1.0
    )
    published: str = param(
        "192", "the authors' counts, by the tokens they left of 576", choices=tuple(PUBLISHED)
    )
    layers: tuple[float, ...] = param(
        (3 / 32, 7 / 32, 16 / 32),
        "layers before each drop; a value below 1 is a share of the model's depth",
        gt=0.0,
    )
    recycle: bool = param(True, "groups of what goes stay as their means")
    positions: str = positions_param("compact")
    repair: bool = repair_param(False)
    budget: float | None = budget_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, self.layers)
        if self.rate is None and self.budget is None and len(self.layers) != 3:
            raise RecipeError(
                f"sparsevlm: the published counts are for 3 drops, layers has {len(self.layers)}; "
                "give rate or budget"
            )

    def expand(self) -> tuple[Stage, ...]:
        return (Question(self), Drop(self))

    def floor(self, depth: int) -> float:
        return self.drops(depth)[0] / depth

    def drops(self, depth: int) -> tuple[int, ...]:
        """Number of layers before each drop."""
        return drop_layers(self.name, self.layers, depth, merge=True)

    def fitted(self, depth: int, first: int) -> Stage:
        published = self.rate is None and self.budget is None  # counts for these very drops
        if published or self.drops(depth)[0] >= first:
            return self
        return replace(self, layers=tuple(map(float, moved_layers(self.layers, depth, first))))


@dataclass(frozen=True)
class Question(Part, EncodeStage):
    """Part 1: notes what goes into the language model."""

    name: ClassVar[str] = SparseVLM.name
    asks_question: ClassVar[bool] = True
    positions = "keep"  # nothing goes here

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        behind = request.order > tokens.layout.order[-1]
        text = request.question_embeds[behind]
        note = request.notes.setdefault(self.name, {})
        note["raters"] = raters(tokens.features, text)[0] if len(text) else behind[:0]
        return tokens


@dataclass(frozen=True)
class Drop(Part, PrefillStage):
    """Part 2: drops and recycles, between layers of the language model."""

    name: ClassVar[str] = SparseVLM.name
    asks_question: ClassVar[bool] = True

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.of.drops(depth)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        return {layer - 1: StatRequest("text") for layer in self.layers(depth)}

    def keep(self, context: PrefillContext, layer: int) -> Tensor | None:
        layout, attention = context.layout, context.stats[layer - 1]
        note = context.notes[self.name]
        rate = note["raters"]
        visual = layout.visual.nonzero().flatten()
        if len(visual) == 0 or len(rate) == 0:  # no picture, or no text behind it
            return None
        kept, groups = self._counts(context, layer, note)
        if kept >= len(visual):
            return None
        # The last picture may be gone by now: then there is more text behind those that are left.
        score = attention[:, -len(rate) :][:, rate].mean((0, 1))
        stays = top(score, layout.visual, kept)
        if groups:
            gone = layout.visual & ~stays
            some = top(score, gone, recycled(int(gone.sum()))[0]).nonzero().flatten()
            stays = stays.index_fill(0, self._merge(context, some, groups), True)
        return (stays | ~layout.visual).nonzero().flatten()

    def _merge(self, context: PrefillContext, some: Tensor, groups: int) -> Tensor:
        """Put the means of groups of the rows ``some`` in the place of their centres, (C,)."""
        layout = context.layout
        means, centres, label = clusters(context.hidden[some], groups)
        centres = some[centres]
        context.hidden = context.hidden.index_copy(0, centres, means.to(context.hidden.dtype))
        none = torch.zeros(groups, device=means.device)
        weight = none.index_add(0, label, layout.weight[some])
        protected = none.index_add(0, label, layout.protected[some].float()) > 0
        context.layout = layout.replace(
            weight=layout.weight.index_copy(0, centres, weight),
            protected=layout.protected.index_copy(0, centres, protected),
        )
        context.repair = context.repair or self.repair
        return centres

    def _counts(self, context: PrefillContext, layer: int, note: dict) -> tuple[int, int]:
        """Tokens that stay as they are before ``layer``, and groups of recycled ones."""
        layers, n = self.layers(context.depth), int(context.layout.visual.sum())
        of, index = self.of, layers.index(layer)
        if "all" not in note:
            came_in = float(context.layout.weight[context.layout.visual].double().sum())
            note["all"] = n
            if of.budget is not None:
                note["totals"] = solve_counts(n, of.budget * came_in, layers, context.depth)
            elif of.rate is not None:
                note["totals"] = (count(of.rate, n),) * len(layers)
        if "totals" in note:
            total = min(note["totals"][index], n)
            return split(n, total) if of.recycle else (total, 0)
        kept = min(count(PUBLISHED[of.published][index] / 576, note["all"]), n - 1)
        return kept, recycled(n - kept)[1] if of.recycle else 0
