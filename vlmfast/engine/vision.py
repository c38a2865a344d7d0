"""The vision tower under a recipe: statistics, in-encoder stages and visual tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vlmfast.core.calls import users_calls
from vlmfast.core.contexts import VisionContext, active
from vlmfast.core.layout import Kind, TokenLayout, VisualTokens
from vlmfast.core.placement import loaded
from vlmfast.core.protocols import EncodeStage, InEncoderStage, ViewStage
from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, StatRequest
from vlmfast.core.views import covering, open_rows
from vlmfast.errors import ModelError, RecipeError
from vlmfast.models.base import Adapter, Encoded

from .between import between_blocks
from .gate import Gate, gated
from .modules import modules_of
from .stats import Stats, Trace
from .tower import captured, replaced

_APART = 1 << 32  # between the numbers of groups of different views
# Of jittered images: pixels down and right, by view, and the standard deviation of the noise.
SHIFTS = ((1, 1), (-1, -1), (1, -1), (-1, 1))
_NOISE = 4.0  # where pixel values are 0 to 255


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


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks of the vision tower.

    Parameters
    ----------
    inside : tuple of InEncoderStage
        Stages that run between its blocks.
    views : tuple of ViewStage
        Stages that leave views out.
    left_out : tuple of str
        As in `VisionStats`.
    requests : dict of int to StatRequest
        Block index to the requested rows.
    saliency : dict of str to (SaliencyRequest, str)
        By key: requests, and the source that serves each.
    cls : bool
        Whether the projected CLS token of each view is requested.
    """

    inside: tuple[InEncoderStage, ...]
    views: tuple[ViewStage, ...]
    left_out: tuple[str, ...]
    requests: dict[int, StatRequest]
    saliency: dict[str, tuple[SaliencyRequest, str]]
    cls: bool

    @staticmethod
    def of(
        adapter: Adapter,
        items: tuple[ItemGeometry, ...],
        inside: list[InEncoderStage],
        outside: list[EncodeStage],
        views: list[ViewStage] | None = None,
    ) -> Wanted:
        """The requests of stages inside and ``outside`` the tower, for these images.

        Raises
        ------
        RecipeError
            Where the tower cannot serve them.
        """
        depth = len(adapter.vision_blocks())
        requests: dict[int, StatRequest] = {}
        inside, left_out = served(adapter, inside, items)
        views = _gating(adapter, views or [], items, inside)
        for stage in inside:
            merge_requests(requests, stage.vision_stats(depth), stage.name)
        for reader in outside:
            _request_rows(adapter, reader, depth, requests)
        saliency = _request_saliency(adapter, [*views, *outside], requests)
        cls = adapter.projects_cls() and any(
            stage.wants_cls and {saliency[asked.key][1] for asked in stage.saliencies()} <= {"cls"}
            for stage in outside
        )
        return Wanted(tuple(inside), tuple(views), left_out, requests, saliency, cls)

    @property
    def joint(self) -> bool:
        """Whether the features of an image may depend on the other images of the prompt."""
        return bool(self.inside) or any(stage.reuses_frames for stage in self.views)


@dataclass(frozen=True, eq=False)
class Images:
    """Images after the vision tower, independent of the prompt that they stand in.

    Parameters
    ----------
    encoded : Encoded
        With all statistics that were wanted.
    groups : dict of int to Tensor
        For each view in which tokens merged, the group of each visual token: int64, (N,).
    notes : dict
        What stages inside the tower noted, as in `VisionContext`.
    """

    encoded: Encoded
    groups: dict[int, Tensor] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)


