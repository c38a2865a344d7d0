"""Families that hold any vision tower and any language model of Transformers: the LLaVAs."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._media import Tensors, view_size
from ._parts import decoder_parts, tower_parts
from ._rotation import turn
from .base import Adapter, Encoded

if TYPE_CHECKING:
    from .base import Model


class Composed(Adapter):
    """Finds blocks, attention and special rows by what they do, not by their names.

    The tower takes square images of one size, and its rows are special rows, then one row for each
    patch.
    """

    # Whether the projector must get the rows of patches alone, because a canvas is made of them.
    patches_alone: ClassVar[bool] = False
    fixed = True

    @classmethod
    def without_weights(cls, config: Any, processor: Any) -> Self:
        adapter = super().without_weights(config, processor)
        adapter.side = (getattr(config.vision_config, "image_size", 0),) * 2
        return adapter

    def examine(self) -> None:
        kind = type(self.tower()).__name__
        self.measure(kind)
        self.decoder_parts = decoder_parts(self.decoder, self.config.get_text_config())
        self._turns: dict[int, str] = {}  # what positions do to the keys of a layer, see `turn`
        self._check_feature_layers()
        strategy = self.config.vision_feature_select_strategy
        if (cut := int(strategy == "default")) > self.specials():
            raise ModelError(
                "vision_feature_select_strategy='default' cuts off the first row of the vision "
                f"tower, which is a patch of {kind}; set 'full' in the config of the model and of "
                "the processor"
            )
        if self.patches_alone and self.specials() > cut:
            raise ModelError(
                f"{kind} as vision tower is not supported by {self.config.model_type}: it has "
                f"{self.specials()} rows before its patches and vision_feature_select_strategy="
                f"{strategy!r} cuts off {cut}; the others have no position in the image"
            )

    def measure(self, kind: str) -> None:
        """Find the parts of the tower, ``kind``, for views as the processor makes them.

        Raises
        ------
        ModelError
            If they are no squares, or the tower does not take them.
        """
        vision = self.config.vision_config
        name = type(self.processor).__name__
        if callable(getattr(self.processor, "image_processor", None)):
            height, width = view_size(self.processor)
        else:  # where only sizes are asked for
            height = width = vision.image_size
        self.side = height, width
        if height != width:
            raise ModelError(
                f"{name} makes images of {height}x{width} pixels, and {self.config.model_type} "
                "takes squares; set the size in the processor"
            )
        if height == getattr(vision, "image_size", height):
            self.tower_parts = tower_parts(kind, vision)
            return
        sizes = (
            f"{name} makes images of {height}x{width} pixels, and the config of the vision tower "
            f"has {vision.image_size}x{vision.image_size}; set the size in the processor"
        )
        patch = vision.patch_size
        if self.patches_alone and height // patch != vision.image_size // patch:
            raise ModelError(f"{sizes}: {self.config.model_type} packs the patches of its config")
        try:
            self.tower_parts = tower_parts(kind, vision, height)
        except ModelError as error:
            raise ModelError(f"{sizes}: {error}") from error

    def view_size(self) -> tuple[int, int]:
        return self.side

    def patches(self) -> int:
        return (self.side[0] // self.config.vision_config.patch_size) ** 2

    def _check_feature_layers(self) -> None:
        layers, depth = self.config.vision_feature_layer, len(self.vision_blocks())
        for layer in [layers] if isinstance(layers, int) else layers:
            # Hugging Face reads a single 0 as none given.
            if not -depth - 1 <= layer <= depth or layers == 0:
                raise ModelError(
                    f"vision_feature_layer={layers} in the config of the model: the vision tower "
                    f"has {depth} blocks, so it must be from {-depth - 1} to {depth} and not 0"
                )

    def examine_windows(self) -> None:
        """Windows are those that layers give to their attention; others in configs are unused."""
        found = self.decoder_parts.windows
        if not any(found):
            if self.kinds:  # without them, Hugging Face's cache has a window all the same
                self.window, self.windows = None, (None,) * self.depth
        elif found != self.windows:  # the masks of Hugging Face may be those of another layer
            self.window, self.windows = min(filter(None, found)), (None,) * self.depth

    def why_no_rotation(self, layer: int, device: torch.device) -> str:
        if reason := super().why_no_rotation(layer, device):
            return reason
        if layer not in self._turns:
            width = self.config.get_text_config().hidden_size
            rows = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(layer))
            call = self.decoder_parts.calls[layer]
            assert call is not None  # there is a state in layers without keys
            self._turns[layer] = turn(
                call,
                self.text_attention(layer),
                lambda rows, at: tuple(of.to(rows.device) for of in self.tables(rows, at, layer)),
                partial(super().turned, layer=layer),
                rows.to(device, self.dtype),
            )
        other = self._turns[layer] == "other"
        return f"whose language model rotates the keys of layer {layer} otherwise" if other else ""

    def turned(self, keys: Tensor, delta: Tensor, layer: int) -> Tensor:
        # A layer without a rotary embedding keeps its keys.
        return keys if self._turns.get(layer) == "unchanged" else super().turned(keys, delta, layer)

    def vision_blocks(self) -> list[nn.Module]:
        return self.tower_parts.blocks_of(self.tower())

    def vision_attention(self, block: nn.Module) -> nn.Module:
        number = next(i for i, own in enumerate(self.vision_blocks()) if own is block)
        return block.get_submodule(self.tower_parts.attention[number])

    def specials(self) -> int:
        return self.tower_parts.specials

    def projects_cls(self) -> bool:
        return self.specials() > 0

    def cells(self, item: ItemGeometry) -> Tensor | None:
        return super().cells(item) if self.tower_parts.rows_alone else None

    def why_no_cells(self, item: ItemGeometry) -> str:
        if self.tower_parts.rows_alone:
            return super().why_no_cells(item)
        return f"the blocks of {type(self.tower()).__name__} also take positions of all patches"

    def images(self, inputs: Tensors) -> list[Tensor]:
        """Features of each image, packed where the family packs them."""
        raise NotImplementedError(f"{type(self).__name__}.images")

    def encode(self, inputs: Tensors, context: VisionContext) -> Encoded:
        features = self.images(inputs)
        layouts = self.layouts(inputs, context.items)
        stats = self.patch_stats(context, math.prod(context.items[0].patches))
        return Encoded(features, layouts, stats, [()] * len(features))

    def image_features(self, *tensors: Tensor, **more: Any) -> list[Tensor]:
        """Projected features of each image, of the layer that the model's config names."""
        output = self.model.base_model.get_image_features(
            *tensors,
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
            **more,
        )
        return list(output.pooler_output)

    def norm(self) -> nn.Module | None:
        name = self.decoder_parts.norm
        return self.decoder.get_submodule(name) if name else None

    def text_attention(self, layer: int) -> nn.Module:
        return self.decoder.layers[layer].get_submodule(self.decoder_parts.attention[layer])

    def attention_norm(self, layer: int) -> nn.Module:
        name = self.decoder_parts.attention_norm[layer]
        return self.decoder.layers[layer].get_submodule(name) if name else nn.Identity()


class Completed(Composed):
    """One whose processor computes the number of placeholders from settings of the model."""

    def __init__(self, model: Model, processor: Any) -> None:
        super().__init__(model, processor)
        self.processor = self.complete(processor)

    def complete(self, processor: Any) -> Any:
        """Add settings that older checkpoints lack to the processor, taken from the model.

        Returns a copy, since the processor is the user's.
        """
        processor = copy.copy(processor)
        patch_size = getattr(processor, "patch_size", None)
        processor.patch_size = patch_size or self.config.vision_config.patch_size
        processor.vision_feature_select_strategy = self.config.vision_feature_select_strategy
        processor.num_additional_image_tokens = self.specials()
        return processor
