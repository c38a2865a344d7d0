"""The stage protocols: what a method may request and what it returns.

A method is a frozen dataclass that derives from one of the protocol classes below. Its fields are
its hyper-parameters, declared with `param`, which also documents and bounds them; recipes, the
command line and ``vlmfast methods`` read that declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..kernels.quantize_kv import Segment
from .contexts import EncodeRequest, PrefillContext, VisionContext
from .counting import TokenCount, inexact
from .drafting import Drafter, Target
from .kv import KV
from .layout import TokenLayout, VisualTokens
from .saliency import Saliency, SaliencyRequest
from .stage import Stage, Stages
from .statistics import ColumnRequest, ColumnStats, ItemGeometry, StatRequest, VisionStats

if TYPE_CHECKING:
    from vlmfast.drafters.draft_auto import Governor
    from vlmfast.media.info import VideoInfo

PROTOCOLS = ("media", "views", "in-encoder", "encode", "prefill", "cache", "decode", "drafter")


@dataclass(frozen=True)
class MediaStage(Stage):
    """Chooses the frames of a video before anything is encoded."""

    protocol: ClassVar[str] = "media"
    query_dependent: ClassVar[bool] = True

    def frames(self, video: VideoInfo, question: str) -> list[int]:
        """Indices of the frames to read, ascending."""
        raise NotImplementedError(f"{type(self).__name__}.frames")


@dataclass(frozen=True)
class ViewStage(Stage):
    """Chooses which views of images the vision tower encodes: crops of an image, frames of a video.

    A view that is left out costs nothing in the tower, the projector and the prefill. With a field
    ``positions = "compact"``, the rows of the prompt are renumbered if tokens are dropped.
    """

    protocol: ClassVar[str] = "views"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    positions = "keep"

    @property
    def chooses_crops(self) -> bool:
        """Whether `crops` may leave any out."""
        return False

    @property
    def reuses_frames(self) -> bool:
        """Whether `reused` may leave any frame out."""
        return False

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """The saliency of the base views that `crops` reads, from attention."""
        return ()

    def crops(self, geometry: ItemGeometry, saliency: tuple[Saliency, ...]) -> list[int]:
        """Crops of an image to encode, from 0 in raster order, ascending.

        Called for each image with crops, after its base view was encoded. The tokens of other crops
        are dropped, and so are newlines of rows without any other token.

        Parameters
        ----------
        saliency : tuple of Saliency
            By `saliencies`: of the base view alone.
        """
        raise NotImplementedError(f"{type(self).__name__}.crops")

    def reused(self, pixels: Tensor) -> list[int]:
        """For each frame of a video the earlier frame whose features it gets, or itself.

        Parameters
        ----------
        pixels : Tensor, (F, V, C, H, W)
            The normalized pixels of F frames of V views each.

        Returns
        -------
        list of int
            Ascending; a frame that another one refers to refers to itself.
        """
        raise NotImplementedError(f"{type(self).__name__}.reused")


@dataclass(frozen=True)
class InEncoderStage(Stage):
    """Runs between the blocks of the vision tower."""

    protocol: ClassVar[str] = "in-encoder"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    optional = False  # whether its method works without it where a tower does not support it
    cells = False  # whether it takes all patches of a visual token as one row, see `on_block`
    # Whether it takes any number of patches for each token, where the projector takes a row of
    # them together (`Adapter.token_rows`); `on_output` then sees tokens.
    token_rows = False

    def vision_stats(self, depth: int) -> dict[int, StatRequest]:
        """Vision layer index to the keys that `on_block` reads, in ``context.keys``."""
        return {}

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Vision blocks (1 .. depth-1) before which `on_block` is called."""
        raise NotImplementedError(f"{type(self).__name__}.blocks")

    def on_block(
        self, context: VisionContext, index: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """New hidden states, and where each row went.

        Without `cells` a stage is called only where the tower makes one visual token of each patch,
        or where `token_rows` allows it.
        With it rows are *cells*: the ``m`` patches that become one visual token, concatenated, so
        that D is ``m`` times the tower's width, as is that of ``context.keys``; special rows are
        repeated to that width. ``context.items`` are the images in ``hidden``, all of one grid of
        visual tokens, and ``context.raster`` is the order of rows within it. Such a stage changes
        rows by merging alone.

        Parameters
        ----------
        hidden : Tensor, (V, N, D)
            Input of block ``index``; the CLS row first where the tower has one.

        Returns
        -------
        hidden : Tensor, (V, M, D)
        source : Tensor, int64, (V, N), or None
            Row of the new hidden states that each old row is now part of; ``None`` when no row was
            merged. Merged rows stay together from there on; the token nearest to their middle
            represents them in the prompt.
        """
        raise NotImplementedError(f"{type(self).__name__}.on_block")

    def on_output(self, context: VisionContext, hidden: Tensor) -> Tensor:
        """Called once, with the input of the projector.

        Parameters
        ----------
        hidden : Tensor, (V', N, D)
            Without the CLS row where the family cuts it off.

        Returns
        -------
        Tensor, (V, N, D)
            One row per view of the batch, as the projector and the packing after it expect. Other
            data for a later part of the method goes to ``context.notes``.
        """
        return hidden


@dataclass(frozen=True)
class EncodeStage(Stage):
    """Reduces the visual tokens between vision encoder and language model.

    With a field ``positions = "compact"``, the rows of the prompt are renumbered if the stage drops
    any.
    """

    protocol: ClassVar[str] = "encode"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    positions = "keep"
    wants_cls = False  # whether `reduce` reads ``stats.cls``
    wants_digest = False  # whether it reads ``stats.items[i].digest``
    joins_frames = False  # whether it reduces the frames of a video together, see `counting.runs`

    def vision_stats(self, depth: int) -> dict[int, StatRequest]:
        """Vision layer index (0 .. depth-1) to the rows that `reduce` reads."""
        return {}

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """The saliency of each token that `reduce` reads; every tower provides one."""
        return ()

    def tokens_left(self, before: TokenCount) -> TokenCount:
        """How many tokens of an image `reduce` leaves, from counts before it alone.

        With `joins_frames`, also of frames of a video that are reduced together.

        Raises
        ------
        RecipeError
            By default: where the number depends on the content of the image.
        """
        raise inexact(self.name, "the content of the image")

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        """Reduce the tokens; by default each image separately, with `reduce_item`."""
        items = tokens.parts()
        parts = [self.reduce_item(own, stats.items[item], stats, request) for item, own in items]
        if all(part is None for part in parts):
            return tokens
        kept = [own if part is None else part for part, (_, own) in zip(parts, items, strict=True)]
        levels = zip(*(part.extra for part in kept), strict=True)
        return VisualTokens(
            torch.cat([part.features for part in kept]),
            TokenLayout.cat([part.layout for part in kept]),
            tuple(torch.cat(level) for level in levels),
        )

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens | None:
        """The reduced tokens of one image, or ``None`` to keep all of them.

        By default the rows that `select_tokens` names.
        """
        index = self.select_tokens(tokens, geometry, stats, request)
        return None if index is None else tokens.select(index)

    def select_tokens(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor | None:
        """Rows of one image to keep: int64 indices, ascending; ``None`` for all."""
        raise NotImplementedError(f"{type(self).__name__}.select_tokens")


@dataclass(frozen=True)
class PrefillStage(Stage):
    """Drops visual tokens between the layers of the language model, during prefill.

    With a field ``positions = "compact"``, the rows are renumbered after each of its drops.
    """

    protocol: ClassVar[str] = "prefill"
    observes: ClassVar[bool] = False  # whether `select_tokens` never returns rows
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    positions = "keep"

    def layers(self, depth: int) -> tuple[int, ...]:
        """Layers (0 .. depth-1) before which `select_tokens` is called."""
        raise NotImplementedError(f"{type(self).__name__}.layers")

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        """Layer index to the attention rows that `select_tokens` reads."""
        return {}

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        """Rows of ``context.layout`` that enter ``layer``: int64, ascending, with all text."""
        raise NotImplementedError(f"{type(self).__name__}.select_tokens")

    def attends(self, depth: int) -> tuple[int, ...]:
        """Layers (0 .. depth-1) whose attention `attend` computes."""
        return ()

    def attend(
        self,
        context: PrefillContext,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
    ) -> Tensor | None:
        """Causal attention of one layer over the rows of ``context.layout``.

        Parameters
        ----------
        query : Tensor, (1, Hq, S, D)
        key, value : Tensor, (1, Hkv, S, D)

        Returns
        -------
        Tensor, (1, Hq, S, D), or None
            ``None`` for the model's own attention.
        """
        raise NotImplementedError(f"{type(self).__name__}.attend")


@dataclass(frozen=True)
class CacheStage(Stage):
    """Compresses the keys and values of a prompt, layer by layer during prefill.

    `compress` is called right after a layer's own attention, so that prefill is exact and memory
    falls layer by layer. Where budgets need all layers, `finish` is called at the end, and later
    stages after it; `trim` may drop some of it before. Prompts without visual tokens are not
    compressed.
    """

    protocol: ClassVar[str] = "cache"
    blockwise: ClassVar[bool] = False  # whether `compress` may see a prompt block by block
    quantizes: ClassVar[bool] = False  # whether its output may contain segments

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        """Layer index to the statistics that `compress` reads."""
        return {}

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        """Compress ``kv`` of ``layer``; ``context.layout`` are the rows at that layer."""
        return kv

    def trim(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        """As `finish`, for the layers so far, after each of them: what `finish` would drop."""
        return cache

    def finish(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
        """As `compress`, for all layers at once, after the last one has run."""
        return cache


@dataclass(frozen=True)
class DecodeStage(Stage):
    """Modifies the cache between decode steps."""

    protocol: ClassVar[str] = "decode"
    attention_mass: ClassVar[bool] = False  # whether `step` reads what each slot receives
    every: ClassVar[int] = 1  # decode steps from one call to the next

    def step(self, slots: Slots, layer: int) -> None:
        """Change the float part of one layer of one sequence, in place, without a host sync.

        Called before the token of the next step is written.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")

    def quiet(self, slots: Slots, layer: int) -> int:
        """How many of the next calls of `step` have nothing to do; called right after one.

        This many drafted tokens can be checked at once, with the same cache as one by one.
        """
        return 0


class Slots(Protocol):
    """The float part of one layer of one sequence, while it is decoded.

    Attributes
    ----------
    keys, values : Tensor, (H, capacity, D)
        Views of the cache's buffers.
    order : Tensor, int64, (H, capacity)
        Index of each slot's token in the full sequence, answer included. Slots beyond ``length``
        are undefined.
    attention_mass : Tensor, float32, (H, capacity)
        Attention received since the prompt, mean over the query heads of each KV head; only where
        a stage of the recipe sets ``attention_mass``. Writable.
    length : Tensor, int64, (H,)
        Slots in use; on the device.
    max_length : int
        The largest of ``length``, on the host.
    prompt : Tensor, int64, (H,)
        What ``length`` was when decoding began.
    seen : int
        Tokens of the full sequence so far, dropped ones included: the next one's ``order``.
    notes : dict
        The sequence's `PrefillContext.notes`.
    """

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def order(self) -> Tensor: ...
    @property
    def attention_mass(self) -> Tensor: ...
    @property
    def length(self) -> Tensor: ...
    @property
    def max_length(self) -> int: ...
    @property
    def prompt(self) -> Tensor: ...
    @property
    def seen(self) -> int: ...
    @property
    def notes(self) -> dict[str, dict[Any, Any]]: ...

    def evict(self, slot: Tensor) -> None:
        """Remove one slot per head, (H,); the last slot takes its place."""

    def quantize(self, count: int, make: Callable[[Tensor, Tensor], Segment]) -> None:
        """Move the first ``count`` slots of every head, keys and values (H, count, D), to a page.

        Only where no stage of the recipe evicts in decode: slots are then in order.
        """

    def rotate(self, keys: Tensor, delta: Tensor) -> Tensor:
        """As `PrefillContext.rotate`."""


@dataclass(frozen=True)
class DrafterStage(Stage):
    """Drafts tokens of the answer, which the model checks all at once. Never changes an answer."""

    protocol: ClassVar[str] = "drafter"
    merges: ClassVar[bool] = False  # whether its trees can be joined with another drafter's
    features: ClassVar[bool] = False  # whether it reads the target's hidden states
    logits: ClassVar[bool] = False  # whether it reads the target's logits
    governs: ClassVar[bool] = False  # whether it drafts nothing and controls other drafters

    def aux_hidden_state_layers(self, depth: int) -> tuple[int, ...]:
        """Decoder layers (0 .. depth-1) whose input it reads."""
        return ()

    def largest(self) -> tuple[int, int]:
        """Maximum nodes of a tree, the root included, and drafted tokens on one path."""
        raise NotImplementedError(f"{type(self).__name__}.largest")

    def open(self, target: Target) -> Drafter:
        """A drafter for one request.

        Raises
        ------
        RecipeError
            When it does not fit ``target``.
        """
        raise NotImplementedError(f"{type(self).__name__}.open")

    def draft_bytes(self, weights: int, cache: int) -> int:
        """Bytes that one drafted token reads, where a decode step reads these; 0: hardly any."""
        return 0

    def check_recipe(self, recipe: Stages) -> None:
        """Check that it can draft under the other stages of a recipe.

        Raises
        ------
        RecipeError
        """

    def choice(self, ships: Callable[[Stage], bool]) -> list[DrafterStage]:
        """Where `governs` is set: the drafters of a recipe that names none.

        ``ships`` returns whether a trained one has weights for the model.
        """
        raise NotImplementedError(f"{type(self).__name__}.choice")

    def govern(self, limit: tuple[int, int], known: dict[Any, Any]) -> Governor:
        """Where `governs` is set: the governor of the drafters of one answer.

        Parameters
        ----------
        limit : (int, int)
            Nodes and depth of the largest tree.
        known : dict
            State for this model and these drafters; shared by all answers.
        """
        raise NotImplementedError(f"{type(self).__name__}.govern")


def tower_stages(recipe: Stages) -> list[ViewStage | InEncoderStage]:
    """The stages of a recipe that change what the vision tower computes, in pipeline order."""
    return [*recipe.acting(ViewStage), *recipe.acting(InEncoderStage)]