def encode(
    adapter: Adapter,
    tensors: dict[str, Tensor],
    items: tuple[ItemGeometry, ...],
    wanted: Wanted,
    stats: Stats,
    trained: dict[str, nn.Module],
) -> Images:
    """Run the vision tower on all images, with the recipe's stages between its blocks.

    Parameters
    ----------
    items : tuple of ItemGeometry
        The images.
    """
    # The pixels of a prompt that has waited are in host memory.
    tensors = {
        key: value
        if value.device.type != "cpu" or key in adapter.host_tensors
        else value.to(adapter.device, non_blocking=True)
        for key, value in tensors.items()
    }
    inside = list(wanted.inside)
    context = _context(
        adapter,
        items,
        wanted,
        trained=trained,
        proportional_attention=any(stage.proportional_attention for stage in inside),
    )
    count = max(item.views[1] for item in items)
    views = count if wanted.cls else 0
    sources = {source for _, source in wanted.saliency.values()}
    measure = partial(_of_bases, adapter, wanted)
    # A replay calls no hooks. The projector of a packed tower is inside the tower.
    capture = not inside and not (adapter.packed and "norm" in sources)
    with (
        active(context),
        _unused_skipped(adapter, context),
        between_blocks(adapter, inside, context, stats) as groups,
        _cls(adapter, views) as cls,
        captured(adapter, context, cls, views) if capture else nullcontext(),
        gated(Gate(adapter, wanted.views, context, cls, measure)) as gate,
        _projected(adapter, "norm" in sources, gate) as projected,
        loaded(adapter.model.base_model),
    ):
        encoded = adapter.encode(tensors, context)
    for features, layout in zip(encoded.features, encoded.layouts, strict=True):
        if len(features) != len(layout):  # before they are cached
            raise ModelError(
                f"the vision tower made {len(features)} tokens of an image that has {len(layout)}; "
                "processor and model do not belong together"
            )
    found = _saliencies(adapter, context, wanted.saliency, projected)
    jitter = max((request.jitter for request, _ in wanted.saliency.values()), default=0)
    others = [_jittered(adapter, tensors, items, wanted, number, gate) for number in range(jitter)]
    stats.vision_passes += 1 + jitter
    stats.views += count
    stats.views_encoded += count if gate is None else gate.encoded
    if gate is not None and groups:
        groups.update({view: groups[of] for view, of in gate.copies().items()})
    encoded.stats = replace(
        encoded.stats,
        cls=torch.cat(cls) if cls else None,
        saliency={
            key: _mean([found[key], *(view[key] for view in others[: request.jitter])])
            for key, (request, _) in wanted.saliency.items()
        },
        left_out=wanted.left_out,
        skipped=None if gate is None else gate.skipped,
    )
    return Images(encoded, groups, context.notes)


def place(
    adapter: Adapter,
    images: Images,
    wanted: Wanted,
    order: Tensor,
    position: Tensor,
    stats: Stats,
    trace: Trace,
) -> VisualTokens:
    """The visual tokens of images that stand in a prompt.

    Parameters
    ----------
    order : Tensor, int64, (N,)
        Indices of the image placeholders in the prompt.
    position : Tensor, int64, (P, N)
        Their rotary ids.
    """
    encoded, items = images.encoded, images.encoded.stats.items
    features = torch.cat(encoded.features)
    if features.shape[0] != order.shape[0]:
        raise ModelError(
            f"the processor made {order.shape[0]} image placeholders, the vision tower "
            f"{features.shape[0]} tokens; processor and model do not belong together"
        )
    layout = TokenLayout.cat(encoded.layouts).replace(order=order, position=position)
    if any(item.video >= 0 for item in items):
        known = layout.on_host.clone()
        of_video = torch.tensor([item.video >= 0 for item in items])[known[1].long()]
        known[0, of_video & (known[0] == Kind.IMAGE)] = int(Kind.VIDEO)
        kind = known[0].to(layout.device, torch.uint8)
        layout = layout.replace(kind=kind).seen(known)
    layout.counted(len(layout))
    extra = tuple(torch.cat(level) for level in zip(*encoded.extra, strict=True))
    tokens = VisualTokens(features, layout, extra)
    stats.visual_tokens_in = len(tokens)
    trace.begin(layout, adapter.depth, items)
    if (skipped := encoded.stats.skipped) is not None:
        name = next(stage.name for stage in wanted.views if stage.chooses_crops)
        tokens = encoded_only(tokens, skipped)
        trace.drop_before(0, tokens.layout, name)
        stats.visual_tokens_kept[name] = len(tokens)
    if images.groups:
        name = wanted.inside[-1].name
        tokens = representatives(tokens, *_of_views(images.groups, items))
        trace.drop_before(0, tokens.layout, name)
        stats.visual_tokens_kept[name] = len(tokens)
    return tokens


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
        if stage.cells and refused and not stage.optional:
            raise adapter.refusal(
                f"{stage.name} merges the patches of whole visual tokens inside the vision tower, "
                f"which {adapter.config.model_type} does not support here: "
                f"{adapter.why_no_cells(refused[0])}"
            )
        if (stage.cells and not refused) or patchwise or (stage.token_rows and adapter.token_rows):
            stays.append(stage)
        elif stage.optional:
            left_out.append(f"{stage.name}: its part inside the vision tower")
        else:
            raise adapter.refusal(
                f"{stage.name} works inside the vision tower, which needs one visual token for "
                f"each of its patches; {adapter.config.model_type} makes one of several here"
            )
    return stays, tuple(left_out)


