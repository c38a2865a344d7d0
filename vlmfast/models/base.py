"""What the engine needs to know about a model family."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from vlmfast.core.buffers import BufferPool
from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import Kind, Numbering, TokenLayout
from vlmfast.core.saliency import SaliencyRequest, to_tokens
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.weights import load_weights
from vlmfast.errors import ModelError, RecipeError

from ._media import Media

if TYPE_CHECKING:
    from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

    class Model(PreTrainedModel, GenerationMixin):
        """What every family's model is; configs differ by family."""

        config: Any
        generation_config: GenerationConfig

        def get_input_embeddings(self) -> nn.Embedding: ...

    class TextDecoder(PreTrainedModel):
        """Its language model without a head."""

        config: Any
        layers: nn.ModuleList
        norm: nn.Module
        rotary_emb: nn.Module


@dataclass
class Encoded:
    """The visual tokens of a prompt, item by item, before anything was dropped.

    Parameters
    ----------
    features : list of Tensor, each (N_i, D)
        In the order of the placeholders.
    layouts : list of TokenLayout, each of N_i rows
        Everything but ``order`` and ``position``, which `prepare` fills in.
    stats : VisionStats
    extra : list of tuple of Tensor
        Per item, further (N_i, D) features that enter deeper in the language model.
    """

    features: list[Tensor]
    layouts: list[TokenLayout]
    stats: VisionStats
    extra: list[tuple[Tensor, ...]]


