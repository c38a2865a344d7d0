"""Keys and values of one layer.

A frozen layer holds, per row and head, ``[segment]...[tail]``: quantized slots, then slots in the
model's dtype. New tokens go to the tail.

Some models have layers that attend within a *window*. It counts rotary ids, or rows where these
have several axes (M-RoPE): `PrefillContext.place`. A dropped row whose id remains free
(``positions=keep``) counts, as in the full model, and so does a row that was evicted from the
cache. After prefill such a layer holds the rows that later tokens can see, at most ``window - 1``,
and cache stages work on these. Slots that leave the window during decoding are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from vlmfast.core.buffers import BufferPool, bucket, capacity_class
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.kernels.quantize_kv import Segment

FREE_SLOTS = 256  # that a frozen layer starts with at most, and gains when it is full
SLOTWISE = ("keys", "values", "order", "rank", "attention_mass", "bias")
Take = Callable[..., Tensor]  # as `BufferPool.take`


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, for one row during prefill and for B rows afterwards.

    During prefill, ``keys`` and ``values`` are (1, H, S, D), or ``kv`` holds the output of a cache
    stage.

    Attributes (frozen)
    -------------------
    keys, values : Tensor, (B, H, capacity, D)
        The tail.
    length : Tensor, int64, (B, H)
        Slots in use in the tail; on the device, a view into `KVCache.length`.
    max_lengths : list of int
        The largest of each row's lengths, on the host.
    segments : list of Segment
        Quantized slots, leading dimensions (B, H), one segment per kind.
    order : Tensor, int64, (B, H, capacity), optional
        Index of each slot's token in the full sequence, where a decode stage reads it.
    rank : Tensor, int32, (B, H, capacity), optional
        Of a layer with a window whose slots may have gaps: the place of each slot's token, counted
        so that the next token's is ``seen``. In its segments, ``order`` holds the same. Without it,
        slots are contiguous up to the next token.
    attention_mass : Tensor, float32, (B, H, capacity), optional
        Attention received, where a decode stage reads it.
    bias : Tensor, float32, (B, H, capacity), optional
        Added to the logits of each slot.
    shift : list of int
        How much smaller this layer's rotary ids are than the running position, by row.
    window : int, optional
        How many places a row of this layer sees, its own included; all of them if ``None``.
    gap : list of int
        How much larger ``seen`` is than the number of places from the first row that entered this
        layer to the next token, by row.
    stored : list of list of int
        By segment and row: slots in use, on the host.
    evens : list of bool
        By row: whether all heads are equally long.
    """

    is_compileable = False  # True would make generate() compile the model
    stateful = False  # whether it holds a state instead, see `StateLayer`

    # In Hugging Face's class these are `None` until the layer has run; only `update` and
    # `held_bytes` read them before. `length` and `seen` exist once the layer is `frozen`.
    keys: Tensor
    values: Tensor
    length: Tensor
    seen: Tensor

    def __init__(self, pool: BufferPool, window: int | None = None) -> None:
        super().__init__()
        self.pool, self.window = pool, window
        self.kv: KV | None = None
        self.max_lengths: list[int] = [0]
        self.stored: list[list[int]] = []
        self.segments: list[Segment] = []
        self.order: Tensor | None = None
        self.rank: Tensor | None = None
        self.attention_mass: Tensor | None = None
        self.bias: Tensor | None = None
        # Of the rows that entered a layer with a window: ``order`` and place, (S,), and the first.
        self.entered: tuple[Tensor, Tensor, int] | None = None
        self.rows = 0  # how many rows entered
        self.gap: list[int] = [0]
        self.incoming: Tensor | None = None  # (T,): bias of the next tokens
        self.shift: list[int] = [0]
        self.evens = [True]
        # Buffers and segments with more rows than are in use; the attributes above are their views.
        self._buffers: dict[str, Tensor] = {}
        self._stores: list[Segment] = []
        self.replaced = 0  # how often a segment moved to a larger buffer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def frozen(self) -> bool:
        return hasattr(self, "length")

    @property
    def even(self) -> bool:
        """Whether all heads of each row are equally long."""
        return all(self.evens)

    @even.setter
    def even(self, value: bool) -> None:
        self.evens = [value]

    @property
    def capacity(self) -> int:
        """Slots of the tail's buffers."""
        return self.keys.shape[2]

    @property
    def prefix(self) -> bool:
        """Whether the slots in use are a prefix of the buffers, the same for all rows and heads.

        Hugging Face's own attention over this prefix is then bit-identical. On CUDA, shapes must
        not change between steps, so masks select the slots.
        """
        lengths = self.max_lengths
        return (
            self.device.type == "cpu"
            and lengths.count(lengths[0]) == len(lengths)
            and all(self.evens)
        )

    def extent(self, tokens: int) -> int:
        """How many slots attention reads, with ``tokens`` new ones: none after the longest row.

        On CUDA, shapes must not change between steps.
        """
        return max(self.max_lengths) + tokens if self.device.type == "cpu" else self.capacity

    # --- prefill ---------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D). A frozen layer writes after ``length`` without advancing it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.frozen:
            self._write(key_states, value_states)
            return self.keys, self.values
        if self.keys is not None:
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
        self.keys, self.values = key_states, value_states
        self.rows = key_states.shape[2]
        self.max_lengths = [self.rows]
        return self.keys, self.values

    def enter(self, context: PrefillContext) -> None:
        """Note the rows of a prompt that this layer has read, if it has a window."""
        if self.window is not None:
            self.entered = context.layout.order, context.place, context.places()[0]

    def slide(self, start: int) -> None:
        """Drop the rows before ``start``, which later tokens cannot see."""
        if not start:
            return
        # Copies, so that the rest is freed.
        self.keys, self.values = self.keys[:, :, start:].clone(), self.values[:, :, start:].clone()
        self.bias = None if self.bias is None else self.bias[..., start:]
        self.max_lengths = [self.keys.shape[2]]

    def put(self, kv: KV) -> None:
        """Replace the collected keys and values by the output of a cache stage."""
        self.kv, self.bias = kv, None
        self.keys = self.values = None  # type: ignore[assignment]  # not read before `freeze`
        self.max_lengths = [len(kv)]
        self.stored = [[len(segment)] for segment in kv.segments]

    def freeze(
        self,
        max_new_tokens: int,
        length: Tensor,
        seen: Tensor,
        logical: int,
        track: bool,
        attention_mass: bool,
        position: int | None = None,
    ) -> None:
        """Move to buffers with free slots for up to ``max_new_tokens`` tokens.

        Parameters
        ----------
        length : Tensor, (1, H)
            Filled with the slots in use.
        seen : Tensor, (1,)
            Ids consumed so far, on the device.
        logical : int
            The same on the host.
        track, attention_mass : bool
            Whether decode stages read ``order`` and ``attention_mass``; only for layers that were
            `put`.
        position : int, optional
            Place of the next token; by default the number of rows that entered.
        """
        track, attention_mass = (flag and not self.stateful for flag in (track, attention_mass))
        kv, self.kv = self.kv, None
        order = masses = rank = None
        first = 0 if self.entered is None else self.entered[2]
        span = self.rows if position is None or self.entered is None else position - first
        offset = logical - first - span  # of ranks from places
        if kv is None:
            keys, values, bias = self.keys, self.values, self.bias
            length.fill_(keys.shape[2])
            bias = None if bias is None else bias.expand(1, keys.shape[1], -1)
            if self.entered is not None and span != self.rows:
                rank = (self.entered[1][-keys.shape[2] :] + offset).expand(keys.shape[1], -1)
                rank = rank.to(torch.int32)
        else:
            keys, values, order = kv.keys[None], kv.values[None], kv.order[None]
            bias, masses = (None if x is None else x[None] for x in (kv.bias, kv.attention_mass))
            length.copy_(kv.lengths[None])
            self.even = len(set(kv.counts)) == 1
            self.segments = [segment.unsqueeze() for segment in kv.segments]
            rank = self._ranked(kv, offset)
        if attention_mass and masses is None:
            masses = torch.zeros(keys.shape[:3], device=keys.device)
        found = {
            "keys": keys,
            "values": values,
            "bias": bias,
            "rank": None if rank is None else rank[None],
            "order": order if track else None,
            "attention_mass": masses if attention_mass else None,
        }
        self._move(found, bucket(keys.shape[2] + min(max_new_tokens, FREE_SLOTS)))
        self.gap, self.entered = [logical - span], None
        self.length, self.seen, self.max_lengths = length, seen, [keys.shape[2]]

    def _ranked(self, kv: KV, offset: int) -> Tensor | None:
        """`rank` of the slots of ``kv``, (H, N); also replaces the ``order`` of its segments."""
        if self.window is None:
            return None
        assert self.entered is not None
        entered, place, _ = self.entered

        def rank(order: Tensor) -> Tensor:
            index = torch.searchsorted(entered, order.to(entered.dtype).contiguous())
            return (place[index.clamp(max=len(place) - 1)] + offset).to(torch.int32)

        self.segments = [replace(s, order=rank(s.order)) for s in self.segments]
        return rank(kv.order)

    # --- buffers ---------------------------------------------------------------------------------

    def _move(self, found: dict[str, Tensor | None], capacity: int) -> None:
        """Copy tensors (B, H, N, ...) to the beginning of buffers of ``capacity`` slots.

        These become the layer's own, all of them or, where memory is exhausted, none.
        """
        buffers: dict[str, Tensor | None] = {}
        with self.pool.all_or_none() as take:
            for name, source in found.items():
                buffers[name] = None if source is None else _buffer(take, source, capacity)
        for name, buffer in buffers.items():
            setattr(self, name, buffer)

    def copy_slots(self, layer: KVLayer, rows: slice, capacity: int) -> None:
        """Copy the tail of some rows of another cache's layer to buffers of ``capacity`` slots."""
        found = {name: getattr(layer, name) for name in SLOTWISE}
        self._move({name: x if x is None else x[rows] for name, x in found.items()}, capacity)

    def _give(self, name: str) -> None:
        """Return a buffer, once it is no longer the layer's: an interrupt may repeat this."""
        buffer = self._buffers.get(name, getattr(self, name))
        setattr(self, name, None)
        self._buffers.pop(name, None)
        self.pool.give(buffer)

    def outgrown(self, tokens: int) -> bool:
        """Whether ``tokens`` more do not fit in every row."""
        return max(self.max_lengths) + tokens > self.keys.shape[2]

    def enlarged(self, tokens: int, row: int = 0) -> int:
        """The capacity with which ``tokens`` more fit in a row."""
        need = self.max_lengths[row] + tokens
        if need <= self.capacity:
            return self.capacity
        return bucket(need + max(FREE_SLOTS - tokens, 0))

    def reserve(self, tokens: int) -> None:
        """Make sure that ``tokens`` more fit.

        Raises
        ------
        RuntimeError
            Where they do not, in buffers that rows share: these do not grow for one row.
        """
        if not self.outgrown(tokens):
            return
        if self._buffers:
            raise RuntimeError(f"{tokens} more tokens do not fit; the rows must leave their group")
        old = {name: getattr(self, name) for name in SLOTWISE}
        self._move(old, self.enlarged(tokens))
        for buffer in old.values():
            self.pool.give(buffer)

    def _write(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        self.reserve(tokens)
        if self.prefix:
            for buffer, new in ((self.keys, keys), (self.values, values)):
                buffer.narrow(2, self.max_lengths[0], tokens).copy_(new)
        else:
            rows, heads = (torch.arange(n, device=self.device) for n in keys.shape[:2])
            at = rows[:, None, None], heads[:, None], self._next(tokens)
            self.keys[at], self.values[at] = keys, values  # much faster than `scatter_`
        if self.incoming is not None and self.bias is None:
            nothing = torch.zeros(*keys.shape[:2], 0, device=self.device)
            self._move({"bias": nothing}, self.capacity)
        self.note(tokens)
        if self.incoming is not None and self.bias is not None:
            index = self._next(tokens)
            self.bias.scatter_(2, index, self.incoming.to(self.bias.dtype).expand_as(index))

    def _next(self, tokens: int) -> Tensor:
        """The next ``tokens`` slots of each row and head, int64, (B, H, tokens)."""
        return self.length[..., None] + torch.arange(tokens, device=self.device)

    def copy(self, source: Tensor, target: Tensor, rows: slice = slice(None)) -> None:
        """Copy the slots ``source`` of some rows to ``target``, both (B, H, N)."""
        for name in SLOTWISE:
            if (buffer := getattr(self, name)) is not None:
                wide = (..., *(None,) * (buffer.dim() - 3))
                shape = (*source.shape, *buffer.shape[3:])
                moved = buffer[rows].gather(2, source[wide].expand(shape))
                buffer[rows].scatter_(2, target[wide].expand(shape), moved)

    def note(self, tokens: int) -> None:
        """Initialize what accompanies the keys and values of the next ``tokens`` slots."""
        if self.order is self.rank is self.attention_mass is self.bias is None:
            return
        steps = torch.arange(tokens, device=self.device)
        index = self.length[..., None] + steps
        for buffer in (self.order, self.rank):
            if buffer is not None:
                new = (self.seen[:, None, None] + steps).to(buffer.dtype)
                buffer.scatter_(2, index, new.expand_as(index))
        for buffer in (self.attention_mass, self.bias):  # slots may have been used before
            if buffer is not None:
                buffer.scatter_(2, index, torch.zeros_like(index, dtype=buffer.dtype))

    def append(self, kv: KV) -> None:
        """Block-wise prefill: replace what was written after ``length`` by ``kv``."""
        kept = len(kv)
        start = self.length[0]
        index = start[:, None] + torch.arange(kept, device=self.device)
        for buffer, new in ((self.keys, kv.keys), (self.values, kv.values)):
            at = index[..., None].expand_as(new)
            buffer[0].scatter_(1, at, new.to(self.dtype))
        extra = (
            (self.order, kv.order),
            (self.attention_mass, kv.attention_mass),
            (self.bias, kv.bias),
        )
        for stored, added in extra:
            if stored is not None and added is not None:
                stored[0].scatter_(1, index, added.to(stored.dtype))
        start.add_(kv.lengths)
        even = len(set(kv.counts)) == 1
        self.evens[0] = self.evens[0] and even
        self.max_lengths[0] = int(start.max())

    def mask(
        self,
        tokens: int,
        tree: Tensor | None = None,
        sliding: bool = False,
        extent: int | None = None,
    ) -> Tensor:
        """Bool (B, H, T, extent): slots that each of the next ``tokens`` may read.

        ``extent`` is the capacity by default.
        ``tree`` (B, T, T) marks which of these tokens see each other; a token that does not see
        itself sees nothing. Without it, attention is causal. ``sliding``: whether any slot in use
        is outside the layer's window.
        """
        slots = torch.arange(self.capacity if extent is None else extent, device=self.device)
        if tree is None:
            last = self.length[..., None] + torch.arange(tokens, device=self.device)
            age = last[..., None] - slots
            mask = age >= 0
            if not sliding:
                return mask
            if self.rank is None:  # without gaps, the age of a slot is that of its token
                assert self.window is not None
                return mask & (age < self.window)
            return mask & self._near(self.rank[..., : len(slots)], self._depth(tokens, tree))
        at = slots - self.length[..., None]  # (B, H, capacity): index among the new tokens
        new = (at >= 0) & (at < tokens)
        at = at.clamp(0, tokens - 1)[:, :, None].expand(-1, -1, tokens, -1)
        old = (slots < self.length[..., None])[:, :, None]
        old = old & tree.diagonal(dim1=1, dim2=2)[:, None, :, None]
        if sliding:
            assert self.window is not None
            depth = self._depth(tokens, tree)
            tree = tree & (depth[:, :, None] - depth[:, None] < self.window)
            old = old & self._near(self.ranks()[..., : len(slots)], depth)
        own = tree[:, None].expand(-1, at.shape[1], -1, -1).gather(3, at)
        return torch.where(new[:, :, None], own, old)

    # --- windows ---------------------------------------------------------------------------------

    def ranks(self) -> Tensor:
        """`rank`, computed where it is not stored: (B, H, capacity)."""
        if self.rank is not None:
            return self.rank
        slots = torch.arange(self.keys.shape[2], device=self.device)
        return (self.seen[:, None] - self.length)[..., None] + slots

    def _depth(self, tokens: int, tree: Tensor | None) -> Tensor:
        """Offset of each of the next ``tokens`` from the first of them, (B or 1, T)."""
        if tree is None:
            return torch.arange(tokens, device=self.device)[None]
        return tree.sum(-1) - 1

    def _near(self, rank: Tensor, depth: Tensor) -> Tensor:
        """Bool (B, H, T, N): which slots of ``rank`` are in the window of each token."""
        assert self.window is not None
        first = self.seen[:, None] + depth - self.window + 1
        return rank[:, :, None] >= first[:, None, :, None]

    def opened(
        self, segment: Segment, tokens: int, tree: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Dequantize a segment: keys, values (B, H, N, D), mask (B, H, T, N) and bias."""
        keys, values = segment.dequantize(dtype)
        mask = segment.valid[:, :, None] & self._near(segment.order, self._depth(tokens, tree))
        if tree is not None:
            mask = mask & tree.diagonal(dim1=1, dim2=2)[:, None, :, None]
        return keys, values, mask, segment.bias

    def receive(self, attention_mass: Tensor, sliding: bool) -> None:
        """Count the attention that the first N slots of the tail have just received, (B, H, N).

        Slots that have left the window receive no more attention; theirs is set to zero.
        """
        assert self.attention_mass is not None
        self.attention_mass[:, :, : attention_mass.shape[2]] += attention_mass
        if sliding:
            assert self.window is not None
            gone = self.ranks() <= (self.seen - self.window)[:, None, None]
            self.attention_mass.masked_fill_(gone, 0.0)

    def release(self) -> None:
        """Return the buffers; the layer must not be used afterwards."""
        for name in SLOTWISE:
            if self.frozen:
                self._give(name)
            setattr(self, name, None)
        self.segments, self._stores, self.kv = [], [], None

    # --- rows ------------------------------------------------------------------------------------

    def page(self, row: int, count: int, page: Segment) -> None:
        """Replace the first ``count`` slots of a row's tail by ``page``, (H, ...)."""
        if self.bias is not None and page.bias is None:
            page = replace(page, bias=self.bias[row, :, :count].clone())
        if self.rank is not None:
            page = replace(page, order=self.rank[row, :, :count].clone())
        at = self._segment_for(row, page, grows=page.group > 0)
        self._write_segment(at, row, page, count)
        for name in SLOTWISE:
            buffer = getattr(self, name)
            if buffer is not None:
                buffer[row, :, : buffer.shape[2] - count] = buffer[row, :, count:].clone()
        self.length[row].sub_(count)
        self.max_lengths[row] -= count

    def _segment_for(self, row: int, page: Segment, *, grows: bool) -> int:
        """Index of the segment for ``page`` (H, ...) of a row; a new one where none is suitable.

        ``grows``: whether it may be appended to slots that the row has. A segment with one set of
        parameters for all slots cannot grow.
        """
        for at, segment in enumerate(self.segments):
            alike = segment.key == page.key and segment.key_step.dtype == page.key_step.dtype
            if alike and (grows or not self.stored[at][row]):
                return at
        rows = len(self.max_lengths)
        empty = Segment.empty(page.unsqueeze(), self.size)  # before anything is changed
        if self._buffers:
            self._stores.append(empty)
        self.segments.append(empty.select(slice(rows)) if self._buffers else empty)
        self.stored.append([0] * rows)
        return len(self.segments) - 1

    def _write_segment(self, at: int, row: int, page: Segment, count: int) -> None:
        """Write ``page`` (H, ...), of which ``count`` slots are in use, after those of the row."""
        stores = self._stores if self._buffers else self.segments
        store, start, rows = stores[at], self.stored[at][row], len(self.max_lengths)
        need, bias = start + len(page), page.bias is not None
        if need > len(store) or (bias and store.bias is None):
            slots = (capacity_class if self._buffers else bucket)(max(need, len(store)))
            group = store.group or 1
            store = store.resized(self.size, -(-slots // group) * group, bias=bias)
            stores[at] = store
            self.replaced += 1
        store.write(row, start, page)
        self.stored[at][row] += count
        if self._buffers:
            self.segments[at] = store.select(slice(rows))

    def state(self, index: int) -> dict[tuple, Tensor]:
        """The part of a layer in `KVCache.state`."""
        state: dict[tuple, Tensor] = {(index, name): x for name, x in self._buffers.items()}
        for number, store in enumerate(self._stores):
            state |= {(index, number, at): x for at, x in enumerate(store.tensors())}
        return state

    @property
    def size(self) -> int:
        """Rows of the buffers."""
        return len(self._buffers.get("keys", self.keys))

    def resized(self, size: int, take: Take) -> Callable[[], None]:
        """Copy all rows to buffers of ``size`` rows, whose capacity is that of a class.

        Parameters
        ----------
        take : callable
            As `BufferPool.take`.

        Returns
        -------
        callable
            Replaces the layer's buffers by these, and allocates nothing.
        """
        rows, capacity = len(self.max_lengths), capacity_class(self.capacity)
        buffers, stores = {}, []
        for name in SLOTWISE:
            if (old := getattr(self, name)) is not None:
                shape = (size, old.shape[1], capacity, *old.shape[3:])
                buffers[name] = take(shape, old.dtype, old.device, clear=False)
                buffers[name][:rows, :, : old.shape[2]] = old
                buffers[name][:rows, :, old.shape[2] :].zero_()  # `join` clears other rows
        for segment in self.segments:
            group = segment.group or 1
            slots = -(-capacity_class(len(segment)) // group) * group
            stores.append(segment.resized(size, slots))

        def move() -> None:
            for name in buffers:
                self._give(name)
            self._buffers, self._stores = buffers, stores
            self.replaced += 1

        return move

    def show(self, rows: int) -> None:
        """Make the tensors views of the first ``rows`` rows of the buffers."""
        for name, buffer in self._buffers.items():
            setattr(self, name, buffer[:rows])
        self.segments = [store.select(slice(rows)) for store in self._stores]

    def join(self, other: KVLayer, source: int) -> None:
        """Write a row of ``other`` after the last row."""
        row, count = len(self.max_lengths), other.max_lengths[source]
        for name, buffer in self._buffers.items():
            buffer[row, :, :count] = getattr(other, name)[source, :, :count]
            buffer[row, :, count:].zero_()  # may hold anything, and NaN * 0 is NaN
        self.max_lengths.append(count)
        self.shift.append(other.shift[source])
        self.gap.append(other.gap[source])
        self.evens.append(other.evens[source])
        for stored in self.stored:
            stored.append(0)
        for segment, lengths in zip(other.segments, other.stored, strict=True):
            if count := lengths[source]:
                page = segment.select(slice(source, source + 1)).first(count).squeeze()
                at = self._segment_for(row, page, grows=False)
                self._write_segment(at, row, page, count)

    def cut(self, rows: int, segments: int) -> None:
        """Forget all rows and segments but the first ones, without an allocation."""
        for values in (self.segments, self._stores, self.stored):
            del values[segments:]
        for values in self._by_row:
            del values[rows:]

    @property
    def _by_row(self) -> list[list]:
        """What is counted by row."""
        return [self.max_lengths, self.shift, self.gap, self.evens, *self.stored]

    def leave(self, row: int, *, keep: bool) -> None:
        """Move the last row to ``row``, which leaves. ``keep``: also segments without slots."""
        last = len(self.max_lengths) - 1
        if row != last:
            for buffer in self._buffers.values():
                buffer[row] = buffer[last]
            for store in self._stores:
                store.move(last, row)
        for store in self._stores:
            store.lengths[last] = 0
        for values in self._by_row:
            values[row] = values[last]
            values.pop()
        if not keep:
            used = [at for at, stored in enumerate(self.stored) if any(stored)]
            self._stores = [self._stores[at] for at in used]
            self.stored = [self.stored[at] for at in used]

    def slots(self, row: int) -> int:
        """Physical length of a row: its segments and its tail, of the longest head."""
        return self.max_lengths[row] + sum(stored[row] for stored in self.stored)

    def held_bytes(self) -> int:
        """Bytes in use, including the parameters of segments, excluding free slots."""
        held = self if self.kv is None else self.kv
        keys = held.keys
        if keys is None:  # the layer has not run yet
            return 0
        each = 2 * keys.shape[-1] * keys.element_size()
        if self.kv is not None:
            taken = sum(self.kv.counts)
        elif self.frozen and not self.even:
            taken = int(self.length.sum())
        else:
            taken = sum(self.max_lengths) * keys.shape[1]
        if self.frozen:
            extra = (self.order, self.rank, self.attention_mass, self.bias)
            each += sum(e.element_size() for e in extra if e is not None)
        return taken * each + sum(segment.held_bytes() for segment in held.segments)

    def get_seq_length(self) -> int:
        return int(self.seen.max()) if self.frozen else self.max_lengths[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.max_lengths) + query_length, 0

    def get_max_length(self) -> int:
        return -1


def _buffer(take: Take, source: Tensor, capacity: int) -> Tensor:
    """Copy (B, H, N, ...) to the beginning of a buffer of ``capacity`` slots."""
    shape = (*source.shape[:2], capacity, *source.shape[3:])
    buffer = take(shape, source.dtype, source.device, clear=False)
    taken = min(source.shape[2], capacity)
    buffer[:, :, :taken] = source[:, :, :taken]
    buffer[:, :, taken:].zero_()
    return buffer
