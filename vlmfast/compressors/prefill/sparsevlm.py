"""SparseVLM: keep the tokens that image-related text attends to, and recycle some of the rest.

Most text tokens of a question are unrelated to the image. SparseVLM (ICML 2025, arXiv 2410.04417;
here its version 1.5) first finds the *raters*, on the input embeddings of the language model, among
the text ``t`` after the last visual token, with all visual tokens ``v``::

    s_t = mean over v of softmax over t of <v, t>          raters: s_t > mean of s

After layers 2, 6 and 15 (of 0 to 31) these rows of the attention of that layer, mean over heads,
score the visual tokens; the best are kept. Of the ``d`` others::

    the trunc(0.3 d) + 1 best are clustered in c = trunc((trunc(0.3 d) + 1) / 10) + 1 groups
    (density peaks over the c nearest; distances by sqrt(width)), and each becomes its mean

``published`` selects the authors' counts by the average number of tokens left of LLaVA-1.5's 576;
other prompts keep the same fractions. ``keep`` keeps one fraction of all tokens after every drop,
and ``budget`` solves ``n lambda^s`` after drop s. Both include the recycled tokens.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- A recycled token takes the position of the centre of its group; theirs follow the kept ones. With
  ``proportional_attention``, its weight is that of the group.
- Densities are compared exactly, and ties go to the lower index; theirs adds random noise.
- All images count, newlines included: theirs supports one span. Only the attention rows of the
  raters are computed, not a full map.
- Its first version chose counts by the rank of the raters' attention, and version 2 neither
  recycles nor renumbers; both are not offered.
- Any depth: ``layers`` are numbers of layers before each drop; values below 1 are fractions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest, PrefillContext
from vlmfast.core.layout import VisualTokens, marked_rows
from vlmfast.core.params import budget_param, param, positions_param, proportional_attention_param
from vlmfast.core.protocols import EncodeStage, PrefillStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest, VisionStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.diversity import density_peaks, euclidean

from ..budget import check_layers, drop_layers, moved_layers, solve_counts
from ..part import Part
from ..select import count, top

# Tokens kept of 576 after each drop, without recycled ones, by the authors' average.
PUBLISHED = {"192": (300, 200, 110), "128": (303, 110, 36), "96": (238, 48, 26), "64": (66, 30, 17)}
RECYCLED, GROUP = 0.3, 10


def raters(visual: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """The text rows that are raters, bool (T,), and the score of each, float32 (T,).

    Parameters
    ----------
    visual : Tensor, (N, D)
    text : Tensor, (T, D)
    """
    score = (visual.float() @ text.float().T).softmax(-1).mean(0)
    rate = score > score.mean()
    return rate | ~rate.any(), score  # all scores equal, or a single row


def recycled(gone: int) -> tuple[int, int]:
    """Number of recycled tokens of ``gone``, and of the groups that they form."""
    if gone <= 0:
        return 0, 0
    tokens = min(int(RECYCLED * gone) + 1, gone)
    return tokens, min(int(tokens / GROUP) + 1, tokens)


def split(n: int, total: int) -> tuple[int, int]:
    """Numbers of kept tokens and of recycled groups of ``n`` so that ``total`` are left."""
    for kept in range(min(n, total), -1, -1):
        if kept + (groups := recycled(n - kept)[1]) <= total:
            return kept, groups
    return 0, total


def clusters(rows: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means (C, D) of ``groups`` of rows (N, D), their centres (C,), and the group of each (N,)."""
    centres, label = density_peaks(euclidean(rows), groups, groups)
    member = (label == torch.arange(groups, device=rows.device)[:, None]).float()
    return member @ rows.float() / member.sum(1, keepdim=True), centres, label


@dataclass(frozen=True)
class SparseVLM(Stage):
    """Keeps tokens that image-related text attends to, and recycles some of the rest."""

    name: ClassVar[str] = "sparsevlm"
    protocol: ClassVar[str] = "encode"
    paper: ClassVar[str] = "ICML 2025, arXiv 2410.04417"
    tier: ClassVar[str] = "baseline"
    lead: ClassVar[str | None] = "keep"
    query_dependent: ClassVar[bool] = True

    keep: float | None = param(
        None,
        "fraction of the visual tokens left after every drop",
        gt=0.0,
        le=1.0,
        excludes=("published",),
    )
    # Not trained: without published weights.
    published: str = param(  # type: ignore[assignment]
        "192", "the authors' counts, by the average tokens left of 576", choices=tuple(PUBLISHED)
    )
    layers: tuple[float, ...] = param(
        (3 / 32, 7 / 32, 16 / 32),
        "layers before each drop; a value below 1 is a fraction of the model's depth",
        gt=0.0,
    )
    recycle: bool = param(True, "keep the means of groups of dropped tokens")
    positions: str = positions_param()
    proportional_attention: bool = proportional_attention_param(False)
    budget: float | None = budget_param("keep", "published")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, self.layers)
        if self.keep is None and self.budget is None and len(self.layers) != 3:
            raise RecipeError(
                f"sparsevlm: the published counts are for 3 drops, layers has {len(self.layers)}; "
                "give keep or budget"
            )

    def expand(self) -> tuple[Stage, ...]:
        return (Question(self), Drop(self))

    def floor(self, depth: int) -> float:
        return self.drops(depth)[0] / depth

    def drops(self, depth: int) -> tuple[int, ...]:
        """Number of layers before each drop."""
        return drop_layers(self.name, self.layers, depth, merge=True)

    def fitted(self, depth: int, first: int) -> Stage:
        published = self.keep is None and self.budget is None  # counts for exactly these drops
        if published or self.drops(depth)[0] >= first:
            return self
        return replace(self, layers=tuple(map(float, moved_layers(self.layers, depth, first))))


