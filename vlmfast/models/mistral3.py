"""Mistral Small 3.1 and 3.2, with the tower of Pixtral: images keep their aspect ratio.

A visual token consists of 2 x 2 patches; a token of text stands between the rows of an image. The
tower attends within each image, and images of one size pass through it together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ItemGeometry, VisionStats

from ._media import Items, Media, Sizes, Tensors
from .base import Adapter, Encoded, Part


class Shaped(Adapter):
    """Families whose images have grids of their own, without crops."""

    blocks, by_size = False, True

    def merge(self) -> int:
        """Rows, and columns, of patches in a visual token."""
        raise NotImplementedError(f"{type(self).__name__}.merge")

    def grids(self, tensors: Tensors) -> list[tuple[int, int]]:
        """Rows and columns of patches of each image."""
        raise NotImplementedError(f"{type(self).__name__}.grids")

    def own(self, tensors: Tensors, first: int, stop: int) -> Tensors:
        """The tensors of some views, without what pads them to others."""
        raise NotImplementedError(f"{type(self).__name__}.own")

    def features(self, tensors: Tensors) -> list[Tensor]:
        """Features (N, D) of each of some images of one size."""
        raise NotImplementedError(f"{type(self).__name__}.features")

    def views(self, items: Sequence[ItemGeometry]) -> list[tuple[int, int]]:
        """Rows and columns of visual tokens of each view."""
        return [item.patches for item in items]

    def encoded(self, tensors: Tensors) -> list[Tensor]:
        """Features (N, D) of each view, which passes through the tower with those of its size."""
        grids = self.grids(tensors)
        found: list[Tensor] = []
        for batch in _by_size(grids):
            parts = [self.own(tensors, view, view + 1) for view in batch]
            found += self.features({key: torch.cat([of[key] for of in parts]) for key in parts[0]})
        return in_order(found, grids)

    def specials(self) -> int:
        return 0

    def patches(self) -> int:
        return 0  # depends on the image

    def cells(self, item: ItemGeometry) -> None:
        return None

    def why_no_cells(self, item: ItemGeometry) -> str:
        return "what its vision tower adds for positions belongs to whole images"

    def block_stats(self, context: VisionContext, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        assert context.chunks is not None
        chunks = in_order(context.chunks[layer], self.views(context.items))
        return [(rows[:, :, 0], keys) for rows, keys in chunks if rows is not None]

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        grids, m = self.views(items), self.merge()
        counts = [math.prod(grids[view]) * m**2 for view in passing(grids)]
        parts = torch.cat([call.flatten(0, -2) for call in calls]).split(counts)
        return [part[None] for part in in_order(parts, grids)]

    def to_tokens(self, patches: Tensor, item: ItemGeometry) -> Tensor:
        (rows, columns), m = item.patches, self.merge()
        return patches.unflatten(-1, (rows, m, columns, m)).mean((-3, -1)).flatten(-2)

    def views_of(self, tensors: Tensors, sizes: Sizes) -> Items:
        m = self.merge()
        return tuple(
            ItemGeometry(size, (0, 0), (i, i + 1), (rows // m, columns // m))
            for i, (size, (rows, columns)) in enumerate(
                zip(sizes, self.grids(tensors) if sizes else [], strict=True)
            )
        )

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        patch, m = self.config.vision_config.patch_size, self.merge()
        grids = self.grids(batch) if self.tensors[0] in batch else []
        return [
            Media(
                (rows // m) * (columns // m),
                self.own(batch, i, i + 1),
                (rows * patch, columns * patch),
            )
            for i, (rows, columns) in enumerate(grids)
        ]

    def parts(self, tensors: Tensors, items: Items) -> list[Part] | None:
        if not items or items[-1].views[1] != len(self.grids(tensors)):
            return None
        return [Part((i,), self.own(tensors, *item.views)) for i, item in enumerate(items)]

    def joined(self, parts: list[Tensors]) -> Tensors:
        padded = {}
        for key in parts[0] if parts else ():
            values = [part[key] for part in parts]
            shape = [max(sizes) for sizes in zip(*(x.shape[1:] for x in values), strict=True)]
            sides = [
                [n for most, own in zip(shape[::-1], x.shape[:0:-1], strict=True)
                 for n in (0, most - own)]
                for x in values
            ]  # fmt: skip
            padded[key] = torch.cat([pad(x, by) for x, by in zip(values, sides, strict=True)])
        return padded

    def encode(self, inputs: Tensors, context: VisionContext) -> Encoded:
        of_view = self.encoded(inputs)
        features = [torch.cat(of_view[slice(*item.views)]) for item in context.items]
        layouts, stats = self.layouts(inputs, context.items), VisionStats(context.items, {})
        return Encoded(features, layouts, stats, [()] * len(features))

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        return [self.copied(self.raster_layout(i, geometry)) for i, geometry in enumerate(items)]


class FamilyAdapter(Shaped):
    tensors = ("pixel_values", "image_sizes")
    processors = ("PixtralProcessor",)

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.model.get_encoder(modality="image").transformer.layers)

    def merge(self) -> int:
        return self.config.spatial_merge_size

    def grids(self, tensors: Tensors) -> list[tuple[int, int]]:
        sizes = tensors["image_sizes"] // self.config.vision_config.patch_size
        return [(rows, columns) for rows, columns in sizes.tolist()]

    def own(self, tensors: Tensors, first: int, stop: int) -> Tensors:
        sizes = tensors["image_sizes"][first:stop]
        height, width = sizes.amax(0).tolist()
        pixels = tensors["pixel_values"][first:stop, :, :height, :width]
        return {"pixel_values": pixels, "image_sizes": sizes}

    def features(self, tensors: Tensors) -> list[Tensor]:
        # Not every release of transformers passes the boundaries of the images on to attention.
        (rows, columns), *more = self.grids(tensors)
        ends = torch.arange(len(more) + 2, dtype=torch.int32, device=self.device) * rows * columns
        # Hugging Face's code takes the only token of an image for an axis of length 1, unless the
        # tokens have one.
        with self.projector().register_forward_hook(lambda module, args, output: output[None]):
            output = self.model.base_model.get_image_features(
                tensors["pixel_values"],
                image_sizes=tensors["image_sizes"],
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
            )
        return list(output.pooler_output)


def _by_size(grids: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The views of each size, which pass through the tower together."""
    found: dict[tuple[int, int], list[int]] = {}
    for view, grid in enumerate(grids):
        found.setdefault(grid, []).append(view)
    return list(found.values())


def passing(grids: Sequence[tuple[int, int]]) -> list[int]:
    """The views in the order in which they pass through the tower."""
    return [view for batch in _by_size(grids) for view in batch]


def in_order(found: Sequence[Any], grids: Sequence[tuple[int, int]]) -> list[Any]:
    """What was found of each view in the order of `passing`, in the order of the views."""
    by_view = dict(zip(passing(grids), found, strict=True))
    return [by_view[view] for view in range(len(grids))]
