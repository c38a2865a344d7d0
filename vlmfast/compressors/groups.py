"""Groups of tokens that are compared with each other: one image, or all frames of a video."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmfast.core.counting import runs
from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import ItemGeometry


def together(tokens: VisualTokens, items: Sequence[ItemGeometry]) -> list[Tensor]:
    """Indices of the tokens of each image and of each video: int64, ascending.

    A long video is split as `counting.runs` describes.
    """
    found = tokens.items()
    videos, sizes = [items[item].video for item, _ in found], [len(index) for _, index in found]
    groups: dict[int, list[Tensor]] = {}
    for run, (_, index) in zip(runs(videos, sizes), found, strict=True):
        groups.setdefault(run, []).append(index)
    return [torch.cat(parts) for parts in groups.values()]
