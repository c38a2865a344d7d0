"""Batched decoding: groups of rows with their cache, and forward passes over their new tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.core.buffers import caught_shortage
from vlmfast.core.contexts import DecodeContext
from vlmfast.core.drafting import Observer, SlotList
from vlmfast.core.tree import Tree
from vlmfast.kernels._triton import requested
from vlmfast.models.base import Adapter

from .cache import KVCache, RowSlots
from .calls import step_modules
from .fingerprint import fingerprint, structures_of
from .forward import Output, forward, placed, shifted
from .graphs import Graphs, StepGraphs
from .joint import JointCache
from .mode import Mode

if TYPE_CHECKING:
    from .sequence import Sequence

_SMALL = 1 << 28  # bytes of the buffers of a group that may be mostly unused
_WIDTHS = (2, 4, 8, 16, 32, 48, 64)  # nodes of a captured tree


class RowGroup:
    """Sequences of one kind and capacity class that are decoded together in shared buffers.

    Parameters
    ----------
    adapter : Adapter
    cache : KVCache
        Frozen.
    position : Tensor, int64, (B, 1), or (3, B, 1) for M-RoPE
        Rotary ids of the next tokens; changed in place.
    rows : list of Sequence
        The sequences, in the order of their rows in the cache.
    size : int
        Rows that are expected: buffers that are small, or of captured steps, have space for them.
    """

    def __init__(
        self,
        adapter: Adapter,
        cache: KVCache,
        position: Tensor,
        rows: Many[Sequence],
        size: int = 1,
    ) -> None:
        self.adapter, self.cache, self.size = adapter, cache, size
        self.graphs: StepGraphs | None = None
        self._listed: tuple[list[tuple[SlotList, ...] | None], list[SlotList]] = [], []
        self.rows = list(rows)
        cache.start(position)

    @property
    def position(self) -> Tensor:
        """Rotary ids of the next tokens, int64, (B, 1), or (3, B, 1) for M-RoPE."""
        assert self.cache.position is not None
        return self.cache.position

    # --- rows ------------------------------------------------------------------------------------

    @property
    def kind(self) -> tuple:
        """What rows must have in common so that none of them pays for what another one needs."""
        stages = tuple(self.rows[0].stages)
        segments = [sorted({s.key for s in layer.segments}) for layer in self.cache.layers]
        return self.cache.kind(), stages, None if stages else segments

    def fits(self, other: RowGroup) -> bool:
        """Whether ``other``, of one row, is of the same kind and capacity class."""
        # Kernels read only slots in use, so that larger segments cost captured steps nothing.
        if self.cache.split or other.cache.split:
            return False
        larger = self.graphs is not None
        return self.kind == other.kind and self.cache.holds(other.cache, larger=larger)

    def join(self, other: RowGroup) -> None:
        """Add the row of ``other``, which `fits` and must not be used afterwards.

        Only this row is written, unless the buffers are full: they then move to others with at
        least twice the rows. Where memory is exhausted, both groups stay as they are.
        """
        if self.captures:
            self._settle(len(self.rows) + 1)
        # Small buffers have space for all rows at once; others grow as rows join.
        fits = self.size * other.cache.row_bytes() <= _SMALL
        self.cache.join(other.cache, self.size if fits else 0)
        self.rows += other.rows
        other.release()

    def leave(self, row: int) -> None:
        """Remove a row, whose place the last row takes. Without rows, the group must not be used.

        At most one row is copied.
        """
        self.rows[row] = self.rows[-1]
        self.rows.pop()
        if self.rows:
            self.cache.leave(row, keep=self.graphs is not None)
        else:
            self.release()

    def take(self, row: int, tokens: int = 0) -> RowGroup:
        """Remove a row, as in `leave`, and return it as a group of one row, with its own buffers.

        The only row of a group that shares no buffers stays where it is: the group is returned.
        ``tokens``: how many more must fit in the row's buffers.
        """
        if len(self.rows) == 1 and not self.cache.shared:
            self.reserve(tokens)
            return self
        cache = self.cache.clone(row, tokens)
        assert cache.position is not None
        taken = RowGroup(self.adapter, cache, cache.position, [self.rows[row]], self.size)
        self.leave(row)
        return taken

    def outgrown(self, tokens: int) -> list[int]:
        """Rows in whose buffers ``tokens`` more do not fit."""
        layers = [layer for layer in self.cache.layers if layer.outgrown(tokens)]
        return [
            row
            for row in range(len(self.rows))
            if any(layer.max_lengths[row] + tokens > layer.capacity for layer in layers)
        ]

    def reserve(self, tokens: int) -> None:
        """Make sure that ``tokens`` more fit in every row. A single row moves to larger buffers.

        Raises
        ------
        RuntimeError
            Where one of several rows has outgrown the group: it must be taken first.
        """
        if self.cache.shared and len(self.rows) == 1 and self.outgrown(tokens):
            self.detach(tokens)
        self.cache.reserve(tokens)

    def detach(self, tokens: int = 0) -> None:
        """Move all rows to buffers that no captured step uses, with space for ``tokens`` more."""
        if self.cache.shared:
            cache = self.cache.clone(None if len(self.rows) > 1 else 0, tokens)
            self.release()
            self.cache = cache

    def release(self) -> None:
        """Return all buffers; the group must not be used afterwards."""
        cache, graphs = self.cache, self.graphs
        if graphs is None:
            cache.release()
        else:
            self.cache, self.graphs = KVCache(0), None  # these buffers are others' from here on
            cache.clear()
            self._idle.put(graphs)

    # --- tokens ----------------------------------------------------------------------------------

    def next(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens`` (B, 1); returns the logits (B, V) after them. No host sync."""
        self.run_decode_stages()
        return self.feed(tokens).logits[:, -1]

    def feed(self, tokens: Tensor) -> Output:
        """As `next`, without the decode stages; returns the full output."""
        return feed([self], tokens)

    def verify(self, trees: Many[Tree]) -> Output:
        """Check one tree per row, after its cached tokens; `accept` then counts tokens."""
        return verify([self], trees)

    def accept(self, paths: Many[Many[int]]) -> None:
        """Count the nodes of ``paths``, root first, of the trees that `verify` has checked."""
        counts = [len(path) for path in paths]
        longest = max(max(counts), 1)
        index = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
        moves = any(list(path) != list(range(len(path))) for path in paths)
        kept = self.cache.accept(index, counts, moves=moves)
        self.position.add_(kept if isinstance(kept, int) else kept[:, None])
        for row, count in zip(self.rows, counts, strict=True):
            row.steps += count - 1  # `run_decode_stages` has counted the root

    def rewind(self, tokens: int, row: int | None = None) -> None:
        """Remove the last ``tokens`` of every row, or of one."""
        self.cache.crop(tokens, row)
        chosen = slice(None) if row is None else slice(row, row + 1)
        self.position[..., chosen, :].sub_(tokens)

    def spare(self, number: int) -> int:
        """How many drafted tokens a row may take before a decode stage has work to do."""
        row, spare = self.rows[number], 1 << 30
        if any(
            stage.attention_mass for stage in row.stages
        ):  # what rejected tokens attend to would count
            return 0
        for stage in row.stages:
            assert row.prompt_slots is not None
            gap = -row.steps % stage.every
            quiet = min(
                stage.quiet(self._slots(number, layer, prompt), layer)
                for layer, prompt in enumerate(row.prompt_slots)
            )
            spare = min(spare, max(gap, quiet, 0))
        return spare

    def shallow(self, number: int, token: int, drafted: int, layers: Many[int]) -> Tensor:
        """Logits (V,) after ``token`` of one row, computed by ``layers`` alone.

        Parameters
        ----------
        drafted : int
            Tokens that were drafted in this way before it; nothing is counted.
        layers : sequence of int
        """
        self.reserve(drafted + 1)
        decoder, cache = self.adapter.decoder, self.cache
        tokens = torch.full((len(self.rows), 1), token, device=self.position.device)
        cache.advance(drafted)
        position = self.position + drafted
        context = DecodeContext(cache)
        if cache.attention_mass:  # what is drafted must not count as a reader of other rows
            tree = torch.zeros(len(self.rows), 1, 1, dtype=torch.bool)
            tree[number] = True
            context.tree = tree.to(position.device)
        try:
            with shifted(self.adapter, context, position):
                hidden = self.adapter.embed(tokens)
                for index in layers:
                    hidden = decoder.layers[index](
                        hidden,
                        attention_mask=None,
                        position_ids=position,
                        **{self.adapter.cache_name: cache},
                        use_cache=True,
                        position_embeddings=self.adapter.tables(hidden, position, index),
                        vlmfast_context=context,
                    )
            norm = self.adapter.normalizer()
            hidden = hidden if norm is None else norm(hidden)
            return self.adapter.logits(hidden[number, -1:].to(position.device))[0]
        finally:
            cache.advance(-drafted)

    def listed(self, views: Many[tuple[SlotList, ...] | None]) -> list[SlotList]:
        """The slots that the rows read at each layer; only views that differ are written again."""
        before, lists = self._listed
        same = len(before) == len(views)
        changed = [row for row, view in enumerate(views) if not same or view is not before[row]]
        for layer in range(len(self.cache.layers)) if changed else ():
            parts = [None if view is None else view[layer] for view in views]
            found: SlotList | None = lists[layer] if same else None
            for row in changed:
                found = None if found is None else found.put(row, parts[row])
            lists[layer : layer + 1] = [SlotList.stacked(parts) if found is None else found]
        self._listed = list(views), lists
        return lists

    def run_decode_stages(self, number: int | None = None) -> None:
        """Run the decode stages of one row, or of each row, on its cache."""
        for at in range(len(self.rows)) if number is None else (number,):
            row = self.rows[at]
            for stage in row.stages:
                if row.steps % stage.every == 0:
                    assert row.prompt_slots is not None
                    for layer, prompt in enumerate(row.prompt_slots):
                        if not self.cache.layers[layer].stateful:
                            stage.step(self._slots(at, layer, prompt), layer)
            row.steps += 1

    def _slots(self, number: int, layer: int, prompt: Tensor) -> RowSlots:
        notes, prompt = self.rows[number].notes, prompt.to(self.cache.layers[layer].device)
        rotate = partial(self.adapter.rotate, layer=layer)
        return RowSlots(self.cache, layer, number, prompt, notes, rotate)

    # --- captured steps --------------------------------------------------------------------------

    @property
    def captures(self) -> bool:
        """Whether steps are captured: on CUDA, unless the user chose otherwise.

        A replay calls no hooks.
        """
        mode = self.adapter.decoding
        on = mode == "graph" or (mode == "auto" and self.position.is_cuda)
        return on and self.adapter.capturable and not step_modules(self.adapter).own_code

    @property
    def _idle(self) -> Graphs:
        return self.adapter.kept.setdefault("graphs", Graphs())

    def _settle(self, rows: int) -> None:
        """Move to buffers for ``rows`` rows that captured steps use: idle ones, or new ones."""
        if self.graphs is not None and rows <= self.cache.size:
            return
        decoder, head = self.adapter.decoder, self.adapter.model.get_output_embeddings()
        kept = structures_of(self.adapter)
        weights = fingerprint(decoder, head, training=True, addresses=True, kept=kept)
        kind = (*self.kind, Mode.current(self.adapter.device).autocast, requested())
        if (found := self._idle.take(kind, weights, self.cache, rows)) is not None:
            try:
                found.cache.join(self.cache)
            except BaseException:
                self._idle.put(found)
                raise
            self.release()
            self.cache, self.graphs = found.cache, found
            return
        self.cache.resize(self._idle.size(self.cache, rows, self.size))
        self.graphs = self._idle.new(kind, weights, self.cache)

    def captured(self, *given: Tensor) -> Output:
        """Run a step through a graph, captured where none fits. ``given`` as in `forward`.

        The next step of the same width overwrites the output.
        """
        self._settle(len(self.rows))
        assert self.graphs is not None
        return self.graphs.run(partial(forward, self.adapter), _aux_layers(self.rows), *given)


