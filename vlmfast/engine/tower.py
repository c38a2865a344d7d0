"""The vision tower as CUDA graphs, one for each input shape that occurs twice.

A tower of two dozen blocks launches about three hundred small kernels; for one image, launching
them takes longer than running them. Its input has few shapes: a number of views of one size, or the
patches of images of the same sizes as before. A graph contains the whole forward pass, statistics
and projected CLS token included. Its outputs are copied, because the next replay overwrites them.
Stages between the blocks are called from Python, so a tower with such stages runs without a graph.
Decode steps are captured by the same `recorded`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vlmfast.core.contexts import Context, VisionContext, current_context
from vlmfast.models.base import Adapter

from .fingerprint import fingerprint, structures_of
from .mode import Mode

# Runs before a capture, in which kernels are compiled and libraries allocate their workspaces.
_WARM_UP = 1
_SHAPES = 8  # graphs that are kept
_MET = 64  # shapes that are remembered
_PATCHES = 4096  # of images in one row; with more, running takes longer than launching

T = TypeVar("T")
Chunks = dict[int, list[tuple[Tensor | None, Tensor | None]]]
Made = tuple[Any, dict[int, Tensor], dict[int, Tensor], Chunks, list[Tensor]]
Record = Callable[[Callable[[], Made]], tuple[Made, Callable[[], None]]]


def recorded(run: Callable[[], T], restore: Callable[[], None]) -> tuple[T, Callable[[], None]]:
    """Record ``run`` as a CUDA graph; returns its output, and what replays it.

    ``restore`` is called after each run and, as a safeguard, after the capture, which runs nothing.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
            restore()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile: only calls of this one invalidate the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()
    restore()
    return made, graph.replay


def cuda_graph(run: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
    """Record ``run``; every replay writes to the tensors of the returned output."""
    return recorded(run, lambda: None)


class Towers:
    """The recorded forward passes of one model's tower.

    Parameters
    ----------
    record : callable, optional
        Records a forward pass and returns what replays it; `cuda_graph` by default.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.record = record or cuda_graph
        self.replayed = 0
        self._met: OrderedDict[tuple, None] = OrderedDict()
        self._now: tuple[VisionContext, list[Tensor]]  # filled by the current forward pass
        # With the tensors whose addresses the graph reads.
        self._kept: OrderedDict[tuple, tuple[Tensor, Any, Made, Callable[[], None]]] = OrderedDict()

    def pass_of(
        self,
        forward: Callable[..., Any],
        pixels: Tensor,
        given: dict[str, Any],
        context: VisionContext,
        cls: list[Tensor],
        views: int,
        state: tuple,
    ) -> Any:
        """The output of ``forward(pixels, **given)``, which also fills ``context`` and ``cls``.

        Parameters
        ----------
        pixels : Tensor, (V, C, H, W), or (S, C) of a packed tower
        given : dict
            Apart from ``grid_thw``, its tensors are the same objects for inputs of the same sizes.
        views : int
            Rows whose CLS token is collected.
        state : tuple
            What else decides about the output: weights and autocast.
        """
        requests = tuple(sorted((layer, str(r)) for layer, r in context.requests.items()))
        # The grids follow from the other arguments; GLM-4V makes a new tensor for each video.
        options = tuple(
            (name, id(value) if isinstance(value, Tensor) else str(value))
            for name, value in sorted(given.items())
            if name != "grid_thw"
        )
        key = (tuple(pixels.shape), pixels.dtype, requests, views, options, state)
        if key not in self._met:  # a shape that occurs once is not worth a graph
            self._met[key] = None
            while len(self._met) > _MET:
                self._met.popitem(last=False)
            return forward(pixels, **given)
        self._now = context, cls
        if key not in self._kept:
            own = pixels.clone()

            def run() -> Made:
                context, cls = self._now
                context.stats.clear()
                context.keys.clear()
                cls.clear()
                earlier = context.chunks  # of other calls of the tower
                context.chunks = None if earlier is None else {}
                output = forward(own, **given)
                chunks, context.chunks = context.chunks or {}, earlier
                return output, dict(context.stats), dict(context.keys), chunks, list(cls)

            read = given, context.packings
            self._kept[key] = (own, read, *self.record(run))
            while len(self._kept) > _SHAPES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        own, _, made, replay = self._kept[key]
        own.copy_(pixels)
        replay()
        self.replayed += 1
        output, stats, keys, chunks, tokens = tree_map_only(Tensor, Tensor.clone, made)
        context.stats.update(stats)
        context.keys.update(keys)
        for layer, parts in chunks.items():
            assert context.chunks is not None
            context.chunks.setdefault(layer, []).extend(parts)
        cls[:] = tokens
        return output


@contextmanager
def captured(
    adapter: Adapter, context: VisionContext, cls: list[Tensor], views: int
) -> Iterator[None]:
    """Replay the tower's forward passes inside the block, where that is possible."""
    tower = adapter.tower() if adapter.fixed_tower else None
    if tower is None or not _captures(adapter) or torch.is_grad_enabled():
        yield
        return
    kept = structures_of(adapter)
    weights = fingerprint(tower, adapter.projector(), addresses=True, kept=kept)
    if weights is None:  # training mode, or hooks, which a replay would not call
        yield
        return
    towers = adapter.kept.setdefault("towers", Towers())
    state = weights, Mode.current(adapter.device).autocast

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(pixel_values: Tensor, *args: Any, **given: Any) -> Any:
            if args or (adapter.packed and len(pixel_values) > _PATCHES):
                return forward(pixel_values, *args, **given)
            return towers.pass_of(forward, pixel_values, given, context, cls, views, state)

        return replayed

    with replaced(tower, wrapped):
        yield


def _captures(adapter: Adapter) -> bool:
    on = adapter.device.type == "cuda" and adapter.decoding in ("auto", "graph")
    return on and adapter.capturable


@contextmanager
def replaced(module: nn.Module, wrapped: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module by ``wrapped(forward)`` inside the block."""
    before = module.__dict__.get("forward")
    module.forward = wrapped(module.forward)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def only_in(context: Context, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for the forward passes of one context; others may go through the same modules."""

    def checked(*args: Any) -> Any:
        return hook(*args) if current_context.get() is context else None

    return checked


def changed(adapter: Adapter, made: Callable[..., Tensor], *outputs: Any) -> Any:
    """The first of the tower's outputs, with ``made(*tensors)`` of all of them.

    Of its levels, only those that the family reads are changed.
    """
    output = outputs[0]
    output.last_hidden_state = made(*(each.last_hidden_state for each in outputs))
    if getattr(output, "hidden_states", None) is not None:
        wanted = [block + 1 for block in adapter.feature_blocks()]
        levels = zip(*(each.hidden_states for each in outputs), strict=True)
        output.hidden_states = tuple(
            made(*level) if i in wanted else level[0] for i, level in enumerate(levels)
        )
    return output
