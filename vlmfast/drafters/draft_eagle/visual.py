"""Fewer visual rows for the drafter; the model that it drafts for keeps its own.

The branches are those of `compressors.elastic`: a row is an embedding with the target's hidden
state of the token before it, and both are selected, averaged or read by the same weights. SpecVLM
(arXiv 2509.11815) leaves open what happens to the hidden states and to the rotary ids. Here pruned
rows keep theirs; rows that stand for several take the last ids of their picture, as in ViSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vlmfast.compressors.cells import grouped
from vlmfast.compressors.select import apportion, count
from vlmfast.compressors.tokens.elastic.module import BRANCHES, MODES, ElasticCompressor, summarise
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import RecipeError

CHOICES = ("all", *BRANCHES, *MODES)
UNTRAINED = ("all", "prune", "pool", "text")  # what needs no compressor
PRUNE, POOL, CONV = 0.05, 0.05, 1 / 3  # shares that SpecVLM's branches leave


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a drafter, before they become what enters the layer.

    Parameters
    ----------
    embeds : Tensor, (S, D)
        Of the token behind each row.
    features : Tensor, (S, D)
        The target's hidden states; of eagle3 behind `EagleModule.project`.
    position : Tensor, int64, (S,)
        Rotary ids.
    image : Tensor, int64, (S,)
        Picture that ``embeds`` belongs to, -1 for text.
    source : Tensor, int64, (S,)
        Which row each was before pictures were shortened; -1 for visual rows.
    """

    embeds: Tensor
    features: Tensor
    position: Tensor
    image: Tensor
    source: Tensor


@dataclass(frozen=True)
class Choice:
    """How a picture was shortened.

    Parameters
    ----------
    logits : Tensor, (5,), optional
        The gate's, in the order of `BRANCHES`; where there was one to ask.
    branch : str
        The branch or mode that was followed.
    """

    logits: Tensor | None
    branch: str


@dataclass(frozen=True)
class Visual:
    """What becomes of the visual rows.

    Parameters
    ----------
    choice : str
        One of `CHOICES`.
    share : float, optional
        Rows of a picture that are left under every branch, as a share; without it SpecVLM's own.
    queries : int
        Rows that the resampler makes of a picture.
    seed : int
        Of random pruning.
    """

    choice: str = "all"
    share: float | None = None
    queries: int = 2
    seed: int = 0

    def counts(self, total: int, compressor: ElasticCompressor | None) -> list[int | None]:
        """Rows that each of `BRANCHES` leaves of ``total``; ``None`` where it is closed."""
        known = compressor is not None
        if self.share is not None:
            same = count(self.share, total)
            fits = known and same <= compressor.queries
            return [same, same, same, same if fits else None, None]
        text = 0 if self.choice == "text" or (known and compressor.text) else None
        return [*(count(share, total) for share in (PRUNE, POOL, CONV)), self.queries, text]


def shortened(
    visual: Visual,
    compressor: ElasticCompressor | None,
    embeds: Tensor,
    features: Tensor,
    position: Tensor,
    layout: TokenLayout,
    question: Tensor,
) -> tuple[Rows, Choice]:
    """The rows of a prompt with its pictures shortened, each by itself; one decision for all.

    Parameters
    ----------
    compressor : ElasticCompressor or None
        Needed by all but `UNTRAINED`.
    embeds, features : Tensor, (S, D)
        As in `Rows`.
    position : Tensor, int64, (S,)
    layout : TokenLayout
        S rows: those of ``embeds``, one behind the rows themselves.
    question : Tensor, (T, D)
        What the gate reads: hidden states of the prompt's text, never of an answer.

    Returns
    -------
    rows : Rows
        All text rows, in order, among what is left of the pictures.
    choice : Choice

    Raises
    ------
    RecipeError
        When a compressor is needed and there is none, or it has fewer queries than are asked for.
    """
    check(visual, compressor)
    seen = layout.visual
    item = torch.where(seen, layout.item.long(), -1)
    everything = Rows(embeds, features, position, item, _sources(seen))
    if visual.choice == "all" or not bool(seen.any()):
        return everything, Choice(None, "all")
    if visual.choice == "text":
        return _selected(everything, (~seen).nonzero().flatten()), Choice(None, "text")

    index = seen.nonzero().flatten()
    tokens = VisualTokens(
        embeds[index],
        layout.select(index).replace(position=position[None, index]),
        (features[index],),
    )
    pictures = [tokens.select(rows) for _, rows in tokens.items()]
    choice = _decided(visual, compressor, pictures, question)
    if choice.branch == "text":
        return _selected(everything, (~seen).nonzero().flatten()), choice
    kept = [_picture(visual, compressor, picture, choice) for picture in pictures]

    text = (~seen).nonzero().flatten()
    rows = Rows(
        torch.cat([embeds[text], *(k.features for k in kept)]),
        torch.cat([features[text], *(k.extra[0] for k in kept)]),
        torch.cat([position[text], *(k.layout.position[0] for k in kept)]),
        torch.cat([item[text], *(k.layout.item.long() for k in kept)]),
        torch.cat([text, *(text.new_full((len(k),), -1) for k in kept)]),
    )
    order = torch.cat([layout.order[text], *(k.layout.order for k in kept)])
    return _selected(rows, order.argsort()), choice