class Batch:
    """Groups of rows that are decoded together: products with weights run once for all rows.

    Rows are numbered in the order in which they joined, whichever group they are in: random numbers
    are drawn in this order.

    Parameters
    ----------
    size : int
        As in `RowGroup`, for its groups.

    Attributes
    ----------
    groups : list of RowGroup
    rows : list of Sequence
        The sequences.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.groups: list[RowGroup] = []
        self.rows: list[Sequence] = []

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input a drafter of any row reads: those of `Output.aux_hidden_states`."""
        return _aux_layers(self.rows)

    # --- rows ------------------------------------------------------------------------------------

    def join(self, group: RowGroup) -> None:
        """Add a group of one row, which must not be used afterwards."""
        rows = list(group.rows)
        self._add(group)
        self.rows += rows

    def leave(self, row: Sequence) -> None:
        """Remove a sequence."""
        group, number = self._place(row)
        group.leave(number)
        self._remove(row)

    def take(self, row: Sequence, tokens: int = 0) -> RowGroup:
        """Remove a sequence and return it as a group of one row; see `RowGroup.take`."""
        group, number = self._place(row)
        taken = group.take(number, tokens)
        self.groups = [own for own in self.groups if own is not taken]
        self._remove(row)
        return taken

    def reserve(self, tokens: int) -> list[tuple[Sequence, Exception]]:
        """Make sure that ``tokens`` more fit in every row; rows that outgrow others move.

        Returns the rows for which there is no memory, with the error. They have left the batch.
        """
        left: list[tuple[Sequence, Exception]] = []
        for group in list(self.groups):
            numbers = [0] if len(group.rows) == 1 else group.outgrown(tokens)
            for row in [group.rows[number] for number in numbers]:
                with caught_shortage() as short:
                    if len(group.rows) == 1:
                        group.reserve(tokens)
                    else:
                        taken = group.take(_number(group.rows, row), tokens)
                        self.groups = [own for own in self.groups if own.rows and own is not taken]
                        self._add(taken)
                if short:
                    self.leave(row)
                    left.append((row, short[0]))
        return left

    def _add(self, group: RowGroup) -> None:
        group.size = max(group.size, self.size)
        vars(self).pop("_orders", None)  # found again
        for own in self.groups:
            if own.fits(group):
                with caught_shortage():
                    own.join(group)
                    return
                break  # it stays in the buffers that it has
        self.groups.append(group)

    def _remove(self, row: Sequence) -> None:
        self.groups = [group for group in self.groups if group.rows]
        self.rows.pop(_number(self.rows, row))
        vars(self).pop("_orders", None)  # found again

    def _place(self, row: Sequence) -> tuple[RowGroup, int]:
        """The group of a sequence, and its row there."""
        for group in self.groups:
            for number, own in enumerate(group.rows):
                if own is row:
                    return group, number
        raise ValueError("the sequence is not in this batch")

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor] | None:
        """The order in which the groups hold the rows, and its inverse; ``None`` for the same."""
        number = {id(row): at for at, row in enumerate(self.rows)}
        order = [number[id(row)] for group in self.groups for row in group.rows]
        if order == list(range(len(order))):
            return None
        numbers = torch.tensor(order, device=self.groups[0].position.device)
        return numbers, numbers.argsort()

    def _by_group(self, values: Many[Any]) -> list[list[Any]]:
        """``values``, one per row, for the rows of each group."""
        return [[values[_number(self.rows, row)] for row in group.rows] for group in self.groups]

    def _arranged(self, output: Output) -> Output:
        """An output of the groups' rows in the order of `rows`."""
        if self._orders is None:
            return output
        inverse, aux = self._orders[1], output.aux_hidden_states
        return Output(
            output.logits.index_select(0, inverse),
            output.hidden.index_select(0, inverse),
            None if aux is None else aux.index_select(0, inverse),
        )

    # --- tokens ----------------------------------------------------------------------------------

    def next(self, tokens: Tensor) -> Tensor:
        """As in `RowGroup`."""
        self.run_decode_stages()
        return self.feed(tokens).logits[:, -1]

    def feed(self, tokens: Tensor) -> Output:
        """As in `RowGroup`."""
        tokens = tokens if self._orders is None else tokens.index_select(0, self._orders[0])
        return self._arranged(feed(self.groups, tokens))

    def verify(self, trees: Many[Tree], observers: Many[Observer | None] = ()) -> Output:
        """As in `RowGroup`; ``observers``, one per row, read the attention of its tree."""
        ordered = [tree for own in self._by_group(trees) for tree in own]
        seen = [each for own in self._by_group(observers) for each in own] if observers else []
        return self._arranged(verify(self.groups, ordered, seen))

    def draft(
        self, tokens: dict[int, int], views: dict[int, tuple[SlotList, ...]], drafted: int
    ) -> dict[int, Tensor]:
        """Logits (V,) after one drafted token of some rows; nothing is counted.

        Parameters
        ----------
        tokens : dict of int to int
            By row.
        views : dict of int to tuple of SlotList
            By row and layer, the slots that the token reads.
        drafted : int
            Tokens that were drafted in this way before it.
        """
        places = [self._place(self.rows[number]) for number in tokens]
        groups = [group for group in self.groups if any(group is own for own, _ in places)]
        number = {id(row): at for at, row in enumerate(self.rows)}
        order = [number[id(row)] for group in groups for row in group.rows]
        of = [[views.get(number[id(row)]) for row in group.rows] for group in groups]
        fed = placed([tokens.get(row, 0) for row in order], groups[0].position.device)
        logits = draft(groups, fed, of, drafted)
        return {row: logits[at] for at, row in enumerate(order) if row in tokens}

    def accept(self, paths: Many[Many[int]]) -> None:
        """As in `RowGroup`."""
        for group, own in zip(self.groups, self._by_group(paths), strict=True):
            group.accept(own)

    def run_decode_stages(self, number: int | None = None) -> None:
        """As in `RowGroup`."""
        for row in self.rows if number is None else [self.rows[number]]:
            group, at = self._place(row)
            group.run_decode_stages(at)

    def cache_bytes(self) -> int:
        """Bytes of all slots that are not quantized, as the longest head has them. No host sync."""
        adapter = self.groups[0].adapter
        slots = sum(sum(layer.max_lengths) for group in self.groups for layer in group.cache.layers)
        return slots * adapter.bytes_per_token() // adapter.depth

    def spare(self, number: int) -> int:
        """As in `RowGroup`."""
        group, row = self._place(self.rows[number])
        return group.spare(row)

    def rewind(self, tokens: int, number: int | None = None) -> None:
        """As in `RowGroup`."""
        for row in self.rows if number is None else [self.rows[number]]:
            group, own = self._place(row)
            group.rewind(tokens, own)

    def shallow(self, number: int, token: int, drafted: int, layers: Many[int]) -> Tensor:
        """As in `RowGroup`."""
        group, row = self._place(self.rows[number])
        return group.shallow(row, token, drafted, layers)


