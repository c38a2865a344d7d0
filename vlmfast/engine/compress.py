"""Runs cache stages after the attention of each layer during prefill."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage, DecodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.kernels.col_stats import col_stats, column_sums
from vlmfast.models.base import Adapter

from .attention_maps import attention_rows, span
from .cache import KVCache
from .stats import Stats

_ROWS_AT_ONCE = 512  # bounds the memory of statistics that no kernel serves


@dataclass
class Compression:
    """Runs the cache stages of a recipe over one prompt.

    Parameters
    ----------
    stages : list of CacheStage
    """

    adapter: Adapter
    stages: list[CacheStage]
    context: PrefillContext
    cache: KVCache
    stats: Stats
    requests: dict[str, dict[int, ColumnRequest]] = field(init=False)
    # Stages after one whose budgets need all layers: they run at the end.
    late: list[CacheStage] = field(init=False)
    waiting: dict[tuple[int, str], tuple[ColumnStats | None, Tensor]] = field(default_factory=dict)
    # Rows that requests have drawn, of all layers with this many rows: they are copied at once.
    drawn: dict[tuple[ColumnRequest, int, torch.device], dict[int, Tensor]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        whole = [type(stage).finish is not CacheStage.finish for stage in self.stages]
        self.late = self.stages[whole.index(True) + 1 :] if any(whole) else []
        depth = self.adapter.depth
        self.requests = {stage.name: stage.text_stats(depth) for stage in self.stages}

    @staticmethod
    def of(
        adapter: Adapter, recipe: Recipe, context: PrefillContext, cache: KVCache, stats: Stats
    ) -> Compression | None:
        """``None`` for a recipe that leaves the cache alone, or a prompt without visual tokens."""
        stages, decoding = recipe.acting(CacheStage), recipe.acting(DecodeStage)
        if not (stages or decoding) or not context.layout.visuals:
            return None
        whole = [s.name for s in stages if type(s).finish is not CacheStage.finish]
        if whole and adapter.state_layers:
            raise adapter.refusal(
                f"{whole[0]} divides its budget among all layers, of which some of "
                f"{adapter.config.model_type} hold a state instead of keys and values"
            )
        compression = Compression(adapter, stages, context, cache, stats)
        context.after = compression.after
        return compression

    def after(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> None:
        """Compress what ``layer`` has just attended to.

        Parameters
        ----------
        query : Tensor, (1, Hq, S, D)
        key, value : Tensor, (1, H, S, D)
            Of the rows of ``context.layout``.
        """
        with self.stats.timed("time_reduce_s", key.device):
            context, cached = self._context(layer, key.device), self.cache.layers[layer]
            layout, heads = context.layout, key.shape[1]
            bias = context.key_bias()
            # A layer with a window holds what later tokens can still see, and stages work on that.
            seen = slice(context.first_left(layer), None)
            cached.enter(context)
            kv = KV(
                keys=key[0, :, seen],
                values=value[0, :, seen],
                order=layout.order[seen].expand(heads, -1),
                position=layout.position[0, seen].expand(heads, -1),
                visual=layout.visual[seen].expand(heads, -1),
                lengths=torch.full((heads,), len(layout.order[seen]), device=key.device),
                bias=None if bias is None else bias[seen].expand(heads, -1),
            ).counted([len(layout) - (seen.start or 0)] * heads, None if seen.start else layout)
            # Before anything is evicted; equal requests share one computation.
            requests = {name: by[layer] for name, by in self.requests.items() if layer in by}
            given = query[0], key[0], context, scaling, bias
            known = {
                request: statistics(request, layer, self.rows(request, layer, context), *given)
                for request in set(requests.values())
            }
            for stage in self.stages:
                stats = known[requests[stage.name]] if stage.name in requests else None
                if stage in self.late:
                    self.waiting[layer, stage.name] = stats, layout.order
                else:
                    kv = stage.compress(context, layer, kv, aligned(stats, kv, layout.order))
            if context.extends:
                cached.append(kv)
            else:
                cached.put(kv)
                self._trim(context)

    def _trim(self, context: PrefillContext) -> None:
        """Drop what stages whose budgets need all layers can tell already."""
        for stage in self.stages:
            if stage in self.late or type(stage).trim is CacheStage.trim:
                continue
            held = [(layer, layer.kv) for layer in self.cache.layers if layer.kv is not None]
            trimmed = stage.trim(context, [kv for _, kv in held])
            for (layer, before), kv in zip(held, trimmed, strict=True):
                if kv is not before:
                    layer.put(kv)

    def rows(self, request: ColumnRequest, layer: int, context: PrefillContext) -> Tensor:
        """Rows of ``context.layout`` that a request selects, ascending."""
        layout = context.layout
        n, device = len(layout), layout.device
        every = torch.arange(n, device=device)
        if request.rows == "all":
            return every
        if request.rows == "text":
            return every[min(layout.text_start, n - 1) :]
        recent = every[n - last_rows(request, n) :]
        if request.rows == "window":
            return recent
        known = self.drawn.setdefault((request, n, device), {})
        if layer not in known:
            layers = range(layer, self.adapter.depth)
            drawn = torch.stack([drawn_rows(request, each, n) for each in layers]).to(device)
            known.update(zip(layers, drawn, strict=True))
        return torch.cat([known[layer], recent])

    def finish(self) -> None:
        """Apply budgets that need all layers, after the last one has run."""
        if self.context.extends or self.adapter.state_layers:
            return
        with self.stats.timed("time_reduce_s", self.adapter.device):
            kvs: list[KV] = []
            for cached in self.cache.layers:
                assert cached.kv is not None
                kvs.append(cached.kv)
            for stage in self.stages:
                if stage in self.late:
                    kvs = [
                        stage.compress(
                            self._context(layer, kv.keys.device),
                            layer,
                            kv,
                            self._waited(layer, stage, kv),
                        )
                        for layer, kv in enumerate(kvs)
                    ]
                kvs = stage.finish(self.context, kvs)
            for cached, kv in zip(self.cache.layers, kvs, strict=True):
                cached.put(kv)

    def _context(self, layer: int, device: torch.device) -> PrefillContext:
        """The context in which stages compress a layer."""
        return replace(self.context.on(device), rotate=partial(self.adapter.rotate, layer=layer))

    def _waited(self, layer: int, stage: CacheStage, kv: KV) -> ColumnStats | None:
        stats, order = self.waiting.pop((layer, stage.name))
        return aligned(stats, kv, order)


def last_rows(request: ColumnRequest, n: int) -> int:
    """How many of the last of ``n`` rows a request selects."""
    last = int(request.n) if request.n >= 1 else n - int((1 - request.n) * n)
    return min(last, n)


def drawn_rows(request: ColumnRequest, layer: int, n: int) -> Tensor:
    """Which of ``n`` rows a request draws before the last ones, on the host, ascending."""
    generator = torch.Generator().manual_seed(request.seed * 1009 + layer)
    count = int(request.random if request.random >= 1 else request.random * n)
    drawn = torch.randperm(n - last_rows(request, n), generator=generator)[:count]
    return drawn.sort().values


def statistics(
    request: ColumnRequest,
    layer: int,
    rows: Tensor,
    query: Tensor,
    key: Tensor,
    context: PrefillContext,
    scaling: float | None,
    bias: Tensor | None,
) -> ColumnStats:
    """Statistics of one layer for a request, over its ``rows`` of ``context.layout``."""
    first, last = span(context, layer)
    heads = key.shape[0]
    if first is last is None:
        summed, want = None if request.rows == "all" else rows, (*request.want, "nnz")
        sums = col_stats(
            query, key, summed, scaling, threshold=request.threshold, bias=bias, want=want
        )
        nnz = sums.pop("nnz").expand(heads, -1)
        return ColumnStats(**sums, nnz=nnz, rows=rows)
    maps = (
        attention_rows(query, key, block, scaling, bias=bias, first=first, last=last)
        for block in rows.split(_ROWS_AT_ONCE)
    )
    sums = column_sums((p.unflatten(0, (heads, -1)) for p in maps), request.threshold, request.want)
    keys = torch.arange(key.shape[1], device=key.device)
    seen = keys <= (rows if last is None else last[rows])[:, None]
    if first is not None:
        seen = seen & (keys >= first[rows][:, None])
    return ColumnStats(**sums, nnz=seen.sum(0).expand(heads, -1), rows=rows)


def aligned(stats: ColumnStats | None, kv: KV, order: Tensor) -> ColumnStats | None:
    """``stats`` of the rows ``order``, gathered to the slots that ``kv`` still has."""
    if stats is None:
        return None
    if min(kv.counts) == len(order):  # nothing was dropped
        return stats
    at = torch.searchsorted(order, kv.order.contiguous()).clamp(max=len(order) - 1)
    names = ("sum", "sumsq", "max", "entropy", "count")
    present = {name: x for name in names if (x := getattr(stats, name)) is not None}
    moved = {
        name: x.gather(2, at[:, None].expand(-1, x.shape[1], -1)) for name, x in present.items()
    }
    return replace(stats, **moved, nnz=stats.nnz.gather(1, at))
