"""Fewer visual rows for the drafter; the target keeps all of its own.

The branches are those of `compressors.elastic`: a row is an embedding with the target's hidden
state of the token before it, and both are selected, averaged or resampled with the same weights.
SpecVLM (arXiv 2509.11815) does not specify the hidden states and rotary ids of shortened rows. Here
pruned rows keep theirs; rows that combine several take the last ids of their image, as in ViSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from vlmfast.compressors.cells import grouped
from vlmfast.compressors.tokens.elastic.module import (
    BRANCHES,
    MODES,
    ElasticCompressor,
    fractions,
    summarise,
)
from vlmfast.compressors.tokens.elastic.stage import Elastic
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import RecipeError

CHOICES = ("all", *BRANCHES, *MODES)
UNTRAINED = ("all", "prune", "pool", "text")  # choices that need no compressor


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a drafter, before they become the layer's input.

    Parameters
    ----------
    embeds : Tensor, (S, D)
        Embedding of the token after each row.
    features : Tensor, (S, D)
        The target's hidden states; for eagle3 after `EagleModule.project`.
    position : Tensor, int64, (S,)
        Rotary ids.
    image : Tensor, int64, (S,)
        Image that ``embeds`` belongs to, -1 for text.
    """

    embeds: Tensor
    features: Tensor
    position: Tensor
    image: Tensor


@dataclass(frozen=True)
class Choice:
    """How the images were shortened.

    Parameters
    ----------
    logits : Tensor, (5,), optional
        The gate's, in the order of `BRANCHES`; None without a gate.
    branch : str
        The branch or mode in use.
    """

    logits: Tensor | None
    branch: str


@dataclass(frozen=True)
class Visual:
    """How visual rows are shortened.

    Parameters
    ----------
    choice : str
        One of `CHOICES`.
    share : float, optional
        Fraction of an image's rows kept under every branch; SpecVLM's own by default.
    queries : int
        Rows of the resampler for each image.
    seed : int
        Seed of random pruning.
    """

    choice: str = "all"
    share: float | None = None
    queries: int = 2
    seed: int = 0

    def counts(self, total: int, compressor: ElasticCompressor | None) -> list[int | None]:
        """Rows that each of `BRANCHES` keeps of ``total``; ``None`` where unavailable."""
        queries = 0 if compressor is None else compressor.queries
        text = self.choice == "text" or (compressor is not None and compressor.text)
        return self.rule.counts(total, queries, text)

    @cached_property
    def rule(self) -> Elastic:
        """The stage with the same rule; its default fractions are those of SpecVLM."""
        mode = self.choice if self.choice in MODES else "select"
        own = {"queries": self.queries} if self.share is None else {"keep": self.share}
        return Elastic(mode=mode, seed=self.seed, **own)


def shortened(
    visual: Visual,
    compressor: ElasticCompressor | None,
    embeds: Tensor,
    features: Tensor,
    position: Tensor,
    layout: TokenLayout,
    question: Tensor,
) -> tuple[Rows, Choice]:
    """The rows of a prompt with its images shortened, each separately; one choice for all.

    Parameters
    ----------
    compressor : ElasticCompressor or None
        Required except for `UNTRAINED`.
    embeds, features : Tensor, (S, D)
        As in `Rows`.
    position : Tensor, int64, (S,)
    layout : TokenLayout
        S rows: those of ``embeds``, shifted by one from the rows.
    question : Tensor, (T, D)
        The gate's input: hidden states of the prompt's text, never of an answer.

    Returns
    -------
    rows : Rows
        All text rows and the remaining visual rows, in order.
    choice : Choice

    Raises
    ------
    RecipeError
        When the choice needs a compressor and the weights have none, or one with fewer queries.
    """
    check(visual, compressor)
    seen = layout.visual
    item = torch.where(seen, layout.item.long(), -1)
    everything = Rows(embeds, features, position, item)
    if visual.choice == "all" or not bool(seen.any()):
        return everything, Choice(None, "all")
    text = (~seen).nonzero().flatten()
    if visual.choice == "text":
        return _selected(everything, text), Choice(None, "text")

    index = seen.nonzero().flatten()
    tokens = VisualTokens(
        embeds[index],
        layout.select(index).replace(position=position[None, index]),
        (features[index],),
    )
    images = [tokens.select(rows) for _, rows in tokens.items()]
    choice = _choice(visual, compressor, images, question)
    if choice.branch == "text":
        return _selected(everything, text), choice
    kept = [_shortened_image(visual, compressor, image, choice) for image in images]
    rows = Rows(
        torch.cat([embeds[text], *(k.features for k in kept)]),
        torch.cat([features[text], *(k.extra[0] for k in kept)]),
        torch.cat([position[text], *(k.layout.position[0] for k in kept)]),
        torch.cat([item[text], *(k.layout.item.long() for k in kept)]),
    )
    order = torch.cat([layout.order[text], *(k.layout.order for k in kept)])
    return _selected(rows, order.argsort()), choice


