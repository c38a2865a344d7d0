"""The interface between the engine and a model family."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from vlmfast.core.buffers import BufferPool
from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import Kind, Numbering, TokenLayout
from vlmfast.core.placement import devices_of, hooked
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.weights import load_weights
from vlmfast.errors import ModelError, RecipeError

from ._media import Items, Tensors
from ._prompts import Prompted
from ._wrapped import check_placement, entries, is_quantized, synchronizes
from .rope import attention_scaling

# Text models that rotate neighboring dimensions, not the two halves of a head. Some layers of
# `cohere2` and `llama4_text` have no rotary embedding at all.
_INTERLEAVED = {"cohere", "cohere2", "glm4v_text", "llama4_text"}

# Kinds of layers that hold a state of fixed size.
_STATES = {"conv", "linear_attention"}

# All kinds of layers that are supported. Others differ in what a row attends to.
_KINDS = {"full_attention", "sliding_attention", *_STATES}

# How far 4-bit weights may be from those that they replace, relative to the largest: half of the
# widest gap of NF4, 0.15 (Dettmers et al. 2023, arXiv 2305.14314), and its scales are per block.
_QUANTIZED = 0.25
_COPIES = 64  # layouts that are kept on the device; a frame of a video has one

if TYPE_CHECKING:
    from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, ProcessorMixin

    class Model(PreTrainedModel, GenerationMixin):
        """Common type of all families; configs differ."""

        config: Any
        base_model: Any
        generation_config: GenerationConfig

        def get_input_embeddings(self) -> nn.Embedding: ...
        def get_output_embeddings(self) -> nn.Linear: ...

        # Its parameters differ between versions.
        def generate(self, *args: Any, **kwargs: Any) -> Any: ...

    class TextDecoder(PreTrainedModel):
        """Its language model without a head."""

        config: Any
        layers: nn.ModuleList
        norm: nn.Module
        rotary_emb: nn.Module


@dataclass
class Encoded:
    """The visual tokens of a prompt, item by item, before any are dropped.

    Parameters
    ----------
    features : list of Tensor, each (N_i, D)
        In the order of the placeholders.
    layouts : list of TokenLayout, each of N_i rows
        Everything but ``order`` and ``position``, which `prepare` fills in.
    stats : VisionStats
    extra : list of tuple of Tensor
        Per item, further (N_i, D) features that are added in deeper layers.
    """

    features: list[Tensor]
    layouts: list[TokenLayout]
    stats: VisionStats
    extra: list[tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Part:
    """Images whose features do not depend on the other images of a prompt.

    Parameters
    ----------
    items : tuple of int
        Their indices.
    tensors : dict of str to Tensor
        Their part of what `Adapter.encode` takes.
    """

    items: tuple[int, ...]
    tensors: Tensors


class Adapter(Prompted):
    """One family: encodes pixels into visual tokens and locates them in the prompt.

    A family's file defines ``FamilyAdapter(Adapter)`` with `encode`, and overrides what differs:
    `positions` and `compact` (M-RoPE), `decoder_kwargs` (deepstack), `mask_rule` (image blocks),
    `min_drop_layer`, `logits` (soft caps).
    """

    kind: ClassVar[Kind] = Kind.IMAGE
    beside: ClassVar[tuple[str, ...]] = ()  # optional outputs of processors
    position_tensors: ClassVar[tuple[str, ...]] = ()  # what `positions` takes besides the ids
    processors: ClassVar[tuple[str, ...]] = ()  # allowed classes; empty allows all
    # Of a prompt's images: 5 if each has several views, 3 if each is a sequence of patches.
    pixel_dims: ClassVar[int] = 4
    packed: ClassVar[bool] = False  # whether the tower takes the concatenated patches of all images
    by_size: ClassVar[bool] = False  # whether `encode` runs the tower for each size of images
    blocks: ClassVar[bool] = True  # whether a video can be read block by block, as images
    # Whether the tower and the projector take one row of a batch for each view, so that views can
    # be left out; and whether images may have crops there.
    views_in_rows: ClassVar[bool] = False
    crops: ClassVar[bool] = False
    # Whether each row of the projector's input contains all patches of one visual token.
    token_rows: ClassVar[bool] = False
    min_drop_layer: int = 0
    # Whether the tower depends on the shape of the pixels, and on tensors that are the same objects
    # for images of the same sizes, alone, so that it can be captured in a graph.
    fixed_tower: ClassVar[bool] = False

    def __init__(self, model: Model, processor: ProcessorMixin) -> None:
        check_placement(model)
        if getattr(processor, "image_processor", None) is None:
            raise ModelError(
                f"{type(processor).__name__} is not multimodal: it has no image processor"
            )
        kinds = [kind.__name__ for kind in type(processor).__mro__]
        if self.processors and not set(kinds) & set(self.processors):
            raise ModelError(
                f"{kinds[0]} does not belong to a {model.config.model_type} model; supported are "
                f"{', '.join(self.processors)}"
            )
        if model.get_output_embeddings() is None or not model.can_generate():
            raise ModelError(f"{type(model).__name__} has no language-model head to answer with")
        self.model = model
        self.processor: Any = processor  # classes differ
        self.processing = threading.RLock()  # processors are not made for several threads
        self.writer: Any = processor  # its chat template writes prompts; the user's own
        self.config: Any = model.config
        self.decoder: TextDecoder = model.get_decoder()
        text = self.config.get_text_config()
        if getattr(text, "attn_logit_softcapping", None) is not None:
            raise ModelError(f"{text.model_type} caps its attention logits, which is not supported")
        self.examine()
        self.depth = len(self.decoder.layers)
        # The kinds of layers; empty where the config does not tell.
        self.kinds: tuple[str, ...] = tuple(getattr(text, "layer_types", None) or ())
        if odd := sorted(set(self.kinds) - _KINDS):
            raise ModelError(
                f"{text.model_type} has {', '.join(odd)} layers, which are not supported; "
                f"supported are {', '.join(sorted(_KINDS))}"
            )
        # Prompt and answer must fit into it, unless the config tells which layers have a window.
        self.window: int | None = getattr(text, "sliding_window", None)
        self.windows: tuple[int | None, ...] = (None,) * self.depth
        if "sliding_attention" in self.kinds:
            self.windows = tuple(
                self.window if kind == "sliding_attention" else None for kind in self.kinds
            )
            self.window = None
        self.examine_windows()
        # Whether layers of different kinds have different rotary tables.
        rotary = inspect.signature(self.decoder.rotary_emb.forward).parameters
        self.rotary_by_kind = "layer_type" in rotary
        # The decoder's argument for the cache; its name depends on the version of transformers.
        given = inspect.signature(self.decoder.forward).parameters
        self.cache_name = "cache" if "cache" in given else "past_key_values"
        # Layers that hold a state instead of keys and values.
        self.state_layers = frozenset(
            index for index, kind in enumerate(self.kinds) if kind in _STATES
        )
        # Modules of trained stages, by method name, `weights` and kind.
        self.modules: dict[tuple[str, str, str], nn.Module] = {}
        self.pool = BufferPool()  # cache buffers, reused by later requests
        self.decoding = "auto"  # how decode steps run, see `VLM`
        self.kept: dict[Hashable, Any] = {}  # state of the engine between requests
        self._copies: OrderedDict[Hashable, tuple[Tensor, ...]] = OrderedDict()

        self._check_devices()
        # Steps of modules that accelerate loads or moves for each call cannot be captured.
        moves = self.split or hooked(model)
        self.capturable = not (moves or any(map(synchronizes, model.modules())))

    @classmethod
    def without_weights(cls, config: Any, processor: Any) -> Self:
        """An adapter that knows only sizes: for `items` and `layouts`, on the CPU.

        Parameters
        ----------
        config : transformers.PreTrainedConfig
        processor : transformers.ProcessorMixin
        """
        adapter = cls.__new__(cls)
        adapter.config, adapter.processor = config, processor
        adapter.model = cast("Model", SimpleNamespace(base_model=cls.packing(config)))
        adapter.decoder = cast(
            "TextDecoder", SimpleNamespace(get_input_embeddings=partial(nn.Embedding, 1, 1))
        )
        adapter.kept, adapter._copies = {}, OrderedDict()
        return adapter

    @staticmethod
    def packing(config: Any) -> Any:
        """What a family reads of a model where there are no weights."""
        return None

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        """The visual tokens of a prompt, item by item, as `Encoded.layouts`; no pixel is read.

        Parameters
        ----------
        tensors : dict of str to Tensor
            The processor's output.
        items : tuple of ItemGeometry
            The result of `items`.

        Raises
        ------
        ModelError
            If the family does not define it.
        """
        raise ModelError(
            f"the family {self.config.model_type} does not define layouts(), so its visual tokens "
            "cannot be counted before they are encoded"
        )

    def examine(self) -> None:
        """Find the parts of the model, in families where any tower or language model may stand.

        Raises
        ------
        ModelError
            For what is not found.
        """

    def examine_windows(self) -> None:
        """Correct `window` and `windows`, in families where any language model may stand."""

    def _check_devices(self) -> None:
        tower, projector = devices_of(self.tower()), devices_of(self.projector())
        if len({*tower, *projector}) > 1:
            raise ModelError(
                f"the vision tower runs on {_listed(tower)} and its projector on "
                f"{_listed(projector)}; a device_map must have both on one device"
            )
        if self.device not in tower:
            raise ModelError(
                f"the embedding runs on {self.device} and the vision tower on {_listed(tower)}; a "
                "device_map must have both on one device"
            )
        for index, layer in enumerate(self.decoder.layers):
            if len(found := devices_of(layer)) > 1:
                raise ModelError(
                    f"layer {index} runs on {_listed(found)}; a device_map must have each layer "
                    "on one device"
                )
        self.split = len(devices_of(self.model)) > 1

    # --- bytes and weights ----------------------------------------------------------------------

    def bytes_per_token(self) -> int:
        """Bytes that one token costs in the cache of all layers, uncompressed.

        Layers that hold a state are not counted.
        """
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        layers = self.depth - len(self.state_layers)
        return 2 * layers * heads * head * self.dtype.itemsize

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of an uncompressed cache after ``tokens``; layers keep what their windows show."""
        slots = [
            tokens if w is None else min(tokens, w - 1)
            for layer, w in enumerate(self.windows)
            if layer not in self.state_layers
        ]
        return sum(slots) * self.bytes_per_token() // len(slots)

    def signature(self) -> list[float]:
        """A few weights that identify this model for stages trained on it."""
        module, name = self._signed()
        weight = module.get_parameter(name)
        size = weight.numel()
        if isinstance(module, nn.Linear):  # a quantized one may be packed
            size = module.out_features * module.in_features
        return entries(module, name, torch.arange(16) * (size - 1) // 15).tolist()

    def _signed(self) -> tuple[nn.Module, str]:
        """The last matrix of the projector, in its module."""
        parts = [*self.projector().named_parameters()]
        name = next(name for name, weight in reversed(parts) if weight.dim() == 2)
        module, _, name = name.rpartition(".")
        return self.projector().get_submodule(module), name

    def trained(self, stage: Stage) -> nn.Module:
        """The module of a trained stage, loaded on first use.

        Raises
        ------
        RecipeError
            If no weights of the stage exist for this model.
        """
        key = (stage.name, stage.weights, getattr(stage, "kind", ""))
        if key not in self.modules:
            slack = _QUANTIZED if is_quantized(self._signed()[0]) else 0.0
            self.modules[key] = load_weights(stage, self.sizes(), self.signature(), slack)
        # The model may have moved since. Drafters run in the model's dtype.
        module, half = self.modules[key], stage.protocol == "drafter" and self.device.type != "cpu"
        weight = next(module.parameters())
        if weight.device != self.device or (half and weight.dtype != self.dtype):
            module.to(self.device, self.dtype if half else None)
        return module

    def ships(self, stage: Stage) -> bool:
        """Whether weights of a trained stage exist for this model."""
        try:
            self.trained(stage)
        except RecipeError:
            return False
        return True

    # --- tensors -------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings, through the module because some families scale inside it."""
        return self._embedding(ids)

    def embed_around(self, ids: Tensor) -> Tensor:
        """Input embeddings of a prompt's text, (..., D); some families have their own for markers
        around images."""
        return self.embed(ids)

    def normalizer(self) -> Callable[[Tensor], Tensor] | None:
        """The norm after the last layer, if any; its result stays on the device of its input."""
        norm = self.norm()
        if norm is None or not self.split:
            return norm
        return lambda hidden: norm(hidden).to(hidden.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of normalized hidden states (..., D)."""
        return self._head(hidden).to(hidden.device)  # the head may be on another device

    def positions(self, inputs: Tensors) -> Tensor:
        """Rotary ids (P, S) of the full prompt, on the device of ``input_ids``.

        ``inputs`` has ``input_ids`` and `position_tensors`.
        """
        ids = inputs["input_ids"]
        return torch.arange(ids.shape[1], device=ids.device)[None]

    def tables(self, hidden: Tensor, position: Tensor, layer: int = 0) -> tuple[Tensor, ...]:
        """Rotary tables of rows at ``position``, (B, S) or (3, B, S), as ``layer`` takes them."""
        kind = self.rotary(layer)
        return tuple(self.decoder.rotary_emb(hidden, position, *([kind] if kind else [])))

    def rotary(self, layer: int) -> str:
        """The kind of rotary tables of a layer; empty where all layers have the same."""
        return self.kinds[layer] if self.rotary_by_kind else ""

    def compact(self, full: Numbering, kept: Tensor) -> Tensor:
        """Rotary ids (P, N) without gaps from dropped tokens; unchanged if none were dropped.

        Parameters
        ----------
        full : Numbering
            Of the prompt before any tokens were dropped, so that the number of drops does not
            matter.
        kept : Tensor, int64, (N,)
            Rows that are kept, ascending.
        """
        if len(kept) == len(full):
            return full.position
        count = torch.arange(len(kept), device=kept.device)
        return full.position[:, :1] + count

    def rotate(self, keys: Tensor, delta: Tensor, layer: int = 0) -> Tensor:
        """Rotate keys (H, N, D) of a layer by ``delta`` rotary ids, int64, (H, N).

        Raises
        ------
        RecipeError
            Where keys cannot be rotated, see `why_no_rotation`.
        """
        if reason := self.why_no_rotation(layer, keys.device):
            raise RecipeError(
                "this recipe changes the rotary ids of cached keys, which is not supported on "
                f"{self.config.model_type}, {reason}; 'snapkv:0.5' works on this model"
            )
        return self.turned(keys, delta, layer)

    def turned(self, keys: Tensor, delta: Tensor, layer: int) -> Tensor:
        """Keys as `rotate` returns them, by the rotary tables of a layer."""
        cos, sin = self.tables(keys.float(), delta, layer)  # heads are batch rows here
        kind = self.rotary(layer) or None
        scale = attention_scaling(self.decoder.rotary_emb, kind)  # keys have it already
        cos, sin = (table.to(keys.device).float() / scale for table in (cos, sin))
        turned, rest = keys.float().split([cos.shape[-1], keys.shape[-1] - cos.shape[-1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1).to(keys.dtype)

    def why_no_rotation(self, layer: int, device: torch.device) -> str:
        """The reason why `rotate` is not supported on a layer, which is on ``device``; or empty."""
        text = self.config.get_text_config()
        if text.model_type in _INTERLEAVED:
            return "whose rotary embedding pairs neighboring dimensions"
        return ""

    def decoder_kwargs(self, layout: TokenLayout, extra: tuple[Tensor, ...]) -> dict[str, Any]:
        """Additional arguments of the decoder in prefill."""
        return {}

    mask_rule: Callable[[TokenLayout], Tensor] | None = None

    def inside(self, items: Items) -> bool:
        """Whether each patch of the tower becomes one visual token."""
        cells = (self.cells(item) for item in items)
        return not self.packed and all(c is not None and c.shape[1] == 1 for c in cells)

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        """The images of a prompt one by one, and videos that are not read as images.

        `joined` puts any of them together again. ``None`` where the tensors do not belong to the
        items; `encode` raises then.
        """
        return by_views(items, {self.tensors[0]: tensors[self.tensors[0]]})

    def encode(self, inputs: Tensors, context: VisionContext) -> Encoded:
        """Run vision tower and projector on all images of a prompt, ``context.items``.

        ``context`` is active meanwhile and contains the statistics afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode")

    # --- shared parts of `encode` ----------------------------------------------------------------

    def patch_stats(self, context: VisionContext, patches: int) -> VisionStats:
        """Statistics over patches, without the CLS column."""
        # A stage may have appended more rows.
        views = max(item.views[1] for item in context.items)
        rows = {layer: r[:views, :, 0, -patches:] for layer, r in context.stats.items()}
        keys = {layer: k[:views, -patches:] for layer, k in context.keys.items()}
        return VisionStats(context.items, rows, keys)

    def copied(self, layout: TokenLayout) -> TokenLayout:
        """A layout that was made in host memory, on the device; the host knows its rows.

        Equal ones are copied once: images of one size come again.
        """
        if self.device.type == "cpu":
            return layout
        parts = self._on_device(*(getattr(layout, f.name) for f in fields(layout)))
        return TokenLayout(*parts).seen(layout.on_host)

    def cells_of(self, geometry: ItemGeometry) -> Tensor | None:
        """`cells` on the device."""
        cells = self.cells(geometry)
        return None if cells is None else self._on_device(cells)[0]

    def _on_device(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Tensors in host memory, on the device; kept by their values."""
        if self.device.type == "cpu":
            return parts
        known = self._copies
        key = (self.device, *((p.dtype, p.shape, p.numpy().tobytes()) for p in parts))
        if (found := known.pop(key, None)) is None:
            with torch.inference_mode(False):  # later calls may need gradients
                found = tuple(part.to(self.device) for part in parts)
        known[key] = found
        if len(known) > _COPIES:
            known.popitem(last=False)
        return found

    def view_layout(
        self, tile: Tensor, y: Tensor, x: Tensor, kind: Tensor, item: int, geometry: ItemGeometry
    ) -> TokenLayout:
        """Layout of one item's tokens from their coordinates and kinds, (N,) each.

        For a newline, ``y`` is the row of the canvas that it ends; tile and x are ignored.
        """
        n, (rows, columns) = tile.shape[0], geometry.patches
        here = (kind == Kind.IMAGE) | (kind == Kind.VIDEO)
        tile, x = torch.where(here, tile, -1), torch.where(here, x, -1)
        blank = TokenLayout.text(
            torch.zeros(n, dtype=torch.int64, device=tile.device),
            torch.zeros(1, n, dtype=torch.int64, device=tile.device),
        )
        top_left, size = self.view_box(geometry, tile)
        cell = size / torch.tensor([columns, rows], device=tile.device)
        corner = top_left + torch.stack([x, y], dim=1) * cell
        box = torch.cat([corner, corner + cell], dim=1).clamp(0, 1)
        return blank.replace(
            kind=kind.to(torch.uint8),
            item=torch.full_like(kind, item, dtype=torch.int32),
            tile=tile.to(torch.int32),
            view=torch.where(here, tile + geometry.views[0], -1).to(torch.int32),
            grid=torch.stack([torch.zeros_like(y), y, x], dim=1).to(torch.int32),
            box=torch.where(here[:, None], box, torch.nan),
        )

    def raster_layout(self, item: int, geometry: ItemGeometry, specials: int = 0) -> TokenLayout:
        """Layout of one view's tokens in raster order, in host memory.

        ``specials`` of them come first; they have no position in the image.
        """
        rows, columns = geometry.patches
        raster = torch.arange(-specials, rows * columns, device="cpu")
        kind = torch.where(raster < 0, int(Kind.SPECIAL), int(self.kind))
        base = torch.zeros_like(raster)
        return self.view_layout(base, raster // columns, raster % columns, kind, item, geometry)

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Corner (top left) and size (N, 2) of each token's tile, (x, y) fractions of the image."""
        return self.shown(geometry, tile, self.processor.image_processor)

    def shown(self, geometry: ItemGeometry, tile: Tensor, processor: Any) -> tuple[Tensor, Tensor]:
        """`view_box` of what a processor shows: the centre of the image, or all of it, resized."""
        height, width = geometry.size
        crop = getattr(processor, "do_center_crop", False)
        short = min(height, width)
        share = [short / width, short / height] if crop else [1.0, 1.0]
        size = torch.tensor(share, device=tile.device).expand(tile.shape[0], 2)
        return (1 - size) / 2, size


def _listed(devices: Sequence[torch.device | None]) -> str:
    return " and ".join(map(str, devices))


def by_views(items: Items, tensors: Tensors, dim: int = 0) -> list[Part] | None:
    """The views of each item, along ``dim``; ``None`` where the items do not cover them all."""
    ends = [0, *(item.views[1] for item in items)]
    fits = [item.views[0] for item in items] == ends[:-1]
    if not fits or any(value.shape[dim] != ends[-1] for value in tensors.values()):
        return None
    return [
        Part(
            (i,),
            {
                key: value.narrow(dim, item.views[0], item.views[1] - item.views[0])
                for key, value in tensors.items()
            },
        )
        for i, item in enumerate(items)
    ]
