"""The context of a forward pass: what the engine tells stages, and what they may change.

One object for each forward pass, of the class for its phase; the engine creates it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vlmfast.kernels.quantize_kv import largest, parameter_dtype

from .drafting import Observer, SlotList
from .layout import Kind, TokenLayout
from .packing import Packing
from .statistics import ItemGeometry, StatRequest

if TYPE_CHECKING:
    from PIL import Image


@dataclass
class VisionContext:
    """A forward pass through the vision tower.

    Parameters
    ----------
    depth : int
        Blocks of the tower.
    items : tuple of ItemGeometry
        The images in the batch.
    requests : dict of int to StatRequest
        Block index to the requested rows.
    modules : dict of int to int
        ``id`` of an attention module to its block index (vision modules do not know theirs).
    specials : int
        Rows before the patches of each view (CLS).
    notes : dict of str to dict
        Data from one part of a method for a later part of the same method, by method name.
    trained : dict of str to Module
        The weights of trained methods, by method name, on the model's device in float32.
    proportional_attention : bool
        Attention adds the logarithm of each key's weight to its logit, so that a merged token
        counts for all the tokens that it represents.
    stats : dict of int to Tensor
        Block index to softmax attention, float32, (views, heads, rows, keys).
    keys : dict of int to Tensor
        Block index to keys, mean over heads, float32, (views, rows, head_dim); ``wide`` ones
        (views, rows, heads * head_dim).
    chunks : dict of int to list of (Tensor, Tensor), optional
        For towers that pack all images in one row and attend within each image: ``stats`` and
        ``keys`` of each image.
    merged : Tensor, int64, (views, rows), optional
        For each row that entered the tower (CLS first), the row that it is part of now. A stage
        with `InEncoderStage.cells` sees the same of CLS and cells.
    sizes : Tensor, float32, (S,), optional
        For towers that pack all images in one row: how many of the rows that entered each row now
        represents.
    lengths : Tensor, int64, (views,), optional
        Valid rows of each view, where merging left different numbers; the others, at the end, are
        padding.
    raster : Tensor, int64, (N,), optional
        For a stage with `InEncoderStage.cells`: the row of each visual token of a view, in raster
        order, where rows are not in that order.
    numbers : list of int, optional
        Of the views in the current forward pass, where these are not all of its images.
    packings : list of (Tensor, Packing)
        For towers that pack all images in one row: the boundaries, int32, (parts + 1,), within
        which blocks attend, and how these parts are batched.
    """

    depth: int = 0
    items: tuple[ItemGeometry, ...] = ()
    requests: dict[int, StatRequest] = field(default_factory=dict)
    modules: dict[int, int] = field(default_factory=dict)
    specials: int = 0
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)
    proportional_attention: bool = False
    stats: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    chunks: dict[int, list[tuple[Tensor | None, Tensor | None]]] | None = None
    merged: Tensor | None = None
    sizes: Tensor | None = None
    lengths: Tensor | None = None
    raster: Tensor | None = None
    numbers: list[int] | None = None
    packings: list[tuple[Tensor, Packing]] = field(default_factory=list)

    def packing(self, ends: Tensor) -> Packing:
        """How the parts between these boundaries are batched; read from the device once."""
        for known, packing in self.packings:
            if known is ends:
                return packing
        made = Packing.of(ends.diff().tolist(), ends.device)
        self.packings.append((ends, made))
        return made


@dataclass
class PrefillContext:
    """A forward pass of a prompt, or of a chunk of one, through the language model.

    Parameters
    ----------
    layout : TokenLayout, S rows
        The tokens that enter the current layer.
    depth : int
        Layers of the language model.
    requests : dict of int to StatRequest
        Layer index to the requested rows.
    notes, trained, proportional_attention
        As in `VisionContext`.
    cache : KVCache, optional
        Of the sequence.
    mask_rule : callable, optional
        ``(layout) -> (S, S) bool`` for models that are not plainly causal over their prompt, apart
        from the windows of layers, which the cache knows.
    norm : callable, optional
        The language model's last norm.
    attend : dict of int to callable
        Layers whose attention a stage computes itself: `PrefillStage.attend`.
    after : callable, optional
        ``(layer, query, key, value, scaling)``, called after the attention of every layer; gives
        cache stages the keys and values.
    rotate : callable, optional
        ``(keys (H, N, D), delta (H, N)) -> keys`` with ``delta`` added to their rotary ids; absent
        where cache stages only select slots.
    limit : int, optional
        Block-wise prefill: slots of this block that each layer may keep.
    extends : bool
        Whether these rows follow others that a frozen cache holds.
    largest : list of Tensor, optional
        Collects the largest values of what is quantized, where its dtype is checked after the
        forward pass; see `parameter_dtype`.
    probe : bool
        Whether only the statistics of one layer are computed, without running the layer.
    stats : dict of int to Tensor
        Layer index to softmax attention, float32, (heads, rows, keys) over the tokens of
        ``layout``; its columns are kept aligned with ``layout`` when rows are dropped. ``columns``
        requests have one row.
    received : dict of int to Tensor
        Layer index to mean logits received from the visual rows, float32, (heads, 1, keys).
    hidden : Tensor, (S, D), optional
        Input of the layer before which `PrefillStage.select_tokens` is called. A stage that merges
        replaces it by the merged rows, of the same shape, before it returns the rows to keep.

    Class attributes
    ----------------
    answer : int
        Rows at the end that are the answer in training; they are no query rows of statistics.
    soft : Tensor, float32, (S,), or None
        Weight of each row of ``layout`` in the following layers; see
        `core.training.TrainingContext`.
    """

    layout: TokenLayout
    depth: int = 0
    requests: dict[int, StatRequest] = field(default_factory=dict)
    notes: dict[str, dict[Any, Any]] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)
    proportional_attention: bool = False
    cache: Any = None
    mask_rule: Callable[[TokenLayout], Tensor] | None = None
    norm: Callable[[Tensor], Tensor] | None = None
    attend: dict[int, Callable[..., Tensor | None]] = field(default_factory=dict)
    after: Callable[..., None] | None = None
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None
    limit: int | None = None
    extends: bool = False
    largest: list[Tensor] | None = None
    probe: bool = False
    stats: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    _places: tuple[TokenLayout, list[int]] | None = field(default=None, init=False, repr=False)

    # Not annotated: `TrainingContext` declares them as fields.
    answer = 0
    soft = cast("Tensor | None", None)

    def select(self, index: Tensor) -> None:
        """Keep rows ``index`` of the current tokens, in the layout and in every statistic."""
        self.layout = self.layout.select(index)
        for stats in (self.stats, self.received):
            stats.update({layer: s.index_select(-1, index) for layer, s in stats.items()})

    def on(self, device: torch.device) -> PrefillContext:
        """The context of a layer on ``device``: its layout is there, the rest is shared."""
        if self.layout.device == device:
            return self
        return replace(self, layout=self.layout.to(device))

    @property
    def place(self) -> Tensor:
        """What windows count, (S,): rotary ids, or rows where ids have several axes (M-RoPE)."""
        position = self.layout.position
        if len(position) == 1:
            return position[0]
        return torch.arange(len(self.layout), device=self.layout.device)

    def places(self) -> list[int]:
        """`place` on the host, read once for all layers with the same rows."""
        if self._places is None or self._places[0] is not self.layout:
            self._places = self.layout, self.place.tolist()
        return self._places[1]

    def visual(self) -> list[bool]:
        """Which rows are visual, on the host, read once for all layers with the same rows."""
        return (self.layout.on_host[0] != Kind.TEXT).tolist()

    def parameter_dtype(self, *tensors: Tensor) -> torch.dtype:
        """The dtype of quantization parameters, see `kernels.quantize_kv.parameter_dtype`.

        Where `largest` is collected, float16 is assumed, and the device is not waited for.
        """
        if self.largest is None or tensors[0].dtype == torch.float16:
            return parameter_dtype(*tensors)
        self.largest.append(largest(*tensors))
        return torch.float16

    def window(self, layer: int) -> int | None:
        """The window of a layer, where the rows of ``layout`` do not all fit into it.

        A row at place ``p`` sees none up to place ``p - window``.
        """
        window = None if self.cache is None else self.cache.layers[layer].window
        if window is None:
            return None
        places = self.places()
        return window if places[-1] - places[0] >= window else None

    def first_left(self, layer: int) -> int:
        """The first row of ``layout`` that tokens after it may see at a layer."""
        if (window := self.window(layer)) is None:
            return 0
        places = self.places()
        return bisect_right(places, places[-1] + 1 - window)

    def visible(self, layer: int) -> Tensor | None:
        """Bool (S, S): which rows of ``layout`` each row sees; ``None`` where plainly causal."""
        mask = None if self.mask_rule is None else self.mask_rule(self.layout)
        if (window := self.window(layer)) is None:
            return mask
        place = self.place
        if mask is None:
            row = torch.arange(len(place), device=place.device)
            mask = row[:, None] >= row
        return mask & (place > place[:, None] - window)

    def key_bias(self) -> Tensor | None:
        """Bias of the logits of each key, float32, (S,), or ``None``."""
        return self.layout.weight.log() if self.proportional_attention else None

    def share(self, rows: Tensor) -> Tensor | None:
        """Weight of each of ``rows`` in a mean over rows; ``None`` for equal weights."""
        return None


@dataclass
class DecodeContext:
    """Forward passes over new tokens of sequences whose cache is frozen.

    Parameters
    ----------
    cache : KVCache
    tree : Tensor, bool, (B, T, T), optional
        Verification of drafts: which of the T new tokens each of them sees.
    ancestors : Tensor, int64, (B, T, 1), optional
        The same as bits, for up to 64 tokens.
    lengths : Tensor, int64, (L, B, H), optional
        Slots of each layer's tail with the new token, where there is one for each row.
    kernels : bool, optional
        Whether attention runs on the project's kernels, where all layers are on one device.
    views : sequence of sequence of SlotList, optional
        By cache and layer, the slots that one new token of each row reads; all by default.
    observers : sequence of (int, Observer) or None, optional
        For rows whose attention is observed: how many of the new tokens count, and who reads it.
    """

    cache: Any
    tree: Tensor | None = None
    ancestors: Tensor | None = None
    lengths: Tensor | None = None
    kernels: bool | None = None
    views: Sequence[Sequence[SlotList]] | None = None
    observers: Sequence[tuple[int, Observer] | None] | None = None

    def on(self, device: torch.device) -> DecodeContext:
        """The context of a layer on ``device``."""
        tree, ancestors = (x if x is None else x.to(device) for x in (self.tree, self.ancestors))
        return replace(self, tree=tree, ancestors=ancestors)


Context = VisionContext | PrefillContext | DecodeContext

# For eager forward passes (vision, prefill). Several vision towers discard unknown keyword
# arguments, so an argument cannot reach their attention.
current_context: ContextVar[Context | None] = ContextVar("vlmfast_context", default=None)


@contextmanager
def active(context: Context) -> Iterator[Context]:
    """Make ``context`` the context of forward passes inside the block."""
    token = current_context.set(context)
    try:
        yield context
    finally:
        current_context.reset(token)


@dataclass(frozen=True)
class EncodeRequest:
    """The question that the visual tokens will serve.

    Parameters
    ----------
    question : str
        The text of the last user turn.
    question_embeds : Tensor, (T, D)
        Input embeddings of the prompt's text tokens.
    depth : int
        Number of layers of the language model.
    notes, trained : dict
        As in `PrefillContext`.
    order : Tensor, int64, (T,), optional
        Indices of these tokens in the full prompt.
    images : sequence of PIL.Image.Image
        The images, by ``TokenLayout.item``; empty where only their features are known.
    """

    question: str
    question_embeds: Tensor
    depth: int
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)
    order: Tensor | None = None
    images: Sequence[Image.Image] = ()