def check(visual: Visual, compressor: ElasticCompressor | None) -> None:
    """Whether the weights can do what is asked.

    Raises
    ------
    RecipeError
    """
    if visual.choice in UNTRAINED:
        return
    if compressor is None:
        raise RecipeError(
            f"draft-eagle: visual={visual.choice} needs weights that were trained with a "
            f"compressor; without one: {', '.join(UNTRAINED)}"
        )
    if visual.queries > compressor.queries:
        raise RecipeError(
            f"draft-eagle: queries={visual.queries} is out of range, the weights have "
            f"{compressor.queries}"
        )


def geometry_of(layout: TokenLayout) -> ItemGeometry:
    """The grids of one picture's patches, as far as they are left."""
    view, grid = layout.view.cpu(), layout.grid.cpu()
    patches = int(grid[:, 1].max()) + 1, int(grid[:, 2].max()) + 1
    return ItemGeometry((1, 1), (0, 0), (int(view.min()), int(view.max()) + 1), patches)


def _sources(seen: Tensor) -> Tensor:
    return torch.arange(len(seen), device=seen.device).masked_fill(seen, -1)


def _selected(rows: Rows, index: Tensor) -> Rows:
    fields = (rows.embeds, rows.features, rows.position, rows.image, rows.source)
    return Rows(*(of.index_select(0, index) for of in fields))


def _decided(
    visual: Visual,
    compressor: ElasticCompressor | None,
    pictures: list[VisualTokens],
    question: Tensor,
) -> Choice:
    if visual.choice not in ("select", "weighted"):
        return Choice(None, visual.choice)
    total = sum(len(picture) for picture in pictures)
    counts = zip(*(visual.counts(len(p), compressor) for p in pictures), strict=True)
    shares = [None if None in of else sum(of) / total for of in counts]
    rows = torch.cat([picture.features[picture.layout.patches] for picture in pictures])
    logits = compressor.gate(question.float(), summarise(rows), shares)
    if visual.choice == "weighted":
        return Choice(logits, "weighted")
    return Choice(logits, BRANCHES[int(logits.argmax())])


def _picture(
    visual: Visual, compressor: ElasticCompressor | None, tokens: VisualTokens, choice: Choice
) -> VisualTokens:
    """What is left of one picture; newlines count, but are never kept."""
    patches = tokens.select(tokens.layout.patches)
    if not len(patches):
        return patches
    geometry, key = geometry_of(patches.layout), _key(visual, tokens)
    counts = visual.counts(len(tokens), compressor)
    if choice.branch == "weighted":
        wanted = count(CONV if visual.share is None else visual.share, len(tokens))
        gates = choice.logits[:3].softmax(0)
        made = compressor.weighted(patches, geometry, wanted, gates, key)
    elif choice.branch == "concat":
        made = _beside(visual, compressor, patches, geometry, counts, key, len(tokens))
    else:
        wanted = counts[BRANCHES.index(choice.branch)]
        if wanted is None:
            raise RecipeError(
                f"draft-eagle: share={visual.share:g} asks for more rows of a picture than "
                f"visual={choice.branch} can give, at most {compressor.queries}"
            )
        made = (compressor or _plain()).branch(choice.branch, patches, geometry, wanted, key)
    if choice.branch == "prune" or made is patches:
        return made
    last = tokens.layout.position[:, len(tokens) - len(made) :]
    return VisualTokens(made.features, made.layout.replace(position=last), made.extra)


@cache
def _plain() -> ElasticCompressor:
    """For pruning and pooling, which have nothing to learn: without numbers or a place."""
    with torch.device("meta"):
        return ElasticCompressor(ElasticCompressor.heads, 2, 1)


def _key(visual: Visual, tokens: VisualTokens) -> tuple[int, ...]:
    return visual.seed, int(tokens.layout.item[0]), len(tokens)


def _beside(
    visual: Visual,
    compressor: ElasticCompressor,
    patches: VisualTokens,
    geometry: ItemGeometry,
    counts: list[int | None],
    key: tuple[int, ...],
    total: int,
) -> VisualTokens:
    """All branches side by side; a picture that is too small for that stays as it is."""
    if visual.share is not None:
        limits = (*(len(patches),) * 3, compressor.queries)
        counts = apportion(count(visual.share, total), (1, 1, 1, 1), limits)
    several = {name: n for name, n in zip(BRANCHES, counts, strict=False) if n}
    held = {
        name: len(grouped(patches.layout, geometry, n).index) if name in ("pool", "conv") else n
        for name, n in several.items()
    }
    if sum(held.values()) > len(patches):
        return patches
    return compressor.concat(patches, geometry, several, key)
