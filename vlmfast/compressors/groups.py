"""Groups of tokens that are compared with each other: one image, or all frames of a video."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import ItemGeometry

MOST = 8192  # tokens in one similarity matrix


def together(tokens: VisualTokens, items: Sequence[ItemGeometry]) -> list[Tensor]:
    """Indices of the tokens of each image and of each video: int64, ascending.

    A video of more than `MOST` tokens is split into runs of frames of at most `MOST` tokens.
    """
    groups: dict[tuple[int, int], list[Tensor]] = {}
    run = size = 0
    last = -1
    for item, index in tokens.items():
        video = items[item].video
        size = size + len(index) if video == last >= 0 else len(index)
        if video != last or video < 0 or size > MOST:
            run, size = run + 1, len(index)
        groups.setdefault((video, run), []).append(index)
        last = video
    return [torch.cat(parts) for parts in groups.values()]
