"""Self-speculation over a view: the model drafts with a part of its own cache.

Attention of a long prompt reads all of its keys and values for every token. A method that
compresses them knows a part that gives almost the same tokens. Here this part, the *view*, only
drafts: the model itself generates a few tokens over it, and one forward pass over the whole cache
verifies them, so that nothing is lost. With the slots ``V[l, h]`` that the view keeps of the prompt
in layer l and KV head h, and all slots after the prompt::

    x_{t+1} = argmax softmax(head(f(x_t)))      f attends to V[l, h] and to all slots written since
    verify    x_1 ... x_steps over the full cache, which also writes their keys and values again

The view is held as indices into the cache; nothing is copied. Its sources:

- ``topk``: all text, and in each layer and KV head the visual slots that receive the most attention
  from the text after them.
- A method that evicts from the cache (``snapkv``, ``pyramidkv``, ``h2o``, ``streamingllm``,
  ``vlcache``, ``cake``): the slots that it would keep.
- A method that reduces the visual tokens before the language model (``hired``, ``divprune``, ...):
  all text, and the visual tokens that it would keep.
- A method that drops visual tokens between the layers (``fastv``, ``dart``, ``pyramiddrop``): all
  text, and in each layer the visual tokens that it would let in.
- A recipe file (``.yaml``) with one of these methods under its own parameters.

Views of ``topk`` and of evictors are computed again every ``refresh`` verified rounds, from the
attention that the nodes of the verified tree gave to the prompt. The first round of each answer is
such a round: in a session the images were read before the question.

TriForce (arXiv 2404.11912) drafts with retrieved chunks of the cache and a smaller model below,
QuantSpec (arXiv 2502.10424) with a cache in 4 bits, Sparse-to-Dense (arXiv 2505.19155) with the
visual keys that the text attends to most, SpecVLM (arXiv 2508.16201) with a second model that reads
a part of the video.

Different from these, and why:

- The view is any selection that a compression method of this library makes, per layer and head
  where it selects so.
- Drafts are one chain of at most ``steps`` tokens. It ends with the first one that is less likely
  than ``confidence`` under the view. There is no second level of drafts as in TriForce; other
  drafters of the recipe add branches to the same tree.
- Sparse-to-Dense selects once, before the answer; with ``refresh=0`` so does ``topk``.
- All nodes of a verified tree vote at a refresh, rejected ones included: they are few, and they
  attend to the prompt as the tokens next to them do.

A prompt without visual tokens has no view, and nothing is drafted. Methods that quantize the cache
or modify it during the answer move slots, so that the recipe cannot contain them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlmfast.compressors.evictor import Evictor
from vlmfast.compressors.part import Part
from vlmfast.compressors.select import best
from vlmfast.core.contexts import EncodeRequest, PrefillContext
from vlmfast.core.counting import TokenCount
from vlmfast.core.drafting import (
    Budget,
    Observer,
    Proposal,
    Read,
    Round,
    SlotList,
    Target,
    ViewDrafter,
)
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout, VisualTokens, marked_rows
from vlmfast.core.params import param
from vlmfast.core.protocols import (
    CacheStage,
    DecodeStage,
    DrafterStage,
    EncodeStage,
    PrefillStage,
)
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.stage import Stage, Stages, with_values
from vlmfast.core.statistics import ColumnRequest, ColumnStats, StatRequest, VisionStats
from vlmfast.core.tree import Tree
from vlmfast.errors import RecipeError, VLMFastError
from vlmfast.kernels.col_stats import column_sums

TOP_K = "topk"
_ALLOWED = (
    "allowed are topk, methods that evict from the cache (snapkv, pyramidkv, h2o, streamingllm, "
    "vlcache, cake), and methods without weights of their own that reduce visual tokens before the "
    "language model (hired, divprune, ...) or between its layers (fastv, dart, pyramiddrop)"
)


@dataclass(frozen=True)
class DraftSelf(DrafterStage):
    """Drafts with the model itself over a compressed view of its own cache."""

    name: ClassVar[str] = "draft-self"
    paper: ClassVar[str] = "Sparse-to-Dense, arXiv 2505.19155"
    lead: ClassVar[str] = "view"
    merges: ClassVar[bool] = True
    # Not annotated: it is no parameter, but the parts read it.
    positions = "keep"

    view: str = param(
        TOP_K,
        "what selects the slots: topk, a method that evicts from the cache or drops visual "
        "tokens, or a recipe file (.yaml) with one such method",
    )
    keep: float = param(
        0.1, "its keep (of topk, fraction of the visual tokens); not used of a file", gt=0.0, le=1.0
    )
    steps: int = param(4, "most drafted tokens", ge=1)
    confidence: float = param(0.3, "a token below this probability ends the draft", ge=0, le=1)
    refresh: int = param(
        8, "verified rounds from one view to the next, of topk and evictors; 0: never", ge=0
    )

    @cached_property
    def selects(self) -> Stage:
        """The stage that selects the slots.

        Raises
        ------
        RecipeError
            Where it cannot.
        """
        if self.view == TOP_K:
            return TopK(self.keep)
        if self.view.endswith(".yaml"):
            stages = Recipe.load(self.view)
            if len(stages) != 1:
                raise RecipeError(
                    f"{self.name}: view={self.view} has the recipe '{stages}'; it must have "
                    "exactly one method"
                )
            (stage,) = stages
        else:
            if self.view not in stage_names():
                raise RecipeError(
                    f"{self.name}: view={self.view}: there is no such method; {_ALLOWED}"
                )
            cls = stage_class(self.view)
            named = any(f.name == "keep" for f in fields(cls))
            named = named and not issubclass(cls, DrafterStage)
            stage = with_values(cls(), keep=self.keep) if named else cls()
        parts = [part for part in stage.expand() if not isinstance(part, DecodeStage)]
        if parts != [stage] or not isinstance(stage, Evictor | EncodeStage | PrefillStage):
            raise RecipeError(
                f"{self.name}: view={self.view} selects no slots of a whole cache; {_ALLOWED}"
            )
        if stage.trained:
            raise RecipeError(
                f"{self.name}: view={self.view} needs weights of its own, which views do not "
                f"load; {_ALLOWED}"
            )
        return stage

    def expand(self) -> tuple[Stage, ...]:
        if isinstance(self.selects, EncodeStage):
            return (self, KeptTokens(self), KeptSlots(self))
        if isinstance(self.selects, PrefillStage):
            return (self, KeptRows(self), KeptSlots(self))
        return (self, KeptSlots(self))

    @property
    def follows_attention(self) -> bool:
        """Whether the view is selected by the attention to the cache, so that it is refreshed."""
        return not isinstance(self.selects, EncodeStage | PrefillStage)

    def largest(self) -> tuple[int, int]:
        return 1 + self.steps, self.steps

    def draft_bytes(self, weights: int, cache: int) -> int:
        keep = getattr(self.selects, "keep", None)
        return weights + int((self.keep if keep is None else keep) * cache)

    def check_recipe(self, recipe: Stages) -> None:
        for stage in recipe:
            for part in stage.expand():
                quantizes = getattr(part, "quantizes", False)
                if isinstance(part, DecodeStage) or quantizes:
                    evicts = any(f.name == "decode" for f in fields(stage))
                    does = "quantizes" if quantizes else "evicts or moves during the answer"
                    raise RecipeError(
                        f"{self.name} drafts over slots of the prompt's cache, which {stage.name} "
                        f"{does}; use "
                        + (f"{stage.name}:decode=false" if evicts else "one of them alone")
                    )

    def open(self, target: Target) -> Chain:
        return Chain(self, target)


# --- what is selected ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TopK(CacheStage):
    """All text, and the visual slots that receive the most attention from the text after them."""

    name: ClassVar[str] = TOP_K

    keep: float = param(0.1, "fraction of the visual slots kept", gt=0.0, le=1.0)

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return dict.fromkeys(range(depth), ColumnRequest("text"))

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        visual, layout = kv.visual & kv.valid, kv.layout
        of = visual.sum(1) if layout is None else torch.tensor([layout.visuals] * len(visual))
        wanted = (self.keep * of).long().clamp(min=1)
        assert stats is not None and stats.sum is not None
        scores = stats.sum.sum(1).masked_fill(~visual, -torch.inf)
        chosen = best(scores, wanted if layout is None else wanted.tolist()) & visual
        counts = None if layout is None else (len(layout) - of + wanted.minimum(of)).tolist()
        return kv.select_mask(chosen | (~kv.visual & kv.valid), counts)


@dataclass(frozen=True)
class Kept:
    """Tokens that the view's method has kept.

    Parameters
    ----------
    order : Tensor, int64, (K,)
        Ascending; with or without the text, all of which is kept.
    visuals, of : int
        How many visual ones there are, and of how many.
    """

    order: Tensor
    visuals: int
    of: int

    def among(self, order: Tensor) -> Tensor:
        """Whether tokens are among these, bool, of the shape of ``order``."""
        if not len(self.order):
            return torch.zeros_like(order, dtype=torch.bool)
        at = torch.searchsorted(self.order, order.contiguous()).clamp(max=len(self.order) - 1)
        return self.order[at] == order

    def left(self, layout: TokenLayout | None) -> int | None:
        """How many rows of a layout, text included, are kept, where the host knows it."""
        if layout is None or layout.visuals != self.of:  # others have dropped some since
            return None
        return len(layout) - self.of + self.visuals


@dataclass(frozen=True)
class KeptTokens(Part, EncodeStage):
    """Notes the visual tokens that the view's method would keep, and keeps all."""

    name: ClassVar[str] = DraftSelf.name

    def tokens_left(self, before: TokenCount) -> TokenCount:
        return before

    @property
    def query_dependent(self) -> bool:  # type: ignore[override]  # depends on the view
        return self.of.selects.query_dependent

    @property
    def wants_cls(self) -> bool:  # type: ignore[override]
        return self.of.selects.wants_cls

    @property
    def wants_digest(self) -> bool:  # type: ignore[override]
        return self.of.selects.wants_digest

    def vision_stats(self, depth: int) -> dict[int, StatRequest]:
        return self.of.selects.vision_stats(depth)

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        return self.of.selects.saliencies()

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        order = self.of.selects.reduce(tokens, stats, request).layout.order
        kept = Kept(order, len(order), len(tokens))
        request.notes.setdefault(self.name, {})["kept"] = kept
        return tokens


