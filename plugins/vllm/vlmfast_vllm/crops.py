"""The LLaVA families: images in square views, and positions that vLLM counts itself.

Imports nothing of vLLM.
"""

from __future__ import annotations

import re
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.errors import RecipeError
from vlmfast.eval.axes import with_field
from vlmfast.models import adapter_class

from .recipes import KEY, Family, Media

_RATIO = "anyres_max_9"  # vLLM reads no other from the configuration of LLaVA-OneVision
_TOWERS = ("clip_vision_model", "siglip_vision_model")


class Renumbered(Family):
    """Families whose tokens are renumbered, because vLLM counts positions."""

    positions = "compact"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.check(Recipe())  # before its tower is measured
        processor = SimpleNamespace(image_processor=None, video_processor=None)
        self.adapter = adapter_class(config.model_type).without_weights(config, processor)
        self.media = lru_cache(maxsize=256)(self._media)

    def _media(self, of: tuple[int, ...]) -> Media:
        """An image, by what decides its tokens."""
        raise NotImplementedError(f"{type(self).__name__}._media")

    def positioned(self, recipe: Recipe) -> Recipe:
        if re.search(r"\bpositions\s*=\s*keep\b", recipe.text):
            raise RecipeError(
                f"{KEY}={recipe.text!r}: vLLM numbers tokens without gaps, so positions=keep "
                "cannot be honoured; leave it out"
            )
        return with_field(recipe, "positions", "compact")


class Crops(Renumbered):
    """What a plan must know of a LLaVA."""

    def _media(self, of: tuple[int, ...]) -> Media:
        """An image of a height and a width."""
        height, width = of
        return Media(self.adapter.image_layout((height, width)), 1)

    def check(self, recipe: Recipe) -> None:
        config, tower = self.config, self.config.vision_config.model_type
        if tower not in _TOWERS:
            raise RecipeError(
                f"{KEY}: vision towers of type {tower} are not supported; supported are "
                f"{' and '.join(_TOWERS)}"
            )
        if not isinstance(config.vision_feature_layer, int):
            raise RecipeError(
                f"{KEY}: a model that projects several vision layers is not supported"
            )
        ratio = getattr(config, "vision_aspect_ratio", _RATIO)
        if config.model_type == "llava_onevision" and ratio != _RATIO:
            raise RecipeError(
                f"{KEY}: vLLM arranges crops by vision_aspect_ratio={_RATIO}, and this model by "
                f"{ratio}"
            )

    def sources(self) -> tuple[str, ...]:
        has_cls = self.config.vision_config.model_type == "clip_vision_model"
        return ("cls", "received", "norm") if has_cls else ("received", "norm")

    def built(self) -> int:
        """Up to the one that feeds the projector."""
        depth = self.config.vision_config.num_hidden_layers
        layer = self.config.vision_feature_layer
        return depth + layer + 1 if layer < 0 else layer

    def block(self, asked: SaliencyRequest) -> int:
        last = self.config.vision_config.num_hidden_layers - 1
        return {"first": 0, "features": self.built() - 1, "last": last}[asked.block]

    def samples(self) -> list[Media]:
        side = self.config.vision_config.image_size
        sizes = [(side, side), *getattr(self.config, "image_grid_pinpoints", ())]
        return [self.media((int(height), int(width))) for height, width in sizes]
