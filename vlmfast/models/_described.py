"""What is known of a model of any family: its parts, their sizes and what its tower shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext
from vlmfast.core.placement import device_of
from vlmfast.core.saliency import SaliencyRequest, to_tokens
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError, RecipeError

from .rope import longest, short


class Described:
    """Of `Adapter`: sizes, saliency, and where to find what works inside the tower."""

    attention: ClassVar[str] = "self_attn"  # its name in a vision block
    prefix_lm: ClassVar[bool] = False  # whether all rows of a prompt attend to each other
    config: Any
    model: Any
    decoder: Any
    depth: int
    state_layers: frozenset[int]

    def view_size(self) -> tuple[int, int] | None:
        """Height and width in pixels of the views that the tower gets; ``None`` where they vary."""
        size = getattr(self.config.vision_config, "image_size", None)
        return (size, size) if isinstance(size, int) else size and tuple(size)

    @property
    def _embedding(self) -> nn.Embedding:
        # Adapters of PEFT may replace it at any time, and the head too. The language model finds it
        # at once, the whole model after a search.
        return cast("nn.Embedding", self.decoder.get_input_embeddings())

    @property
    def _head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        device = self._embedding.weight.device
        if device.type != "meta":
            return device
        found = device_of(self._embedding)  # of offloaded weights
        assert found is not None
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self._embedding.weight.shape[-1]

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        return self._head.out_features  # quantized weights may be packed into another shape

    @property
    def max_positions(self) -> int | None:
        """Maximum of positions of the language model, if its config sets one."""
        return longest(self.config.get_text_config())

    @property
    def reusable(self) -> bool:
        """Whether another prompt with the same beginning can continue from the cache of one."""
        return not (self.prefix_lm or self.state_layers)

    def is_short(self, positions: int) -> bool:
        """Whether the rotary tables of a prompt are those of each of its parts."""
        most = short(self.config.get_text_config())
        return most is None or positions <= most

    @property
    def image_token_id(self) -> int:
        return self.config.image_token_id

    def placeholders(self) -> tuple[int, ...]:
        """Placeholder ids of images and videos."""
        names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
        found = {getattr(self.config, name, None) for name in names}
        return tuple(sorted(token for token in found if token is not None))

    def visual(self, ids: Tensor) -> Tensor:
        """Mask of the placeholders of images and videos: bool, same shape as ``ids``."""
        return ids == self.image_token_id

    def modalities(self, ids: Tensor) -> Tensor:
        """0 for text, 1 for placeholders of images and 2 for those of videos, shape of ``ids``."""
        return self.visual(ids) * (1 + (ids != self.image_token_id).int())

    def tower(self) -> nn.Module:
        """The vision tower, called with pixels."""
        return self.model.get_encoder(modality="image")

    def vision_blocks(self) -> list[nn.Module]:
        """Blocks of the vision tower, in order."""
        tower = self.model.get_encoder(modality="image")
        tower = getattr(tower, "vision_model", tower)  # some versions wrap CLIP
        encoder = getattr(tower, "encoder", None)
        blocks = getattr(encoder, "layers", None) or getattr(encoder, "layer", None)
        if blocks is None:
            raise ModelError(f"{type(tower).__name__} as vision tower is not supported")
        return list(blocks)

    def vision_attention(self, block: nn.Module) -> nn.Module:
        """The module of a vision block whose attention is replaced by the engine's."""
        names = (self.attention, "self_attn", "attention")
        found = next((m for name in names if (m := getattr(block, name, None)) is not None), None)
        if found is None:
            raise ModelError(f"{type(block).__name__} as vision block is not supported")
        # The attention of ViTs consists of a part that attends and an output projection.
        return getattr(found, "attention", found)

    def refusal(self, reason: str) -> RecipeError:
        """The error for a recipe that this model cannot run; it names one that runs."""
        return RecipeError(f"{reason}; on this model 'divprune:0.2' works")

    # --- saliency ------------------------------------------------------------------------------

    def specials(self) -> int:
        """Rows of the tower before the patches of each view: 1 for a CLS token."""
        tower = self.model.get_encoder(modality="image")
        embeddings = getattr(getattr(tower, "vision_model", tower), "embeddings", None)
        names = ("class_embedding", "cls_token")
        return int(any(getattr(embeddings, name, None) is not None for name in names))

    def sources(self) -> tuple[str, ...]:
        """Entries of `saliency.SOURCES` that the tower supports, the default first."""
        return ("cls", "received", "norm") if self.specials() else ("received", "norm")

    def source(self, asked: SaliencyRequest) -> str:
        """The source used for a request."""
        return self.sources()[0] if asked.source == "auto" else asked.source

    def why_no_source(self, source: str) -> str:
        """The reason why `sources` does not include a source."""
        return "its vision tower has no CLS token"

    def why_no_crops(self) -> str:
        """The reason why `crops` is false."""
        return f"{self.config.model_type} encodes each image as one view"

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
        """Statistics (V, H, P) and keys (V, P, D) of each item's patches in ``layer``.

        The view of the whole image comes first. `to_tokens` defines the order of patches.
        """
        n, rows, keys = self.patches(), context.stats[layer], context.keys.get(layer)
        views = [self.whole_first(item) for item in context.items]
        return [
            (
                _views(rows[:, :, 0, -n:], own),
                None if keys is None else _views(keys[:, -n:], own),
            )
            for own in views
        ]

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        """The projector's inputs, recorded call by call, as (V, P, D) of each item."""
        views = [view for call in calls for view in call]
        return [torch.stack([views[i] for i in self.whole_first(item)]) for item in items]

    def to_tokens(self, patches: Tensor, item: ItemGeometry) -> Tensor:
        """Values (..., P) of an item's patches as means over its visual tokens, (..., N)."""
        n = item.patches[0] * item.patches[1]
        if patches.shape[-1] == n:
            return patches
        side = math.isqrt(patches.shape[-1])  # rows before the square are CLS
        return to_tokens(patches[..., -side * side :], item.patches)

    def whole_first(self, item: ItemGeometry) -> list[int]:
        """The views of an item: the whole image first, then its crops in raster order."""
        return list(range(*item.views))

    # --- work inside the tower -------------------------------------------------------------------

    def cells(self, item: ItemGeometry) -> Tensor | None:
        """Patches of the tower that form each visual token of a view: int64, (N, m).

        Tokens are in raster order; patches are rows of the tower, counted after `specials`.
        ``None`` if patches do not belong to single tokens, see `why_no_cells`.
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

    def norm(self) -> nn.Module | None:
        """The norm after the last layer of the language model."""
        return getattr(self.decoder, "norm", None)

    def text_attention(self, layer: int) -> nn.Module:
        """The module of a layer of the language model that attends."""
        return self.decoder.layers[layer].get_submodule("self_attn")

    def attention_norm(self, layer: int) -> nn.Module:
        """The norm before the attention of a layer of the language model."""
        return self.decoder.layers[layer].get_submodule("input_layernorm")

    def mergers(self) -> list[nn.Module]:
        """Modules that turn the rows of a packed tower into tokens, including `projector`."""
        return [self.projector()]

    def tower_order(self, items: Sequence[ItemGeometry]) -> list[int]:
        """Indices of ``items`` in the order in which a packed tower processes them."""
        return list(range(len(items)))

    def projector(self) -> nn.Module:
        """The module that projects the tower's rows (V, N, D) to the language model's width."""
        return self.model.base_model.multi_modal_projector

    def feature_blocks(self) -> list[int]:
        """Indices of the vision blocks whose output the projector takes, ascending."""
        layer = getattr(self.config, "vision_feature_layer", -1)
        layers = [layer] if isinstance(layer, int) else layer
        depth = len(self.vision_blocks())
        return sorted(index - 1 if index >= 0 else depth + index for index in layers)

    def feature_block(self) -> int:
        """The first of `feature_blocks`."""
        return self.feature_blocks()[0]

    def sizes(self) -> dict[str, Any]:
        """Properties of the model that a trained stage needs, see `Stage.build`."""
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


def _views(x: Tensor, numbers: list[int]) -> Tensor:
    """Rows ``numbers`` of a tensor, without indices that would be copied to the device."""
    first, last = min(numbers), max(numbers) + 1
    if numbers == list(range(first, last)):
        return x[first:last]
    return torch.cat([x[n : n + 1] for n in numbers])