def _number(rows: Many[Sequence], row: Sequence) -> int:
    return next(number for number, own in enumerate(rows) if own is row)


def _aux_layers(rows: Many[Sequence]) -> tuple[int, ...]:
    return tuple(sorted({layer for row in rows for layer in row.aux_layers}))


# --- forward passes ------------------------------------------------------------------------------


def feed(groups: Many[RowGroup], tokens: Tensor) -> Output:
    """Feed ``tokens`` (B, 1) to the rows of all groups, in this order."""
    for group in groups:
        group.reserve(1)
    output = run_step(groups, tokens)
    for group in groups:
        group.cache.advance_host()
    return output


def draft(
    groups: Many[RowGroup],
    tokens: Tensor,
    views: Many[Many[tuple[SlotList, ...] | None]],
    drafted: int,
) -> Tensor:
    """Logits (B, V) after ``tokens`` (B, 1), which read the slots of ``views`` alone.

    By group and row; rows without a view are computed, but not used. As in `RowGroup.shallow`,
    nothing is counted, and the next forward pass overwrites what is written.
    """
    for group in groups:
        group.reserve(drafted + 1)
    lists = [group.listed(own) for group, own in zip(groups, views, strict=True)]
    caches = [group.cache for group in groups]
    cache = caches[0] if len(caches) == 1 else JointCache(caches)
    for own in caches:
        own.advance(drafted)
    try:
        given = tokens, torch.full_like(tokens, drafted), torch.ones_like(tokens, dtype=torch.bool)
        output = forward(groups[0].adapter, cache, (), *given[:2], given[2][..., None], views=lists)
        return output.logits[:, -1]
    finally:
        for own in caches:
            own.advance(-drafted)


