"""The KV cache: grows layer by layer during prefill, then freezes into static buffers.

Three numbers are kept apart. *Logical* length counts the ids that were consumed; rotary ids follow
it. *Physical* length counts the slots that a layer, row and head really holds; masks and memory
follow it, and it differs between layers, rows and heads as soon as something is dropped. *Capacity*
is what the buffers could hold.

A frozen layer holds, per row and head, ``[segment]...[tail]``: quantised slots, then slots in the
model's dtype. New tokens go to the tail.

Some models have layers that attend within a *window*. It counts the rows that entered the layer, as
the model itself does: rows that were dropped before are no part of the sequence, rows that were
evicted afterwards are. After prefill such a layer holds the last ``window - 1`` rows, which are all
that later tokens can see, and cache stages work on these. What leaves the window during the answer
is masked.
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
from vlmfast.core.kv import KV
from vlmfast.kernels.quantize_kv import Segment

_ROOM = 256  # free slots that a frozen layer starts with at most, and gains when it is full
_NEAR = torch.iinfo(torch.int32).max
_SLOTWISE = ("keys", "values", "order", "rank", "mass", "bias")


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, for one row during prefill and for B rows afterwards.

    While collecting, ``keys`` and ``values`` are (1, H, S, D), or ``kv`` holds what a cache stage
    made of them.

    Attributes (frozen)
    -------------------
    keys, values : Tensor, (B, H, capacity, D)
        The tail.
    length : Tensor, int64, (B, H)
        Slots of the tail that are taken; on the device, a view into `KVCache.length`.
    held : list of int
        The largest of each row's lengths, on the host.
    segments : list of Segment
        Quantised slots, leading dimensions (B, H), one of each kind.
    order : Tensor, int64, (B, H, capacity), optional
        Index of each slot's token in the full sequence, where a decode stage reads it.
    rank : Tensor, int32, (B, H, capacity), optional
        Of a layer with a window whose slots may have gaps: the place of each slot's token among
        the rows that entered the layer, counted so that the next token's is ``seen``. The ``order``
        of its segments says the same. Without it, slots follow each other up to the next token.
    mass : Tensor, float32, (B, H, capacity), optional
        Attention received, where a decode stage reads it.
    bias : Tensor, float32, (B, H, capacity), optional
        Added to the logits of each slot.
    shift : list of int
        How far this layer's rotary ids lie behind the running position, by row.
    window : int, optional
        How many rows a row of this layer sees, itself included; all of them without it.
    gap : list of int
        Ids of each row's prompt that did not enter this layer.
    """

    is_compileable = False  # True would make generate() compile the model by itself

    # Hugging Face's class says `None` of a layer that has not run; nothing but `update` and
    # `held_bytes` reads them then. What follows is there once the layer is `frozen`.
    keys: Tensor
    values: Tensor
    length: Tensor
    seen: Tensor

    def __init__(self, pool: BufferPool, window: int | None = None) -> None:
        super().__init__()
        self.pool, self.window = pool, window
        self.kv: KV | None = None
        self.held: list[int] = [0]
        self.stored: list[list[int]] = []  # by segment and row: slots on the host
        self.segments: list[Segment] = []
        self.order: Tensor | None = None
        self.rank: Tensor | None = None
        self.mass: Tensor | None = None
        self.bias: Tensor | None = None
        self.entered: Tensor | None = None  # (S,): ``order`` of the rows that entered the layer
        self.rows = 0  # how many these are
        self.gap: list[int] = [0]
        self.incoming: Tensor | None = None  # (T,): bias of the tokens that come next
        self.shift: list[int] = [0]
        self.even = True  # whether all heads of a row are equally long
        self.lent = False  # whether buffers belong to a captured step, which will use them again

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def frozen(self) -> bool:
        return hasattr(self, "length")

    @property
    def prefix(self) -> bool:
        """Whether what is there is a plain prefix of the buffers, the same for all rows and heads.

        Hugging Face's own attention on it then gives Hugging Face's own bits. On CUDA shapes must
        not change from step to step, so masks say what is there.
        """
        return self.even and min(self.held) == max(self.held) and self.device.type == "cpu"

    # --- prefill ---------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D). A frozen layer writes behind ``length`` without advancing it."""
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
        self.held = [self.rows]
        return self.keys, self.values

    def slide(self) -> None:
        """Let go of what later tokens cannot see: all but the last ``window - 1`` rows."""
        assert self.window is not None
        start = max(self.keys.shape[2] - self.window + 1, 0)
        # Copies, so that the rest is freed.
        self.keys, self.values = (of[:, :, start:].clone() for of in (self.keys, self.values))
        self.bias = None if self.bias is None else self.bias[..., start:]
        self.held = [self.keys.shape[2]]

    def put(self, kv: KV) -> None:
        """What a cache stage left of the prompt takes the place of what was collected."""
        self.kv, self.bias = kv, None
        self.keys = self.values = None  # type: ignore[assignment]  # not read before `freeze`
        self.held = [len(kv)]
        self.stored = [[int(segment.lengths.max())] for segment in kv.segments]

    def freeze(
        self, room: int, length: Tensor, seen: Tensor, logical: int, track: bool, mass: bool
    ) -> None:
        """Move to buffers with ``room`` free slots.

        Parameters
        ----------
        length : Tensor, (1, H)
            Where to count slots.
        seen : Tensor, (1,)
            Where the ids consumed so far are counted.
        logical : int
            How many that are.
        track, mass : bool
            Whether decode stages read ``order`` and ``mass``; only of layers that were `put`.
        """
        kv, self.kv = self.kv, None
        order = masses = rank = None
        if kv is None:
            keys, values, bias = self.keys, self.values, self.bias
            length.fill_(keys.shape[2])
            bias = None if bias is None else bias.expand(1, keys.shape[1], -1)
        else:
            keys, values, order = kv.keys[None], kv.values[None], kv.order[None]
            bias, masses = (None if of is None else of[None] for of in (kv.bias, kv.mass))
            length.copy_(kv.lengths[None])
            self.even = bool((kv.lengths == kv.lengths[0]).all())
            self.segments = [segment.unsqueeze() for segment in kv.segments]
            rank = self._ranked(kv, logical)
        self.gap, self.entered = [logical - self.rows], None
        self.length, self.seen, self.held = length, seen, [keys.shape[2]]
        capacity = bucket(keys.shape[2] + min(room, _ROOM))
        self.keys, self.values = (self._buffer(of, capacity) for of in (keys, values))
        self.bias = None if bias is None else self._buffer(bias, capacity)
        self.rank = None if rank is None else self._buffer(rank[None], capacity)
        if track:
            assert order is not None
            self.order = self._buffer(order, capacity)
        if mass:
            start = torch.zeros(keys.shape[:3], device=keys.device) if masses is None else masses
            self.mass = self._buffer(start, capacity)

    def _ranked(self, kv: KV, logical: int) -> Tensor | None:
        """`rank` of the slots of ``kv``, (H, N); that of its segments takes their ``order``."""
        if self.window is None:
            return None
        entered = self.entered
        assert entered is not None

        def rank(order: Tensor) -> Tensor:
            place = torch.searchsorted(entered, order.to(entered.dtype).contiguous())
            return (place + logical - self.rows).to(torch.int32)

        self.segments = [replace(of, order=rank(of.order)) for of in self.segments]
        return rank(kv.order)

    # --- buffers ---------------------------------------------------------------------------------

    def _buffer(self, of: Tensor, capacity: int) -> Tensor:
        """(B, H, N, ...) at the beginning of a buffer of ``capacity`` slots."""
        shape = (*of.shape[:2], capacity, *of.shape[3:])
        buffer = self.pool.take(shape, of.dtype, of.device)
        taken = min(of.shape[2], capacity)
        buffer[:, :, :taken] = of[:, :, :taken]
        return buffer

    def _give(self, buffer: Tensor) -> None:
        if not self.lent:
            self.pool.give(buffer)

    def _resize(self, capacity: int) -> None:
        for name in _SLOTWISE:
            of = getattr(self, name)
            if of is not None:
                setattr(self, name, self._buffer(of, capacity))
                self._give(of)

    def reserve(self, tokens: int) -> None:
        """Make sure that ``tokens`` more fit in every row."""
        need = max(self.held) + tokens
        if need > self.keys.shape[2]:
            self._resize(bucket(need + max(_ROOM - tokens, 0)))

    def _write(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        self.reserve(tokens)
        index = self.length[..., None] + torch.arange(tokens, device=self.device)
        if self.prefix:
            at = slice(self.held[0], self.held[0] + tokens)
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
        """What is known of the next ``tokens`` slots beside keys and values."""
        if all(of is None for of in (self.order, self.rank, self.mass, self.bias)):
            return
        steps = torch.arange(tokens, device=self.device)
        index = self.length[..., None] + steps
        for of in (self.order, self.rank):
            if of is not None:
                new = (self.seen[:, None, None] + steps).to(of.dtype)
                of.scatter_(2, index, new.expand_as(index))
        for of in (self.mass, self.bias):  # slots may have been taken before
            if of is not None:
                of.scatter_(2, index, torch.zeros_like(index, dtype=of.dtype))

    def append(self, kv: KV, tokens: int) -> None:
        """Block-wise prefill: ``kv`` takes the place of the last ``tokens`` that were written."""
        kept = len(kv)
        start = self.length[0]
        index = start[:, None] + torch.arange(kept, device=self.device)
        for buffer, new in ((self.keys, kv.keys), (self.values, kv.values)):
            at = index[..., None].expand_as(new)
            buffer[0].scatter_(1, at, new.to(self.dtype))
        for of, beside in ((self.order, kv.order), (self.mass, kv.mass), (self.bias, kv.bias)):
            if of is not None and beside is not None:
                of[0].scatter_(1, index, beside.to(of.dtype))
        start.add_(kv.lengths)
        even = bool((kv.lengths == kv.lengths[0]).all())
        self.even = self.even and even
        self.held[0] = int(start.max())

    def mask(self, tokens: int, tree: Tensor | None = None, sliding: bool = False) -> Tensor:
        """Bool (B, H, T, capacity): slots that each of the next ``tokens`` may read.

        ``tree`` (B, T, T) says which of these tokens see each other, one that does not see itself
        sees nothing; without it each sees those before it. ``sliding`` says whether some of what
        is there lies outside the layer's window.
        """
        slots = torch.arange(self.keys.shape[2], device=self.device)
        depth = self._depth(tokens, tree) if sliding else None
        if tree is not None:
            if depth is not None:
                assert self.window is not None
                tree = tree & (depth[:, :, None] - depth[:, None] < self.window)
            at = slots - self.length[..., None]  # (B, H, capacity): place among the new tokens
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
        """`rank`, or what it would be: (B, H, capacity)."""
        if self.rank is not None:
            return self.rank
        slots = torch.arange(self.keys.shape[2], device=self.device)
        return (self.seen[:, None] - self.length)[..., None] + slots

    def _depth(self, tokens: int, tree: Tensor | None) -> Tensor:
        """(B or 1, T): how far each of the next ``tokens`` stands after the first of them."""
        if tree is None:
            return torch.arange(tokens, device=self.device)[None]
        return tree.sum(-1) - 1

    def _near(self, rank: Tensor, depth: Tensor) -> Tensor:
        """Bool (B, H, T, N): which slots of ``rank`` lie in the window of each token."""
        assert self.window is not None
        first = self.seen[:, None] + depth - self.window + 1
        return rank[:, :, None] >= first[:, None, :, None]

    def opened(
        self, segment: Segment, tokens: int, tree: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Keys, values (B, H, N, D), mask (B, H, T, N) and bias of a segment, as of a tail."""
        keys, values = segment.dequantise(dtype)
        mask = segment.valid[:, :, None] & self._near(segment.order, self._depth(tokens, tree))
        if tree is not None:
            mask = mask & tree.diagonal(dim1=1, dim2=2)[:, None, :, None]
        return keys, values, mask, segment.bias

    def receive(self, mass: Tensor, sliding: bool) -> None:
        """Count the attention that the first N slots of the tail have just received, (B, H, N).

        What has left the window will never receive any again and weighs nothing.
        """
        assert self.mass is not None
        self.mass[:, :, : mass.shape[2]] += mass
        if sliding:
            assert self.window is not None
            gone = self.ranks() <= (self.seen - self.window)[:, None, None]
            self.mass.masked_fill_(gone, 0.0)

    def release(self) -> None:
        """Give the buffers back; the layer is not used again."""
        for name in _SLOTWISE:
            if self.frozen:
                self._give(getattr(self, name))
            setattr(self, name, None)
        self.segments, self.kv = [], None

    # --- rows ------------------------------------------------------------------------------------

    def page(self, row: int, count: int, page: Segment) -> None:
        """The first ``count`` slots of a row's tail have become ``page``, (H, ...)."""
        if self.bias is not None and page.bias is None:
            page = replace(page, bias=self.bias[row, :, :count].clone())
        if self.rank is not None:
            page = replace(page, order=self.rank[row, :, :count].clone())
        page = page.unsqueeze()
        kinds = [segment.key for segment in self.segments]
        if page.group and page.key in kinds:
            at = kinds.index(page.key)
        else:  # slots that share their parameters all together cannot grow
            at = len(kinds)
            self.segments.append(Segment.empty(page, len(self.held)))
            self.stored.append([0] * len(self.held))
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
            of = getattr(self, name)
            if of is not None:
                of[row, :, : of.shape[2] - count] = of[row, :, count:].clone()
        self.length[row].sub_(count)
        self.held[row] -= count

    def slots(self, row: int) -> int:
        """Physical length of a row: its segments and its tail, of the longest head."""
        return self.held[row] + sum(stored[row] for stored in self.stored)

    def held_bytes(self) -> int:
        """Bytes of what is held now, parameters of segments included, free slots not."""
        segments: Sequence[Segment] = ()
        if self.frozen:
            taken, segments = int(self.length.sum()), self.segments
        elif self.kv is not None:
            taken, segments = int(self.kv.lengths.sum()), self.kv.segments
        elif self.keys is None:  # the layer has not run yet
            return 0
        else:
            taken = self.keys.shape[1] * self.held[0]
        of = self.kv.keys if self.kv is not None else self.keys
        each = 2 * of.shape[-1] * of.element_size()
        if self.frozen:
            extra = (self.order, self.rank, self.mass, self.bias)
            each += sum(e.element_size() for e in extra if e is not None)
        return taken * each + sum(segment.held_bytes() for segment in segments)

    def get_seq_length(self) -> int:
        return int(self.seen.max()) if self.frozen else self.held[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.held) + query_length, 0

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
        Of each layer; none by default.

    Attributes (frozen)
    -------------------
    length : Tensor, int64, (L, B, H)
        The layers' own are views of it.
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
        self.base: list[int] = []  # ids by row that were compressed, or came in front of such
        self.track = self.mass = False

    @property
    def rows(self) -> int:
        return len(self.logical)

    def freeze(self, room: int, logical: int, *, track: bool = False, mass: bool = False) -> None:
        """End of prefill: buffers for about ``room`` more tokens; ``logical`` ids consumed."""
        first = self.layers[0]
        heads = len(first.kv.keys) if first.kv is not None else first.keys.shape[1]
        shape = (len(self.layers), 1, heads)
        self.track, self.mass = track, mass
        self.length = torch.zeros(shape, dtype=torch.int64, device=first.device)
        self.seen = torch.full((1,), logical, device=first.device)
        self.logical = [logical]
        for layer, length in zip(self.layers, self.length, strict=True):
            layer.freeze(room, length, self.seen, logical, track, mass)
        whole = all(layer.held == self.logical and layer.even for layer in self.layers)
        self.base = [0 if whole else logical]

    def sliding(self, layer: int, tokens: int) -> bool:
        """Whether a layer may hold something outside the window of one of the next ``tokens``."""
        held = self.layers[layer]
        if held.window is None:
            return False
        spans = held.held
        if held.rank is not None:
            spans = [logical - gap for logical, gap in zip(self.logical, held.gap, strict=True)]
        return max(spans) + tokens > held.window

    def advance(self, tokens: int = 1) -> None:
        """Count ``tokens`` that the last pass wrote to every row."""
        self.advance_device(tokens)
        self.advance_host(tokens)

    def advance_device(self, tokens: int = 1) -> None:
        """The part of `advance` that a captured step repeats."""
        self.length.add_(tokens)
        self.seen.add_(tokens)

    def advance_host(self, tokens: int = 1) -> None:
        """The part of `advance` that it does not."""
        for layer in self.layers:
            layer.held = [held + tokens for held in layer.held]
        self.logical = [logical + tokens for logical in self.logical]

    def reserve(self, tokens: int) -> None:
        """Make sure that every layer has room for ``tokens`` more."""
        for layer in self.layers:
            layer.reserve(tokens)

    def state(self) -> dict[tuple, Tensor]:
        """Every tensor that a decode step reads or writes, by its place."""
        state: dict[tuple, Tensor] = {("length",): self.length, ("seen",): self.seen}
        for at, layer in enumerate(self.layers):
            for name in _SLOTWISE:
                if (of := getattr(layer, name)) is not None:
                    state[at, name] = of
            for number, segment in enumerate(layer.segments):
                for field in _tensors(segment):
                    state[at, number, field.name] = getattr(segment, field.name)
        return state

    def load(self, state: dict[tuple, Tensor]) -> None:
        """Go on in the tensors of ``state``, which hold the same; own buffers are given back."""
        self.length, self.seen = state["length",], state["seen",]
        for at, (layer, length) in enumerate(zip(self.layers, self.length, strict=True)):
            layer.length, layer.seen = length, self.seen
            for name in _SLOTWISE:
                of = getattr(layer, name)
                if of is not None and of is not state[at, name]:
                    layer._give(of)
                    setattr(layer, name, state[at, name])
            layer.segments = [
                _replaced(segment, {f.name: state[at, number, f.name] for f in _tensors(segment)})
                for number, segment in enumerate(layer.segments)
            ]

    def lend(self, lent: bool) -> None:
        """Whether the buffers belong to a captured step."""
        for layer in self.layers:
            layer.lent = lent

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
        """What is written meanwhile has ``bias`` (T,) added to its logits."""
        for layer in self.layers:
            layer.incoming = bias
        try:
            yield
        finally:
            for layer in self.layers:
                layer.incoming = None

    def crop(self, tokens: int) -> None:
        """Forget the last ``tokens`` of every row.

        Raises
        ------
        ValueError
            Where a layer does not hold them in its tail, one slot each.
        """
        if self.track:
            raise ValueError("a cache that decode stages rework cannot be cropped")
        for logical, base in zip(self.logical, self.base, strict=True):
            if logical - tokens < base:
                raise ValueError(f"{tokens} tokens reach into the compressed part of the cache")
        self.length.sub_(tokens)
        for layer in self.layers:
            layer.held = [held - tokens for held in layer.held]
        self._count(-tokens)

    def accept(self, index: Tensor, counts: Sequence[int], *, moves: bool = True) -> None:
        """Keep some of the tokens that the last pass wrote behind the tail, and count them.

        Parameters
        ----------
        index : Tensor, int64, (B, A)
            Which of the T written tokens each row keeps, ascending; behind ``counts`` anything.
        counts : sequence of int
            How many of the A each row keeps.
        moves : bool
            Whether any of them has to move up; ``False`` where every row keeps its first ones.
        """
        kept = torch.tensor(counts, device=index.device)
        for layer in self.layers if moves else ():
            source = layer.length[..., None] + index[:, None]
            target = layer.length[..., None] + torch.arange(index.shape[1], device=index.device)
            for name in _SLOTWISE:
                of = getattr(layer, name)
                if of is None:
                    continue
                wide = (..., *(None,) * (of.dim() - 3))
                shape = (*source.shape, *of.shape[3:])
                moved = of.gather(2, source.clamp(max=of.shape[2] - 1)[wide].expand(shape))
                of.scatter_(2, target.clamp(max=of.shape[2] - 1)[wide].expand(shape), moved)
            for of in (layer.order, layer.rank):
                if of is not None:  # what is kept follows without gaps
                    steps = torch.arange(index.shape[1], device=index.device)
                    order = (self.seen[:, None, None] + steps).to(of.dtype)
                    of.scatter_(2, target.clamp(max=of.shape[2] - 1), order.expand_as(target))
        for layer in self.layers:
            layer.held = [held + count for held, count in zip(layer.held, counts, strict=True)]
        self.length.add_(kept[None, :, None])
        self.seen.add_(kept)
        self.logical = [n + count for n, count in zip(self.logical, counts, strict=True)]

    # --- batches ---------------------------------------------------------------------------------

    @staticmethod
    def cat(caches: Sequence[KVCache]) -> KVCache:
        """One frozen cache with the rows of all ``caches``, which are used up."""
        if len(caches) == 1:
            return caches[0]
        first = caches[0]
        joined = KVCache(len(first.layers), first.pool)
        joined.track = any(cache.track for cache in caches)
        joined.mass = any(cache.mass for cache in caches)
        joined.length = torch.cat([cache.length for cache in caches], dim=1)
        joined.seen = torch.cat([cache.seen for cache in caches])
        joined.logical = [n for cache in caches for n in cache.logical]
        joined.base = [n for cache in caches for n in cache.base]
        for at, layer in enumerate(joined.layers):
            parts = [cache.layers[at] for cache in caches]
            layer.lazy_initialization(parts[0].keys, parts[0].values)
            layer.length, layer.seen = joined.length[at], joined.seen
            layer.held = [n for part in parts for n in part.held]
            layer.shift = [n for part in parts for n in part.shift]
            layer.gap = [n for part in parts for n in part.gap]
            layer.window = next((p.window for p in parts if p.window is not None), None)
            own = {part.window for part in parts}
            ranked = len(own) > 1 or any(part.rank is not None for part in parts)
            layer.even = all(part.even for part in parts)
            capacity = bucket(max(layer.held) + _ROOM)
            for name, wanted in (
                ("keys", True),
                ("values", True),
                ("order", joined.track),
                ("rank", ranked),
                ("mass", joined.mass),
                ("bias", any(part.bias is not None for part in parts)),
            ):
                if wanted:
                    setattr(layer, name, _stacked(layer, name, parts, capacity))
            for part in parts:  # all of it fits into the window: near to whatever comes
                if part.window is None and layer.window is not None:
                    part.segments = [
                        replace(of, order=torch.full_like(of.order, _NEAR)) for of in part.segments
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
            layer.held, layer.shift, layer.gap = (
                [of[row] for row in rows] for of in (layer.held, layer.shift, layer.gap)
            )
            layer.stored = [[of[row] for row in rows] for of in layer.stored]
            for name in _SLOTWISE:
                of = getattr(layer, name)
                if of is not None:
                    shape = (len(rows), *of.shape[1:])
                    buffer = layer.pool.take(shape, of.dtype, of.device)
                    torch.index_select(of, 0, index, out=buffer)
                    setattr(layer, name, buffer)
                    layer._give(of)
            layer.segments = [segment.rows(index) for segment in layer.segments]
            kept = [at for at, stored in enumerate(layer.stored) if any(stored)]
            layer.segments = [layer.segments[at] for at in kept]
            layer.stored = [layer.stored[at] for at in kept]

    def clone(self) -> KVCache:
        """A copy that shares nothing that changes."""
        twin = KVCache(len(self.layers), self.pool, [layer.window for layer in self.layers])
        twin.track, twin.mass = self.track, self.mass
        twin.logical, twin.base = list(self.logical), list(self.base)
        twin.length, twin.seen = self.length.clone(), self.seen.clone()
        for layer, copy, length in zip(self.layers, twin.layers, twin.length, strict=True):
            copy.lazy_initialization(layer.keys, layer.values)
            copy.length, copy.seen, copy.even = length, twin.seen, layer.even
            copy.held, copy.shift = list(layer.held), list(layer.shift)
            copy.gap = list(layer.gap)
            # A segment is never written to, unless a captured step owns it: pages make a new one.
            copy.segments = [
                _replaced(s, {f.name: getattr(s, f.name).clone() for f in _tensors(s)})
                if layer.lent
                else s
                for s in layer.segments
            ]
            copy.stored = [list(s) for s in layer.stored]
            for name in _SLOTWISE:
                of = getattr(layer, name)
                if of is not None:
                    setattr(copy, name, copy._buffer(of, of.shape[2]))
        return twin

    def release(self) -> None:
        """Give all buffers back; the cache is not used again."""
        for layer in self.layers:
            layer.release()

    # --- what is held ----------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Bytes of all keys and values held now."""
        return sum(layer.held_bytes() for layer in self.layers)

    def lengths(self, row: int = 0) -> list[int]:
        """Slots held per layer, of the longest head."""
        return [layer.slots(row) for layer in self.layers]


def _tensors(segment: Segment) -> list[Field]:
    return [f for f in fields(segment) if isinstance(getattr(segment, f.name), Tensor)]


def _replaced(segment: Segment, tensors: dict[str, Any]) -> Segment:
    return replace(segment, **tensors)


def _stacked(layer: KVLayer, name: str, parts: Sequence[KVLayer], capacity: int) -> Tensor:
    """A buffer with the rows of all parts; zeros where a part has none."""
    like = next(getattr(part, name) for part in parts if getattr(part, name) is not None)
    rows = sum(len(part.held) for part in parts)
    shape = (rows, like.shape[1], capacity, *like.shape[3:])
    buffer, row = layer.pool.take(shape, like.dtype, like.device), 0
    for part in parts:
        of, count = part.ranks() if name == "rank" else getattr(part, name), max(part.held)
        if of is not None:
            buffer[row : row + len(part.held), :, :count] = of[:, :, :count]
        row += len(part.held)
    return buffer


def _join_segments(layer: KVLayer, parts: Sequence[KVLayer]) -> None:
    """Segments of one kind stand together; rows that have none of it get an empty one."""
    # A layer may hold several of one kind: the first of each stand together, then the second.
    kinds: dict[tuple, Segment] = {}
    places: list[dict[tuple, int]] = []
    for part in parts:
        keys, place = [segment.key for segment in part.segments], {}
        for at, segment in enumerate(part.segments):
            kind = segment.key, keys[:at].count(segment.key)
            place[kind] = at
            kinds.setdefault(kind, segment)
        places.append(place)
    for kind, like in kinds.items():
        pieces, stored = [], []
        for part, place in zip(parts, places, strict=True):
            rows, own = len(part.held), place.get(kind)
            pieces.append(Segment.empty(like, rows) if own is None else part.segments[own])
            stored += [0] * rows if own is None else part.stored[own]
        layer.segments.append(Segment.cat(pieces))
        layer.stored.append(stored)


class RowSlots:
    """One row of one layer's tail, as decode stages see it (`stages.Slots`)."""

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
    def mass(self) -> Tensor:
        assert self._layer.mass is not None
        return self._layer.mass[self._row]

    @property
    def length(self) -> Tensor:
        return self._layer.length[self._row]

    @property
    def held(self) -> int:
        return self._layer.held[self._row]

    @property
    def seen(self) -> int:
        return self._cache.logical[self._row]

    def evict(self, slot: Tensor) -> None:
        last = (self.length - 1)[:, None]
        for name in _SLOTWISE:
            of = getattr(self._layer, name)
            if of is not None:
                of = of[self._row]
                wide = (..., *(None,) * (of.dim() - 2))
                shape = (len(of), 1, *of.shape[2:])
                moved = of.gather(1, last[wide].expand(shape))
                of.scatter_(1, slot[:, None][wide].expand(shape), moved)
        self.length.sub_(1)
        self._layer.held[self._row] -= 1

    def quantise(self, count: int, make: Callable[[Tensor, Tensor], Segment]) -> None:
        page = make(self.keys[:, :count], self.values[:, :count])
        self._layer.page(self._row, count, page)
