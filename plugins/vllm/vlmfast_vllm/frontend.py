"""What a server knows of a model that vLLM runs: prompts, recipes and counts, without weights.

Imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vlmfast.api.request import Rendered, render
from vlmfast.api.stored_recipe import AUTO
from vlmfast.core.counting import ImageLayout, VideoLayout
from vlmfast.core.exact import exact_count
from vlmfast.core.hub import check_model
from vlmfast.core.recipe import Recipe
from vlmfast.errors import ModelError, RecipeError
from vlmfast.models import adapter_class

from .crops import Crops
from .grids import Grids
from .recipes import KEY, Plan, Plans
from .tiles import Tiles

FAMILIES = {
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), Crops),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), Grids),
    "internvl": Tiles,
}
_SIZES = 256  # of images and videos whose layouts are kept


@dataclass(frozen=True)
class Prompt:
    """A request as vLLM takes it.

    Parameters
    ----------
    given : dict
        The prompt of ``AsyncLLM.generate``.
    plan : Plan
        Its recipe.
    layouts : list of ImageLayout or VideoLayout
        Its images and videos, where a recipe drops tokens of them.
    """

    given: dict[str, Any]
    plan: Plan
    layouts: list[ImageLayout | VideoLayout]


class Frontend:
    """A model without its weights.

    Parameters
    ----------
    model : str or Path
        A folder or a hub id.
    recipe : str
        The server's own recipe.

    Attributes
    ----------
    generation : transformers.GenerationConfig
        The checkpoint's settings.

    Raises
    ------
    ModelError
        For a checkpoint that does not exist, or of a family that the plug-in does not support.
    RecipeError
        For a recipe that vLLM cannot run.
    """

    def __init__(self, model: str | Path, recipe: str) -> None:
        from transformers import AutoConfig, AutoProcessor, GenerationConfig

        check_model(str(model))
        try:
            self.config = AutoConfig.from_pretrained(model)
            self.processor = AutoProcessor.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"{model} has no configuration or no processor: {reason}") from error
        kind = self.config.model_type
        if kind not in FAMILIES:
            raise ModelError(
                f"{model} is a {kind!r} model; --engine vllm serves {', '.join(FAMILIES)}"
            )
        try:
            self.generation = GenerationConfig.from_pretrained(model)
        except OSError:
            self.generation = GenerationConfig.from_model_config(self.config)
        self.adapter = adapter_class(kind).without_weights(self.config, self.processor)
        self.adapter.writer = self.processor
        tokenizer = self.processor.tokenizer
        # vLLM tokenizes a prompt with special tokens; templates may have written this one.
        own = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        self._bos = tokenizer.bos_token if own and tokenizer.bos_token else ""
        self.plans = Plans(FAMILIES[kind](self.config), _own(recipe))
        self._lock = threading.Lock()
        self._image = lru_cache(_SIZES)(self._image_of)
        self._video = lru_cache(_SIZES)(self._video_of)

    def recipe(self, recipe: str) -> Recipe:
        """Parse a recipe, as `VLM.recipe` does.

        Raises
        ------
        RecipeError
            Also for a recipe that vLLM cannot run, with the reason.
        """
        return self.plan(_own(recipe)).recipe

    def plan(self, recipe: str) -> Plan:
        """The plan of a recipe; any thread may call this."""
        with self._lock:
            return self.plans.of(recipe)

    def prompt(self, messages: list[dict[str, Any]], plan: Plan, tenant: str) -> Prompt:
        """Read the videos of messages, and write their prompt.

        Parameters
        ----------
        messages : list of dict
            As of `VLM.chat`.
        plan : Plan
        tenant : str
            Requests share the prefix cache where it is the same.

        Raises
        ------
        VLMFastError
            For messages that cannot be answered.
        """
        read = render(self.adapter, messages, Recipe())
        text = read.text.removeprefix(self._bos) if self._bos else read.text
        salt = hashlib.sha256(tenant.encode()).hexdigest()
        given: dict[str, Any] = {"prompt": text, "cache_salt": salt}
        images, videos = self.adapter.parted(read.images, read.frames)
        if images or videos:
            _check_videos(plan, read)
            given["multi_modal_data"] = self._media(images, videos, read)
            given["mm_processor_kwargs"] = {KEY: plan.text}
        layouts: list[ImageLayout | VideoLayout] = []
        if plan.stages:
            layouts += [self._image((image.height, image.width)) for image in images]
            layouts += [self._video((v[0].height, v[0].width), len(v)) for v in videos]
        return Prompt(given, plan, layouts)

    def visual(self, ids: list[int]) -> int:
        """Placeholders of images and videos in a prompt."""
        marks = {*self.adapter.placeholders()}
        if isinstance(self.plans.family, Tiles):  # whose videos keep another one in vLLM
            marks.add(self.processor.tokenizer.convert_tokens_to_ids(self.processor.video_token))
        return sum(token in marks for token in ids)

    def _media(self, images: list[Any], videos: list[Any], read: Rendered) -> dict[str, Any]:
        found: dict[str, Any] = {"image": images} if images else {}
        if videos:
            of = self.adapter.of_videos(videos, read.times)
            arrays = [np.stack([np.asarray(frame) for frame in own]) for own in of["videos"]]
            if not isinstance(self.plans.family, Tiles):  # which has no times
                about = [{**own, _SAMPLE: False} for own in of["video_metadata"]]
                arrays = list(zip(arrays, about, strict=True))
            found["video"] = arrays
        return found

    def _image_of(self, size: tuple[int, int]) -> ImageLayout:
        """An image of ``size`` (height, width)."""
        family, images = self.plans.family, self.processor.image_processor
        if isinstance(family, Crops):
            return family.media(size).of
        if isinstance(family, Tiles):
            views = images.get_number_of_image_patches(*size, {"crop_to_patches": True})
            return family.media((*size, *(self.adapter.canvas(size) if views > 1 else (0, 0)))).of
        rows, columns = _patches(images, *size)
        return family.media("image", (1, rows, columns)).of

    def _video_of(self, size: tuple[int, int], frames: int) -> VideoLayout:
        """A video on a model that does not read it as images."""
        blank = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (frames, *size, 3))
        of = self.adapter.of_videos([list(blank)], [])
        tensors = self.processor.video_processor(
            videos=of["videos"], do_sample_frames=False, return_tensors="pt"
        )
        return self.plans.family.media("video", tensors["video_grid_thw"][0].tolist()).of


_SAMPLE = "do_sample_frames"


def kept(plan: Plan, layouts: list[ImageLayout | VideoLayout]) -> dict[str, int]:
    """The number of visual tokens that each stage leaves."""
    found = {}
    for count, stage in enumerate(plan.stages, 1):
        so_far = Recipe(tuple(plan.stages[:count]))
        found[stage.name] = sum(exact_count(so_far, of) for of in layouts)
    return found


def _own(recipe: str) -> str:
    """The text of a recipe of the server, which may be in a file."""
    if recipe.strip() == AUTO:
        raise RecipeError(
            "recipe='auto' depends on the weights of the model, which vLLM loads; name the recipe"
        )
    return (str(Recipe.parse(recipe)) or "none") if Recipe.reads_file(recipe) else recipe


def _check_videos(plan: Plan, read: Rendered) -> None:
    """Refuse recipes that vLLM would run in another way on the videos of a prompt."""
    if isinstance(plan.family, Grids) or not read.times:
        return
    for stage in plan.stages:
        if isinstance(plan.family, Tiles):
            raise RecipeError(
                f"{stage.name}: vLLM reduces only images of this model; ask about videos under "
                "recipe 'none'"
            )
        if stage.joins_frames:
            raise RecipeError(
                f"{stage.name} chooses among all frames of a video, and vLLM reduces each frame "
                "of this model alone; use another recipe"
            )


def _patches(processor: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches of an image of a Qwen."""
    resize = sys.modules[type(processor).__module__].smart_resize
    side, size = processor.patch_size, processor.size
    found = resize(
        height,
        width,
        factor=side * processor.merge_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
    return found[0] // side, found[1] // side
