"""Exact counts of visual tokens from the sizes of images and videos.

Other engines reserve the places of an image in the prompt before they encode it, so they need the
number of tokens that a recipe keeps without the image's content.
"""

from __future__ import annotations

from typing import Any

from .counting import ImageLayout, TokenCount, VideoLayout, inexact, runs
from .protocols import EncodeStage, ViewStage
from .recipe import Recipe


def exact_count(recipe: Any, media: ImageLayout | VideoLayout) -> int:
    """Number of visual tokens of an image or video that enter the language model under a recipe.

    It follows from sizes alone: no pixel and no question is read, also where a method chooses
    tokens by them. Stages that act later, such as cache compression, do not change it.

    >>> layout = vlm.image_layout((480, 640))
    >>> vlmfast.exact_count("hired:budget=0.2", layout)

    Parameters
    ----------
    recipe : str, Stage or Recipe
    media : ImageLayout or VideoLayout
        The result of `VLM.image_layout` or `VLM.video_layout`.

    Returns
    -------
    int
        Of an image that is the only one in its prompt, or one of several.

    Raises
    ------
    RecipeError
        If the number depends on the content of the image or on trained weights.
    """
    return sum(group.total for group in _left(recipe, media))


def exact_counts(recipe: Any, video: VideoLayout) -> tuple[int, ...]:
    """Number of visual tokens of each frame of a video that enter the language model.

    >>> layout = vlm.video_layout((480, 640), frames=8)
    >>> vlmfast.exact_counts("hired:budget=0.2", layout)

    Parameters
    ----------
    recipe, video
        As of `exact_count`.

    Returns
    -------
    tuple of int
        One for each entry of ``video.frames``; they sum to `exact_count`.

    Raises
    ------
    RecipeError
        Also if a method chooses among the tokens of all frames: their sum is exact, and the number
        in each frame depends on the content.
    """
    groups = _left(recipe, video)
    if any(group.frames > 1 for group in groups):
        joined = [stage.name for stage in Recipe.of(recipe).acting("encode") if stage.joins_frames]
        raise inexact(
            joined[0], "the content of the video in each frame, which `exact_count` adds up"
        )
    return tuple(group.total for group in groups)


def _left(recipe: Any, media: ImageLayout | VideoLayout) -> list[TokenCount]:
    """What is left of an image, or of each frame or of frames of a video together."""
    recipe = Recipe.of(recipe)
    frames = media.frames if isinstance(media, VideoLayout) else (media,)
    tiled = any(frame.geometry.tiles != (0, 0) for frame in frames)
    for part in (part for stage in recipe for part in stage.expand()):
        if part.protocol == "in-encoder":
            raise inexact(part.name, "what merges inside the vision tower")
        if isinstance(part, ViewStage) and part.chooses_crops and tiled:
            raise inexact(part.name, "the crops that it chooses")
    groups = [TokenCount.of(frame) for frame in frames]
    for part in recipe.acting("encode"):
        if part.trained:
            raise inexact(part.name, "trained weights")
        groups = _after(part, groups)
    return groups


def _after(stage: EncodeStage, groups: list[TokenCount]) -> list[TokenCount]:
    """What a stage leaves of groups of frames."""
    if getattr(stage, "fraction", None) == 1:
        return groups
    apart = all(group.frames == 1 for group in groups)
    if stage.joins_frames and len(groups) > 1:
        numbers = runs([0] * len(groups), [group.total for group in groups])
        if not apart and max(numbers) > 1:
            raise inexact(stage.name, "the frames between which the video is split")
        groups = [
            TokenCount.joined([g for g, of in zip(groups, numbers, strict=True) if of == number])
            for number in dict.fromkeys(numbers)
        ]
    elif not stage.joins_frames and not apart:
        raise inexact(stage.name, "how many tokens the stages before it keep of each frame")
    return [stage.tokens_left(group) for group in groups]
