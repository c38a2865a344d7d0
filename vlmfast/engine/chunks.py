"""Chunked prefill: a prompt as several forward passes of bounded length.

Each chunk attends to the keys and values of those before it, so the result is that of one forward
pass. Chunks bound the memory of a long prompt, and other requests are decoded between them.

A prompt is not split where a stage needs all of its rows in one layer before the next layer runs:
stages that drop tokens between layers or compress the cache. Nor is it split inside a span whose
rows attend to each other in both directions, such as an image of Gemma 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from vlmfast.core.protocols import CacheStage, DecodeStage, PrefillStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.models.base import Adapter

from .prefill import Prompt


def splits(stage: Stage) -> bool:
    """Whether a prompt may be split into chunks under a stage."""
    parts = (stage, *stage.expand())
    return not any(isinstance(part, PrefillStage | CacheStage | DecodeStage) for part in parts)


def why_whole(adapter: Adapter, recipe: Recipe, prompt: Prompt, total: int) -> str:
    """Why a prompt is prefilled in one forward pass; empty where it may be split.

    Parameters
    ----------
    total : int
        Rows of prompt and answer.
    """
    visual = bool(prompt.layout.visual.any())
    for stage in recipe if visual else ():
        if not splits(stage):
            return f"{stage.name} needs the whole prompt in each layer"
    if any(window is not None and total > window for window in adapter.windows):
        return f"layers of {adapter.config.model_type} attend within a window"
    return ""


def chunks(adapter: Adapter, prompt: Prompt, size: int) -> Iterator[Prompt]:
    """The parts of a prompt, of at most ``size`` rows where no longer span must stay whole."""
    layout, rows = prompt.layout, len(prompt.layout)
    starts = layout.order.tolist()
    first = 0
    for last in _ends(adapter, prompt, size):
        index = torch.arange(first, last, device=layout.device)
        visual = layout.visual[:first].sum(), layout.visual[:last].sum()
        extra = tuple(level[int(visual[0]) : int(visual[1])] for level in prompt.extra)
        end = prompt.full_length if last == rows else starts[last]
        yield replace(
            prompt,
            embeds=prompt.embeds[first:last],
            layout=layout.select(index),
            full_length=end - (starts[first] if first else 0),
            extra=extra if visual[0] < visual[1] else (),
        )
        first = last


def _ends(adapter: Adapter, prompt: Prompt, size: int) -> Iterator[int]:
    """Where chunks end: rows of the prompt, ascending."""
    layout, rows = prompt.layout, len(prompt.layout)
    # Rows before which the prompt may be cut.
    open_ = torch.ones(rows + 1, dtype=torch.bool)
    if adapter.mask_rule is not None:
        inside = layout.visual[1:] & layout.visual[:-1] & (layout.item[1:] == layout.item[:-1])
        open_[1:-1] = ~inside.cpu()
    cuts = open_.nonzero().flatten().tolist()
    first = 0
    while first < rows:
        within = [cut for cut in cuts if first < cut <= first + size]
        first = max(within) if within else min(cut for cut in cuts if cut > first)
        yield first
