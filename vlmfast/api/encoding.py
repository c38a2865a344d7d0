"""The visual tokens of an image under a recipe, without a question: for other engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.prefill import Inputs, prepare
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import RecipeError
from vlmfast.models.base import Adapter

from .request import messages_of, render, tensors_of

_QUESTION = "?"  # read by no stage that is allowed here


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """The visual tokens that a recipe keeps of an image.

    Parameters
    ----------
    features : Tensor, (K, D)
        As they enter the language model, in its dtype.
    kept : Tensor, int64, (K,)
        Which of the image's ``tokens`` each one is; of merged tokens the one that represents them.
    position_ids : Tensor, int64, (P, K)
        Rotary ids, counted from that of the image's first token; P is 1, or 3 for M-RoPE.
    size : (int, int)
        Height and width of the image in pixels.
    tokens : int
        Visual tokens before any were dropped.
    """

    features: Tensor
    kept: Tensor
    position_ids: Tensor
    size: tuple[int, int]
    tokens: int


def check_encodable(recipe: Recipe) -> None:
    """Check that features of an image carry all that a recipe does.

    Raises
    ------
    RecipeError
        For stages that read the question, that act after the features, or that need the number of
        tokens merged into each.
    """
    for stage in recipe:
        for part in stage.expand():
            if part.protocol not in ("in-encoder", "encode"):
                raise RecipeError(
                    f"{part.name} acts in the {part.protocol} step, which features do not contain; "
                    "use stages of the vision tower and of visual tokens alone, such as "
                    "'hired:budget=0.2'"
                )
            if part.query_dependent:
                raise RecipeError(
                    f"{part.name} reads the question, and features are encoded before it is known; "
                    "'hired:budget=0.2' works"
                )
            if part.proportional_attention:
                raise RecipeError(
                    f"{part.name}: proportional_attention needs the number of tokens merged into "
                    f"each, which features do not contain; use "
                    f"'{part.name}:proportional_attention=false'"
                )


def encode_image(adapter: Adapter, image: Any, recipe: Recipe) -> EncodedImage:
    """Run the vision tower and the encode stages of a recipe on one image.

    Raises
    ------
    VLMFastError
        As `check_encodable`; `MediaError` for an image that cannot be read, `RecipeError` for a
        recipe that does not run on this model, or a model whose images enter several layers.
    """
    check_encodable(recipe)
    prompt = render(adapter, messages_of(_QUESTION, image), Recipe())
    inputs = Inputs(tensors_of(adapter, prompt), prompt.sizes, prompt.question, prompt.frames)
    stats = Stats()
    with torch.no_grad(), switched(adapter.model):
        found = prepare(adapter, inputs, recipe, stats, Trace())
    if found.extra:
        raise RecipeError(
            f"images of {adapter.config.model_type} enter several layers of the language model, "
            "which one set of features does not contain"
        )
    visual = found.layout.visual
    places = adapter.visual(inputs.tensors["input_ids"][0]).nonzero().flatten()
    first = int(places[0])
    position = found.layout.position[:, visual]
    return EncodedImage(
        found.embeds[visual],
        torch.searchsorted(places, found.layout.order[visual].to(places.dtype)),
        position - adapter.positions(inputs.tensors)[:, first : first + 1],
        prompt.sizes[0],
        stats.visual_tokens_in,
    )
