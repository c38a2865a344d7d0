"""Prompts on their way to the decoder: what the engine reads of them, prefills and drops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from vlmfast import VLM, Handle
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.engine import compress, prefiller
from vlmfast.engine.attention import TEXT, VISION, switched, text_attention
from vlmfast.engine.attention_maps import attention_rows, received_logits
from vlmfast.engine.between import Batched, Packed
from vlmfast.engine.chunks import chunks, splits, splittable
from vlmfast.engine.forward import shifted
from vlmfast.engine.opening import sampler_of
from vlmfast.engine.prefill import Inputs, Prompt, prefill, prepare
from vlmfast.engine.prefiller import Prefiller
from vlmfast.engine.stats import Stats, Trace
from vlmfast.engine.vision import SHIFTS, Wanted, encode, jittered, representatives

__all__ = [
    "SHIFTS",
    "TEXT",
    "VISION",
    "Batched",
    "Inputs",
    "Packed",
    "Prompt",
    "Stats",
    "Trace",
    "Wanted",
    "attention_rows",
    "chunks",
    "encode",
    "jittered",
    "prefill",
    "prepare",
    "received_logits",
    "representatives",
    "sampler_of",
    "shifted",
    "splits",
    "splittable",
    "switched",
    "text_attention",
]


def prepared(vlm: VLM, inputs: Inputs, recipe: Any = ()) -> tuple[Prompt, Stats]:
    """A prompt as it enters the language model, and what its preparation counted."""
    stats = Stats()
    with switched(vlm.model):
        return prepare(vlm.adapter, inputs, Recipe.of(recipe), stats, Trace()), stats


# --- prompts that are watched ---------------------------------------------------------------------


@contextmanager
def logits_of_prompts() -> Iterator[list[Tensor]]:
    """The logits after each prompt, or part of one, that is prefilled meanwhile."""
    seen: list[Tensor] = []

    def kept(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*args: Any, **named: Any) -> Tensor:
            seen.append(own(*args, **named))
            return seen[-1]

        return keep

    parts = {name: kept(getattr(Prefiller, name)) for name in ("prefill", "extend")}
    with mock.patch.multiple(Prefiller, **parts):
        yield seen


@contextmanager
def token_by_token() -> Iterator[None]:
    """Text after a compressed cache is fed in parts of one token."""
    with mock.patch.object(prefiller, "_AT_ONCE", 1):
        yield


def expire(handle: Handle) -> None:
    """Let the deadline of a request pass."""
    handle.sequence.deadline = 0.0


def statistics_within(
    request: ColumnRequest, query: Tensor, key: Tensor, first: Tensor, last: Tensor
) -> ColumnStats:
    """Statistics of a layer whose row ``i`` attends to the keys ``first[i]`` to ``last[i]``."""
    rows = torch.arange(key.shape[1])
    with mock.patch.object(compress, "span", return_value=(first, last)):
        return compress.statistics(request, 0, rows, query, key, None, None, None)
