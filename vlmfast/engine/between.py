"""Stages between the blocks of the vision tower, and the merging of rows there.

A stage merges *cells*: all patches of the tower that become one visual token, a single patch in
many towers and 2 x 2 or more in others. Two cells merge patch by patch, so that the module that
turns patches into tokens (a merger, a pixel shuffle, a pool) still gets whole cells. Stages see
each cell as one wide row of concatenated patches; this module splits it into rows of the tower.

After the tower, each merged row is copied to all positions that it replaced, so that the family's
own packing (crops, letterbox, newlines) and the merger get the grid that they expect.

`Batched` towers have one batch row per view. A `Packed` tower has the patches of all images in one
row and attends within each image or window. There a merged cell takes the position of its first
member: its window and its rotary position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext, current_context
from vlmfast.core.layout import marked_rows
from vlmfast.core.packing import Packing
from vlmfast.core.protocols import InEncoderStage
from vlmfast.errors import RecipeError
from vlmfast.models.base import Adapter

from .stats import Stats
from .tower import changed, only_in, replaced


@contextmanager
def between_blocks(
    adapter: Adapter, stages: list[InEncoderStage], context: VisionContext, stats: Stats
) -> Iterator[dict[int, Tensor]]:
    """Hooks that run ``stages`` before blocks, and undo merges after the tower.

    Yields
    ------
    dict of int to Tensor
        For each view in which tokens merged, the group of each visual token: int64, (N,).
        Filled after the tower has run.
    """
    tower = (Packed if adapter.packed else Batched)(adapter, context)
    blocks, last = adapter.vision_blocks(), adapter.feature_block()
    by_block: dict[int, list[InEncoderStage]] = {}
    for stage in stages:
        for index in stage.blocks(len(blocks)):
            if not 1 <= index <= last:
                raise RecipeError(
                    f"{stage.name}: vision block {index} is out of range, allowed are 1 to {last}"
                )
            by_block.setdefault(index, []).append(stage)

    def before_block(index: int) -> Callable[..., tuple[tuple, dict] | None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            hidden = args[0]
            if index == 0:
                tower.begin(hidden)
            if index in by_block:
                with stats.timed("time_reduce_s", hidden.device):
                    for stage in by_block[index]:
                        hidden = tower.ask(stage, index, hidden)
            return tower.given((hidden, *args[1:]), kwargs)

        return only_in(context, hook)

    def after_block(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            tower.note(index)

        return only_in(context, hook)

    def after_tower(output: Any) -> Any:
        if current_context.get() is not context or context.merged is None:
            return output
        return changed(adapter, tower.spread, output)

    def spreading(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: after_tower(forward(*args, **kwargs))

    def before_merger(module: nn.Module, args: tuple) -> tuple:
        return (tower.spread(args[0]), *args[1:])

    def before_projector(module: nn.Module, args: tuple) -> tuple:
        hidden = args[0]
        with stats.timed("time_reduce_s", hidden.device):
            for stage in stages:
                hidden = stage.on_output(context, hidden)
        return (hidden, *args[1:])

    with ExitStack() as hooks:
        enter = hooks.enter_context
        if stages:
            for index, block in enumerate(blocks):
                enter(block.register_forward_pre_hook(before_block(index), with_kwargs=True))
                enter(block.register_forward_hook(after_block(index)))
            if adapter.packed:
                for merger in adapter.mergers():
                    enter(merger.register_forward_pre_hook(only_in(context, before_merger)))
            before = only_in(context, before_projector)
            enter(adapter.projector().register_forward_pre_hook(before))
            if not adapter.packed:
                # A gate may call the tower twice; the rows of each call are copied back separately.
                enter(replaced(adapter.tower(), spreading))
        yield tower.groups
        tower.finish()


class Batched:
    """A tower whose rows are (V, N, D): of each view special rows, then patches in raster order.

    Once cells have merged, the order is: special rows, then cell by cell.
    """

    def __init__(self, adapter: Adapter, context: VisionContext) -> None:
        self.adapter, self.context = adapter, context
        self.groups: dict[int, Tensor] = {}
        self.views = 0  # of all calls so far
        self.merged: Tensor | None = None  # of each special row and cell, the row it is part of

    def begin(self, hidden: Tensor) -> None:
        """Start a call of the tower; images and videos may come in separate calls."""
        self.finish()
        first, self.views = self.views, self.views + len(hidden)
        numbers = self.context.numbers
        self.numbers = list(range(first, self.views)) if numbers is None else numbers
        here, items = set(self.numbers), self.context.items
        self.items = tuple(item for item in items if here & set(range(*item.views)))
        cells = self.adapter.cells_of(self.items[0]) if self.items else None
        self.cells = None if cells is None else cells.to(hidden.device)
        self.context.merged = self.context.lengths = self.merged = None

    def ask(self, stage: InEncoderStage, index: int, hidden: Tensor) -> Tensor:
        """Run a stage before block ``index``; returns the rows that enter the block."""
        context = self.context
        if not stage.cells:
            hidden, source = stage.on_block(context, index, hidden)
            if source is not None:
                context.merged = (
                    source if context.merged is None else source.gather(1, context.merged)
                )
            return hidden
        assert self.cells is not None
        specials, m = context.specials, self.cells.shape[1]
        keys = {at: self.wide(keys) for at, keys in context.keys.items() if at == index - 1}
        seen = replace(context, items=self.items, merged=self.merged, keys=keys)
        rows, source = stage.on_block(seen, index, self.wide(hidden, self.merged is not None))
        if source is None:
            return hidden
        if seen.lengths is not None:
            context.lengths = specials + (seen.lengths - specials) * m
        self.merged = source if self.merged is None else source.gather(1, self.merged)
        group = self.merged[:, specials:] - specials
        patch = torch.arange(m, device=group.device)
        merged = self.merged.new_empty(len(group), specials + self.cells.numel())
        merged[:, :specials] = torch.arange(specials, device=group.device)
        merged[:, specials + self.cells] = specials + group[..., None] * m + patch
        context.merged = merged
        patches = rows[:, specials:].unflatten(2, (m, -1)).flatten(1, 2)
        return torch.cat([rows[:, :specials, : patches.shape[2]], patches], dim=1)

    def wide(self, rows: Tensor, by_cell: bool = False) -> Tensor:
        """Rows (V, N, D) as special rows, repeated to the width, and cells: (V, S + C, m D)."""
        assert self.cells is not None
        specials, m = self.context.specials, self.cells.shape[1]
        patches = rows[:, specials:]
        if not by_cell:
            patches = patches[:, self.cells.flatten()]
        cells = patches.unflatten(1, (-1, m)).flatten(2)
        return torch.cat([rows[:, :specials].repeat(1, 1, m), cells], dim=1)

    def given(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments of a block for the remaining rows, without a mask that hides nothing."""
        if self.context.merged is None:
            return args, kwargs
        rest = tuple(self._unmasked(arg) for arg in args[1:])
        return (args[0], *rest), {key: self._unmasked(arg) for key, arg in kwargs.items()}

    def _unmasked(self, given: Any) -> Any:
        merged = self.context.merged
        if not isinstance(given, Tensor) or given.dim() != 4 or merged is None:
            return given
        if given.shape[-1] != merged.shape[1]:
            return given
        if not bool((given if given.dtype == torch.bool else given == 0).all()):
            raise RecipeError(
                "rows of the vision tower cannot merge in padded views; configure the processor to "
                "make views without padding"
            )
        return None

    def note(self, index: int) -> None:
        """Block ``index`` has run."""

    def spread(self, rows: Tensor) -> Tensor:
        """Copy merged rows to all positions that they replaced: (V, M, D) to (V, N, D)."""
        assert self.context.merged is not None
        index = self.context.merged[..., None]
        return rows.gather(1, index.expand(-1, -1, rows.shape[2]))

    def finish(self) -> None:
        """End a call of the tower."""
        if self.context.merged is None:
            return
        # Where no cells merged, each patch is a token: groups of patches are groups of tokens.
        merged = self.context.merged if self.merged is None else self.merged
        groups = merged[:, self.context.specials :]
        for number, group in zip(self.numbers, groups, strict=True):
            self.groups[number] = group


