"""CATP: prune several images, each with its own text, of which the last one is asked about.

Methods for one image do worse than random selection where a prompt shows examples before it asks.
Contextually Adaptive Token Pruning (AAAI 2026, arXiv 2508.07871) prunes a fraction ``R`` of the
tokens in two halves. Before the language model each image keeps the ``|Y| = floor(n (1 - R/2))``
tokens that cover the image and match its text, by greedy steps::

    max over Y of  sum over x of max over y in Y of sim(x, y) + 0.7 sum over y in Y of sim(y, text)

with sim the cosine, scaled to [0, 1], and text the mean of the input embeddings between this image
and the next. In the language model, with A_l the attention of the last token of the prompt in layer
l (mean over heads) and h hidden states, the tokens of all images but the last are ranked together
after layer K, and those of the last after layer K + 1::

    max(0, A_K[c] - A_(K-1)[c]) + 0.6 cos(h_c, mean h of the last image and the text after it)
    cos(h_q, mean h of what is left of the other images)

until a fraction ``1 - R`` of each is left. ``keep`` is that fraction, and ``budget`` solves it.

The paper has no public code. Where it leaves details open:

- K = 6 of 32 layers is a fraction of any depth; at least one layer runs before it.
- The frames of a video are one image. An image without text after it is matched with all text.
- A single image has nothing to be compared with: its tokens are ranked after layer K + 1 as those
  of other images are, against the text after it.
- An already merged token counts as one token. Ties go to the lower index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from vlmfast.core.contexts import EncodeRequest, PrefillContext
from vlmfast.core.counting import TokenCount, inexact
from vlmfast.core.layout import VisualTokens, marked_rows
from vlmfast.core.params import budget_param, param, positions_param
from vlmfast.core.protocols import EncodeStage, PrefillStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest, VisionStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.coverage import cover
from vlmfast.kernels.diversity import cosine

from ..budget import equivalent, solve
from ..groups import groups_of
from ..part import Part
from ..select import top


@dataclass(frozen=True)
class CATP(Stage):
    """Keeps tokens of several images by their own texts, then by the last image and its text."""

    name: ClassVar[str] = "catp"
    protocol: ClassVar[str] = "encode"
    paper: ClassVar[str] = "AAAI 2026, arXiv 2508.07871"
    lead: ClassVar[str | None] = "keep"
    query_dependent: ClassVar[bool] = True

    keep: float = param(1 / 3, "fraction of the tokens left at the end, 1 - R", gt=0.0, le=1.0)
    k: float = param(6 / 32, "layer K; a value below 1 is a fraction of the depth", gt=0.0)
    text: float = param(0.7, "weight of an image's text, before the language model", ge=0.0)
    sample: float = param(0.6, "weight of the last image's text, in the language model", ge=0.0)
    positions: str = positions_param()
    budget: float | None = budget_param()

    def expand(self) -> tuple[Stage, ...]:
        return (Cover(self), Context(self))

    def floor(self, depth: int) -> float:
        return 0.5 * (self.layer(depth) + 1) / depth

    def layer(self, depth: int) -> int:
        """K, counted from 0; at least one layer runs before it."""
        k = max(round(self.k * depth), 1) if self.k < 1 else int(min(self.k, depth))
        if (k != self.k and self.k >= 1) or k + 2 >= depth:
            raise RecipeError(
                f"catp: k={self.k:g} means layer {k:g} of {depth}; it must be a whole number, or a "
                "fraction below 1, with at least two layers after it"
            )
        return k

    def shares(self, depth: int, asks: float) -> tuple[float, float]:
        """Fractions of the tokens left before the language model, and at the end.

        ``asks`` is the fraction of the tokens that belongs to the last image.
        """
        if self.budget is None:
            return (1 + self.keep) / 2, self.keep
        k = self.layer(depth)

        def cost(rate: float) -> float:
            first = (1 + rate) / 2
            counts = (first, asks * first + (1 - asks) * rate, rate)
            return equivalent(1, (0, k + 1, k + 2), counts, depth)

        rate = solve(cost, self.budget)
        return (1 + rate) / 2, rate


@dataclass(frozen=True)
class Cover(Part, EncodeStage):
    """Part 1: before the language model, each image with its text."""

    name: ClassVar[str] = CATP.name
    query_dependent: ClassVar[bool] = True
    joins_frames = True

    def tokens_left(self, before: TokenCount) -> TokenCount:
        """Newlines compete too."""
        if self.of.budget is not None:
            raise inexact(self.name, "the other images of the prompt and the depth of the model")
        share = (1 + self.of.keep) / 2
        if share == 1:
            return before
        k = self.count(before.total, share)
        return before.left(k, k - (before.total - before.least), min(k, before.most))

    def count(self, n: int, share: float) -> int:
        """Tokens kept of ``n``."""
        return max(1, int(round(n * share, 6)))

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        groups = groups_of(tokens, stats.items)
        videos = [stats.items[group.first].video for group in groups]
        # Long videos come in parts.
        asks = [i for i, video in enumerate(videos) if video == videos[-1] >= 0]
        asks = asks or [len(videos) - 1]
        n = sum(len(groups[i]) for i in asks)
        share, last = self.of.shares(request.depth, n / len(tokens))
        request.notes[self.name] = {
            "asks": groups[asks[0]].first,  # all items from here on
            "totals": [max(1, round(last * count)) for count in (n, len(tokens) - n)],
        }
        if share == 1:
            return tokens
        assert request.order is not None
        kept, indices = [], [group.index() for group in groups]
        first, last = (tokens.layout.order[torch.stack([i[at] for i in indices])] for at in (0, -1))
        after = request.order > last[:, None]  # (groups, T): the text between two of them
        after[:-1] &= request.order < first[1:, None]
        counts = after.sum(1).tolist()  # the only read
        for index, mask, count in zip(indices, after, counts, strict=True):
            text = request.question_embeds
            text = text[marked_rows(mask, count)] if count else text
            rows = tokens.features[index].float()
            alike = (cosine(rows) + 1) / 2
            named = (cosine_similarity(rows, text.float().mean(0)[None]) + 1) / 2
            k = self.count(len(index), share)
            kept.append(index[cover(alike, k, bonus=self.of.text * named)])
        return tokens.select(torch.cat(kept).sort().values)


@dataclass(frozen=True)
class Context(Part, PrefillStage):
    """Part 2: in the language model, the other images, and then the last."""

    name: ClassVar[str] = CATP.name
    query_dependent: ClassVar[bool] = True

    def layers(self, depth: int) -> tuple[int, ...]:
        k = self.of.layer(depth)
        return (k + 1, k + 2)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        k = self.of.layer(depth)
        return {k - 1: StatRequest("last"), k: StatRequest("last"), k + 1: StatRequest("last")}

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        assert context.hidden is not None
        layout, note, hidden = context.layout, context.notes[self.name], context.hidden.float()
        asks = layout.visual & (layout.item >= note["asks"])
        shown = layout.visual & ~asks  # the other images
        sample, others = note["totals"]
        first = layer == self.layers(context.depth)[0]
        pool, total = (shown, others) if first else (asks, sample)
        ends = torch.arange(1, len(layout) + 1, device=hidden.device) * pool
        here, border = torch.stack([pool.sum(), ends.amax()]).tolist()  # the only read
        if here <= total:
            return None
        if first or here == layout.visuals:
            # For a single image, the text after it.
            rows = hidden[border : len(layout) - context.answer]
            gain = context.stats[layer - 1].mean(0)[0] - context.stats[layer - 2].mean(0)[0]
            mean = (rows if len(rows) else hidden[layout.visual_rows()]).mean(0)
            score = gain.clamp(min=0) + self.of.sample * cosine_similarity(hidden, mean[None])
        else:
            rows = marked_rows(shown, layout.visuals - here)
            score = cosine_similarity(hidden, hidden[rows].mean(0)[None])
        stays = ~pool | top(score, pool, total)
        return marked_rows(stays, len(layout) - here + total)
