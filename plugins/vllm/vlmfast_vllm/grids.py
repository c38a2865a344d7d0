"""The Qwens: images and videos with grids of their own, and rotary ids (t, y, x).

A *block* is a run of placeholders: an image, a video of Qwen2-VL and Qwen2.5-VL, one step of a
video of Qwen3-VL, which has a timestamp before each step. Text goes on after a block by its
*extent*. Where dropped tokens leave gaps (``positions=keep``), it follows from the size, and text
has its rotary ids before anything is encoded. With ``positions=compact`` it depends on what is
kept. Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.counting import ImageLayout, VideoLayout
from vlmfast.core.layout import Numbering
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.models import adapter_class

from .recipes import Family, Media
from .travel import digits

Grid = tuple[int, int, int]  # steps, rows and columns of patches


@dataclass(frozen=True, eq=False)
class Blocks(Media):
    """An image or video in blocks.

    Parameters
    ----------
    of, runs
        As of `Media`.
    places : Tensor, int64, (3, N)
        Rotary ids of its tokens, counted from the first id of their block.
    step : Tensor, int64, (N,)
        The step of each token.
    extent : int
        Rotary ids that each block takes.
    """

    places: Tensor
    step: Tensor
    extent: int

    @cached_property
    def columns(self) -> Tensor:
        """`places` as they travel."""
        return digits(self.places)


class Grids(Family):
    """What a plan must know of a Qwen."""

    # Axes (t, y, x) that move the text after a block. vLLM counts times too; in a video,
    # transformers counts rows and columns alone.
    counted: Sequence[int] = (0, 1, 2)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        processor = SimpleNamespace(image_processor=None, video_processor=None)
        self.adapter = adapter_class(config.model_type).without_weights(config, processor)
        self.stepwise = not config.model_type.startswith(("qwen2_vl", "qwen2_5_vl"))
        self._known = lru_cache(maxsize=256)(self._media)

    def media(self, modality: str, grid: Sequence[int], seconds: float = 1.0) -> Blocks:
        """An image, or a video with ``seconds`` between its steps."""
        t, h, w = (int(n) for n in grid)
        return self._known(modality, (t, h, w), float(seconds))

    def _media(self, modality: str, grid: Grid, seconds: float) -> Blocks:
        video, vision = modality == "video", self.config.vision_config
        (steps, *patches), key = grid, f"{modality}_grid_thw"
        size = patches[0] * vision.patch_size, patches[1] * vision.patch_size
        tensors = {key: torch.tensor([grid])}
        if video:  # no pixel is read
            tensors[self.adapter.video_tensors[0]] = torch.empty(0)
        items = self.adapter.items(tensors, [size], [(0, 0, steps)] if video else [])
        frames = [
            ImageLayout.of(*of)
            for of in zip(items, self.adapter.layouts(tensors, items), strict=True)
        ]
        of = VideoLayout(tuple(frames)) if video else frames[0]
        step = torch.repeat_interleave(torch.arange(len(frames)), len(frames[0]))
        runs = steps if video and self.stepwise else 1
        # As vLLM, in this order and precision.
        rate = float(seconds) * getattr(vision, "tokens_per_second", 1.0) if video else 1.0
        time = torch.zeros_like(step) if runs > 1 or not video else (step.double() * rate).long()
        grids = torch.cat([frame.layout.grid for frame in frames]).long()
        places = torch.stack([time, grids[:, 1], grids[:, 2]])
        extent = max(int(places[axis].max()) for axis in self.counted) + 1
        return Blocks(of, runs, places, step, extent)

    def positioned(self, recipe: Recipe) -> Recipe:
        return recipe

    def compacted(self, media: Blocks, kept: Tensor) -> tuple[Tensor, list[int]]:
        """Rotary ids (3, K) of kept tokens without gaps, and the extent of each block.

        Parameters
        ----------
        media : Blocks
        kept : Tensor, int64, (K,)
            Ascending.
        """
        n, size = len(media), len(media) // media.runs
        places, extents = media.places[:, kept].clone(), []
        for first in range(0, n, size):
            mine = (kept >= first) & (kept < first + size)
            # Between two rows of text, whose ids tell where the block begins and ends.
            ids = torch.nn.functional.pad(media.places[:, first : first + size] + 1, (1, 1))
            ids[:, -1] = media.extent + 1
            segment = torch.ones(size + 2, dtype=torch.int64)
            segment[0], segment[-1] = 0, 2
            ends = torch.tensor([0]), torch.tensor([size + 1])
            rows = torch.cat([ends[0], kept[mine] - first + 1, ends[1]])
            found = self.adapter.compact(Numbering(ids, segment), rows)
            places[:, mine] = found[:, 1:-1] - 1
            extents.append(int(found[0, -1]) - 1)
        return places, extents

    def sources(self) -> tuple[str, ...]:
        return self.adapter.sources()

    def built(self) -> int:
        return len(self.adapter.vision_blocks())

    def block(self, asked: SaliencyRequest) -> int:
        return self.adapter.salient_block(asked.block)

    def samples(self) -> list[Media]:
        m = self.config.vision_config.spatial_merge_size
        image, video = (
            self.media(kind, (steps, 6 * m, 8 * m)) for kind, steps in (("image", 1), ("video", 3))
        )
        return [image, video]


def numbered(length: int, blocks: Sequence[tuple[int, int, int, Tensor | None]]) -> Tensor:
    """Rotary ids (3, ``length`` + 1) of a prompt and of the token after it.

    Parameters
    ----------
    length : int
        Of the shortened prompt.
    blocks : sequence of (int, int, int, Tensor or None)
        Ascending: first row, rows, what is added to the id after them, and the ids (3, rows)
        counted from the beginning of the block; ``None`` where they come with the features, so that
        the rows get the first id.
    """
    ids, row, next_id = torch.zeros(3, length + 1, dtype=torch.int64), 0, 0
    for first, rows, extent, places in [*blocks, (length + 1, 0, 0, None)]:
        ids[:, row:first] = torch.arange(next_id, next_id + first - row)
        next_id += first - row
        ids[:, first : first + rows] = next_id if places is None else next_id + places
        row, next_id = first + rows, next_id + extent
    return ids


def runs_of(tokens: Sequence[int], token: int, first: int, stop: int) -> list[tuple[int, int]]:
    """First row and length of each run of ``token`` in rows ``first`` to ``stop``."""
    found: list[tuple[int, int]] = []
    for row in range(first, stop):
        if tokens[row] != token:
            continue
        if found and sum(found[-1]) == row:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((row, 1))
    return found
