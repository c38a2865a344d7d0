"""Decode steps as CUDA graphs, captured once per number of rows and reused by later requests.

A step launches a thousand small kernels from Python; a graph launches them at once. It reads and
writes fixed addresses, so captured steps belong to the buffers of a group of rows. Rows join and
leave in place: a step runs on their number rounded up to a power of two, and rows that are not in
use do not advance. When a group ends, its buffers wait with their steps for the next group of the
same kind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cache import KVCache
from .forward import Output
from .tower import recorded

State = dict[tuple, Tensor]
Record = Callable[[Callable[[], None], Callable[[], State]], Callable[[], None]]


def rounded(rows: int) -> int:
    """The number of rows of a captured step: the next power of two."""
    return 1 << (rows - 1).bit_length()


class StepGraphs:
    """The captured steps on the buffers of one cache.

    Parameters
    ----------
    kind : tuple
        `RowGroup.kind` of the rows.
    weights : bytes, optional
        `fingerprint` of the addresses that steps read in addition to the cache.
    cache : KVCache
        With buffers that rows share.
    record : callable
        ``(step, state) -> replay``: records a step and returns what replays it. ``state`` returns
        the tensors that it reads and writes.
    """

    def __init__(self, kind: tuple, weights: bytes | None, cache: KVCache, record: Record) -> None:
        self.kind, self.weights, self.cache, self.record = kind, weights, cache, record
        self._replaced = cache.replaced
        self._inputs: dict[tuple, tuple[Tensor, ...]] = {}
        self._outputs: dict[tuple, Output] = {}
        self._replays: dict[tuple, Callable[[], None]] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.cache.state().values())

    def run(
        self, forward: Callable[..., Output], aux_layers: tuple[int, ...], *given: Tensor
    ) -> Output:
        """Run a step of all rows in use.

        Parameters
        ----------
        forward : callable
            ``(cache, aux_layers, *given) -> Output``, without host sync.
        given : Tensor, (B, ...)

        Returns
        -------
        Output
            The next step with the same key overwrites it.
        """
        cache, rows = self.cache, self.cache.rows
        if self._replaced != cache.replaced:  # the old steps read buffers that are gone
            self._replaced = cache.replaced
            for steps in (self._inputs, self._outputs, self._replays):
                steps.clear()
        # Steps beyond the window of a layer have a mask that others do not need.
        width = given[0].shape[1]
        sliding = tuple(cache.sliding(layer, width) for layer in range(len(cache.layers)))
        key = rounded(rows), width, aux_layers, sliding
        if key not in self._replays:
            self._replays[key] = self._capture(key, forward, given)
        for own, x in zip(self._inputs[key], given, strict=True):
            own[:rows] = x
        self._replays[key]()
        output = self._outputs[key]
        aux = output.aux_hidden_states
        aux = None if aux is None else aux[:rows]
        return Output(output.logits[:rows], output.hidden[:rows], aux)

    def _capture(
        self, key: tuple, forward: Callable[..., Output], given: tuple[Tensor, ...]
    ) -> Callable[[], None]:
        rows, _, aux_layers, _ = key
        # Rows that are not in use repeat the first one's input.
        inputs = tuple(x[:1].repeat(rows, *(1,) * (x.dim() - 1)) for x in given)
        for own, x in zip(inputs, given, strict=True):
            own[: len(x)] = x
        self._inputs[key] = inputs

        def step() -> None:
            with self.cache.shown(rows):
                self._outputs[key] = forward(self.cache, aux_layers, *inputs)

        return self.record(step, self.cache.state)


def cuda_graph(step: Callable[[], None], state: Callable[[], State]) -> Callable[[], None]:
    """Record ``step`` as a CUDA graph; ``state`` is restored afterwards."""
    tensors = state()
    before = {key: x.clone() for key, x in tensors.items() if _advances(key)}

    def restore() -> None:
        for key, x in before.items():
            tensors[key].copy_(x)

    return recorded(step, restore)[1]


def _advances(key: tuple) -> bool:
    """Whether a step changes more of this tensor than the free slot that it writes."""
    states = len(key) == 3 and isinstance(key[1], str)  # see `StateLayer.state`
    return states or key[0] in ("position", "length", "seen") or key[-1] == "attention_mass"


class Graphs:
    """Idle buffers of one model, with their captured steps.

    Parameters
    ----------
    limit : int
        Maximum bytes of idle buffers; on CUDA half of the memory that is free without them instead.
        The oldest are freed first.
    record : callable, optional
        As in `StepGraphs`; `cuda_graph` by default.
    """

    def __init__(self, limit: int = 4 << 30, record: Record | None = None) -> None:
        self.limit, self.record = limit, record or cuda_graph
        self.captured = self.reused = 0  # how often a step was recorded, and buffers were reused
        self._idle: list[StepGraphs] = []

    def take(
        self, kind: tuple, weights: bytes | None, cache: KVCache, rows: int
    ) -> StepGraphs | None:
        """Idle buffers of ``kind`` for ``rows`` rows like those of ``cache``.

        Those whose steps read other ``weights`` are freed, and all of them in training mode.
        """
        self._idle = [graphs for graphs in self._idle if weights and graphs.weights == weights]
        for at, graphs in enumerate(self._idle):
            own = graphs.cache
            if graphs.kind == kind and own.size >= rows and own.holds(cache, larger=True):
                self.reused += 1
                return self._idle.pop(at)
        return None

    def size(self, cache: KVCache, rows: int, most: int) -> int:
        """For how many rows new buffers have space: ``rows``, or up to ``most`` of them.

        On CUDA, the larger number only if it takes less than half of the memory that is free.
        """
        size = rounded(max(rows, most))
        if cache.seen.is_cuda:
            free = torch.cuda.mem_get_info(cache.seen.device)[0]
            while size >= 2 * rows and size * cache.row_bytes() > free // 2:
                size //= 2
        return max(size, rounded(rows))

    def new(self, kind: tuple, weights: bytes | None, cache: KVCache) -> StepGraphs:
        """The steps of ``cache``, none of which is captured yet."""
        return StepGraphs(kind, weights, cache, self._count)

    def _count(self, step: Callable[[], None], state: Callable[[], State]) -> Callable[[], None]:
        self.captured += 1
        return self.record(step, state)

    def put(self, graphs: StepGraphs) -> None:
        """Add ``graphs``, whose buffers have no rows now, to the idle ones."""
        self._idle.append(graphs)
        graphs.cache.pool.frees(self.clear)
        idle = sum(each.nbytes for each in self._idle)
        limit = self.limit
        if graphs.cache.seen.is_cuda:
            limit = (torch.cuda.mem_get_info(graphs.cache.seen.device)[0] + idle) // 2
        while idle > limit:
            idle -= self._idle.pop(0).nbytes

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()
