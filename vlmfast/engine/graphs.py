"""One decode step as a CUDA graph, captured once per shape and reused by later requests.

A step launches a thousand small kernels from Python; a graph launches them at once. It reads and
writes fixed addresses, so a captured step keeps its buffers: a decoder whose cache has the same
shapes copies its state into them and continues there. A cache that outgrows its buffers, or gets a
page of quantized slots or other rows, has new shapes and needs another step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .cache import KVCache
from .output import Output

_WARM_UP = 3  # steps before a capture, in which libraries allocate their workspaces

State = dict[tuple, Tensor]
Signature = tuple[tuple[tuple, tuple[int, ...], torch.dtype], ...]


class Steps(Protocol):
    """What decodes in the buffers of a graph: `Decoder`."""

    cache: KVCache
    aux_layers: tuple[int, ...]

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...

    def forward(
        self, tokens: Tensor, offset: Tensor | None = None, tree: Tensor | None = None
    ) -> Output: ...


def signature(state: State) -> Signature:
    """The shapes and dtypes that a captured step must share with a decoder."""
    return tuple((key, tuple(x.shape), x.dtype) for key, x in state.items())


class StepGraph:
    """The captured steps of one set of buffers: for one token, and for trees by width.

    Parameters
    ----------
    decoder : Steps
        Its buffers become those of the graph; it continues to use them.
    record : callable, optional
        ``(step, state) -> replay``: records a step and returns what replays it; `cuda_graph` by
        default.
    """

    def __init__(self, decoder: Steps, record: Callable[..., Any] | None = None) -> None:
        self.state = decoder.state()
        self.signature = signature(self.state)
        self.record = record or cuda_graph
        self.inputs: dict[tuple, tuple[Tensor, ...]] = {}
        self.outputs: dict[tuple, Output] = {}
        self._replays: dict[tuple, Callable[[], None]] = {}

    def _step_of(self, decoder: Steps, key: tuple) -> Callable[[], None]:
        def step() -> None:
            self.outputs[key] = decoder.forward(*self.inputs[key])

        return step

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.state.values())

    def serves(self, decoder: Steps) -> bool:
        """Whether ``decoder`` uses these buffers."""
        state = decoder.state()
        return len(state) == len(self.state) and all(
            key in self.state and self.state[key] is x for key, x in state.items()
        )

    def adopt(self, decoder: Steps) -> None:
        """Copy the state of ``decoder`` into these buffers, which it then uses."""
        for key, x in decoder.state().items():
            self.state[key].copy_(x)
        decoder.load(self.state)

    def replay(self, decoder: Steps, *given: Tensor) -> Output:
        """Run one step of ``decoder``, which uses these buffers.

        ``given`` are the arguments of `Decoder.forward`. The output is overwritten by the next step
        of the same width.
        """
        # Steps beyond the window of a layer have a mask that others do not need.
        width, cache = given[0].shape[1], decoder.cache
        sliding = tuple(cache.sliding(layer, width) for layer in range(len(cache.layers)))
        key = (width, decoder.aux_layers, sliding)
        if key not in self._replays:
            self.inputs[key] = tuple(x.clone() for x in given)
            self._replays[key] = self.record(self._step_of(decoder, key), self.state)
        for own, x in zip(self.inputs[key], given, strict=True):
            own.copy_(x)
        self._replays[key]()
        return self.outputs[key]


def cuda_graph(step: Callable[[], None], state: State) -> Callable[[], None]:
    """Record ``step`` as a CUDA graph; ``state`` is restored afterwards."""
    before = {key: x.clone() for key, x in state.items() if _advances(key)}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
            for key, x in before.items():
                state[key].copy_(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile: only calls of this one invalidate the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for key, x in before.items():  # capturing runs nothing; this is a safeguard
        state[key].copy_(x)
    return graph.replay


def _advances(key: tuple) -> bool:
    """Whether a step changes more of this tensor than the free slot that it writes."""
    return key[0] in ("position", "length", "seen") or key[-1] == "attention_mass"


class Graphs:
    """The idle captured steps of one model.

    Parameters
    ----------
    limit : int
        Maximum bytes of idle buffers; the oldest steps are freed first.
    record : callable, optional
        As in `StepGraph`.
    """

    def __init__(self, limit: int = 4 << 30, record: Callable[..., Any] | None = None) -> None:
        self.limit, self.record = limit, record
        self.captured = self.adopted = 0  # how often a step was recorded, and reused
        self._idle: list[StepGraph] = []

    def get(self, decoder: Steps) -> StepGraph:
        """A step whose buffers ``decoder`` then uses: an idle one, or a new one."""
        wanted = signature(decoder.state())
        for at, graph in enumerate(self._idle):
            if graph.signature == wanted:
                self._idle.pop(at).adopt(decoder)
                self.adopted += 1
                return graph
        self.captured += 1
        return StepGraph(decoder, self.record)

    def put(self, graph: StepGraph) -> None:
        """Add ``graph``, whose buffers no decoder uses now, to the idle steps."""
        self._idle.append(graph)
        while sum(idle.nbytes for idle in self._idle) > self.limit:
            self._idle.pop(0)
