"""``POST /tokenize``: the ids of a request with images, and those that its recipe leaves."""

from __future__ import annotations

from typing import Any

import torch

from vlmfast.api.vlm import VLM

from .chat import turns_of
from .opening import Result
from .query import Query, Recipes
from .schema import Message, Own, several


class TokenizeRequest(Own):
    """A request of ``POST /tokenize``."""

    messages: several(Message, 2048, 1)  # type: ignore[valid-type]


def query_of(request: TokenizeRequest, recipes: Recipes) -> Query:
    """A query whose prompt is read, since most recipes look at the image to choose tokens."""
    return Query(
        model=request.model,
        recipe=recipes.of(request),
        turns=turns_of(request.messages),
        max_new_tokens=1,
        temperature=0.0,
        num_frames=request.num_frames,
        fps=request.fps,
        trace=True,  # tells which tokens are left
        cache_salt=request.cache_salt,
    )


def tokenized(result: Result, vlm: VLM) -> dict[str, Any]:
    """The ids of a prompt, and those that enter the first layer of the language model."""
    ids, stats, trace = result.prompt, result.answer.stats, result.answer.trace
    left = torch.ones(len(ids), dtype=torch.bool)
    if trace.layout is not None and trace.entered is not None:
        visual = vlm.adapter.visual(ids).nonzero().flatten().cpu()
        left[visual] = torch.isin(trace.layout.order, trace.entered.order).cpu()
    kept = ids.cpu()[left].tolist()
    return {
        "count": len(ids),
        "max_model_len": vlm.adapter.max_positions,
        "tokens": ids.tolist(),
        "vlmfast": {
            "recipe": result.answer.canonical_recipe,
            "count": len(kept),
            "tokens": kept,
            "visual_tokens_in": stats.visual_tokens_in,
            "visual_tokens_kept": stats.visual_tokens_kept,
            "visual_tokens_per_layer": stats.visual_tokens_per_layer,
        },
    }