@dataclass(frozen=True)
class KeptRows(Part, PrefillStage):
    """Notes the rows that the view's method would let into each layer, and lets all in."""

    name: ClassVar[str] = DraftSelf.name
    observes: ClassVar[bool] = True

    @property
    def query_dependent(self) -> bool:  # type: ignore[override]  # depends on the view
        return self.of.selects.query_dependent

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.of.selects.layers(depth)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        return self.of.selects.text_stats(depth)

    def attends(self, depth: int) -> tuple[int, ...]:
        return self.of.selects.attends(depth)

    def attend(self, context: PrefillContext, layer: int, *given: Any) -> None:
        state = context.notes.setdefault(self.name, {}).setdefault("state", {})
        self.of.selects.attend(replace(context, notes=state), layer, *given)

    def select_tokens(self, context: PrefillContext, layer: int) -> None:
        notes, layout = context.notes.setdefault(self.name, {}), context.layout
        rows = torch.arange(len(layout), device=layout.device)
        if (kept := notes.get("kept")) is not None:
            rows = marked_rows(kept.among(layout.order) | ~layout.visual, kept.left(layout))
        visuals = len(rows) - (len(layout) - layout.visuals)
        own = replace(
            context,
            layout=layout.select(rows).counted(visuals),
            notes=notes.setdefault("state", {}),
            stats={at: found.index_select(-1, rows) for at, found in context.stats.items()},
            hidden=None if context.hidden is None else context.hidden.index_select(0, rows),
        )
        left = self.of.selects.select_tokens(own, layer)
        rows = rows if left is None else rows[left]
        visuals = len(rows) - (len(layout) - layout.visuals)
        notes["kept"] = Kept(layout.order[rows], visuals, layout.visuals)


