"""Which methods run on a model, found out by asking the model itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmfast.core.protocols import MediaStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.errors import VLMFastError

if TYPE_CHECKING:
    from .vlm import VLM

_SIZE = (64, 96)  # height and width of the image that is asked about
_FRAMES = 4
_SHARE = 0.97


@dataclass(frozen=True)
class Support:
    """Whether a method runs on a model.

    Parameters
    ----------
    method : str
    runs : bool or None
        ``None`` where it was not tried, because that would download another model.
    saliency : str
        Where it reads saliency: ``cls``, ``received`` or ``norm``; empty where it reads none.
    note : str
        Why it does not run, or which of its parts is left out.
    """

    method: str
    runs: bool | None
    saliency: str = ""
    note: str = ""


def support_of(vlm: VLM, recipe: Any, *, video: bool = False) -> Support:
    """Ask one question under a recipe, for an answer of one token.

    Parameters
    ----------
    vlm : VLM
    recipe : str, Stage or Recipe
    video : bool
        Ask about a video of four frames instead of an image.
    """
    method = recipe if isinstance(recipe, str) else str(recipe)
    recipe = vlm.recipe(recipe)
    if any(stage.other_model for stage in recipe):
        return Support(method, None, note="runs a model of its own, which would be downloaded")
    if recipe.acting(MediaStage) and not video:
        return Support(method, False, note="chooses the frames of a video")
    noise = np.random.default_rng(0).integers(0, 256, (_FRAMES, *_SIZE, 3), dtype=np.uint8)
    media = {"video": list(noise), "num_frames": _FRAMES} if video else {"images": noise[0]}
    if recipe.acting(MediaStage):
        del media["num_frames"]
    try:
        answer = vlm.ask("What is this?", **media, recipe=recipe, max_new_tokens=1)
    except VLMFastError as error:
        return Support(method, False, note=str(error).partition("\n")[0])
    left_out = "; ".join(part.partition(": ")[2] for part in answer.stats.left_out)
    note = f"without {left_out}" if left_out else ""
    return Support(method, True, answer.stats.saliency, note)


def support(vlm: VLM, *, video: bool = False) -> list[Support]:
    """`support_of` for every method that can be found, by name."""
    found = []
    for name in sorted(stage_names()):
        stage = stage_class(name)()
        # Defaults of cache methods are for longer prompts than the one that is asked here.
        shares = {}
        if any(part.protocol == "cache" for part in stage.expand()):
            shares = {f.name: _SHARE for f in fields(stage) if f.name in ("share", "tsp")}
        tried = support_of(vlm, Recipe((replace(stage, **shares),)), video=video)
        found.append(replace(tried, method=name))
    return found