def _gating(
    adapter: Adapter,
    views: list[ViewStage],
    items: tuple[ItemGeometry, ...],
    inside: list[InEncoderStage],
) -> list[ViewStage]:
    """The stages that leave views out.

    Raises
    ------
    RecipeError
        Where the family or another stage of the recipe does not allow it.
    """
    acting = [stage for stage in views if stage.chooses_crops or stage.reuses_frames]
    family, found = adapter.config.model_type, []
    for stage in acting:
        if stage.chooses_crops and not adapter.crops:
            raise adapter.refusal(
                f"{stage.name} leaves out crops of images, and {adapter.why_no_crops()}"
            )
        if stage.reuses_frames and not adapter.views_in_rows:
            raise adapter.refusal(
                f"{stage.name} leaves out frames of a video, and {family} cannot encode some of "
                "them without the others"
            )
        if stage.chooses_crops or any(item.video >= 0 for item in items):
            found.append(stage)
    for other in inside if found else ():
        if not other.cells:
            raise RecipeError(
                f"{other.name} works on the views of a prompt together inside the vision tower; it "
                f"cannot be combined with {found[0].name}, which leaves some of them out"
            )
    return found


def _request_rows(
    adapter: Adapter, stage: EncodeStage, depth: int, requests: dict[int, StatRequest]
) -> None:
    """Add a stage's requests of single blocks, whose statistics are of whole views."""
    own = stage.vision_stats(depth)
    family = adapter.config.model_type
    for layer, request in own.items():
        if adapter.packed or adapter.by_size or not adapter.global_blocks():
            raise adapter.refusal(
                f"{stage.name} reads the attention of single blocks of the vision tower, view by "
                f"view, which {family} does not expose"
            )
        if request.rows == "cls" and not adapter.specials():
            raise adapter.refusal(
                f"{stage.name} ranks visual tokens by the attention of a CLS token, and the vision "
                f"tower of {family} has none"
            )
        if not 0 <= layer < depth:
            raise RecipeError(f"vision layer {layer} was requested, the tower has {depth} layers")
    merge_requests(requests, own, stage.name)


def _request_saliency(
    adapter: Adapter,
    stages: Sequence[EncodeStage | ViewStage],
    requests: dict[int, StatRequest],
) -> dict[str, tuple[SaliencyRequest, str]]:
    """By key: the requests of stages, and the source that serves each; adds what these need."""
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
                merge_requests(requests, {adapter.salient_block(request.block): rows}, stage.name)
    return wanted


def _context(
    adapter: Adapter, items: tuple[ItemGeometry, ...], wanted: Wanted, **more: Any
) -> VisionContext:
    blocks = adapter.vision_blocks()
    return VisionContext(
        depth=len(blocks),
        modules={id(adapter.vision_attention(block)): i for i, block in enumerate(blocks)},
        items=items,
        requests=dict(wanted.requests),
        specials=adapter.specials(),
        chunks={} if adapter.packed or adapter.by_size else None,
        **more,
    )


