"""LFM2-VL: images keep their aspect ratio, one token for 2 x 2 patches.

The processor splits a large image into square tiles, which are followed by the whole image in fewer
pixels. Its grid differs from that of the tiles.

Most layers of its language model are short convolutions, which hold the last inputs as a state: a
token that was dropped before such a layer never enters it, and the tokens on both sides of the gap
follow each other there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ItemGeometry
from vlmfast.core.views import spread
from vlmfast.errors import ModelError

from ._media import Items, Media, Sizes, Tensors, runs
from .internvl import tile_box, whole_last
from .mistral3 import Shaped, in_order, passing

_TILE = re.compile(r"<\|img_row_(\d+)_col_(\d+)\|>\s*$")


class FamilyAdapter(Shaped):
    tensors = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    processors = ("Lfm2VlProcessor",)
    nested, pixel_dims = True, 3

    def norm(self) -> nn.Module:
        return self.decoder.get_submodule("embedding_norm")

    def attention_norm(self, layer: int) -> nn.Module:
        return self.decoder.layers[layer].get_submodule("operator_norm")

    def why_no_crops(self) -> str:
        return f"{self.config.model_type} projects the patches of all views as one image"

    def merge(self) -> int:
        return self.config.downsample_factor

    def grids(self, tensors: Tensors) -> list[tuple[int, int]]:
        return [(rows, columns) for rows, columns in tensors["spatial_shapes"].tolist()]

    def own(self, tensors: Tensors, first: int, stop: int) -> Tensors:
        own = {key: tensors[key][first:stop] for key in self.tensors}
        most = int(own["spatial_shapes"].prod(-1).max())
        unpadded = ("pixel_values", "pixel_attention_mask")
        return own | {key: own[key][:, :most] for key in unpadded}

    def features(self, tensors: Tensors) -> list[Tensor]:
        output = self.model.base_model.get_image_features(*(tensors[key] for key in self.tensors))
        return list(output.pooler_output)

    def views(self, items: Sequence[ItemGeometry]) -> list[tuple[int, int]]:
        return [_grid(item, view) for item in items for view in range(*item.views)]

    # --- tiles -----------------------------------------------------------------------------------

    def tilings(self, ids: Tensor, views: int) -> list[tuple[tuple[int, int], int]]:
        """Rows and columns of tiles, and the number of views, of each image of a prompt (S,).

        Text before each tile gives its row and column; the whole image comes last.

        Raises
        ------
        ModelError
            If these are not the ``views`` that the processor made.
        """
        found, end, count, tiles = [], 0, 0, (0, 0)
        for start, length in runs(ids, self.image_token_id):
            text = self.processor.tokenizer.decode(ids[end:start])
            end, count, label = start + length, count + 1, _TILE.search(text)
            if label:
                tiles = int(label[1]), int(label[2])
                continue
            found.append((tiles, count))
            count, tiles = 0, (0, 0)
        fits = all(count == tiles[0] * tiles[1] + 1 for tiles, count in found)
        if count or not fits or sum(count for _, count in found) != views:
            raise ModelError(
                f"the processor made {views} views of images, which do not fit the prompt; tiles "
                "need use_thumbnail=True and use_image_special_tokens=True in the processor"
            )
        return found

    def _item(
        self,
        size: tuple[int, int],
        tiles: tuple[int, int],
        first: int,
        grids: Sequence[tuple[int, int]],
    ) -> ItemGeometry:
        """An image with views of these rows and columns of patches."""
        m = self.merge()
        own = tuple((rows // m, columns // m) for rows, columns in grids)
        most = max(rows for rows, _ in own), max(columns for _, columns in own)
        differ = own if len(set(own)) > 1 else ()
        return ItemGeometry(size, tiles, (first, first + len(own)), most, grids=differ)

    def views_of(self, tensors: Tensors, sizes: Sizes) -> Items:
        grids = self.grids(tensors) if sizes else []
        if len(grids) == len(sizes):
            tilings = [((0, 0), 1)] * len(sizes)
        else:
            tilings = self.tilings(tensors["input_ids"][0], len(grids))
        items, first = [], 0
        for size, (tiles, count) in zip(sizes, tilings, strict=True):
            items.append(self._item(size, tiles, first, grids[first : first + count]))
            first += count
        return tuple(items)

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        grids = self.grids(batch) if self.tensors[0] in batch else []
        if not any("<|img_row_1_col_1|>" in self.processor.tokenizer.decode(row) for row in ids):
            return super().images_in(batch, ids)
        patch, m, found, first = self.config.vision_config.patch_size, self.merge(), [], 0
        rows = torch.cat(ids)  # an image does not begin in one row and end in another
        for (down, across), count in self.tilings(rows, len(grids)):
            own = grids[first : first + count]
            size = own[0][0] * patch * max(down, 1), own[0][1] * patch * max(across, 1)
            tokens = sum(r * c for r, c in own) // m**2
            views = self.own(batch, first, first + count)
            found.append(Media(tokens, views, size, 0, (down, across)))
            first += count
        return found

    def layouts(self, tensors: Tensors, items: Items) -> list[TokenLayout]:
        found = []
        for i, item in enumerate(items):
            *tiles, whole = range(*item.views)
            views = (*enumerate(tiles, 1), (0, whole))
            own = TokenLayout.cat([self._layout(i, item, *of) for of in views])
            found.append(self.copied(own))
        return found

    whole_first = whole_last

    def view_box(self, geometry: ItemGeometry, tile: Tensor) -> tuple[Tensor, Tensor]:
        return tile_box(geometry, tile)

    def _layout(self, number: int, item: ItemGeometry, tile: int, view: int) -> TokenLayout:
        """Layout of the tokens of one view."""
        own = replace(item, patches=_grid(item, view))
        host = torch.device("cpu")
        y, x = spread(own.patches, own.patches, host).unbind(1)
        kind = torch.full_like(y, int(self.kind))
        layout = self.view_layout(torch.full_like(y, tile), y, x, kind, number, own)
        place = spread(own.patches, item.patches, host)
        grid = torch.cat([torch.zeros_like(place[:, :1]), place], dim=1)
        return layout.replace(
            grid=grid.to(torch.int32), view=torch.full_like(y, view, dtype=torch.int32)
        )

    # --- saliency --------------------------------------------------------------------------------

    def block_stats(self, context: VisionContext, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        assert context.chunks is not None
        ordered = in_order(context.chunks[layer], self.views(context.items))
        chunks = [(rows, keys) for rows, keys in ordered if rows is not None]
        found = []
        for item in context.items:
            own = [chunks[view] for view in self.whole_first(item)]
            placed = self._placed(item, [rows[:, :, 0] for rows, _ in own])
            keys = [of.transpose(1, 2) for _, of in own if of is not None]
            found.append((placed, self._placed(item, keys).transpose(1, 2) if keys else None))
        return found

    def projector_input(self, calls: list[Tensor], items: Sequence[ItemGeometry]) -> list[Tensor]:
        grids, m, parts, found = self.views(items), self.merge(), list[Tensor](), []
        for call in calls:
            # The tokens of several views of one size may stand side by side.
            patches = math.prod(grids[passing(grids)[len(parts)]]) * m**2
            parts += call[0].chunk(call[0].shape[:2].numel() // patches, 1)
        of_view = in_order(parts, grids)
        for item in items:
            views = []
            for view in self.whole_first(item):
                rows = of_view[view]
                down, across = grids[view]
                if len(rows) == m:  # the patches of each token side by side
                    rows = rows.unflatten(1, (down, across, m)).permute(1, 0, 2, 3, 4)
                views.append(rows.reshape(1, down * across * m * m, -1).transpose(1, 2))
            found.append(self._placed(item, views).transpose(1, 2))
        return found

    def _placed(self, item: ItemGeometry, views: Sequence[Tensor]) -> Tensor:
        """Values (1, D, P_v) of the patches of each view, the whole first, as those of one raster.

        Returns
        -------
        Tensor, (V, D, P)
            0 where a view has no token.
        """
        (rows, columns), m = item.patches, self.merge()
        placed = views[0].new_zeros(len(views), views[0].shape[1], rows, columns, m * m)
        for number, (values, view) in enumerate(zip(views, self.whole_first(item), strict=True)):
            down, across = _grid(item, view)
            tokens = values[0].unflatten(-1, (down, m, across, m)).transpose(-3, -2)
            y, x = spread((down, across), item.patches, values.device).unbind(1)
            placed[number, :, y, x] = tokens.flatten(-2).flatten(1, 2)
        return placed.unflatten(-1, (m, m)).transpose(-3, -2).flatten(2)


def _grid(item: ItemGeometry, view: int) -> tuple[int, int]:
    """Rows and columns of visual tokens of a view."""
    return item.grids[view - item.views[0]] if item.grids else item.patches
