"""LLaVA-NeXT-Video: images as in LLaVA-NeXT; videos with one view per frame, patches pooled."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.statistics import ItemGeometry

from ._media import Frames, Items, Media, Sizes, Tensors
from .base import Encoded, Part
from .llava_next import FamilyAdapter as LlavaNext


class FamilyAdapter(LlavaNext):
    video_tensors = ("pixel_values_videos",)
    processors = ("LlavaNextVideoProcessor",)
    fixed = True

    def visual(self, ids: Tensor) -> Tensor:
        return (ids == self.config.image_token_id) | (ids == self.config.video_token_id)

    def pooled(self) -> int:
        """Tokens in a row of a frame."""
        vision = self.config.vision_config
        return vision.image_size // vision.patch_size // self.config.spatial_pool_stride

    def cells(self, item: ItemGeometry) -> Tensor | None:
        stride = getattr(self.config, "spatial_pool_stride", 1)
        pooled = item.video >= 0 and item.patches == (self.pooled(), self.pooled())
        return None if pooled and self.patches() ** 0.5 % stride else super().cells(item)

    def videos_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        return self._alike(batch, self.video_tensors[0], self.config.video_token_id, ids)

    def items(self, tensors: Tensors, sizes: Sizes, frames: Frames) -> Items:
        if self.video_tensors[0] not in tensors:
            return super().items(tensors, sizes, frames)
        alone = [size for size, (video, *_) in zip(sizes, frames, strict=True) if video < 0]
        single = self.views_of(tensors, alone)
        view = single[-1].views[1] if single else 0  # the tower processes the images first
        images, items, side = iter(single), [], self.pooled()
        for size, (video, index, total, *_) in zip(sizes, frames, strict=True):
            if video < 0:
                items.append(next(images))
            else:
                views = (view, view + 1)
                items.append(ItemGeometry(size, (0, 0), views, (side, side), video, (index, total)))
                view += 1
        return tuple(items)

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        (key,) = self.video_tensors
        if key not in tensors:
            return super().parts(tensors, items)
        alone, framed = self._kinds(tensors, items)
        found: list[Part] | None = []
        if alone:
            found = super().parts(tensors, tuple(items[i] for i in alone))
        videos: dict[int, list[int]] = {}
        for i in framed:
            videos.setdefault(items[i].video, []).append(i)
        if found is None or len(tensors[key]) != len(videos):
            return None
        return [
            *(replace(of, items=tuple(alone[i] for i in of.items)) for of in found),
            *(
                Part(tuple(frames), {key: pixels})
                for frames, pixels in zip(videos.values(), tensors[key].split(1), strict=True)
            ),
        ]

    def encode(self, inputs: Tensors, context: VisionContext) -> Encoded:
        features: dict[int, Tensor] = {}
        alone, framed = self._kinds(inputs, context.items)
        if alone:
            features |= zip(alone, self.images(inputs), strict=True)
        first = dict(context.stats), dict(context.keys)
        if framed:
            context.stats.clear()
            context.keys.clear()
            features |= zip(framed, self.frames(inputs), strict=True)
            for before, now in zip(first, (context.stats, context.keys), strict=True):
                for layer, of in before.items():
                    now[layer] = torch.cat([of, now[layer]])
        order = range(len(context.items))
        stats = self.patch_stats(context, self.patches())
        layouts = self.layouts(inputs, context.items)
        return Encoded([features[i] for i in order], layouts, stats, [()] * len(order))

    def _kinds(self, tensors: Tensors, items: Items) -> tuple[list[int], list[int]]:
        """Indices of the images, and of the frames of videos."""
        has_video = self.video_tensors[0] in tensors
        framed = [i for i, item in enumerate(items) if has_video and item.video >= 0]
        return [i for i in range(len(items)) if i not in framed], framed

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        alone, framed = self._kinds(tensors, items)
        found: dict[int, TokenLayout] = {}
        for n, i in enumerate(alone):
            size = tensors["image_sizes"][n : n + 1].cpu()
            found[i] = self._layout(i, items[i], size)
        for i in framed:
            found[i] = self._frame(i, items[i], self.frame_tokens(items[i]))
        return [self.copied(found[i]) for i in range(len(items))]

    def frame_tokens(self, item: ItemGeometry) -> int:
        """Tokens of a frame of a video."""
        return math.prod(item.patches)

    def frames(self, inputs: Tensors) -> list[Tensor]:
        """Features of each frame, video by video."""
        pixels, each = inputs["pixel_values_videos"], self.pooled() ** 2
        output = self.model.base_model.get_video_features(
            pixels,
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
        )
        # Some versions of transformers append a newline to each video here, others elsewhere.
        videos = [video.flatten(0, -2)[: pixels.shape[1] * each] for video in output.pooler_output]
        return [frame for video in videos for frame in video.split(each)]

    def _frame(self, item: int, geometry: ItemGeometry, n: int) -> TokenLayout:
        rows, columns = geometry.patches
        raster = torch.arange(n, device="cpu")
        newline = raster >= rows * columns
        kind = torch.where(newline, int(Kind.NEWLINE), int(self.kind))
        y, x = (raster // columns).clamp(max=rows - 1), raster % columns
        return self.view_layout(torch.zeros_like(raster), y, x, kind, item, geometry)

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        if geometry.tiles != (0, 0):
            return super().view_box(geometry, tile)
        return self.shown(geometry, tile, self.processor.video_processor)