@dataclass(frozen=True)
class Question(Part, EncodeStage):
    """Part 1: finds the raters on the input of the language model."""

    name: ClassVar[str] = SparseVLM.name
    query_dependent: ClassVar[bool] = True
    positions = "keep"  # nothing is dropped here

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        assert request.order is not None
        after = request.order > tokens.layout.order[-1]
        text = request.question_embeds[marked_rows(after)]
        note = request.notes.setdefault(self.name, {})
        note["raters"] = raters(tokens.features, text)[0] if len(text) else after[:0]
        return tokens


@dataclass(frozen=True)
class Drop(Part, PrefillStage):
    """Part 2: drops and recycles, between layers of the language model."""

    name: ClassVar[str] = SparseVLM.name
    query_dependent: ClassVar[bool] = True

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.of.drops(depth)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        return {layer - 1: StatRequest("text") for layer in self.layers(depth)}

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        layout, attention = context.layout, context.stats[layer - 1]
        note = context.notes[self.name]
        rate = note["raters"]
        if not layout.visuals or len(rate) == 0:  # no image, or no text after it
            return None
        kept, groups = self._counts(context, layer, note)
        if kept >= layout.visuals:
            return None
        if "rows" not in note:
            note["rows"] = marked_rows(rate)
        # If the last image has been dropped, more text follows those that are left.
        score = attention[:, -len(rate) :].index_select(1, note["rows"]).mean((0, 1))
        stays = top(score, layout.visual, kept)
        if groups:
            gone = layout.visual & ~stays
            again = recycled(layout.visuals - kept)[0]
            rows = marked_rows(top(score, gone, again), again)
            stays = stays.index_fill(0, self._merge(context, rows, groups), True)
        text = len(layout) - layout.visuals
        return marked_rows(stays | ~layout.visual, text + kept + groups)

    def _merge(self, context: PrefillContext, rows: Tensor, groups: int) -> Tensor:
        """Replace the centre of each group of ``rows`` by the group's mean; the centres, (C,)."""
        layout = context.layout
        assert context.hidden is not None
        means, centres, label = clusters(context.hidden[rows], groups)
        centres = rows[centres]
        context.hidden = context.hidden.index_copy(0, centres, means.to(context.hidden.dtype))
        none = torch.zeros(groups, device=means.device)
        weight = none.index_add(0, label, layout.weight[rows])
        protected = none.index_add(0, label, layout.protected[rows].float()) > 0
        context.layout = layout.replace(
            weight=layout.weight.index_copy(0, centres, weight),
            protected=layout.protected.index_copy(0, centres, protected),
        )
        context.proportional_attention = (
            context.proportional_attention or self.proportional_attention
        )
        return centres

    def _counts(self, context: PrefillContext, layer: int, note: dict) -> tuple[int, int]:
        """Numbers of kept tokens and of recycled groups, before ``layer``."""
        layers, n = self.layers(context.depth), context.layout.visuals
        method = self.of
        if "all" not in note:
            note["all"] = n
            if method.budget is not None:
                weight = context.layout.weight * context.layout.visual
                came_in = float(weight.double().sum())
                note["totals"] = solve_counts(n, method.budget * came_in, layers, context.depth)
            elif method.keep is not None:
                note["totals"] = (count(method.keep, n),) * len(layers)
        if "totals" in note:
            total = min(note["totals"][layers.index(layer)], n)
            return split(n, total) if method.recycle else (total, 0)
        # In a shallow model, several of the authors' drops may be one: the last of them counts.
        drop = moved_layers(method.layers, context.depth, 1)[layer]
        kept = min(count(PUBLISHED[method.published][drop] / 576, note["all"]), n - 1)
        return kept, recycled(n - kept)[1] if method.recycle else 0
