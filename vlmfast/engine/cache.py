"""The KV cache: grows layer by layer during prefill, then freezes into static buffers.

Three numbers are kept apart. *Logical* length counts the ids that were consumed; rotary ids follow
it. *Physical* length counts the slots in use of a layer, row and head; masks and memory
follow it, and it differs between layers, rows and heads as soon as something is dropped. *Capacity*
counts the slots of the buffers.

Sequences that are decoded together share buffers. Those have at least as many batch rows as are in
use, which come first; tensors of a cache are views of these. A row that joins is written after the
last one, and the last one takes the place of a row that leaves, so that no other row is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from vlmfast.core.buffers import BufferPool, capacity_class
from vlmfast.errors import ModelError
from vlmfast.kernels.quantize_kv import Segment

from .kv_layer import SLOTWISE, KVLayer
from .state_layer import StateLayer

_BY_ROW = {"length": 1, "seen": 0, "position": -2, "shifts": 1}  # with the axis of the rows


class KVCache(Cache):
    """One `KVLayer` per decoder layer; one row during prefill, B rows in a batch.

    Parameters
    ----------
    depth : int
        Number of decoder layers.
    pool : BufferPool, optional
        Where buffers come from.
    windows : sequence of int or None, optional
        One per layer; none by default.
    states : collection of int
        Layers that hold a state instead of keys and values.

    Attributes (frozen)
    -------------------
    length : Tensor, int64, (L, B, H)
        Those of the layers are views of it.
    seen : Tensor, int64, (B,)
        Ids consumed, on the device.
    position : Tensor, int64, (B, 1), or (3, B, 1) for M-RoPE
        Rotary ids of the next tokens.
    shifts : Tensor, int64, (K, B)
        How much smaller the rotary ids of layers are whose rows were renumbered in prefill.
    offsets : dict of int to Tensor, int64, (B, 1)
        The same by layer; layers with equal ones share a tensor.
    live : Tensor, int64, (B,), or None
        1 for rows in use. Only where `shown` includes other rows, which must not advance.
    """

    layers: list[KVLayer]  # type: ignore[assignment]  # narrower than Hugging Face's: no others
    length: Tensor
    seen: Tensor

    def __init__(
        self,
        depth: int,
        pool: BufferPool | None = None,
        windows: Sequence[int | None] | None = None,
        states: Collection[int] = (),
    ) -> None:
        self.pool = pool or BufferPool(0)
        windows = [None] * depth if windows is None else windows
        super().__init__(
            layers=[
                StateLayer(self.pool) if index in states else KVLayer(self.pool, window)
                for index, window in enumerate(windows)
            ]
        )
        self.stateful = bool(states)
        self.position: Tensor | None = None
        self.shifts: Tensor | None = None
        self.live: Tensor | None = None
        self.offsets: dict[int, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}  # with more rows than are in use
        # Copies of `length` and `seen` for layers on other devices; of these layers, they count.
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._shifted: dict[int, int] = {}  # by layer: index into `shifts`
        self.logical: list[int] = []  # `seen` on the host
        self.base: list[int] = []  # by row: ids up to the last compressed one
        self.track = self.attention_mass = False

    @property
    def rows(self) -> int:
        return len(self.logical)

    def freeze(
        self,
        max_new_tokens: int,
        logical: int,
        *,
        base: int | None = None,
        track: bool = False,
        attention_mass: bool = False,
        position: int | None = None,
    ) -> None:
        """End of prefill: move ``logical`` consumed ids to buffers for ``max_new_tokens`` more.

        ``base``: to how many ids it can be cropped, if no layer has dropped or compressed rows; by
        default to none of them if each has a slot. ``position``: rotary id of the next token, where
        windows count rotary ids.
        """
        first = next(layer for layer in self.layers if not layer.stateful)
        heads = len(first.kv.keys) if first.kv is not None else first.keys.shape[1]
        shape = (len(self.layers), 1, heads)
        self.track, self.attention_mass = track, attention_mass
        self.length = torch.zeros(shape, dtype=torch.int64, device=first.device)
        self.seen = torch.full((1,), logical, device=first.device)
        self.logical = [logical]
        for index, layer in enumerate(self.layers):
            length, seen = self._counts(layer.device)
            own = None if position is None else position - layer.shift[0]
            given = max_new_tokens, length[index], seen, logical, track, attention_mass
            layer.freeze(*given, own)
        rows = logical if base is None else first.rows
        whole = all(layer.max_lengths == [rows] and layer.even for layer in self.layers)
        whole = whole and not self.stateful
        self.base = [base or 0 if whole else logical]

    def _counts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`length` and `seen` on the device of a layer."""
        if device == self.length.device:
            return self.length, self.seen
        if device not in self._copies:
            self._copies[device] = self.length.to(device), self.seen.to(device)
        return self._copies[device]

    @property
    def _counted(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.length, self.seen), *self._copies.values()]

    @property
    def split(self) -> bool:
        """Whether layers are on several devices; the cache then has a single row."""
        return bool(self._copies)

    def slots(self) -> Tensor:
        """Slots in use of each layer of a cache of a single row: int64, (L, H), a copy."""
        if not self.split:
            return self.length[:, 0].clone()
        return torch.stack([layer.length[0].to(self.length.device) for layer in self.layers])

    def sliding(self, layer: int, tokens: int) -> bool:
        """Whether a layer may hold slots outside the window of one of the next ``tokens``."""
        cached = self.layers[layer]
        if cached.window is None:
            return False
        spans = cached.max_lengths
        if cached.rank is not None:
            spans = [logical - gap for logical, gap in zip(self.logical, cached.gap, strict=True)]
        return max(spans) + tokens > cached.window

    # --- states, as Hugging Face's layers read and write them -------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state(layer_idx).states.get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        kernel = kwargs["conv_kernel_size"]
        return self._state(layer_idx).append_inputs(conv_states, state_idx, kernel)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state(layer_idx).states.get(("recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self._state(layer_idx).set("recurrent", state_idx, recurrent_states)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        if layer_idx is not None:
            layers = [self._state(layer_idx)]
        return bool(layers) and all(layer.states for layer in layers)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _state(self, layer: int) -> StateLayer:
        found = self.layers[layer]
        if not isinstance(found, StateLayer):
            raise ModelError(f"layer {layer} of this model holds a state of an unknown kind")
        return found

    def advance(self, tokens: int = 1) -> None:
        """Count ``tokens`` that the last forward pass wrote to every row."""
        self.advance_device(tokens)
        self.advance_host(tokens)

    def advance_device(self, tokens: int = 1) -> None:
        """The part of `advance` on the device."""
        for length, seen in self._counted:
            length.add_(tokens)
            seen.add_(tokens)

    def count_token(self) -> None:
        """Count one token of every row and move to the next position, on the device."""
        assert self.position is not None
        if self.live is None:
            self.advance_device()
            self.position.add_(1)
        else:
            self.length.add_(self.live[:, None])
            self.seen.add_(self.live)
            self.position.add_(self.live[:, None])

    def advance_host(self, tokens: int = 1) -> None:
        """The part of `advance` on the host."""
        for layer in self.layers:
            layer.max_lengths = [length + tokens for length in layer.max_lengths]
        self.logical = [logical + tokens for logical in self.logical]

    def reserve(self, tokens: int) -> None:
        """Make sure that ``tokens`` more fit in every layer."""
        for layer in self.layers:
            layer.reserve(tokens)

    def state(self) -> dict[tuple, Tensor]:
        """Every tensor that a captured step reads or writes, with all its rows."""
        state: dict[tuple, Tensor] = {(name,): x for name, x in self._buffers.items()}
        for at, layer in enumerate(self.layers):
            state |= layer.state(at)
        return state

    def consume(self, tokens: int) -> None:
        """Count ids of every row that were compressed: their slots are counted already."""
        if tokens:
            for _, seen in self._counted:
                seen.add_(tokens)
            self.logical = [logical + tokens for logical in self.logical]
            self.base = list(self.logical)

    @contextmanager
    def biased(self, bias: Tensor | None) -> Iterator[None]:
        """Add ``bias`` (T,) to the logits of the tokens written inside the block."""
        for layer in self.layers:
            layer.incoming = None if bias is None else bias.to(layer.device)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.incoming = None

    def crop(self, tokens: int, row: int | None = None) -> None:
        """Remove the last ``tokens`` of every row, or of one.

        Raises
        ------
        ValueError
            Where a layer does not hold them in its tail, one slot each.
        """
        if self.attention_mass or self.stateful:
            what = "with attention masses" if self.attention_mass else "with the states of layers"
            raise ValueError(f"a cache {what} cannot be cropped")
        rows = range(self.rows) if row is None else [row]
        if any(self.logical[at] - tokens < self.base[at] for at in rows):
            raise ValueError(f"{tokens} tokens reach into the compressed part of the cache")
        chosen = slice(None) if row is None else slice(row, row + 1)
        for length, seen in self._counted:
            length[:, chosen].sub_(tokens)
            seen[chosen].sub_(tokens)
        for at in rows:
            self.logical[at] -= tokens
            for layer in self.layers:
                layer.max_lengths[at] -= tokens

    def accept(self, index: Tensor, counts: Sequence[int], *, moves: bool = True) -> Tensor | int:
        """Keep the accepted tokens of those that the last forward pass wrote, and count them.

        Parameters
        ----------
        index : Tensor, int64, (B, A)
            Which of the T written tokens each row keeps, ascending; padded after ``counts``. On the
            host.
        counts : sequence of int
            How many of the A each row keeps.
        moves : bool
            Whether any token has to move; ``False`` where every row keeps its first ones.

        Returns
        -------
        Tensor, int64, (B,), or int
            ``counts`` on the device; one number where all are equal.
        """
        kept: Tensor | int = counts[0]
        if moves or len(set(counts)) > 1:  # one copy for both
            table = torch.cat([index, torch.tensor(counts)[:, None]], 1).to(self.length.device)
            index, kept = table[:, :-1], table[:, -1]
        for layer in self.layers if moves else ():
            index = index.to(layer.device)
            source = layer.length[..., None] + index[:, None]
            target = layer.length[..., None] + torch.arange(index.shape[1], device=index.device)
            source, target = (slots.clamp(max=layer.capacity - 1) for slots in (source, target))
            layer.copy(source, target)
            for buffer in (layer.order, layer.rank):
                if buffer is not None:  # kept tokens are numbered without gaps
                    steps = torch.arange(index.shape[1], device=index.device)
                    order = (layer.seen[:, None, None] + steps).to(buffer.dtype)
                    buffer.scatter_(2, target, order.expand_as(target))
        for layer in self.layers:
            layer.max_lengths = [
                length + n for length, n in zip(layer.max_lengths, counts, strict=True)
            ]
        for length, seen in self._counted:
            length.add_(kept if isinstance(kept, int) else kept.to(length.device)[None, :, None])
            seen.add_(kept if isinstance(kept, int) else kept.to(seen.device))
        self.logical = [n + count for n, count in zip(self.logical, counts, strict=True)]
        return kept

    # --- rows ------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Rows of the buffers, of which the first ones are in use."""
        return len(self._buffers["seen"]) if self._buffers else self.rows

    @property
    def shared(self) -> bool:
        """Whether the buffers are for several rows."""
        return bool(self._buffers)

    @property
    def replaced(self) -> int:
        """How often a part of the buffers was replaced by a larger one."""
        return sum(layer.replaced for layer in self.layers)

    def start(self, position: Tensor) -> None:
        """Begin decoding at ``position``: (B, 1), or (3, B, 1) for M-RoPE."""
        self.position, found = position, dict[tuple[int, ...], int]()
        for index, layer in enumerate(self.layers):
            if any(shift := tuple(layer.shift)):
                self._shifted[index] = found.setdefault(shift, len(found))
        if found:
            self.shifts = torch.tensor(list(found), device=position.device)
        self._set_offsets()

    def _set_offsets(self) -> None:
        if self.shifts is not None:
            columns = [shift[:, None] for shift in self.shifts]
            self.offsets = {layer: columns[at] for layer, at in self._shifted.items()}

    def kind(self) -> tuple:
        """What rows must have in common to share buffers without costs for each other."""
        return tuple(
            (
                layer.window,
                self._shifted.get(index),
                *(getattr(layer, name) is not None for name in SLOTWISE),
            )
            for index, layer in enumerate(self.layers)
        )

    def holds(self, other: KVCache, *, larger: bool = False) -> bool:
        """Whether a row of ``other`` is of the same capacity class, in every layer.

        ``larger``: whether segments may be of a larger class, too.
        """
        for layer, part in zip(self.layers, other.layers, strict=True):
            if capacity_class(layer.capacity) != capacity_class(part.capacity):
                return False
            own = capacity_class(max(map(len, layer.segments), default=0))
            need = capacity_class(max(map(max, part.stored), default=0))
            if need > own or (need < own and not larger):
                return False
        return True

    def resize(self, size: int) -> None:
        """Move to buffers of ``size`` rows and of the capacity of a class; all rows are copied.

        Where memory is exhausted, nothing changes.
        """
        rows, buffers = self.rows, {}
        with self.pool.all_or_none() as take:
            moves = [layer.resized(size, take) for layer in self.layers]
            for name, axis in _BY_ROW.items():
                old = getattr(self, name)
                if old is not None:
                    shape = list(old.shape)
                    shape[axis] = size
                    buffers[name] = old.new_zeros(shape)
                    buffers[name].narrow(axis, 0, rows).copy_(old)
            buffers["live"] = torch.zeros_like(buffers["seen"])
            buffers["live"][:rows] = 1
        for move in moves:
            move()
        self._buffers = buffers
        self.show(rows)

    def show(self, rows: int) -> None:
        """Make all tensors views of the first ``rows`` rows of the buffers."""
        for name, axis in _BY_ROW.items():
            if name in self._buffers:
                setattr(self, name, self._buffers[name].narrow(axis, 0, rows))
        for layer, length in zip(self.layers, self.length, strict=True):
            layer.length, layer.seen = length, self.seen
            layer.show(rows)
        self._set_offsets()

    @contextmanager
    def shown(self, rows: int) -> Iterator[None]:
        """Inside the block, a step runs on the first ``rows`` rows, not only on those in use.

        Rows not in use are fed too, write to their own free slots, and do not advance.
        """
        self.show(rows)
        # With one or two rows, all are in use: their number is rounded up to a power of two.
        self.live = self._buffers["live"][:rows] if rows > 2 else None
        try:
            yield
        finally:
            self.live = None
            self.show(self.rows)

    def join(self, other: KVCache, expected: int = 0) -> None:
        """Write the rows of ``other`` after the last row.

        ``expected``: rows for which there is space once the buffers have to grow, at the least.
        Where memory is exhausted, no row is written.

        Raises
        ------
        ValueError
            Where it is not of the same `kind`: a part of its rows would be left out.
        """
        if self.kind() != other.kind():
            raise ValueError("rows of different kinds cannot share buffers")
        rows, segments = self.rows, [len(layer.segments) for layer in self.layers]
        try:
            for source in range(other.rows):
                self._join(other, source, expected)
        except BaseException:
            self._cut(rows, segments)
            raise

    def _join(self, other: KVCache, source: int, expected: int) -> None:
        row = self.rows
        if row == self.size or not self.shared:
            self.resize(max(2 * row, expected, 1))
        for layer, part in zip(self.layers, other.layers, strict=True):
            layer.join(part, source)
        for name, axis in _BY_ROW.items():
            if name in self._buffers:
                new = getattr(other, name).select(axis, source)
                self._buffers[name].select(axis, row).copy_(new)
        self._buffers["live"][row] = 1
        self.logical.append(other.logical[source])
        self.base.append(other.base[source])
        self.show(self.rows)

    def _cut(self, rows: int, segments: Sequence[int]) -> None:
        """Forget what a join has written after the first ``rows``. Allocates nothing.

        ``segments``: how many each layer had before.
        """
        for layer, count in zip(self.layers, segments, strict=True):
            layer.cut(rows, count)
        for values in (self.logical, self.base):
            del values[rows:]
        if self.shared:
            self._buffers["live"][rows:] = 0
            self._buffers["length"][:, rows:] = 0
            self.show(rows)

    def leave(self, row: int, *, keep: bool = False) -> None:
        """Remove a row; the last one takes its place.

        ``keep``: whether segments without slots keep their buffers.
        """
        if not self.shared:
            self.resize(self.rows)
        last = self.rows - 1
        for layer in self.layers:
            layer.leave(row, keep=keep)
        for name, axis in _BY_ROW.items():
            if name in self._buffers and row != last:
                buffer = self._buffers[name]
                buffer.select(axis, row).copy_(buffer.select(axis, last))
        self._buffers["live"][last] = 0
        self._buffers["length"][:, last] = 0
        for values in (self.logical, self.base):
            values[row] = values[last]
            values.pop()
        self.show(last)

    def clear(self) -> None:
        """Remove all rows, but keep the buffers."""
        while self.rows:
            self.leave(self.rows - 1, keep=True)

    def clone(self, row: int | None = None, tokens: int = 0) -> KVCache:
        """A copy of all rows, or of one, that shares no mutable state.

        ``tokens``: how many more must fit in its buffers.
        """
        states = [index for index, layer in enumerate(self.layers) if layer.stateful]
        windows = [layer.window for layer in self.layers]
        twin = KVCache(len(self.layers), self.pool, windows, states)
        rows = slice(None) if row is None else slice(row, row + 1)
        try:
            twin.track, twin.attention_mass = self.track, self.attention_mass
            twin.logical, twin.base = self.logical[rows], self.base[rows]
            twin.length, twin.seen = self.length[:, rows].clone(), self.seen[rows].clone()
            for device, (length, seen) in self._copies.items():
                twin._copies[device] = length[:, rows].clone(), seen[rows].clone()
            for index, (layer, copy) in enumerate(zip(self.layers, twin.layers, strict=True)):
                copy.lazy_initialization(layer.keys, layer.values)
                length, seen = twin._counts(layer.device)
                copy.length, copy.seen, copy.evens = length[index], seen, layer.evens[rows]
                copy.max_lengths, copy.shift = layer.max_lengths[rows], layer.shift[rows]
                copy.gap = layer.gap[rows]
                if isinstance(copy, StateLayer) and isinstance(layer, StateLayer):
                    for name, state in layer.states.items():
                        copy.states[name] = state[rows].clone()
                for segment, stored in zip(layer.segments, layer.stored, strict=True):
                    if any(own := stored[rows]):
                        copy.segments.append(segment.select(rows).first(max(own)).clone())
                        copy.stored.append(own)
                copy.copy_slots(layer, rows, layer.enlarged(tokens, row or 0))
            if self.position is not None:
                twin.start(self.position[..., rows, :].clone())
        except BaseException:
            twin.release()
            raise
        return twin

    def release(self) -> None:
        """Return all buffers; the cache must not be used afterwards."""
        for layer in self.layers:
            layer.release()

    # --- sizes -----------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Bytes of all keys and values in use."""
        return sum(layer.held_bytes() for layer in self.layers)

    def row_bytes(self) -> int:
        """Bytes of the buffers of one row in a group, without segments."""
        total = 0
        for layer in self.layers:
            for name in SLOTWISE:
                if (x := getattr(layer, name)) is not None:
                    of_slot = x.element_size() * x.shape[1] * math.prod(x.shape[3:])
                    total += capacity_class(layer.capacity) * of_slot
        return total

    def lengths(self, row: int = 0) -> list[int]:
        """Slots in use per layer, of the longest head."""
        return [layer.slots(row) for layer in self.layers]


class RowSlots:
    """One row of one layer's tail, as decode stages see it (`core.protocols.Slots`)."""

    def __init__(
        self,
        cache: KVCache,
        layer: int,
        row: int,
        prompt: Tensor,
        notes: dict,
        rotate: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._cache, self._layer, self._row = cache, cache.layers[layer], row
        self.prompt, self.notes, self.rotate = prompt, notes, rotate

    @property
    def keys(self) -> Tensor:
        return self._layer.keys[self._row]

    @property
    def values(self) -> Tensor:
        return self._layer.values[self._row]

    @property
    def order(self) -> Tensor:
        assert self._layer.order is not None
        return self._layer.order[self._row]

    @property
    def attention_mass(self) -> Tensor:
        assert self._layer.attention_mass is not None
        return self._layer.attention_mass[self._row]

    @property
    def length(self) -> Tensor:
        return self._layer.length[self._row]

    @property
    def max_length(self) -> int:
        return self._layer.max_lengths[self._row]

    @property
    def seen(self) -> int:
        return self._cache.logical[self._row]

    def evict(self, slot: Tensor) -> None:
        last = (self.length - 1)[:, None]
        self._layer.copy(last[None], slot[None, :, None], slice(self._row, self._row + 1))
        self.length.sub_(1)
        self._layer.max_lengths[self._row] -= 1
        self._hold()

    def quantize(self, count: int, make: Callable[[Tensor, Tensor], Segment]) -> None:
        page = make(self.keys[:, :count], self.values[:, :count])
        self._layer.page(self._row, count, page)
        self._hold()

    def _hold(self) -> None:
        """Allow no crop beyond the tokens so far: not all of them have a slot of their own."""
        self._cache.base[self._row] = self._cache.logical[self._row]
