"""InternVL: square views of an image, of which the whole image is the last; a view has no size.

Imports nothing of vLLM.
"""

from __future__ import annotations

from vlmfast.core.counting import ImageLayout
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import RecipeError

from .crops import Renumbered
from .recipes import KEY, Media


class Tiles(Renumbered):
    """What a plan must know of an InternVL."""

    def _media(self, of: tuple[int, ...]) -> Media:
        """An image of a height and a width, and its rows and columns of crops; 0 without crops."""
        height, width, down, across = of
        side, views = self.adapter.side(), down * across + 1
        item = ItemGeometry((height, width), (down, across), (0, views), (side, side))
        return Media(ImageLayout.of(item, self.adapter.layouts({}, (item,))[0]), 1)

    def check(self, recipe: Recipe) -> None:
        config = self.config
        if (config.vision_feature_layer, config.vision_feature_select_strategy) != (-1, "default"):
            raise RecipeError(
                f"{KEY}: vLLM projects the patches of the last vision layer, and this model is "
                f"configured with vision_feature_layer={config.vision_feature_layer}, "
                f"vision_feature_select_strategy={config.vision_feature_select_strategy!r}"
            )

    def sources(self) -> tuple[str, ...]:
        return ("cls", "received", "norm")

    def built(self) -> int:
        return self.config.vision_config.num_hidden_layers

    def block(self, asked: SaliencyRequest) -> int:
        last = self.built() - 1
        return {"first": 0, "features": last, "last": last}[asked.block]

    def samples(self) -> list[Media]:
        tiles = ((0, 0), (1, 2), (2, 1), (2, 2), (2, 3))
        side = self.config.vision_config.image_size[0]
        return [self.media((side * max(d, 1), side * max(a, 1), d, a)) for d, a in tiles]
