"""Chunked prefill: a prompt as several forward passes of bounded length.

Each chunk attends to the keys and values of those before it, so the result is that of one forward
pass. Chunks bound the memory of a long prompt, and other requests are decoded between them.

A prompt is not split where a stage needs all of its rows in one layer before the next layer runs:
stages that drop tokens between layers or compress the cache. Nor is it split inside a span whose
rows attend to each other in both directions, such as an image of Gemma 3 or a prompt of PaliGemma.
Nor where its rotary tables depend on its length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import torch

from vlmfast.core.protocols import CacheStage, DecodeStage, PrefillStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.models.base import Adapter

from .calls import step_modules
from .prefill import Prompt


def splits(stage: Stage) -> bool:
    """Whether a prompt may be split into chunks under a stage."""
    parts = (stage, *stage.expand())
    return not any(isinstance(part, PrefillStage | CacheStage | DecodeStage) for part in parts)


def splittable(adapter: Adapter, recipe: Recipe, prompt: Prompt, max_new_tokens: int) -> bool:
    """Whether a prompt may be prefilled in several forward passes."""
    places = prompt.places()
    windows = [window for window in adapter.windows if window is not None]
    # Within the narrowest window, no row of a chunk is cut off from an earlier one.
    if windows and places + max_new_tokens > min(windows):
        return False
    if adapter.prefix_lm or not adapter.is_short(prompt.reach()):
        return False
    if step_modules(adapter).around:  # users' code sees the prompt once
        return False
    return all(map(splits, recipe)) or not prompt.layout.visuals


def chunks(adapter: Adapter, prompt: Prompt, size: int) -> Iterator[Prompt]:
    """The parts of a prompt, of at most ``size`` rows where no longer span must stay whole."""
    layout, rows = prompt.layout, len(prompt.layout)
    starts = layout.order.tolist()
    visual = [0, *layout.visual.cumsum(0).tolist()]  # visual rows before each row
    first = 0
    for last in _ends(adapter, prompt, size):
        index = torch.arange(first, last, device=layout.device)
        extra = tuple(level[visual[first] : visual[last]] for level in prompt.extra)
        end = prompt.full_length if last == rows else starts[last]
        yield replace(
            prompt,
            embeds=prompt.embeds[first:last],
            layout=layout.select(index),
            full_length=end - (starts[first] if first else 0),
            tensors={},
            extra=extra if visual[first] < visual[last] else (),
            base=starts[last - 1] + 1,
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
        at = bisect_right(cuts, first + size) - 1  # the last cut within ``size`` rows
        first = cuts[at] if cuts[at] > first else cuts[at + 1]
        yield first
