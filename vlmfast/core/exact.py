"""Exact counts of visual tokens from the size of an image.

Other engines reserve the places of an image in the prompt before they encode it, so they need the
number of tokens that a recipe keeps without the image's content.
"""

from __future__ import annotations

from typing import Any

from .counting import ImageLayout, TokenCount, inexact
from .protocols import ViewStage
from .recipe import Recipe


def exact_count(recipe: Any, image: ImageLayout) -> int:
    """Number of visual tokens of an image that enter the language model under a recipe.

    It follows from the size of the image alone. Stages that act later, such as cache compression,
    do not change it.

    >>> layout = vlm.image_layout((480, 640))
    >>> vlmfast.exact_count("hired:budget=0.2", layout)

    Parameters
    ----------
    recipe : str, Stage or Recipe
    image : ImageLayout
        The result of `VLM.image_layout`.

    Returns
    -------
    int
        Of an image that is the only one in its prompt, or one of several.

    Raises
    ------
    RecipeError
        If the number depends on the content of the image, on the question or on trained weights.
    """
    recipe, found = Recipe.of(recipe), TokenCount.of(image)
    for part in (part for stage in recipe for part in stage.expand()):
        if part.protocol == "in-encoder":
            raise inexact(part.name, "what merges inside the vision tower")
        if isinstance(part, ViewStage) and part.chooses_crops:
            raise inexact(part.name, "the crops that it chooses")
    for part in recipe.acting("encode"):
        if part.trained:
            raise inexact(part.name, "trained weights")
        if part.query_dependent:
            raise inexact(part.name, "the question")
        found = part.tokens_left(found)
    return found.total
