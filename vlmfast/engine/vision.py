"""The vision tower under a recipe: statistics, in-encoder stages and visual tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext, active
from vlmfast.core.layout import Kind, TokenLayout, VisualTokens
from vlmfast.core.protocols import EncodeStage, InEncoderStage
from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, StatRequest, VisionStats
from vlmfast.core.views import covering
from vlmfast.errors import ModelError, RecipeError
from vlmfast.models.base import Adapter

from .between import between_blocks
from .stats import Stats, Trace
from .tower import captured


def merge_requests(
    requests: dict[int, StatRequest], more: dict[int, StatRequest], name: str
) -> None:
    """Add the requests of one more stage; one layer yields one kind of statistic."""
    for layer, request in more.items():
        joined = requests.setdefault(layer, request).joined(request)
        if joined is None:
            raise RecipeError(
                f"{name} needs {request} of layer {layer}, another stage of the recipe "
                f"{requests[layer]}; they cannot be combined"
            )
        requests[layer] = joined


def encode(
    adapter: Adapter,
    tensors: dict[str, Tensor],
    items: tuple[ItemGeometry, ...],
    inside: list[InEncoderStage],
    outside: list[EncodeStage],
    order: Tensor,
    position: Tensor,
    stats: Stats,
    trace: Trace,
    notes: dict[str, dict],
    trained: dict[str, nn.Module],
) -> tuple[VisualTokens, VisionStats]:
    """Encode all images, with ``inside`` stages between the blocks of the tower.

    Parameters
    ----------
    items : tuple of ItemGeometry
        The images.
    outside : list of EncodeStage
        Only their requests for statistics are used here.
    order : Tensor, int64, (N,)
        Indices of the image placeholders in the prompt.
    position : Tensor, int64, (P, N)
        Their rotary ids.
    """
    blocks = adapter.vision_blocks()
    inside, left_out = served(adapter, inside, items)
    context = VisionContext(
        depth=len(blocks),
        modules={id(getattr(block, adapter.attention)): i for i, block in enumerate(blocks)},
        items=items,
        notes=notes,
        trained=trained,
        proportional_attention=any(stage.proportional_attention for stage in inside),
        specials=adapter.specials(),
        chunks={} if adapter.packed else None,
    )
    for stage in inside:
        merge_requests(context.requests, stage.vision_stats(context.depth), stage.name)
    for reader in outside:
        _request_rows(adapter, reader, context)
    wanted = _request_saliency(adapter, outside, context)
    wants_cls = adapter.projects_cls() and any(
        stage.wants_cls and {wanted[request.key][1] for request in stage.saliencies()} <= {"cls"}
        for stage in outside
    )
    views = max(item.views[1] for item in items) if wants_cls else 0
    with (
        active(context),
        _unused_skipped(adapter, context),
        between_blocks(adapter, inside, context, stats) as groups,
        _cls(adapter, views) as cls,
        _projected(adapter, any(source == "norm" for _, source in wanted.values())) as projected,
        nullcontext() if inside else captured(adapter, context, cls, views),
    ):
        encoded = adapter.encode(tensors, context)
    vision = replace(
        encoded.stats,
        cls=torch.cat(cls) if cls else None,
        saliency={
            key: _saliency(adapter, context, request, source, projected)
            for key, (request, source) in wanted.items()
        },
        left_out=left_out,
    )
    features = torch.cat(encoded.features)
    if features.shape[0] != order.shape[0]:
        raise ModelError(
            f"the processor made {order.shape[0]} image placeholders, the vision tower "
            f"{features.shape[0]} tokens; processor and model do not belong together"
        )
    layout = TokenLayout.cat(encoded.layouts).replace(order=order, position=position)
    frames = torch.tensor([item.video >= 0 for item in items], device=order.device)
    in_video = (layout.kind == Kind.IMAGE) & frames[layout.item.long()]
    layout = layout.replace(kind=layout.kind.masked_fill(in_video, int(Kind.VIDEO)))
    extra = tuple(torch.cat(level) for level in zip(*encoded.extra, strict=True))
    tokens = VisualTokens(features, layout, extra)
    stats.visual_tokens_in = len(tokens)
    trace.begin(layout, adapter.depth)
    if groups:
        tokens = representatives(tokens, *_of_views(groups, items))
        trace.drop_before(0, tokens.layout, inside[-1].name)
        stats.visual_tokens_kept[inside[-1].name] = len(tokens)
    return tokens, vision


def served(
    adapter: Adapter, inside: list[InEncoderStage], items: tuple[ItemGeometry, ...]
) -> tuple[list[InEncoderStage], tuple[str, ...]]:
    """The stages that can run inside the tower, and the optional parts that are left out.

    Raises
    ------
    RecipeError
        When a stage cannot run there and its method would drop nothing without it.
    """
    patchwise = adapter.inside(items)
    stays, left_out = [], []
    for stage in inside:
        refused = [item for item in items if adapter.cells(item) is None]
        if stage.cells and refused:
            raise adapter.refusal(
                f"{stage.name} merges the patches of whole visual tokens inside the vision tower, "
                f"which {adapter.config.model_type} does not support here: "
                f"{adapter.why_no_cells(refused[0])}"
            )
        if stage.cells or patchwise or (stage.token_rows and adapter.token_rows):
            stays.append(stage)
        elif stage.optional:
            left_out.append(f"{stage.name}: its part inside the vision tower")
        else:
            raise adapter.refusal(
                f"{stage.name} works inside the vision tower, which needs one visual token for "
                f"each of its patches; {adapter.config.model_type} makes one of several here"
            )
    return stays, tuple(left_out)


def _request_rows(adapter: Adapter, stage: EncodeStage, context: VisionContext) -> None:
    """Requests of single blocks, whose statistics are of whole views."""
    requests = stage.vision_stats(context.depth)
    family = adapter.config.model_type
    for layer, request in requests.items():
        if adapter.packed or not adapter.global_blocks():
            raise adapter.refusal(
                f"{stage.name} reads the attention of single blocks of the vision tower, view by "
                f"view, which {family} does not expose"
            )
        if request.rows == "cls" and not adapter.specials():
            raise adapter.refusal(
                f"{stage.name} ranks visual tokens by the attention of a CLS token, and the vision "
                f"tower of {family} has none"
            )
        if not 0 <= layer < context.depth:
            raise RecipeError(
                f"vision layer {layer} was requested, the tower has {context.depth} layers"
            )
    merge_requests(context.requests, requests, stage.name)


def _request_saliency(
    adapter: Adapter, stages: list[EncodeStage], context: VisionContext
) -> dict[str, tuple[SaliencyRequest, str]]:
    """By key: the requests of stages, and the source that serves each."""
    wanted: dict[str, tuple[SaliencyRequest, str]] = {}
    for stage in stages:
        for request in stage.saliencies():
            source = adapter.source(request)
            if source not in adapter.sources():
                raise RecipeError(
                    f"{stage.name}: saliency={source} cannot be read from "
                    f"{adapter.config.model_type}: {adapter.why_no_source(source)}; allowed are "
                    f"auto, {', '.join(adapter.sources())}"
                )
            wanted[request.key] = request, source
            if source != "norm":
                rows = StatRequest(source, keys=request.keys, wide=request.wide)
                merge_requests(
                    context.requests, {adapter.salient_block(request.block): rows}, stage.name
                )
    return wanted


def _saliency(
    adapter: Adapter,
    context: VisionContext,
    request: SaliencyRequest,
    source: str,
    features: list[Tensor],
) -> tuple[Saliency, ...]:
    """The saliency of a request, item by item."""
    if source == "norm":
        inputs = adapter.projector_input(features, context.items)
        found = [(x.norm(dim=-1)[:, None], x if request.keys else None) for x in inputs]
    else:
        found = adapter.block_stats(context, adapter.salient_block(request.block))
    answer = []
    for item, (rows, keys) in zip(context.items, found, strict=True):
        together = 1 if source == "norm" else rows.shape[-1] / math.prod(item.patches)
        rows = adapter.to_tokens(rows, item) * together
        if request.keys:
            assert keys is not None
            keys = adapter.to_tokens(keys.transpose(1, 2), item).transpose(1, 2)
        answer.append(Saliency(source, rows, keys if request.keys else None))
    return tuple(answer)


@contextmanager
def _projected(adapter: Adapter, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects the input of the projector, call by call, float32."""
    found: list[Tensor] = []
    if not wanted:
        yield found
        return

    def hook(module: nn.Module, args: tuple) -> None:
        found.append(args[0].float())

    handle = adapter.projector().register_forward_pre_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _cls(adapter: Adapter, views: int) -> Iterator[list[Tensor]]:
    """Collects the projected CLS token of the first ``views`` rows, which the family may cut off.

    One tensor (V, D) per forward pass of the tower; none where no view is requested.
    """
    found: list[Tensor] = []
    if not views:
        yield found
        return
    if len(adapter.feature_blocks()) > 1:
        raise RecipeError(
            "this recipe needs the projected CLS token, and the model projects several layers of "
            "its vision tower at once"
        )

    def hook(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        # The projector's own hooks are for what the family sends through it.
        found.append(adapter.projector().forward(hidden[:views, :1])[:, 0])

    handle = adapter.vision_blocks()[adapter.feature_block()].register_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _unused_skipped(adapter: Adapter, context: VisionContext) -> Iterator[None]:
    """Skip the blocks after the last one whose output or attention is used.

    LLaVA uses the features of the second-to-last block, so that the last one need not run.
    """
    used = max([*adapter.feature_blocks(), *context.requests])
    idle = adapter.vision_blocks()[used + 1 :]
    before = [block.__dict__.get("forward") for block in idle]
    try:
        for block in idle:
            block.forward = _identity
        yield
    finally:
        for block, forward in zip(idle, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _identity(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _of_views(
    groups: dict[int, Tensor], items: tuple[ItemGeometry, ...]
) -> tuple[list[Tensor], list[int]]:
    """By view, group of each token (itself where none merged) and tokens per row."""
    grids = {view: item.patches for item in items for view in range(*item.views)}
    first = next(iter(groups.values()))
    alone = {
        view: torch.arange(math.prod(grid), device=first.device) for view, grid in grids.items()
    }
    views = range(max(grids) + 1)
    return (
        [groups.get(view, alone.get(view, first[:0])) for view in views],
        [grids.get(view, (0, 0))[1] for view in views],
    )


def representatives(
    tokens: VisualTokens, groups: Sequence[Tensor], widths: Sequence[int]
) -> VisualTokens:
    """One token per merged group: the one nearest to the group's middle, lower index on ties.

    Parameters
    ----------
    groups : sequence of Tensor, each int64, (N,)
        Group of each visual token of each view, in raster order.
    widths : sequence of int
        Visual tokens in a row of each view.

    Returns
    -------
    VisualTokens
        ``weight`` counts the tokens of the group that are in the prompt, ``box`` covers them.
    """
    layout = tokens.layout
    here, view = layout.view >= 0, layout.view.clamp(min=0).long()
    counts = torch.tensor([0, *map(len, groups)], device=view.device)
    stride = max(int(group.max()) for group in groups if len(group)) + 1
    table = torch.cat([group + number * stride for number, group in enumerate(groups)])
    width = torch.tensor(widths, device=view.device)[view]
    index = counts.cumsum(0)[view] + layout.grid[:, 1] * width + layout.grid[:, 2]
    group = table[torch.where(here, index, 0).long()]
    # Newlines belong to no view: each is a group of its own.
    group = torch.where(
        here, group, int(group.max()) + 1 + torch.arange(len(layout), device=group.device)
    )
    _, group = group.unique(return_inverse=True)
    n = int(group.max()) + 1
    point = layout.grid[:, 1:].double()
    size = torch.zeros(n, dtype=torch.float64, device=group.device).index_add(
        0, group, torch.ones_like(point[:, 0])
    )
    middle = torch.zeros(n, 2, dtype=torch.float64, device=group.device)
    middle = middle.index_add(0, group, point) / size[:, None]
    distance = (point - middle[group]).square().sum(1)
    # Sorted by group, then distance, then index (both sorts are stable): the first of each group.
    rank = distance.argsort(stable=True)
    rank = rank[group[rank].argsort(stable=True)]
    starts = torch.cat([size.new_zeros(1), size.cumsum(0)[:-1]]).long()
    chosen = rank[starts]
    kept = chosen.sort().values
    box = covering(layout.box, group, n)
    reduced = tokens.select(kept)
    weight = size[group[kept]].to(layout.weight.dtype)
    return VisualTokens(
        reduced.features, reduced.layout.replace(weight=weight, box=box[group[kept]]), reduced.extra
    )