def verify(
    groups: Many[RowGroup], trees: Many[Tree], observers: Many[Observer | None] = ()
) -> Output:
    """Check one tree per row of all groups, in this order, after its cached tokens.

    ``observers``: by row, who reads the attention of its tree, if anyone.
    """
    width = max(len(tree) for tree in trees)
    if groups[0].captures:  # few widths, so that few steps are captured
        width = next(w for w in _WIDTHS if w >= width) if width <= _WIDTHS[-1] else width
    rows = len(trees)
    sizes = [rows * width, rows * width, rows * width * width]

    def parts(given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, offset, mask = given.split(sizes)
        return tokens.view(rows, width), offset.view(rows, width), mask.view(rows, width, width)

    given = torch.zeros(sum(sizes), dtype=torch.int64)  # all of it is copied to the device at once
    tokens, offset, mask = parts(given)
    mask.diagonal(dim1=1, dim2=2).fill_(1)
    masses = [group.cache.attention_mass for group in groups for _ in group.rows]
    for row, (tree, attention_mass) in enumerate(zip(trees, masses, strict=True)):
        n = len(tree)
        tokens[row] = tree.tokens[0]  # padding: any token, masked out
        tokens[row, :n] = torch.tensor(tree.tokens)
        offset[row, :n] = torch.tensor(tree.depths)
        mask[row, :n, :n] = tree.mask()
        if attention_mass:  # padding must not count as a reader
            mask[row, n:] = 0
    device = groups[0].position.device
    for group in groups:
        group.reserve(width)
    pairs = zip(trees, observers, strict=True) if any(observers) else ()
    seen = [None if observer is None else (len(tree), observer) for tree, observer in pairs]
    tokens, offset, mask = parts(given.to(device))
    return run_step(groups, tokens, offset, mask.bool(), observers=seen)


def run_step(
    groups: Many[RowGroup], *given: Tensor, observers: Many[tuple[int, Observer] | None] = ()
) -> Output:
    """A step of all groups: one forward pass, or one of each group.

    A step that is observed is not captured.
    """
    first = groups[0]
    if observers or (not first.captures and (len(groups) == 1 or not first.cache.stateful)):
        caches = [group.cache for group in groups]
        cache = caches[0] if len(caches) == 1 else JointCache(caches)
        aux_layers = _aux_layers([row for group in groups for row in group.rows])
        return forward(first.adapter, cache, aux_layers, *given, observers=observers or None)
    if len(groups) == 1:
        return first.captured(*given)
    parts = (x.split([len(group.rows) for group in groups]) for x in given)
    if first.captures:
        outputs = [group.captured(*part) for group, *part in zip(groups, *parts, strict=True)]
    else:  # layers write states to one cache
        outputs = [run_step([group], *part) for group, *part in zip(groups, *parts, strict=True)]
    aux = [output.aux_hidden_states for output in outputs]
    return Output(
        torch.cat([output.logits for output in outputs]),
        torch.cat([output.hidden for output in outputs]),
        None if any(x is None for x in aux) else torch.cat(aux),
    )
