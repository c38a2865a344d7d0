"""Tokens that are judged together: those of a picture, or of all frames of a clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import ItemGeometry

MOST = 8192  # tokens whose similarities are compared with each other at once


def together(tokens: VisualTokens, items: Sequence[ItemGeometry]) -> list[Tensor]:
    """Indices of the tokens of each picture, and of each clip; int64, ascending.

    A clip of more than `MOST` tokens falls into runs of frames that are within it.
    """
    groups: dict[tuple[int, int], list[Tensor]] = {}
    run = size = 0
    last = -1
    for item, index in tokens.items():
        clip = items[item].clip
        size = size + len(index) if clip == last >= 0 else len(index)
        if clip != last or clip < 0 or size > MOST:
            run, size = run + 1, len(index)
        groups.setdefault((clip, run), []).append(index)
        last = clip
    return [torch.cat(parts) for parts in groups.values()]