@dataclass(frozen=True)
class KeptSlots(Part, CacheStage):
    """Notes the slots that the view keeps of each layer, and keeps all.

    The note of a layer is ``(slots, counts, start, visual)``: a `SlotList`, and which of the first
    slots belong to visual tokens.
    """

    name: ClassVar[str] = DraftSelf.name

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return self.of.selects.text_stats(depth) if self.of.follows_attention else {}

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        notes = context.notes.setdefault(self.name, {})
        if not self.of.follows_attention:
            mask = kv.valid
            counts: tuple[int, ...] | None = kv.counts
            if (noted := notes.get("kept")) is not None:
                mask = mask & (noted.among(kv.order) | ~kv.visual)
                left = noted.left(kv.layout)
                counts = None if left is None else (left,) * len(mask)
            kept = numbered(kv).select_mask(mask, counts)
        else:
            # The slots are only selected; none is rotated.
            own = replace(context, notes=notes.setdefault("state", {}), rotate=None)
            kept = self.of.selects.compress(own, layer, numbered(kv), stats)
        notes.setdefault("layers", {})[layer] = indices(kept)
        return kv

    def finish(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        notes = context.notes[self.name]
        kept = [notes["layers"][layer] for layer in range(len(cache))]
        state = notes.pop("state", {})
        if self.of.follows_attention:
            kept = self.of.selects.finish(replace(context, notes=state), kept)
        notes.pop("kept", None)
        notes["layers"] = {
            layer: (*chosen(view), kv.lengths.clone(), kv.visual.clone())
            for layer, (view, kv) in enumerate(zip(kept, cache, strict=True))
        }
        return cache


def numbered(kv: KV) -> KV:
    """``kv`` with the index of each slot in place of its token's, so that a selection names it."""
    slots = torch.arange(len(kv), device=kv.keys.device)
    return replace(kv, order=slots.expand(len(kv.keys), -1))


def indices(kept: KV) -> KV:
    """A selection without its keys and values."""
    nothing = kept.keys.new_empty(*kept.keys.shape[:2], 0)
    return replace(kept, keys=nothing, values=nothing, bias=None, attention_mass=None)


def chosen(kept: KV) -> tuple[Tensor, Tensor]:
    """The slots of a selection from `numbered`, and how many there are of each head."""
    return kept.order.masked_fill(~kept.valid, 0).contiguous(), kept.lengths.clone()


# --- drafts --------------------------------------------------------------------------------------


class Chain(ViewDrafter):
    """Drafts one path, token by token, over the view."""

    def __init__(self, stage: DraftSelf, target: Target) -> None:
        self.stage, self.target = stage, target
        noted = target.notes.get("layers")
        self.visual: list[Tensor] = []
        self.known: list[Known] = []
        if noted:
            layers = [noted[layer] for layer in range(target.depth)]
            self.known = Known.of(layers)
            self.view = tuple(
                SlotList(slots, counts, start, (min(known.start),))
                for (slots, counts, start, _), known in zip(layers, self.known, strict=True)
            )
            self.visual = [visual for *_, visual in layers]
        self.asked = {} if self.view is None else KeptSlots(stage).text_stats(target.depth)
        self.age = stage.refresh  # verified rounds since the last refresh
        self.state: dict[str, Any] = {}
        self.kept: list[KV] = []  # of the layers that have been observed in this round

    def prefill(self, read: Read) -> None:
        pass

    def extend(self, done: Round) -> None:
        self.age += 1

    def propose(self, root: int, budget: Budget) -> Proposal:
        chain = [root]
        for depth in range(1, min(budget.depth, self.stage.steps) + 1):
            if self.view is None:
                break
            logits = yield chain[-1]
            token, probability = self.target.likeliest(logits, budget, depth)
            chain.append(token)
            if probability < self.stage.confidence:
                break
        return Tree.chain(chain)

    # --- refresh ---------------------------------------------------------------------------------

    def observer(self) -> Observer | None:
        if not self.asked or not self.stage.refresh or self.age < self.stage.refresh:
            return None
        self.age, self.state, self.kept = 0, {}, []
        return self._observe

    def _observe(self, layer: int, attention: Tensor, keys: Tensor, values: Tensor) -> None:
        """Select the slots of a layer again, from the attention (Hq, T, N) of verified nodes."""
        assert self.view is not None
        visual, start = self.visual[layer], self.view[layer].start
        n = visual.shape[1]
        slots = torch.arange(n, device=keys.device).expand(len(keys), -1)
        known, context = self.known[layer], self._context(layer)
        kv = KV(keys[:, :n], values[:, :n], slots, slots, visual, start)
        kv = kv.counted(known.start, context.layout if known.whole(n) else None)
        stats = columns(attention[..., :n], self.asked[layer], len(keys))
        method = self.stage.selects
        assert isinstance(method, CacheStage)  # others do not ask for attention
        kept = method.compress(context, layer, kv, stats)
        self.kept.append(indices(kept))
        if len(self.kept) == len(self.view):
            final = method.finish(context, self.kept)
            pairs = zip(final, self.view, strict=True)
            self.view = tuple(SlotList(*chosen(kv), old.start, old.least) for kv, old in pairs)
            self.kept = []

    def _context(self, layer: int) -> PrefillContext:
        visual = self.visual[layer]
        order = torch.arange(visual.shape[1], device=visual.device)
        layout = TokenLayout.text(order, order[None]).replace(kind=visual[0].to(torch.uint8))
        layout = layout.counted(self.known[layer].visuals)
        return PrefillContext(layout, depth=self.target.depth, notes=self.state)


@dataclass(frozen=True)
class Known:
    """What the host knows of the prompt's slots in a layer.

    Parameters
    ----------
    start : tuple of int
        How many there are in each KV head.
    visuals : int
        How many of the first head's belong to visual tokens.
    alike : bool
        Whether the same slots do so in all heads.
    """

    start: tuple[int, ...]
    visuals: int
    alike: bool

    @staticmethod
    def of(layers: list[tuple[Tensor, ...]]) -> list[Known]:
        """Of the notes of all layers, read at once.

        Raises
        ------
        VLMFastError
            Where a note is damaged.
        """
        home, rows = layers[0][2].device, []
        for slots, counts, start, visual in layers:
            wrong = (counts > slots.shape[1]).any() | (start > visual.shape[1]).any()
            alike = (visual == visual[:1]).all()
            rows += [torch.stack([wrong.long(), alike.long(), visual[0].sum()]), start]
        numbers = iter(torch.cat([row.to(home) for row in rows]).tolist())
        found = []
        for layer, (_, _, start, _) in enumerate(layers):
            wrong, alike, visuals = islice(numbers, 3)
            if wrong:
                raise VLMFastError(f"{DraftSelf.name}: the stored view of layer {layer} is damaged")
            found.append(Known(tuple(islice(numbers, len(start))), visuals, bool(alike)))
        return found

    def whole(self, slots: int) -> bool:
        """Whether all heads have the same tokens in ``slots`` slots."""
        return self.alike and set(self.start) == {slots}


def columns(attention: Tensor, request: ColumnRequest, heads: int) -> ColumnStats:
    """Statistics over all rows of ``attention``, float32, (Hq, T, N); see `ColumnRequest`."""
    rows = torch.arange(attention.shape[1], device=attention.device)
    sums = column_sums([attention.unflatten(0, (heads, -1))], request.threshold, request.want)
    nnz = torch.full((heads, attention.shape[2]), len(rows), device=attention.device)
    return ColumnStats(**sums, nnz=nnz, rows=rows)
