"""Families that hold any vision tower and any language model of Transformers: the LLaVAs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._parts import decoder_parts, tower_parts
from .base import Adapter

if TYPE_CHECKING:
    from .base import Model


class Composed(Adapter):
    """Finds blocks, attention and special rows by what they do, not by their names.

    The tower takes square images of one size, and its rows are special rows, then one row for each
    patch.
    """

    # Whether the projector must get the rows of patches alone, because a canvas is made of them.
    patches_alone: ClassVar[bool] = False

    def examine(self) -> None:
        kind = type(self.tower()).__name__
        self.tower_parts = tower_parts(kind, self.config.vision_config)
        self.decoder_parts = decoder_parts(self.decoder, self.config.get_text_config())
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
