"""Which methods run on a model, found by running each of them once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from vlmfast.core.protocols import MediaStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.errors import VLMFastError, one_line

if TYPE_CHECKING:
    from vlmfast.core.stage import Stage

    from .vlm import VLM

_SIZE = (64, 96)  # height and width of the test image
_FRAMES = 4
_KEEP = 0.97


@dataclass(frozen=True)
class Support:
    """Whether a method runs on a model.

    Parameters
    ----------
    method : str
    runs : bool or None
        ``None`` if it was not tried, because that would download another model.
    saliency : str
        Source of its saliency: ``cls``, ``received`` or ``norm``; empty if it uses none.
    note : str
        Why it does not run, or which of its parts is skipped.
    """

    method: str
    runs: bool | None
    saliency: str = ""
    note: str = ""


def support_of(vlm: VLM, recipe: str | Stage | Recipe | None, *, video: bool = False) -> Support:
    """Test whether a recipe runs on a model, by generating one token.

    Parameters
    ----------
    vlm : VLM
    recipe : str, Stage or Recipe
    video : bool
        Test with a video of four frames instead of an image.
    """
    method = recipe if isinstance(recipe, str) else str(recipe)
    recipe = vlm.recipe(recipe)
    if any(stage.other_model for stage in recipe):
        return Support(method, None, note="needs another model, which would be downloaded")
    if recipe.acting(MediaStage) and not video:
        return Support(method, False, note="chooses the frames of a video")
    noise = np.random.default_rng(0).integers(0, 256, (_FRAMES, *_SIZE, 3), dtype=np.uint8)
    media = {"video": list(noise), "num_frames": _FRAMES} if video else {"images": noise[0]}
    if recipe.acting(MediaStage):
        del media["num_frames"]
    try:
        answer = vlm.ask("What is this?", **media, recipe=recipe, max_new_tokens=1)
    except VLMFastError as error:
        return Support(method, False, note=one_line(error))
    left_out = "; ".join(part.partition(": ")[2] for part in answer.stats.left_out)
    note = f"without {left_out}" if left_out else ""
    return Support(method, True, answer.stats.saliency, note)


def support(vlm: VLM, *, video: bool = False) -> list[Support]:
    """Run `support_of` for every registered method, in alphabetical order."""
    found = []
    for name in sorted(stage_names()):
        stage = stage_class(name)()
        # The defaults of cache methods are for longer prompts than this one.
        keeps = {}
        if any(part.protocol == "cache" for part in stage.expand()):
            keeps = {f.name: _KEEP for f in fields(stage) if f.name in ("keep", "tsp")}
        tried = support_of(vlm, Recipe((replace(stage, **keeps),)), video=video)
        found.append(replace(tried, method=name))
    return found
