"""The recipe of a server, and whether vLLM can run it. Imports nothing of vLLM."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from vlmfast.core.counting import ImageLayout
from vlmfast.core.exact import exact_count
from vlmfast.core.recipe import Recipe
from vlmfast.errors import RecipeError
from vlmfast.eval.axes import with_field
from vlmfast.models import adapter_class

KEY = "vlmfast_recipe"  # in --hf-overrides
_LOG = logging.getLogger("vllm.vlmfast")  # below the one that vLLM prints
_RATIO = "anyres_max_9"  # vLLM reads no other from the configuration of LLaVA-OneVision


class Plan:
    """A recipe on the model of a server.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model.
    recipe : Recipe
        Its tokens are renumbered (``positions=compact``), because vLLM counts positions itself.

    Raises
    ------
    RecipeError
        For a recipe that vLLM cannot run, with the reason.
    """

    def __init__(self, config: Any, recipe: Recipe) -> None:
        recipe = _renumbered(recipe)
        self.config, self.recipe = config, recipe
        processor = SimpleNamespace(image_processor=None, video_processor=None)
        self.adapter = adapter_class(config.model_type).without_weights(config, processor)
        self.stages = recipe.acting("encode")
        self.layout = lru_cache(maxsize=256)(self.adapter.image_layout)
        self.count = lru_cache(maxsize=4096)(self._count)
        _check(config, recipe)
        for size in _sizes(config):
            self.count(size)

    @staticmethod
    def of(config: Any) -> Plan | None:
        """The plan of a model whose configuration names a recipe; ``None`` without one."""
        text = getattr(config, KEY, None)
        if text is None:
            return None
        if not isinstance(text, str) or Recipe.reads_file(text):
            raise RecipeError(f"{KEY}={text!r} must be the text of a recipe")
        recipe = Recipe.parse(text)
        if not recipe:
            return None
        plan = Plan(config, recipe)
        _LOG.info("%s: %s", KEY, plan.recipe)
        return plan

    def _count(self, size: tuple[int, int]) -> int:
        """Tokens kept of an image of ``size`` (height, width)."""
        return exact_count(self.recipe, self.layout(size))

    def image(self, size: tuple[int, int]) -> ImageLayout:
        """The tokens of an image before any are dropped."""
        return self.layout(size)


def _renumbered(recipe: Recipe) -> Recipe:
    """The recipe as vLLM runs it, whose positions follow each other without gaps.

    Raises
    ------
    RecipeError
        If its text asks for the original positions.
    """
    if re.search(r"\bpositions\s*=\s*keep\b", recipe.text):
        raise RecipeError(
            f"{KEY}={recipe.text!r}: vLLM numbers tokens without gaps, so positions=keep cannot be "
            "honoured; leave it out"
        )
    return with_field(recipe, "positions", "compact")


def sources(config: Any) -> tuple[str, ...]:
    """The sources of saliency that the vision tower has, the default first."""
    has_cls = config.vision_config.model_type == "clip_vision_model"
    return ("cls", "received", "norm") if has_cls else ("received", "norm")


def built_blocks(config: Any) -> int:
    """Blocks of the vision tower that vLLM builds: up to the one that feeds the projector."""
    depth, layer = config.vision_config.num_hidden_layers, config.vision_feature_layer
    return depth + layer + 1 if layer < 0 else layer


def block_of(config: Any, block: str) -> int:
    """Index of the block that a `SaliencyRequest` means."""
    last = config.vision_config.num_hidden_layers - 1
    return {"first": 0, "features": built_blocks(config) - 1, "last": last}[block]


def _check(config: Any, recipe: Recipe) -> None:
    if config.vision_config.model_type not in ("clip_vision_model", "siglip_vision_model"):
        raise RecipeError(
            f"{KEY}: vision towers of type {config.vision_config.model_type} are not supported; "
            "supported are clip_vision_model and siglip_vision_model"
        )
    if not isinstance(config.vision_feature_layer, int):
        raise RecipeError(f"{KEY}: a model that projects several vision layers is not supported")
    ratio = getattr(config, "vision_aspect_ratio", _RATIO)
    if config.model_type == "llava_onevision" and ratio != _RATIO:
        raise RecipeError(
            f"{KEY}: vLLM arranges crops by vision_aspect_ratio={_RATIO}, and this model by {ratio}"
        )
    for stage in recipe:
        for part in stage.expand():
            if part.protocol != "encode":
                raise RecipeError(
                    f"{part.name} acts in the {part.protocol} step; vLLM runs stages of visual "
                    "tokens alone, such as 'hired:budget=0.2'"
                )
            if part.proportional_attention:
                raise RecipeError(
                    f"{part.name}: vLLM's attention knows no weights of merged tokens; use "
                    f"'{part.name}:proportional_attention=false'"
                )
            if part.query_dependent:
                raise RecipeError(
                    f"{part.name} reads the question; vLLM caches the tokens of an image for all "
                    "questions"
                )
            if part.vision_stats(built_blocks(config)):
                raise RecipeError(f"{part.name} reads single vision blocks, which is not supported")
            for asked in part.saliencies():
                _check_saliency(config, part.name, asked)


def _check_saliency(config: Any, name: str, asked: Any) -> None:
    if asked.jitter:
        raise RecipeError(
            f"{name}: guard={asked.jitter} needs more forward passes of the vision tower, which "
            "vLLM does not run; use guard=0"
        )
    if asked.source not in ("auto", *sources(config)):
        raise RecipeError(
            f"{name}: saliency={asked.source} cannot be read from this vision tower; allowed are "
            f"auto, {', '.join(sources(config))}"
        )
    if block_of(config, asked.block) >= built_blocks(config):
        raise RecipeError(
            f"{name} reads block {block_of(config, asked.block)} of the vision tower, and vLLM "
            f"builds only blocks 0 to {built_blocks(config) - 1}, whose output the model uses; "
            "'hired:budget=0.2' works"
        )


def _sizes(config: Any) -> list[tuple[int, int]]:
    """Sizes of images for which a recipe is tried at the start."""
    side = config.vision_config.image_size
    found = [(side, side), *getattr(config, "image_grid_pinpoints", ())]
    return [(int(height), int(width)) for height, width in found]