class Adapter:
    """One family: pixels in, visual tokens out, and where they sit in the prompt.

    A family's file defines ``FamilyAdapter(Adapter)`` with `encode`, and overrides what differs:
    `positions` and `compact` (M-RoPE), `decoder_kwargs` (deepstack), `mask_rule` (image blocks),
    `min_drop_layer`, `logits` (soft caps).
    """

    kind: ClassVar[Kind] = Kind.IMAGE
    tensors: ClassVar[tuple[str, ...]] = ("pixel_values",)  # what `encode` takes
    clip_tensors: ClassVar[tuple[str, ...]] = ()  # the same of clips, where they are no pictures
    beside: ClassVar[tuple[str, ...]] = ()  # what processors give beside these, where they do
    processors: ClassVar[tuple[str, ...]] = ()  # classes that belong to the family, if it checks
    fixed: ClassVar[bool] = False  # whether views are of the one size that the tower takes
    nested: ClassVar[bool] = False  # whether the processor takes a list of pictures per prompt
    attention: ClassVar[str] = "self_attn"  # what a vision block calls it
    pixel_dims: ClassVar[int] = 4  # of the images of a prompt; 5 where each has several views
    packed: ClassVar[bool] = False  # whether the tower takes the patches of all images in one row
    blocks: ClassVar[bool] = True  # whether a clip can be read block by block, as pictures
    # Whether the patches of each visual token are one row of what the projector takes.
    token_rows: ClassVar[bool] = False
    min_drop_layer: ClassVar[int] = 0
    # Whether the tower does the same for all inputs of one shape, so that it can be captured.
    fixed_tower: ClassVar[bool] = False

    def __init__(self, model: Model, processor: Any) -> None:
        if any(p.device.type == "meta" for p in model.parameters()):
            raise ModelError("the model is on the meta device; load its weights first")
        if len({p.device for p in model.parameters()}) > 1:
            raise ModelError("the model is spread over several devices; one device is supported")
        if getattr(processor, "image_processor", None) is None:
            raise ModelError(
                f"{type(processor).__name__} is no multimodal processor: it has no image processor"
            )
        kinds = [kind.__name__ for kind in type(processor).__mro__]
        if self.processors and not set(kinds) & set(self.processors):
            raise ModelError(
                f"{kinds[0]} does not belong to a {model.config.model_type} model; supported are "
                f"{', '.join(self.processors)}"
            )
        if model.get_output_embeddings() is None or not model.can_generate():
            raise ModelError(f"{type(model).__name__} has no language-model head to answer with")
        self.model, self.processor = model, processor
        self.writer = processor  # whose chat template writes prompts, the user's own
        self.config: Any = model.config
        self.decoder: TextDecoder = model.get_decoder()
        self.depth = len(self.decoder.layers)
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        text = self.config.get_text_config()
        if getattr(text, "attn_logit_softcapping", None) is not None:
            raise ModelError(f"{text.model_type} caps its attention logits, which is not supported")
        # Prompt and answer must fit into it, but where a family names the windows of its layers.
        self.window: int | None = getattr(text, "sliding_window", None)
        self.windows: tuple[int | None, ...] = (None,) * self.depth
        # Modules of trained stages, by recipe word, `weights` and kind.
        self.modules: dict[tuple[str, str, str], nn.Module] = {}
        self.pool = BufferPool()  # buffers of caches, from one request to the next
        self.decoding = "auto"  # how decode steps run, see `VLM`
        self.kept: dict[Hashable, Any] = {}  # what the engine keeps from one request to the next

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return self._embedding.weight.shape[-1]

    @property
    def vocabulary(self) -> int:
        """Of the logits."""
        return self._head.weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Rotary ids that the language model was made for, where its config says so."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def image_token_id(self) -> int:
        return self.config.image_token_id

    def placeholders(self) -> tuple[int, ...]:
        """Ids that stand for pictures and clips, and never for text."""
        names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
        found = {getattr(self.config, name, None) for name in names}
        return tuple(sorted(found - {None}))

    def visual(self, ids: Tensor) -> Tensor:
        """Which ids stand for a picture or a clip: bool, of their shape."""
        return ids == self.image_token_id

    def tower(self) -> nn.Module:
        """The vision tower, called with pixels."""
        return self.model.get_encoder(modality="image")

    def vision_blocks(self) -> list[nn.Module]:
        """Blocks of the vision tower, first one first."""
        tower = self.model.get_encoder(modality="image")
        tower = getattr(tower, "vision_model", tower)  # a wrapper in some versions of CLIP
        return list(tower.encoder.layers)

    def refusal(self, reason: str) -> RecipeError:
        """The error for a recipe that this model cannot run; names one that every family runs."""
        return RecipeError(f"{reason}; on this model 'divprune:0.2' works")

    # --- saliency ------------------------------------------------------------------------------

    def specials(self) -> int:
        """Rows of the tower in front of the patches of each view: 1 for a CLS token."""
        tower = self.model.get_encoder(modality="image")
        embeddings = getattr(getattr(tower, "vision_model", tower), "embeddings", None)
        names = ("class_embedding", "cls_token")
        return int(any(getattr(embeddings, name, None) is not None for name in names))

    def sources(self) -> tuple[str, ...]:
        """Of `saliency.SOURCES` those that the tower has, the usual one first."""
        return ("cls", "received", "norm") if self.specials() else ("received", "norm")

    def source(self, asked: SaliencyRequest) -> str:
        """The source that answers a request."""
        return self.sources()[0] if asked.source == "auto" else asked.source

    def why_no_source(self, source: str) -> str:
        """The reason why a source of `saliency.SOURCES` is not among `sources`."""
        return "its vision tower has no CLS token"

    def projects_cls(self) -> bool:
        """Whether the projector takes one row of the tower at a time, the CLS row too."""
        return self.specials() == 1

    def global_blocks(self) -> list[int]:
        """Vision blocks in which patches attend to the whole view, ascending."""
        return list(range(len(self.vision_blocks())))

    def salient_block(self, block: str) -> int:
        """The block that a `SaliencyRequest` means: the nearest of `global_blocks`, the later one
        where two are equally near."""
        last = len(self.vision_blocks()) - 1
        meant = {"first": 0, "features": self.feature_blocks()[-1], "last": last}[block]
        return min(self.global_blocks(), key=lambda index: (abs(index - meant), -index))

    def block_stats(self, context: VisionContext, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        """What ``layer`` says of each item: statistics (V, H, P) and keys (V, P, D) of its patches.

        The view of the whole image first. `to_tokens` knows in which order patches are.
        """
        n, rows, keys = self.patches(), context.stats[layer], context.keys.get(layer)
        views = [self.whole_first(item) for item in context.items]
        return [(rows[v, :, 0, -n:], None if keys is None else keys[v, -n:]) for v in views]

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        """What went into the projector, call by call, as (V, P, D) of each item."""
        views = [view for call in calls for view in call]
        return [torch.stack([views[i] for i in self.whole_first(item)]) for item in items]

    def to_tokens(self, patches: Tensor, item: ItemGeometry) -> Tensor:
        """Values (..., P) of an item's patches as means over its visual tokens, (..., N)."""
        n = item.patches[0] * item.patches[1]
        if patches.shape[-1] == n:
            return patches
        side = math.isqrt(patches.shape[-1])  # what does not belong to the square is CLS
        return to_tokens(patches[..., -side * side :], item.patches)

    def whole_first(self, item: ItemGeometry) -> list[int]:
        """The views of an item, that of the whole image first, then its crops in raster order."""
        return list(range(*item.views))

    # --- work inside the tower -------------------------------------------------------------------

    def cells(self, item: ItemGeometry) -> Tensor | None:
        """Patches of the tower that make each visual token of a view: int64, (N, m).

        Tokens are in raster order; patches are rows of the tower, counted after `specials`.
        ``None`` where no patches belong to one token alone, see `why_no_cells`.
        """
        side, (rows, columns) = math.isqrt(self.patches()), item.patches
        if side % rows or side % columns:
            return None
        patches = torch.arange(side * side).view(rows, side // rows, columns, side // columns)
        return patches.transpose(1, 2).flatten(2).flatten(0, 1)

    def why_no_cells(self, item: ItemGeometry) -> str:
        """The reason why an item has no `cells`."""
        side, (rows, columns) = math.isqrt(self.patches()), item.patches
        return (
            f"the {side} x {side} patches of its vision tower do not divide into "
            f"{rows} x {columns} visual tokens"
        )

    def mergers(self) -> list[nn.Module]:
        """The modules that make tokens of the rows of a packed tower, `projector` among them."""
        return [self.projector()]

    def tower_order(self, items: Sequence[ItemGeometry]) -> list[int]:
        """Indices of ``items`` in the order in which a packed tower reads them."""
        return list(range(len(items)))

    def projector(self) -> nn.Module:
        """The module through which the tower's rows (V, N, D) go to the language model's width."""
        return self.model.base_model.multi_modal_projector

    def feature_blocks(self) -> list[int]:
        """Indices of the vision blocks whose output goes to the projector, ascending."""
        layer = getattr(self.config, "vision_feature_layer", -1)
        layers = [layer] if isinstance(layer, int) else layer
        depth = len(self.vision_blocks())
        return sorted(index - 1 if index >= 0 else depth + index for index in layers)

    def feature_block(self) -> int:
        """The first of `feature_blocks`."""
        return self.feature_blocks()[0]

    def sizes(self) -> dict[str, Any]:
        """What a trained stage must know of the model, see `Stage.build`."""
        text, vision = self.config.get_text_config(), self.config.vision_config
        return {
            "family": self.config.model_type,
            "width": text.hidden_size,
            "depth": self.depth,
            "heads": text.num_attention_heads,
            "vision_width": vision.hidden_size,
            "vision_depth": len(self.vision_blocks()),
            "vision_heads": getattr(vision, "num_attention_heads", getattr(vision, "num_heads", 0)),
            "patches": self.patches(),
        }

    def patches(self) -> int:
        """Patches of one view in the vision tower."""
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2

    def bytes_per_token(self) -> int:
        """Bytes that one token costs in the cache of all layers, uncompressed."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * self.depth * heads * head * self.dtype.itemsize

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of an uncompressed cache after ``tokens``; layers hold what their windows show."""
        slots = (tokens if w is None else min(tokens, w - 1) for w in self.windows)
        return sum(slots) * self.bytes_per_token() // self.depth

    def signature(self) -> list[float]:
        """A few numbers by which weights that were trained for this very model know it again."""
        weight = next(p for p in reversed(list(self.projector().parameters())) if p.dim() == 2)
        weight = weight.detach().flatten()
        index = torch.arange(16, device=weight.device) * (len(weight) - 1) // 15
        return weight[index].float().tolist()

    def trained(self, stage: Stage) -> nn.Module:
        """The module of a trained stage, loaded when it is first asked for.

        Raises
        ------
        RecipeError
            When there are no weights of the stage for this model.
        """
        key = (stage.name, stage.weights, getattr(stage, "kind", ""))
        if key not in self.modules:
            self.modules[key] = load_weights(stage, self.sizes(), self.signature())
        # The model may have moved since. What only guesses may do so in the model's own type.
        module, half = self.modules[key], stage.protocol == "drafter" and self.device.type != "cpu"
        some = next(module.parameters())
        if some.device != self.device or (half and some.dtype != self.dtype):
            module.to(self.device, self.dtype if half else None)
        return module

    def ships(self, stage: Stage) -> bool:
        """Whether there are weights of a trained stage for this model."""
        try:
            self.trained(stage)
        except RecipeError:
            return False
        return True

    # --- prompt --------------------------------------------------------------------------------

    def frame_label(self, index: int) -> str:
        """Text before frame ``index`` (from 0) where a clip is read as pictures."""
        label = getattr(self.config, "vlmfast_frame_label", "")
        return label.format(i=index + 1)

    def image_token(self) -> str:
        """The placeholder of one picture in the text of a prompt."""
        return self.processor.image_token

    def marks(self) -> tuple[str, ...]:
        """The placeholders of pictures, and of clips that are not read as pictures."""
        clips = (self.processor.video_token,) if self.clip_tensors else ()
        return (self.image_token(), *clips)

    def inputs(
        self, text: str, images: list[Any], frames: Sequence[tuple] = ()
    ) -> dict[str, Tensor]:
        """Run the family's processor; tensors on the model's device, pixels in its dtype.

        ``images`` are all pictures and frames, ``frames`` is as in `engine.prefill.Inputs`.
        """
        tokenizer = self.processor.tokenizer
        bos = tokenizer.bos_token
        pictures, clips = self.parted(images, frames)
        try:
            batch = self.processor(
                images=([pictures] if self.nested else pictures) if pictures else None,
                text=[text],
                return_tensors="pt",
                add_special_tokens=not (bos and text.startswith(bos)),
                **(self.of_clips(clips) if clips else {}),
                **(self.on_device() if images else {}),
            )
        except (ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"{type(self.processor).__name__} refused the prompt: {reason}"
            ) from error
        wanted = (self.tensors if pictures else ()) + (self.clip_tensors if clips else ())
        lacking = [key for key in wanted if key not in batch]
        if lacking:
            raise ModelError(
                f"{type(self.processor).__name__} made no {', '.join(lacking)}: it does not belong "
                f"to a {self.config.model_type} model"
            )
        if "attention_mask" in batch and not bool(batch["attention_mask"].all()):
            raise ModelError(
                f"{type(self.processor).__name__} padded the prompt; prompts are read one at a "
                "time and without padding: take padding out of the processor's own arguments"
            )
        for key, value in batch.items():
            if self.fixed and key.startswith("pixel_values"):
                self._fits(value)
        return {
            key: self.moved(key, value) for key, value in batch.items() if isinstance(value, Tensor)
        }

    def moved(self, key: str, value: Tensor) -> Tensor:
        """An input on the device, pixels in the model's dtype; the host waits for no copy."""
        dtype = self.dtype if key.startswith("pixel_values") else value.dtype
        if self.device.type == "cuda" and value.device.type == "cpu":
            return value.pin_memory().to(self.device, non_blocking=True).to(dtype)
        return value.to(self.device, dtype)

    def _fits(self, pixels: Tensor) -> None:
        size = self.config.vision_config.image_size
        takes = (size, size) if isinstance(size, int) else tuple(size)
        if tuple(pixels.shape[-2:]) != takes:
            height, width = pixels.shape[-2:]
            raise ModelError(
                f"{type(self.processor).__name__} makes pictures of {height}x{width} pixels, and "
                f"the vision tower takes {takes[0]}x{takes[1]}; set the size in the processor"
            )

    def parted(
        self, images: list[Any], frames: Sequence[tuple]
    ) -> tuple[list[Any], list[tuple[list[Any], list[float]]]]:
        """Pictures, and clips that are not read as pictures: frames and their seconds."""
        if not self.clip_tensors or not frames:
            return images, []
        pictures: list[Any] = []
        clips: dict[int, tuple[list[Any], list[float]]] = {}
        for picture, (clip, _, _, *seconds) in zip(images, frames, strict=True):
            if clip < 0:
                pictures.append(picture)
            else:
                shown, times = clips.setdefault(clip, ([], []))
                shown.append(picture)
                times += seconds
        return pictures, list(clips.values())

    def of_clips(self, clips: list[tuple[list[Any], list[float]]]) -> dict[str, Any]:
        """Clips as the processor takes them: frames have been chosen, and it is told when."""
        about = []
        for shown, times in clips:
            gap = (times[-1] - times[0]) / max(len(times) - 1, 1) or 1.0
            about.append(
                {
                    "fps": 1 / gap,
                    "total_num_frames": len(shown),
                    "frames_indices": [time / gap for time in times],
                    "duration": gap * len(shown),
                }
            )
        videos = [shown for shown, _ in clips]
        return {"videos": videos, "video_metadata": about, "do_sample_frames": False}

    # --- a batch of prompts ----------------------------------------------------------------------

    def pictures_in(self, batch: dict[str, Tensor], ids: list[Tensor]) -> list[Media]:
        """The pictures of a batch in the order of its rows, whose ids are ``ids``, (S_i,) each."""
        return self._alike(batch, self.tensors[0], self.image_token_id, ids)

    def clips_in(self, batch: dict[str, Tensor], ids: list[Tensor]) -> list[Media]:
        """Its clips, where they are no pictures."""
        return []

    def _alike(
        self, batch: dict[str, Tensor], key: str, token: int, ids: list[Tensor]
    ) -> list[Media]:
        """Pictures, or clips (N, T, C, H, W), that all cost the same number of tokens."""
        pixels = batch.get(key)
        if pixels is None:
            return []
        tokens = sum(int((of == token).sum()) for of in ids) // max(len(pixels), 1)
        frames = pixels.shape[1] if pixels.dim() == 5 else 0
        size = pixels.shape[-2], pixels.shape[-1]
        return [Media(tokens, {key: one}, size, frames) for one in pixels.split(1)]

    def joined(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """`Media.tensors` of several pictures and clips as those of one prompt."""
        keys = {key: None for part in parts for key in part}
        return {key: torch.cat([part[key] for part in parts if key in part]) for key in keys}

    def items_of(
        self, tensors: dict[str, Tensor], media: Sequence[Media]
    ) -> tuple[ItemGeometry, ...]:
        """`items` of a prompt that came in a batch."""
        sizes, frames, clips = [], [], 0
        for one in media:
            clip = clips if one.frames else -1
            clips += one.frames > 0
            sizes += [one.size] * max(one.frames, 1)
            frames += [(clip, i, max(one.frames, 1)) for i in range(max(one.frames, 1))]
        return self.items(tensors, sizes, frames) if media else ()

    def on_device(self) -> dict[str, Any]:
        """Where pictures are resized and normalised: on the GPU, by processors that can."""
        if self.device.type == "cpu":
            return {}
        backend = getattr(self.processor.image_processor, "backend", None)
        return {"device": self.device} if backend == "torchvision" else {}

    # --- tensors -------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings; through the module, because some families scale inside it."""
        return self._embedding(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of normalised hidden states (..., D)."""
        return self._head(hidden)

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        """Rotary ids (P, S) of the full prompt."""
        length = inputs["input_ids"].shape[1]
        return torch.arange(length, device=self.device)[None]

    def tables(self, hidden: Tensor, position: Tensor, layer: int = 0) -> tuple[Tensor, ...]:
        """Rotary tables of rows at ``position``, (B, S) or (3, B, S), as ``layer`` takes them."""
        return tuple(self.decoder.rotary_emb(hidden, position))

    def rotary(self, layer: int) -> str:
        """Which kind of rotary tables a layer takes."""
        return ""

    def compact(self, full: Numbering, kept: Tensor) -> Tensor:
        """Rotary ids (P, N) without the gaps of what was dropped; the prompt's own if nothing was.

        Parameters
        ----------
        full : Numbering
            Of the prompt before anything was dropped, so that it does not matter how many drops
            there were.
        kept : Tensor, int64, (N,)
            Rows of it that are left, ascending.
        """
        if len(kept) == len(full):
            return full.position
        count = torch.arange(len(kept), device=kept.device)
        return full.position[:, :1] + count

    def rotate(self, keys: Tensor, delta: Tensor) -> Tensor:
        """Keys (H, N, D) whose rotary ids are moved by ``delta``, int64, (H, N)."""
        cos, sin = self.tables(keys.float(), delta)  # each head is a row of the batch here
        scale = getattr(self.decoder.rotary_emb, "attention_scaling", 1.0)  # keys have it already
        cos, sin = cos.float() / scale, sin.float() / scale
        turned, rest = keys.float().split([cos.shape[-1], keys.shape[-1] - cos.shape[-1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1).to(keys.dtype)

    def decoder_kwargs(self, layout: TokenLayout, extra: tuple[Tensor, ...]) -> dict[str, Any]:
        """Further arguments of the decoder in prefill."""
        return {}

    mask_rule: Callable[[TokenLayout], Tensor] | None = None

    def items(
        self, tensors: dict[str, Tensor], sizes: list[tuple[int, int]], frames: Sequence[tuple]
    ) -> tuple[ItemGeometry, ...]:
        """`geometry` of a prompt's pictures, and which of them are frames.

        The parameters are those of `engine.prefill.Inputs`; a family may join frames to one item.
        """
        items = self.views_of(tensors, sizes)
        if not frames:
            return items
        return tuple(
            replace(item, clip=clip, frame=(index, total))
            for item, (clip, index, total, *_) in zip(items, frames, strict=True)
        )

    def inside(self, items: tuple[ItemGeometry, ...]) -> bool:
        """Whether the tower makes one visual token of each of its patches."""
        cells = (self.cells(item) for item in items)
        return not self.packed and all(of is not None and of.shape[1] == 1 for of in cells)

    def views_of(
        self, tensors: dict[str, Tensor], sizes: list[tuple[int, int]]
    ) -> tuple[ItemGeometry, ...]:
        """`geometry`, where the processor's output says more than the sizes."""
        return self.geometry(sizes)

    def geometry(self, sizes: list[tuple[int, int]]) -> tuple[ItemGeometry, ...]:
        """How pictures of ``sizes`` (height, width in pixels) lie in the vision batch."""
        raise NotImplementedError(f"{type(self).__name__}.geometry")

    def encode(self, inputs: dict[str, Tensor], context: VisionContext) -> Encoded:
        """Vision tower and projector over all pictures of a prompt, ``context.items``.

        ``step`` is active meanwhile and holds the statistics afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode")

    # --- shared parts of `encode` ----------------------------------------------------------------

    def patch_stats(self, context: VisionContext, patches: int) -> VisionStats:
        """Statistics over patches: the CLS column is cut off."""
        views = max(
            item.views[1] for item in context.items
        )  # a stage may have put more rows behind
        rows = {layer: of[:views, :, 0, -patches:] for layer, of in context.stats.items()}
        keys = {layer: of[:views, -patches:] for layer, of in context.keys.items()}
        return VisionStats(context.items, rows, keys)

    def view_layout(
        self, tile: Tensor, y: Tensor, x: Tensor, kind: Tensor, item: int, geometry: ItemGeometry
    ) -> TokenLayout:
        """Layout of one item's tokens from their coordinates and kinds, (N,) each.

        Of a newline, ``y`` is the row of the canvas that it closes; tile and x do not count.
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

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Top left corner and size (N, 2) as (x, y) shares of the picture, of each token's tile."""
        height, width = geometry.size
        crop = getattr(self.processor.image_processor, "do_center_crop", False)
        short = min(height, width)
        size = [short / width, short / height] if crop else [1.0, 1.0]
        size = torch.tensor(size, device=tile.device).expand(tile.shape[0], 2)
        return (1 - size) / 2, size