def _of_bases(
    adapter: Adapter, wanted: Wanted, context: VisionContext
) -> dict[str, tuple[Saliency, ...]]:
    """By key: the saliency that stages read to choose crops."""
    asked = {request.key for stage in wanted.views for request in stage.saliencies()}
    requests = {key: of for key, of in wanted.saliency.items() if key in asked}
    return _saliencies(adapter, context, requests, [])


def _saliencies(
    adapter: Adapter,
    context: VisionContext,
    requests: dict[str, tuple[SaliencyRequest, str]],
    features: list[Tensor],
) -> dict[str, tuple[Saliency, ...]]:
    """By key: the saliency of each request, item by item."""
    answers = {}
    for key, (request, source) in requests.items():
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
        answers[key] = tuple(answer)
    return answers


def _jittered(
    adapter: Adapter,
    tensors: dict[str, Tensor],
    items: tuple[ItemGeometry, ...],
    wanted: Wanted,
    number: int,
    gate: Gate | None,
) -> dict[str, tuple[Saliency, ...]]:
    """By key: the saliency in jittered view ``number``, without stages inside the tower."""
    context = _context(adapter, items, wanted)
    requests = {key: of for key, of in wanted.saliency.items() if of[0].jitter > number}
    sources = {source for _, source in requests.values()}
    decided, cls = None if gate is None else gate.decided, list[Tensor]()
    measure = partial(_of_bases, adapter, wanted)
    with (
        active(context),
        _unused_skipped(adapter, context),
        captured(adapter, context, cls, 0),
        gated(Gate(adapter, wanted.views, context, cls, measure, decided)) as again,
        _projected(adapter, "norm" in sources, again) as projected,
        loaded(adapter.model.base_model),
    ):
        adapter.encode(jittered(tensors, number, adapter.processor.image_processor), context)
    return _saliencies(adapter, context, requests, projected)


def jittered(tensors: dict[str, Tensor], number: int, processor: Any) -> dict[str, Tensor]:
    """Jittered view ``number`` of the images of a prompt, the same on every device.

    All images and crops get the same shift and the same noise, so that the result for one image
    does not depend on the others. Towers that take patches, which cannot be shifted, get the noise
    alone.

    Parameters
    ----------
    tensors : dict of str to Tensor
        What `Adapter.encode` takes; only those of pixels change.
    number : int
    processor : object
        Hugging Face's image processor, for the scale of the normalized pixels.
    """
    return {
        key: _jitter(value, number, _scale(processor)) if key.startswith("pixel_values") else value
        for key, value in tensors.items()
    }


def _jitter(pixels: Tensor, number: int, scale: float) -> Tensor:
    image = pixels.dim() >= 4  # (..., C, H, W), else (patches, D)
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(pixels.shape[-3:] if image else pixels.shape[-1:], generator=generator)
    if image:
        pixels = shifted(pixels, *SHIFTS[number % len(SHIFTS)])
    return pixels + (noise * _NOISE * scale).to(pixels.device, pixels.dtype)


def shifted(pixels: Tensor, down: int, right: int) -> Tensor:
    """Move the content of images (..., H, W); the border is repeated."""
    height, width = pixels.shape[-2:]
    rows = (torch.arange(height, device=pixels.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=pixels.device) - right).clamp(0, width - 1)
    return pixels.index_select(-2, rows).index_select(-1, columns)


def _scale(processor: Any) -> float:
    """Normalized units of one step of a pixel value of 0 to 255, mean over channels."""
    normalizes = getattr(processor, "do_normalize", True)
    std = (getattr(processor, "image_std", None) if normalizes else None) or 1.0
    values = [std] if isinstance(std, float | int) else list(std)
    return len(values) / sum(values) / 255


def _mean(views: list[tuple[Saliency, ...]]) -> tuple[Saliency, ...]:
    """The mean over several views of the same items; other fields are those of the first."""
    if len(views) == 1:
        return views[0]
    return tuple(
        replace(of[0], rows=torch.stack([saliency.rows for saliency in of]).mean(0))
        for of in zip(*views, strict=True)
    )


