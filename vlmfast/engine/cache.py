"""The KV cache: grows layer by layer during prefill, then freezes into static buffers.

Three numbers are kept apart. *Logical* length counts the ids that were consumed; rotary ids follow
it. *Physical* length counts the slots in use of a layer, row and head; masks and memory
follow it, and it differs between layers, rows and heads as soon as something is dropped. *Capacity*
counts the slots of the buffers.

A frozen layer holds, per row and head, ``[segment]...[tail]``: quantized slots, then slots in the
model's dtype. New tokens go to the tail.

Some models have layers that attend within a *window*. As in the model itself, it counts the rows
that entered the layer: rows dropped before the layer do not count, rows evicted afterwards do.
After prefill such a layer holds the last ``window - 1`` rows, which are all that later tokens can
see, and cache stages work on these. Slots that leave the window during decoding are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from vlmfast.core.buffers import BufferPool, bucket
from vlmfast.core.former import FormerAttribute
from vlmfast.core.kv import KV
from vlmfast.kernels.quantize_kv import Segment

_FREE_SLOTS = 256  # that a frozen layer starts with at most, and gains when it is full
_NEAR = torch.iinfo(torch.int32).max
_SLOTWISE = ("keys", "values", "order", "rank", "attention_mass", "bias")


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
        Of a layer with a window whose slots may have gaps: the index of each slot's token among
        the rows that entered the layer, counted so that the next token's is ``seen``. In its
        segments, ``order`` holds the same. Without it, slots are contiguous up to the next token.
    attention_mass : Tensor, float32, (B, H, capacity), optional
        Attention received, where a decode stage reads it.
    bias : Tensor, float32, (B, H, capacity), optional
        Added to the logits of each slot.
    shift : list of int
        How much smaller this layer's rotary ids are than the running position, by row.
    window : int, optional
        How many rows a row of this layer sees, itself included; all of them if ``None``.
    gap : list of int
        Ids of each row's prompt that did not enter this layer.
    """

    is_compileable = False  # True would make generate() compile the model

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
        self.stored: list[list[int]] = []  # by segment and row: slots on the host
        self.segments: list[Segment] = []
        self.order: Tensor | None = None
        self.rank: Tensor | None = None
        self.attention_mass: Tensor | None = None
        self.bias: Tensor | None = None
        self.entered: Tensor | None = None  # (S,): ``order`` of the rows that entered the layer
        self.rows = 0  # how many rows entered
        self.gap: list[int] = [0]
        self.incoming: Tensor | None = None  # (T,): bias of the next tokens
        self.shift: list[int] = [0]
        self.even = True  # whether all heads of a row are equally long
        self.graph_owned = False  # whether the buffers belong to a captured step, which reuses them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def frozen(self) -> bool:
        return hasattr(self, "length")

    @property
    def prefix(self) -> bool:
        """Whether the slots in use are a prefix of the buffers, the same for all rows and heads.

        Hugging Face's own attention over this prefix is then bit-identical. On CUDA, shapes must
        not change between steps, so masks select the slots.
        """
        return (
            self.even
            and min(self.max_lengths) == max(self.max_lengths)
            and self.device.type == "cpu"
        )

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

    def slide(self) -> None:
        """Drop what later tokens cannot see: all but the last ``window - 1`` rows."""
        assert self.window is not None
        start = max(self.keys.shape[2] - self.window + 1, 0)
        # Copies, so that the rest is freed.
        self.keys, self.values = self.keys[:, :, start:].clone(), self.values[:, :, start:].clone()
        self.bias = None if self.bias is None else self.bias[..., start:]
        self.max_lengths = [self.keys.shape[2]]

    def put(self, kv: KV) -> None:
        """Replace the collected keys and values by the output of a cache stage."""
        self.kv, self.bias = kv, None
        self.keys = self.values = None  # type: ignore[assignment]  # not read before `freeze`
        self.max_lengths = [len(kv)]
        self.stored = [[int(segment.lengths.max())] for segment in kv.segments]

    def freeze(
        self,
        max_new_tokens: int,
        length: Tensor,
        seen: Tensor,
        logical: int,
        track: bool,
        attention_mass: bool,
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
        """
        kv, self.kv = self.kv, None
        order = masses = rank = None
        if kv is None:
            keys, values, bias = self.keys, self.values, self.bias
            length.fill_(keys.shape[2])
            bias = None if bias is None else bias.expand(1, keys.shape[1], -1)
        else:
            keys, values, order = kv.keys[None], kv.values[None], kv.order[None]
            bias, masses = (None if x is None else x[None] for x in (kv.bias, kv.attention_mass))
            length.copy_(kv.lengths[None])
            self.even = bool((kv.lengths == kv.lengths[0]).all())
            self.segments = [segment.unsqueeze() for segment in kv.segments]
            rank = self._ranked(kv, logical)
        self.gap, self.entered = [logical - self.rows], None
        self.length, self.seen, self.max_lengths = length, seen, [keys.shape[2]]
        capacity = bucket(keys.shape[2] + min(max_new_tokens, _FREE_SLOTS))
        self.keys, self.values = self._buffer(keys, capacity), self._buffer(values, capacity)
        self.bias = None if bias is None else self._buffer(bias, capacity)
        self.rank = None if rank is None else self._buffer(rank[None], capacity)
        if track:
            assert order is not None
            self.order = self._buffer(order, capacity)
        if attention_mass:
            start = torch.zeros(keys.shape[:3], device=keys.device) if masses is None else masses
            self.attention_mass = self._buffer(start, capacity)

    def _ranked(self, kv: KV, logical: int) -> Tensor | None:
        """`rank` of the slots of ``kv``, (H, N); also replaces the ``order`` of its segments."""
        if self.window is None:
            return None
        entered = self.entered
        assert entered is not None

        def rank(order: Tensor) -> Tensor:
            index = torch.searchsorted(entered, order.to(entered.dtype).contiguous())
            return (index + logical - self.rows).to(torch.int32)

        self.segments = [replace(s, order=rank(s.order)) for s in self.segments]
        return rank(kv.order)

    # --- buffers ---------------------------------------------------------------------------------

    def _buffer(self, source: Tensor, capacity: int) -> Tensor:
        """Copy (B, H, N, ...) to the beginning of a buffer of ``capacity`` slots."""
        shape = (*source.shape[:2], capacity, *source.shape[3:])
        buffer = self.pool.take(shape, source.dtype, source.device)
        taken = min(source.shape[2], capacity)
        buffer[:, :, :taken] = source[:, :, :taken]
        return buffer

    def _give(self, buffer: Tensor) -> None:
        if not self.graph_owned:
            self.pool.give(buffer)

    def _resize(self, capacity: int) -> None:
        for name in _SLOTWISE:
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, self._buffer(old, capacity))
                self._give(old)

    def reserve(self, tokens: int) -> None:
        """Make sure that ``tokens`` more fit in every row."""
        need = max(self.max_lengths) + tokens
        if need > self.keys.shape[2]:
            self._resize(bucket(need + max(_FREE_SLOTS - tokens, 0)))

    def _write(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        self.reserve(tokens)
        index = self.length[..., None] + torch.arange(tokens, device=self.device)
        if self.prefix:
            at = slice(self.max_lengths[0], self.max_lengths[0] + tokens)
            self.keys[:, :, at], self.values[:, :, at] = keys, values
        else:
            for buffer, new in ((self.keys, keys), (self.values, values)):
                buffer.scatter_(2, index[..., None].expand_as(new), new)
        if self.incoming is not None and self.bias is None:
            nothing = torch.zeros(*index.shape[:2], 0, device=self.device)
            self.bias = self._buffer(nothing, self.keys.shape[2])
        self.note(tokens)
        if self.incoming is not None and self.bias is not None:
            self.bias.scatter_(2, index, self.incoming.to(self.bias.dtype).expand_as(index))

    def note(self, tokens: int) -> None:
        """Initialize what accompanies the keys and values of the next ``tokens`` slots."""
        if all(x is None for x in (self.order, self.rank, self.attention_mass, self.bias)):
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

    def append(self, kv: KV, tokens: int) -> None:
        """Block-wise prefill: replace the last ``tokens`` that were written by ``kv``."""
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
        even = bool((kv.lengths == kv.lengths[0]).all())
        self.even = self.even and even
        self.max_lengths[0] = int(start.max())

    def mask(self, tokens: int, tree: Tensor | None = None, sliding: bool = False) -> Tensor:
        """Bool (B, H, T, capacity): slots that each of the next ``tokens`` may read.

        ``tree`` (B, T, T) marks which of these tokens see each other; a token that does not see
        itself sees nothing. Without it, attention is causal. ``sliding``: whether any slot in use
        is outside the layer's window.
        """
        slots = torch.arange(self.keys.shape[2], device=self.device)
        depth = self._depth(tokens, tree) if sliding else None
        if tree is not None:
            if depth is not None:
                assert self.window is not None
                tree = tree & (depth[:, :, None] - depth[:, None] < self.window)
            at = slots - self.length[..., None]  # (B, H, capacity): index among the new tokens
            new = (at >= 0) & (at < tokens)
            at = at.clamp(0, tokens - 1)[:, :, None].expand(-1, -1, tokens, -1)
            own = tree[:, None].expand(-1, at.shape[1], -1, -1).gather(3, at)
            old = (slots < self.length[..., None])[:, :, None]
            old = old & tree.diagonal(dim1=1, dim2=2)[:, None, :, None]
            if depth is not None:
                old = old & self._near(self.ranks(), depth)
            return torch.where(new[:, :, None], own, old)
        last = self.length[..., None] + torch.arange(tokens, device=self.device)
        mask = slots <= last[..., None]
        return mask if depth is None else mask & self._near(self.ranks(), depth)

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
        for name in _SLOTWISE:
            if self.frozen:
                self._give(getattr(self, name))
            setattr(self, name, None)
        self.segments, self.kv = [], None

    # --- rows ------------------------------------------------------------------------------------

    def page(self, row: int, count: int, page: Segment) -> None:
        """Replace the first ``count`` slots of a row's tail by ``page``, (H, ...)."""
        if self.bias is not None and page.bias is None:
            page = replace(page, bias=self.bias[row, :, :count].clone())
        if self.rank is not None:
            page = replace(page, order=self.rank[row, :, :count].clone())
        page = page.unsqueeze()
        kinds = [segment.key for segment in self.segments]
        if page.group and page.key in kinds:
            at = kinds.index(page.key)
        else:  # a segment with one set of parameters for all slots cannot grow
            at = len(kinds)
            self.segments.append(Segment.empty(page, len(self.max_lengths)))
            self.stored.append([0] * len(self.max_lengths))
        segment = self.segments[at]
        rows = []
        for b, stored in enumerate(self.stored[at]):
            own = segment.rows(torch.arange(b, b + 1, device=self.device)).first(stored)
            if b == row:
                own = own.append(page) if stored else page
            rows.append(own)
        self.segments[at] = rows[0] if len(rows) == 1 else Segment.cat(rows)
        self.stored[at][row] += count
        for name in _SLOTWISE:
            buffer = getattr(self, name)
            if buffer is not None:
                buffer[row, :, : buffer.shape[2] - count] = buffer[row, :, count:].clone()
        self.length[row].sub_(count)
        self.max_lengths[row] -= count

    def slots(self, row: int) -> int:
        """Physical length of a row: its segments and its tail, of the longest head."""
        return self.max_lengths[row] + sum(stored[row] for stored in self.stored)

    def held_bytes(self) -> int:
        """Bytes in use, including the parameters of segments, excluding free slots."""
        segments: Sequence[Segment] = ()
        if self.frozen:
            taken, segments = int(self.length.sum()), self.segments
        elif self.kv is not None:
            taken, segments = int(self.kv.lengths.sum()), self.kv.segments
        elif self.keys is None:  # the layer has not run yet
            return 0
        else:
            taken = self.keys.shape[1] * self.max_lengths[0]
        keys = self.kv.keys if self.kv is not None else self.keys
        each = 2 * keys.shape[-1] * keys.element_size()
        if self.frozen:
            extra = (self.order, self.rank, self.attention_mass, self.bias)
            each += sum(e.element_size() for e in extra if e is not None)
        return taken * each + sum(segment.held_bytes() for segment in segments)

    def get_seq_length(self) -> int:
        return int(self.seen.max()) if self.frozen else self.max_lengths[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.max_lengths) + query_length, 0

    def get_max_length(self) -> int:
        return -1


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

    Attributes (frozen)
    -------------------
    length : Tensor, int64, (L, B, H)
        Those of the layers are views of it.
    seen : Tensor, int64, (B,)
        Ids consumed, on the device.
    """

    layers: list[KVLayer]  # type: ignore[assignment]  # narrower than Hugging Face's: no others
    length: Tensor
    seen: Tensor

    def __init__(
        self,
        depth: int,
        pool: BufferPool | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.pool = pool or BufferPool(0)
        windows = [None] * depth if windows is None else windows
        super().__init__(layers=[KVLayer(self.pool, window) for window in windows])
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
        track: bool = False,
        attention_mass: bool = False,
    ) -> None:
        """End of prefill: move ``logical`` consumed ids to buffers for ``max_new_tokens`` more."""
        first = self.layers[0]
        heads = len(first.kv.keys) if first.kv is not None else first.keys.shape[1]
        shape = (len(self.layers), 1, heads)
        self.track, self.attention_mass = track, attention_mass
        self.length = torch.zeros(shape, dtype=torch.int64, device=first.device)
        self.seen = torch.full((1,), logical, device=first.device)
        self.logical = [logical]
        for layer, length in zip(self.layers, self.length, strict=True):
            layer.freeze(max_new_tokens, length, self.seen, logical, track, attention_mass)
        whole = all(layer.max_lengths == self.logical and layer.even for layer in self.layers)
        self.base = [0 if whole else logical]

    def sliding(self, layer: int, tokens: int) -> bool:
        """Whether a layer may hold slots outside the window of one of the next ``tokens``."""
        cached = self.layers[layer]
        if cached.window is None:
            return False
        spans = cached.max_lengths
        if cached.rank is not None:
            spans = [logical - gap for logical, gap in zip(self.logical, cached.gap, strict=True)]
        return max(spans) + tokens > cached.window

    def advance(self, tokens: int = 1) -> None:
        """Count ``tokens`` that the last forward pass wrote to every row."""
        self.advance_device(tokens)
        self.advance_host(tokens)

    def advance_device(self, tokens: int = 1) -> None:
        """The part of `advance` that a captured step repeats."""
        self.length.add_(tokens)
        self.seen.add_(tokens)

    def advance_host(self, tokens: int = 1) -> None:
        """The part of `advance` that a captured step does not repeat."""
        for layer in self.layers:
            layer.max_lengths = [length + tokens for length in layer.max_lengths]
        self.logical = [logical + tokens for logical in self.logical]

    def reserve(self, tokens: int) -> None:
        """Make sure that ``tokens`` more fit in every layer."""
        for layer in self.layers:
            layer.reserve(tokens)

    def state(self) -> dict[tuple, Tensor]:
        """Every tensor that a decode step reads or writes."""
        state: dict[tuple, Tensor] = {("length",): self.length, ("seen",): self.seen}
        for at, layer in enumerate(self.layers):
            for name in _SLOTWISE:
                if (buffer := getattr(layer, name)) is not None:
                    state[at, name] = buffer
            for number, segment in enumerate(layer.segments):
                for field in _tensors(segment):
                    state[at, number, field.name] = getattr(segment, field.name)
        return state

    def load(self, state: dict[tuple, Tensor]) -> None:
        """Switch to the tensors of ``state``, which hold the same values; return own buffers."""
        self.length, self.seen = state["length",], state["seen",]
        for at, (layer, length) in enumerate(zip(self.layers, self.length, strict=True)):
            layer.length, layer.seen = length, self.seen
            for name in _SLOTWISE:
                buffer = getattr(layer, name)
                if buffer is not None and buffer is not state[at, name]:
                    layer._give(buffer)
                    setattr(layer, name, state[at, name])
            layer.segments = [
                _replaced(segment, {f.name: state[at, number, f.name] for f in _tensors(segment)})
                for number, segment in enumerate(layer.segments)
            ]

    def mark_graph_owned(self, owned: bool) -> None:
        """Record whether the buffers belong to a captured step."""
        for layer in self.layers:
            layer.graph_owned = owned

    def consume(self, tokens: int) -> None:
        """Count ids of every row that were compressed: their slots are counted already."""
        if tokens:
            self._count(tokens)
            self.base = list(self.logical)

    def _count(self, tokens: int) -> None:
        self.seen.add_(tokens)
        self.logical = [logical + tokens for logical in self.logical]

    @contextmanager
    def biased(self, bias: Tensor | None) -> Iterator[None]:
        """Add ``bias`` (T,) to the logits of the tokens written inside the block."""
        for layer in self.layers:
            layer.incoming = bias
        try:
            yield
        finally:
            for layer in self.layers:
                layer.incoming = None

    def crop(self, tokens: int) -> None:
        """Remove the last ``tokens`` of every row.

        Raises
        ------
        ValueError
            Where a layer does not hold them in its tail, one slot each.
        """
        if self.track:
            raise ValueError("a cache that decode stages modify cannot be cropped")
        for logical, base in zip(self.logical, self.base, strict=True):
            if logical - tokens < base:
                raise ValueError(f"{tokens} tokens reach into the compressed part of the cache")
        self.length.sub_(tokens)
        for layer in self.layers:
            layer.max_lengths = [length - tokens for length in layer.max_lengths]
        self._count(-tokens)

    def accept(self, index: Tensor, counts: Sequence[int], *, moves: bool = True) -> None:
        """Keep the accepted tokens of those that the last forward pass wrote, and count them.

        Parameters
        ----------
        index : Tensor, int64, (B, A)
            Which of the T written tokens each row keeps, ascending; padded after ``counts``.
        counts : sequence of int
            How many of the A each row keeps.
        moves : bool
            Whether any token has to move; ``False`` where every row keeps its first ones.
        """
        kept = torch.tensor(counts, device=index.device)
        for layer in self.layers if moves else ():
            source = layer.length[..., None] + index[:, None]
            target = layer.length[..., None] + torch.arange(index.shape[1], device=index.device)
            for name in _SLOTWISE:
                buffer = getattr(layer, name)
                if buffer is None:
                    continue
                last = buffer.shape[2] - 1
                wide = (..., *(None,) * (buffer.dim() - 3))
                shape = (*source.shape, *buffer.shape[3:])
                moved = buffer.gather(2, source.clamp(max=last)[wide].expand(shape))
                buffer.scatter_(2, target.clamp(max=last)[wide].expand(shape), moved)
            for buffer in (layer.order, layer.rank):
                if buffer is not None:  # kept tokens are numbered without gaps
                    steps = torch.arange(index.shape[1], device=index.device)
                    order = (self.seen[:, None, None] + steps).to(buffer.dtype)
                    at = target.clamp(max=buffer.shape[2] - 1)
                    buffer.scatter_(2, at, order.expand_as(target))
        for layer in self.layers:
            layer.max_lengths = [
                length + n for length, n in zip(layer.max_lengths, counts, strict=True)
            ]
        self.length.add_(kept[None, :, None])
        self.seen.add_(kept)
        self.logical = [n + count for n, count in zip(self.logical, counts, strict=True)]

    # --- batches ---------------------------------------------------------------------------------

    @staticmethod
    def cat(caches: Sequence[KVCache]) -> KVCache:
        """One frozen cache with the rows of all ``caches``, which must not be used afterwards."""
        if len(caches) == 1:
            return caches[0]
        first = caches[0]
        joined = KVCache(len(first.layers), first.pool)
        joined.track = any(cache.track for cache in caches)
        joined.attention_mass = any(cache.attention_mass for cache in caches)
        joined.length = torch.cat([cache.length for cache in caches], dim=1)
        joined.seen = torch.cat([cache.seen for cache in caches])
        joined.logical = [n for cache in caches for n in cache.logical]
        joined.base = [n for cache in caches for n in cache.base]
        for at, layer in enumerate(joined.layers):
            parts = [cache.layers[at] for cache in caches]
            layer.lazy_initialization(parts[0].keys, parts[0].values)
            layer.length, layer.seen = joined.length[at], joined.seen
            layer.max_lengths = [n for part in parts for n in part.max_lengths]
            layer.shift = [n for part in parts for n in part.shift]
            layer.gap = [n for part in parts for n in part.gap]
            layer.window = next((p.window for p in parts if p.window is not None), None)
            own = {part.window for part in parts}
            ranked = len(own) > 1 or any(part.rank is not None for part in parts)
            layer.even = all(part.even for part in parts)
            capacity = bucket(max(layer.max_lengths) + _FREE_SLOTS)
            for name, wanted in (
                ("keys", True),
                ("values", True),
                ("order", joined.track),
                ("rank", ranked),
                ("attention_mass", joined.attention_mass),
                ("bias", any(part.bias is not None for part in parts)),
            ):
                if wanted:
                    setattr(layer, name, _stacked(layer, name, parts, capacity))
            for part in parts:  # all of it fits into the window, also for later tokens
                if part.window is None and layer.window is not None:
                    part.segments = [
                        replace(s, order=torch.full_like(s.order, _NEAR)) for s in part.segments
                    ]
            _join_segments(layer, parts)
            for part in parts:
                part.release()
        return joined

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``, in that order."""
        index = torch.tensor(list(rows), device=self.length.device)
        self.length = self.length.index_select(1, index)
        self.seen = self.seen.index_select(0, index)
        self.logical = [self.logical[row] for row in rows]
        self.base = [self.base[row] for row in rows]
        for layer, length in zip(self.layers, self.length, strict=True):
            layer.length, layer.seen = length, self.seen
            layer.max_lengths, layer.shift, layer.gap = (
                [values[row] for row in rows]
                for values in (layer.max_lengths, layer.shift, layer.gap)
            )
            layer.stored = [[stored[row] for row in rows] for stored in layer.stored]
            for name in _SLOTWISE:
                old = getattr(layer, name)
                if old is not None:
                    shape = (len(rows), *old.shape[1:])
                    buffer = layer.pool.take(shape, old.dtype, old.device)
                    torch.index_select(old, 0, index, out=buffer)
                    setattr(layer, name, buffer)
                    layer._give(old)
            layer.segments = [segment.rows(index) for segment in layer.segments]
            kept = [at for at, stored in enumerate(layer.stored) if any(stored)]
            layer.segments = [layer.segments[at] for at in kept]
            layer.stored = [layer.stored[at] for at in kept]

    def clone(self) -> KVCache:
        """A copy that shares no mutable state."""
        twin = KVCache(len(self.layers), self.pool, [layer.window for layer in self.layers])
        twin.track, twin.attention_mass = self.track, self.attention_mass
        twin.logical, twin.base = list(self.logical), list(self.base)
        twin.length, twin.seen = self.length.clone(), self.seen.clone()
        for layer, copy, length in zip(self.layers, twin.layers, twin.length, strict=True):
            copy.lazy_initialization(layer.keys, layer.values)
            copy.length, copy.seen, copy.even = length, twin.seen, layer.even
            copy.max_lengths, copy.shift = list(layer.max_lengths), list(layer.shift)
            copy.gap = list(layer.gap)
            # Segments are immutable, unless a captured step owns them: pages make a new one.
            copy.segments = [
                _replaced(s, {f.name: getattr(s, f.name).clone() for f in _tensors(s)})
                if layer.graph_owned
                else s
                for s in layer.segments
            ]
            copy.stored = [list(s) for s in layer.stored]
            for name in _SLOTWISE:
                buffer = getattr(layer, name)
                if buffer is not None:
                    setattr(copy, name, copy._buffer(buffer, buffer.shape[2]))
        return twin

    def release(self) -> None:
        """Return all buffers; the cache must not be used afterwards."""
        for layer in self.layers:
            layer.release()

    # --- sizes -----------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Bytes of all keys and values in use."""
        return sum(layer.held_bytes() for layer in self.layers)

    def lengths(self, row: int = 0) -> list[int]:
        """Slots in use per layer, of the longest head."""
        return [layer.slots(row) for layer in self.layers]


def _tensors(segment: Segment) -> list[Field]:
    return [f for f in fields(segment) if isinstance(getattr(segment, f.name), Tensor)]


def _replaced(segment: Segment, tensors: dict[str, Any]) -> Segment:
    return replace(segment, **tensors)


def _stacked(layer: KVLayer, name: str, parts: Sequence[KVLayer], capacity: int) -> Tensor:
    """A buffer with the rows of all parts; zeros where a part has none."""
    like = next(getattr(part, name) for part in parts if getattr(part, name) is not None)
    rows = sum(len(part.max_lengths) for part in parts)
    shape = (rows, like.shape[1], capacity, *like.shape[3:])
    buffer, row = layer.pool.take(shape, like.dtype, like.device), 0
    for part in parts:
        own, count = part.ranks() if name == "rank" else getattr(part, name), max(part.max_lengths)
        if own is not None:
            buffer[row : row + len(part.max_lengths), :, :count] = own[:, :, :count]
        row += len(part.max_lengths)
    return buffer


def _join_segments(layer: KVLayer, parts: Sequence[KVLayer]) -> None:
    """Join segments of the same kind; rows without one get an empty segment."""
    # A layer may hold several of one kind: the first of each are joined, then the second.
    kinds: dict[tuple, Segment] = {}
    indices: list[dict[tuple, int]] = []
    for part in parts:
        keys, index = [segment.key for segment in part.segments], {}
        for at, segment in enumerate(part.segments):
            kind = segment.key, keys[:at].count(segment.key)
            index[kind] = at
            kinds.setdefault(kind, segment)
        indices.append(index)
    for kind, like in kinds.items():
        pieces, stored = [], []
        for part, index in zip(parts, indices, strict=True):
            rows, own = len(part.max_lengths), index.get(kind)
            pieces.append(Segment.empty(like, rows) if own is None else part.segments[own])
            stored += [0] * rows if own is None else part.stored[own]
        layer.segments.append(Segment.cat(pieces))
        layer.stored.append(stored)


class RowSlots:
    """One row of one layer's tail, as decode stages see it (`core.protocols.Slots`)."""

    mass = FormerAttribute("attention_mass")
    held = FormerAttribute("max_length")

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
        for name in _SLOTWISE:
            buffer = getattr(self._layer, name)
            if buffer is not None:
                row = buffer[self._row]
                wide = (..., *(None,) * (row.dim() - 2))
                shape = (len(row), 1, *row.shape[2:])
                moved = row.gather(1, last[wide].expand(shape))
                row.scatter_(1, slot[:, None][wide].expand(shape), moved)
        self.length.sub_(1)
        self._layer.max_lengths[self._row] -= 1

    def quantize(self, count: int, make: Callable[[Tensor, Tensor], Segment]) -> None:
        page = make(self.keys[:, :count], self.values[:, :count])
        self._layer.page(self._row, count, page)