class Packed:
    """A tower whose rows are (S, D): image by image, cell by cell, in the order of its windows."""

    def __init__(self, adapter: Adapter, context: VisionContext) -> None:
        self.adapter, self.context = adapter, context
        self.groups: dict[int, Tensor] = {}
        self.waiting = adapter.tower_order(context.items)  # items that no call has taken yet
        self.noted: dict[int, list[tuple[Tensor | None, Tensor | None]]] = {}
        self.keys: Tensor | None = None  # of the last block that ran, (S', d)
        self.taken: list[int] = []

    def begin(self, hidden: Tensor) -> None:
        self._group()
        device, self.taken = hidden.device, []
        cells: list[Tensor] = []
        self.counts: list[int] = []
        while sum(self.counts) < len(hidden):
            self.taken.append(self.waiting.pop(0))
            own = self.adapter.cells_of(self.context.items[self.taken[-1]])
            assert own is not None
            cells.append(own.to(device))
            self.counts.append(cells[-1].numel())
        self.m = cells[0].shape[1]
        # By image: the cell of each token, in the order of the tower; the merged cell that each
        # cell is part of now; the first member of each merged cell.
        self.cell_of = [own[:, 0] // self.m for own in cells]
        self.merged = [torch.arange(len(own), device=device) for own in cells]
        self.first = [torch.arange(len(own), device=device) for own in cells]
        self.has_merged = False
        self._update()

    def ask(self, stage: InEncoderStage, index: int, hidden: Tensor) -> Tensor:
        context, parts = self.context, []
        cells = self._by_image(hidden)
        keys = None if self.keys is None else self._by_image(self.keys)
        for i, (item, rows) in enumerate(zip(self.taken, cells, strict=True)):
            merged = self.merged[i]
            known = {} if keys is None else {index - 1: keys[i][merged][None]}
            seen = replace(
                context,
                items=(context.items[item],),
                merged=merged[None],
                keys=known,
                raster=self.cell_of[i],
            )
            (rows,), source = stage.on_block(seen, index, rows[None])
            if source is not None:
                first = torch.full_like(merged, len(merged))[: len(rows)]
                first = first.scatter_reduce(0, source[0], self.first[i], "amin")
                order = first.argsort()
                rows, self.first[i] = rows[order], first[order]
                self.merged[i] = order.argsort()[source[0][merged]]
                self.has_merged = True
            parts.append(rows)
        if not self.has_merged:
            return hidden
        self._update()
        return torch.cat(parts).unflatten(1, (self.m, -1)).flatten(0, 1)

    def given(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Boundaries, rotary tables and sizes for the remaining rows."""
        if not self.has_merged:
            return args, kwargs
        ends = kwargs["cu_seqlens"]
        if (known := self.left.get(id(ends))) is None:
            known = self.left[id(ends)] = ends, *self._left(ends)
        _, left, longest = known
        kwargs = {**kwargs, "cu_seqlens": left}
        if (most := kwargs.get("max_seqlen")) is not None:
            kwargs["max_seqlen"] = most.new_tensor(longest) if isinstance(most, Tensor) else longest
        if (tables := kwargs.get("position_embeddings")) is not None:
            kwargs["position_embeddings"] = tuple(table[self.rows] for table in tables)
        if self.context.proportional_attention:
            self.context.sizes = self.sizes
        return args, kwargs

    def _left(self, ends: Tensor) -> tuple[Tensor, int]:
        """Boundaries of the remaining rows, and the most rows between two of them."""
        ends_by_cell = (ends // self.m).to(self.positions.dtype)
        left = torch.searchsorted(self.positions, ends_by_cell) * self.m
        lengths = left.diff()
        known = [n for n in lengths.tolist() if n]  # the only read: windows may be empty now
        rows = marked_rows(lengths > 0, len(known)) + 1
        left = torch.cat([left[:1], left.index_select(0, rows)]).to(ends.dtype)
        self.context.packings.append((left, Packing.of(known, left.device)))
        return left, max(known)

    def note(self, index: int) -> None:
        """Record the statistics of block ``index``, chunk by chunk, for all original rows."""
        self.keys, self.context.sizes = None, None
        assert self.context.chunks is not None
        chunks = self.context.chunks.pop(index, [])
        if shown := [keys for _, keys in chunks if keys is not None]:
            self.keys = torch.cat(shown, dim=1)[0]
        if index not in self.adapter.global_blocks():
            return  # chunks are windows
        for i, (stats, keys) in enumerate(chunks):
            if self.has_merged:
                rows = self._rows(self.merged[i])
                stats = None if stats is None else stats[..., rows]
                keys = None if keys is None else keys[:, rows]
            self.noted.setdefault(index, []).append((stats, keys))

    def spread(self, rows: Tensor) -> Tensor:
        """Copy merged rows to all positions that they replaced: (S', D) to (S, D)."""
        if not self.has_merged:
            return rows
        counts = [len(first) * self.m for first in self.first]
        parts = zip(rows.split(counts), self.merged, strict=True)
        return torch.cat([part[self._rows(merged)] for part, merged in parts])

    def finish(self) -> None:
        self._group()
        assert self.context.chunks is not None
        self.context.chunks.update(self.noted)

    def _group(self) -> None:
        for i, item in enumerate(self.taken if self.taken and self.has_merged else ()):
            view = self.context.items[item].views[0]
            self.groups[view] = self.merged[i][self.cell_of[i]]

    def _by_image(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows (S', D) as cells (M, m D) of each image."""
        return rows.unflatten(0, (-1, self.m)).flatten(1).split([len(f) for f in self.first])

    def _rows(self, cells: Tensor) -> Tensor:
        """Indices of the rows of ``cells``, (C,) to (C m,)."""
        patch = torch.arange(self.m, device=cells.device)
        return (cells[:, None] * self.m + patch).flatten()

    def _update(self) -> None:
        """Recompute positions, rows and sizes of the remaining cells."""
        self.left: dict[int, tuple[Tensor, Tensor, int]] = {}  # by boundaries before: them, `_left`
        starts = [sum(self.counts[:i]) // self.m for i in range(len(self.counts))]
        cells = [first + start for first, start in zip(self.first, starts, strict=True)]
        self.positions = torch.cat(cells)
        self.rows = self._rows(self.positions)
        sizes = [
            torch.zeros(len(first), device=first.device).index_add(
                0, merged, torch.ones_like(merged, dtype=torch.float32)
            )
            for first, merged in zip(self.first, self.merged, strict=True)
        ]
        self.sizes = torch.cat(sizes).repeat_interleave(self.m)