def check(visual: Visual, compressor: ElasticCompressor | None) -> None:
    """Check that the weights support ``visual``.

    Raises
    ------
    RecipeError
    """
    if visual.choice in UNTRAINED:
        return
    if compressor is None:
        raise RecipeError(
            f"draft-eagle: visual={visual.choice} needs weights that were trained with a "
            f"compressor; allowed without one are {', '.join(UNTRAINED)}"
        )
    if visual.queries > compressor.queries:
        raise RecipeError(
            f"draft-eagle: queries={visual.queries} is out of range, the weights have "
            f"{compressor.queries}"
        )


def geometry_of(layout: TokenLayout) -> ItemGeometry:
    """The grids of one image's remaining patches."""
    view, grid = layout.view.cpu(), layout.grid.cpu()
    patches = int(grid[:, 1].max()) + 1, int(grid[:, 2].max()) + 1
    return ItemGeometry((1, 1), (0, 0), (int(view.min()), int(view.max()) + 1), patches)


def _selected(rows: Rows, index: Tensor) -> Rows:
    fields = (rows.embeds, rows.features, rows.position, rows.image)
    return Rows(*(field.index_select(0, index) for field in fields))


def _choice(
    visual: Visual,
    compressor: ElasticCompressor | None,
    images: list[VisualTokens],
    question: Tensor,
) -> Choice:
    if visual.choice not in ("select", "weighted"):
        return Choice(None, visual.choice)
    total = sum(len(image) for image in images)
    shares = fractions([visual.counts(len(image), compressor) for image in images], total)
    rows = torch.cat([image.features[image.layout.patches] for image in images])
    assert compressor is not None
    logits = compressor.gate(question.float(), summarise(rows), shares)
    if visual.choice == "weighted":
        return Choice(logits, "weighted")
    return Choice(logits, BRANCHES[int(logits.argmax())])


def _shortened_image(
    visual: Visual, compressor: ElasticCompressor | None, tokens: VisualTokens, choice: Choice
) -> VisualTokens:
    """The remaining rows of one image; newlines count, but are never kept."""
    patches = tokens.select(tokens.layout.patches)
    if not len(patches):
        return patches
    geometry, counts = geometry_of(patches.layout), visual.counts(len(tokens), compressor)
    if choice.branch == "concat":
        assert compressor is not None
        several = visual.rule.parts(compressor, len(patches), counts)
        lengths = (
            len(grouped(patches.layout, geometry, n).index) if name in ("pool", "conv") else n
            for name, n in several.items()
        )
        if sum(lengths) > len(patches):  # an image too small for all branches is unchanged
            return patches
    elif choice.branch in BRANCHES and counts[BRANCHES.index(choice.branch)] is None:
        most = 0 if compressor is None else compressor.queries
        raise RecipeError(
            f"draft-eagle: keep={visual.share:g} needs more rows of an image than "
            f"visual={choice.branch} can give, at most {most}"
        )
    made = visual.rule.shortened(
        compressor or _untrained(), tokens, geometry, counts, choice.logits, choice.branch
    )
    if choice.branch == "prune":
        return made
    last = tokens.layout.position[:, len(tokens) - len(made) :]
    return VisualTokens(made.features, made.layout.replace(position=last), made.extra)


@cache
def _untrained() -> ElasticCompressor:
    """For pruning and pooling, which have no weights: on the meta device."""
    with torch.device("meta"):
        return ElasticCompressor(ElasticCompressor.heads, 2, 1)