@contextmanager
def _projected(adapter: Adapter, wanted: bool, gate: Gate | None) -> Iterator[list[Tensor]]:
    """Collects the input of the projector, call by call, float32."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: tuple) -> None:
        rows = args[0].float()
        found.append(rows if gate is None else gate.expanded(rows))

    with adapter.projector().register_forward_pre_hook(hook) if wanted else nullcontext():
        yield found


@contextmanager
def _cls(adapter: Adapter, views: int) -> Iterator[list[Tensor]]:
    """Collects the projected CLS token of the first ``views`` rows, which the family may cut off.

    One tensor (V, D) per forward pass of the tower; none where no view is requested.
    """
    found: list[Tensor] = []
    if views and len(adapter.feature_blocks()) > 1:
        raise RecipeError(
            "this recipe needs the projected CLS token, and the model projects several layers of "
            "its vision tower at once"
        )

    def hook(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        # The projector's own hooks are for what the family sends through it.
        found.append(adapter.projector().forward(hidden[:views, :1])[:, 0])

    block = adapter.vision_blocks()[adapter.feature_block()]
    with block.register_forward_hook(hook) if views else nullcontext():
        yield found


@contextmanager
def _unused_skipped(adapter: Adapter, context: VisionContext) -> Iterator[None]:
    """Skip the blocks after the last one whose output or attention is used.

    LLaVA uses the features of the second-to-last block, so that the last one need not run, unless
    hooks of the user's may read its output.
    """
    used = max([*adapter.feature_blocks(), *context.requests])
    idle = adapter.vision_blocks()[used + 1 :]
    if idle and users_calls(*modules_of(adapter, "tower", adapter.tower()).all):
        idle = []
    with ExitStack() as skipped:
        for block in idle:
            skipped.enter_context(replaced(block, lambda forward: _identity))
        yield


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


def encoded_only(tokens: VisualTokens, skipped: Tensor) -> VisualTokens:
    """The tokens of views that were encoded, and newlines of rows with any of them.

    Parameters
    ----------
    skipped : Tensor, bool, (views,)
    """
    layout = tokens.layout
    gone = (layout.view >= 0) & skipped[layout.view.clamp(min=0).long()]
    stays = ~gone
    for _, index in tokens.items():
        own, lost = layout.select(index), gone[index]
        newline = own.kind == Kind.NEWLINE
        open_ = open_rows(~lost & ~newline, own, tiled=True) | ~lost.any()
        stays = stays.index_copy(0, index, ~lost & (open_ | ~newline))
    known = stays.cpu()  # the only read
    return tokens if bool(known.all()) else tokens.marked(stays, known)


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
    layout, n = tokens.layout, len(tokens)
    here, view = layout.view >= 0, layout.view.clamp(min=0).long()
    own, some = torch.arange(n, device=view.device), set(widths) - {0}
    # Views of one width need no table of them, which would be copied to the device.
    width = torch.tensor(widths, device=view.device)[view] if len(some) > 1 else max(some)
    place = torch.where(here, layout.grid[:, 1] * width + layout.grid[:, 2], 0).long()
    group = view * _APART + pad_sequence(list(groups), batch_first=True)[view, place]
    # Newlines belong to no view: each is a group of its own.
    group = torch.where(here, group, -1 - own)
    rank = group.argsort(stable=True)
    first = torch.ones_like(here)  # of its group, in this order
    first[1:] = group[rank[1:]] != group[rank[:-1]]
    group = torch.empty_like(rank).scatter(0, rank, first.cumsum(0) - 1)
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
    chosen = torch.zeros_like(here).scatter(0, rank, first)
    box = covering(layout.box, group, n)[group]
    changed = layout.replace(weight=size[group].to(layout.weight.dtype), box=box)
    return VisualTokens(tokens.features, changed, tokens.extra).marked(chosen, chosen.cpu())
