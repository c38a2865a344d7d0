"""Qwen2.5-VL: images keep their aspect ratio, one token for 2 x 2 patches, rotary ids (t, y, x).

Videos are not read as images. Their frames are joined in pairs, and each pair is an item of the
layout.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import Numbering, TokenLayout
from vlmfast.core.packing import Packing
from vlmfast.core.saliency import window_order
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.media.info import FrameTimes

from ._media import Frames, Items, Media, Sizes, Tensors
from .base import Adapter, Encoded, Part

_SIZES = 8  # of prompts, for which arguments of the tower are kept
# Attributes of towers that these arguments depend on.
_INTERPOLATION = ("num_grid_per_side", "interpolation_mode", "interpolation_align_corners")
_SETTINGS = ("spatial_merge_size", "window_size", "patch_size", *_INTERPOLATION)

Grids = tuple[tuple[int, int, int], ...]  # steps, rows and columns of patches of each image
Sized = tuple[Tensor, dict[str, Any], list[tuple[Tensor, Packing]]]


class FamilyAdapter(Adapter):
    tensors = ("pixel_values", "image_grid_thw")
    video_tensors = ("pixel_values_videos", "video_grid_thw")
    beside: ClassVar[tuple[str, ...]] = ("second_per_grid_ts", "mm_token_type_ids")
    processors: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLProcessor", "Qwen2VLProcessor")
    position_tensors = host_tensors = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    attention = "attn"
    packed = fixed_tower = True
    whole_steps: ClassVar[bool] = False  # whether the processor refuses less than a step of a video
    grid_on_device: ClassVar[bool] = False  # whether the tower computes with the grids of images

    def visual(self, ids: Tensor) -> Tensor:
        return (ids == self.config.image_token_id) | (ids == self.config.video_token_id)

    @staticmethod
    def packing(config: Any) -> Any:
        return SimpleNamespace(visual=SimpleNamespace(blocks=[None] * config.vision_config.depth))

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.model.base_model.visual.blocks)

    def projector(self) -> nn.Module:
        return self.model.base_model.visual.merger

    def patches(self) -> int:
        return 0  # depends on the image

    def cells(self, item: ItemGeometry) -> Tensor:
        m = self.config.vision_config.spatial_merge_size**2
        order = self._order(item)
        slot = torch.arange(math.prod(item.patches)) if order is None else order.argsort()
        return slot[:, None] * m + torch.arange(m)

    def tower_order(self, items: Sequence[ItemGeometry]) -> list[int]:
        """The tower reads the images first."""
        return sorted(range(len(items)), key=lambda i: items[i].video >= 0)

    def specials(self) -> int:
        return 0

    def sources(self) -> tuple[str, ...]:
        return ("received", "norm") if self.global_blocks() else ("norm",)

    def why_no_source(self, source: str) -> str:
        if source == "received":
            return "all blocks of its vision tower attend within windows"
        return super().why_no_source(source)

    def global_blocks(self) -> list[int]:
        everywhere = getattr(self.config.vision_config, "fullatt_block_indexes", None)
        return super().global_blocks() if everywhere is None else sorted(everywhere)

    def block_stats(self, context: VisionContext, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        assert context.chunks is not None
        parts = [(of[:, :, 0], keys) for of, keys in context.chunks[layer] if of is not None]
        return self._by_item(parts, context.items)

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        merge = self.config.vision_config.spatial_merge_size**2
        counts = [math.prod(items[i].patches) * merge for i in self.tower_order(items)]
        return self._by_item([part[None] for part in torch.cat(calls).split(counts)], items)

    def _by_item(self, parts: list[Any], items: Sequence[ItemGeometry]) -> list[Any]:
        """Reorder the tower's outputs, first of images and then of videos, by item."""
        order = self.tower_order(items)
        return [parts[order.index(i)] for i in range(len(items))]

    def to_tokens(self, patches: Tensor, item: ItemGeometry) -> Tensor:
        """The patches of a token are consecutive; tokens are in the order of windows."""
        merge = self.config.vision_config.spatial_merge_size
        tokens = patches.unflatten(-1, (-1, merge**2)).mean(-1)
        order = self._order(item)
        if order is None:
            return tokens
        (raster,) = self._on_device(order.argsort())
        return tokens.index_select(-1, raster.to(tokens.device))

    def _order(self, item: ItemGeometry) -> Tensor | None:
        """Tokens in the order of the tower's windows; ``None`` for raster order."""
        vision = self.config.vision_config
        size = getattr(vision, "window_size", None)
        if size is None:
            return None
        return window_order(*item.patches, size // vision.spatial_merge_size // vision.patch_size)

    def tables(self, hidden: Tensor, position: Tensor, layer: int = 0) -> tuple[Tensor, ...]:
        return super().tables(hidden, position.expand(3, *position.shape[-2:]), layer)

    def positions(self, inputs: Tensors) -> Tensor:
        ids = inputs["input_ids"]
        if not bool(self.visual(ids).any()):
            return super().positions(inputs).expand(3, -1)
        position, _ = self.model.base_model.get_rope_index(
            ids,
            mm_token_type_ids=self.modalities(ids),
            **{key: inputs[key].to(ids.device) for key in self.position_tensors if key in inputs},
        )
        return position[:, 0]

    def compact(self, full: Numbering, kept: Tensor) -> Tensor:
        if len(kept) == len(full):
            return full.position
        position, segment = full.position, full.segment
        left = torch.zeros_like(segment, dtype=torch.bool).index_fill(0, kept, True)
        gaps = torch.stack([_gaps(axis, segment, left) for axis in position])
        # As in `get_rope_index`, text follows the rows and columns of an image or video, not times.
        shrunk = _extents(position[1:], segment) - _extents((position - gaps)[1:], segment, left)
        moved = (shrunk.cumsum(0) - shrunk)[segment]
        return (position - gaps - moved).index_select(1, kept)

    def of_videos(self, videos: list[list[Any]], times: Sequence[FrameTimes]) -> dict[str, Any]:
        given = super().of_videos(videos, times)
        if self.whole_steps:
            # The processor repeats the last frame of a step, but refuses less than one step.
            step = self.processor.video_processor.temporal_patch_size
            given["videos"] = [shown + shown[-1:] * (step - len(shown)) for shown in videos]
        return given

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        return self._patches_in(batch, *self.tensors)

    def videos_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        return self._patches_in(batch, *self.video_tensors, video=True)

    def _patches_in(
        self, batch: Tensors, pixels: str, grid: str, video: bool = False
    ) -> list[Media]:
        if grid not in batch:
            return []
        vision, found, grids = self.config.vision_config, [], batch[grid]
        parts = batch[pixels].split(grids.prod(-1).tolist())
        for i, (part, (t, h, w)) in enumerate(zip(parts, grids.tolist(), strict=True)):
            own = {pixels: part, grid: grids[i : i + 1]}
            if video and "second_per_grid_ts" in batch:
                own["second_per_grid_ts"] = batch["second_per_grid_ts"][i : i + 1]
            size = h * vision.patch_size, w * vision.patch_size
            tokens = t * h * w // vision.spatial_merge_size**2
            found.append(Media(tokens, own, size, int(video)))
        return found

    def items(self, tensors: Tensors, sizes: Sizes, frames: Frames) -> Items:
        merge = self.config.vision_config.spatial_merge_size
        images, videos = (
            iter(tensors[key].tolist() if key in tensors else [])
            for key in ("image_grid_thw", "video_grid_thw")
        )
        items: list[ItemGeometry] = []
        for size, (video, *frame) in zip(sizes, frames or [(-1, 0, 1)] * len(sizes), strict=True):
            whole = video >= 0 and self.video_tensors[0] in tensors  # not read as images
            if whole and frame[0] > 0:
                continue
            t, h, w = next(videos if whole else images)
            item = ItemGeometry(size, (0, 0), (0, 1), (h // merge, w // merge), video)
            steps = [(i, t) for i in range(t)] if whole else [tuple(frame[:2])]
            items += [replace(item, frame=step) for step in steps]
        return tuple(replace(item, views=(i, i + 1)) for i, item in enumerate(items))

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        images, videos = (
            iter(of(tensors, [tensors["input_ids"]])) for of in (self.images_in, self.videos_in)
        )
        found: list[Part] = []
        whole = self.video_tensors[0] in tensors
        first = 0
        while first < len(items):
            in_video = whole and items[first].video >= 0
            stop = first + (items[first].frame[1] if in_video else 1)
            media = next(videos if in_video else images)
            found.append(Part(tuple(range(first, stop)), media.tensors))
            first = stop
        return found

    def encode(self, inputs: Tensors, context: VisionContext) -> Encoded:
        whole = self.video_tensors[0] in inputs
        kinds = ["video" if whole and item.video >= 0 else "image" for item in context.items]
        features = {
            kind: self._tower(
                inputs,
                context,
                kind,
                [item for item, of in zip(context.items, kinds, strict=True) if of == kind],
            )
            for kind in ("image", "video")
        }
        parts = [next(features[kind]) for kind in kinds]
        layouts = self.layouts(inputs, context.items)
        stats = VisionStats(context.items, {})
        return Encoded([p[0] for p in parts], layouts, stats, [p[1:] for p in parts])

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        return [self.copied(self.raster_layout(i, geometry)) for i, geometry in enumerate(items)]

    def _tower(
        self,
        inputs: Tensors,
        context: VisionContext,
        kind: str,
        items: list[ItemGeometry],
    ) -> Iterator[tuple[Tensor, ...]]:
        """Features of each image, or of each time step of each video, level by level."""
        if not items:
            return iter(())
        merge = self.config.vision_config.spatial_merge_size
        grids = tuple(
            (of.frame[1] if kind == "video" else 1, *(n * merge for n in of.patches))
            for of in items
            if kind == "image" or of.frame[0] == 0
        )
        grid, given, packings = self._sized(grids)
        context.packings += packings
        pixels = inputs[(self.tensors if kind == "image" else self.video_tensors)[0]]
        encode = getattr(self.model.base_model, f"get_{kind}_features")
        output: Any = encode(pixels, grid, **{f"{kind}_{key}": of for key, of in given.items()})
        deep = getattr(output, "deepstack_features", None) or ()
        levels = [
            of if isinstance(of, Tensor) else torch.cat(list(of))
            for of in (output.pooler_output, *deep)
        ]
        counts = [math.prod(item.patches) for item in items]
        return zip(*(level.split(counts) for level in levels), strict=True)

    def _sized(self, grids: Grids) -> Sized:
        """What depends on the sizes of images alone; kept for the last sizes."""
        tower: Any = self.tower()
        settings = {name: getattr(tower, name) for name in _SETTINGS if hasattr(tower, name)}
        known = self.kept.setdefault("sized", OrderedDict())
        key = grids, self.device, *settings.items()
        if key not in known:
            with torch.inference_mode(False):  # later calls may need gradients
                known[key] = self._new_sized(grids, settings)
            while len(known) > _SIZES:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]

    def _new_sized(self, grids: Grids, settings: dict[str, Any]) -> Sized:
        """`_sized` for a tower with these `_SETTINGS`.

        A tower otherwise computes its arguments from the grids, with reads by the host.
        """
        grid, merge = torch.tensor(grids), settings["spatial_merge_size"]
        given = {"position_ids": get_vision_position_ids(grid, merge)}
        ends = {"cu_seqlens": get_vision_cu_seqlens(grid)}
        if (window := settings.get("window_size")) is not None:
            given["window_index"], ends["cu_window_seqlens"] = get_vision_window_index(
                grid, merge, window, settings["patch_size"]
            )
        if settings.get("num_grid_per_side") is not None:
            side, mode, corners = (settings[name] for name in _INTERPOLATION)
            given["interp_indices"], given["interp_weights"] = (
                get_vision_interpolation_indices_and_weights(grid, side, mode, corners, merge)
            )
        lengths = {name: of.diff().tolist() for name, of in ends.items()}
        given = {name: of.to(self.device) for name, of in (given | ends).items()}
        packings = [(given[name], Packing.of(of, self.device)) for name, of in lengths.items()]
        # Such as `max_window_seqlen`, of `cu_window_seqlens`.
        most = {f"max{name[2:-1]}": max(of) for name, of in lengths.items()}
        return grid.to(self.device) if self.grid_on_device else grid, given | most, packings


def _gaps(position: Tensor, segment: Tensor, left: Tensor) -> Tensor:
    """Total size of the gaps before each row, within its segment and on one axis.

    An id that no row has any longer is removed together with its step to the next one.

    Parameters
    ----------
    position, segment : Tensor, int64, (S,)
    left : Tensor, bool, (S,)
        Rows that are not dropped.

    Returns
    -------
    Tensor, int64, (S,)
    """
    ids, row = (segment * (position.max() + 1) + position).unique(return_inverse=True)
    gone = ids.diff(append=ids[-1:]).index_fill(0, row[left], 0)
    ahead = (gone.cumsum(0) - gone)[row]
    return ahead - _lowest(ahead, segment)[segment]


def _extents(position: Tensor, segment: Tensor, left: Tensor | None = None) -> Tensor:
    """Number of ids of each segment, on the axis with the most.

    Parameters
    ----------
    position : Tensor, int64, (A, S)
    segment : Tensor, int64, (S,)
    left : Tensor, bool, (S,), optional
        Rows that count; all by default.

    Returns
    -------
    Tensor, int64, (K,)
    """
    taken = position.amax(0) - _lowest(position.amin(0), segment)[segment] + 1
    if left is not None:
        taken = taken.masked_fill(~left, 0)
    none = torch.zeros_like(taken[: int(segment[-1]) + 1])
    return none.scatter_reduce(0, segment, taken, "amax")


def _lowest(values: Tensor, segment: Tensor) -> Tensor:
    """The lowest value (K,) of each segment."""
    none = torch.zeros_like(values[: int(segment[-1]) + 1])
    return none.scatter_reduce(0, segment, values, "amin", include_self=False)
