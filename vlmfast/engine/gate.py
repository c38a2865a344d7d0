"""Leaves views of images out of the vision tower: crops and frames that a recipe does not need.

The family's own code runs on all views of a prompt. Its tower is replaced by one that encodes only
some of them: first the base view of each image, then the crops that a `ViewStage` chooses by it.
In its output, each view gets the rows of the view that it is a copy of, and a view that was left
out gets zeros; so it is with the projector, which also computes the encoded views alone. The
family's code therefore sees all views that it expects, before and after it. The tokens of views
that were left out are dropped before the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext, current_context
from vlmfast.core.protocols import ViewStage
from vlmfast.core.saliency import Saliency
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import RecipeError
from vlmfast.models.base import Adapter

from .tower import changed, only_in, replaced

Measure = Callable[[VisionContext], dict[str, tuple[Saliency, ...]]]
# Of one forward pass: projected CLS tokens, statistics and keys.
Collected = tuple[list[Tensor], dict[int, Tensor], dict[int, Tensor]]


@dataclass(frozen=True, eq=False)
class Decision:
    """Which views of one call of the tower are encoded.

    Parameters
    ----------
    rows : list of int
        The encoded views, counted from the first of the call, in the order of the tower.
    index, position : Tensor, int64, (encoded views,) and (views,)
        ``rows`` on the device, and for each view of the call the entry of ``rows`` whose features
        it gets, -1 for none.
    source : list of int
        The view that each view is a copy of, itself for most.
    """

    rows: list[int]
    index: Tensor
    position: Tensor
    source: list[int]

    @staticmethod
    def of(rows: list[int], source: list[int], device: torch.device) -> Decision:
        """With its indices on ``device``."""
        place = {view: row for row, view in enumerate(rows)}
        position = [place.get(view, -1) for view in source]
        both = torch.tensor(rows + position, device=device)  # one copy
        return Decision(rows, both[: len(rows)], both[len(rows) :], source)

    @property
    def everything(self) -> bool:
        """Whether all views are encoded, in their order."""
        return self.rows == list(range(len(self.source)))


@dataclass(eq=False)
class Gate:
    """Encodes the views that the stages of a recipe choose.

    Parameters
    ----------
    adapter : Adapter
    stages : tuple of ViewStage
    context : VisionContext
        Of the forward pass.
    cls : list of Tensor
        Collects the projected CLS tokens of each call of the tower.
    measure : callable
        The saliency of the items of a context after a call of the tower, by key.
    known : dict of int to Decision, optional
        Decisions of an earlier pass over the same images, by the first view of the call.

    Attributes
    ----------
    decided : dict of int to Decision
        Those of this pass.
    views, encoded : int
        Of all calls so far, and those of them that were encoded.
    """

    adapter: Adapter
    stages: tuple[ViewStage, ...]
    context: VisionContext
    cls: list[Tensor]
    measure: Measure
    known: dict[int, Decision] | None = None
    decided: dict[int, Decision] = field(default_factory=dict)
    views: int = 0
    encoded: int = 0

    def __post_init__(self) -> None:
        self.crops = next((stage for stage in self.stages if stage.chooses_crops), None)
        self.frames = next((stage for stage in self.stages if stage.reuses_frames), None)

    @property
    def skipped(self) -> Tensor | None:
        """Views without features, bool, (views,); ``None`` where no stage chooses crops."""
        if self.crops is None:
            return None
        return torch.cat([self.decided[first].position < 0 for first in sorted(self.decided)])

    def copies(self) -> dict[int, int]:
        """Views with the features of another view, and that view."""
        return {
            first + view: first + source
            for first, decision in self.decided.items()
            for view, source in enumerate(decision.source)
            if view != source
        }

    def call(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The output of the tower ``forward`` for the views that are encoded."""
        pixels = args[0] if args else kwargs["pixel_values"]
        first, count = self.views, len(pixels)
        self.views += count
        before, parts = self.cls[:], list[Collected]()

        def encode(rows: list[int]) -> Any:
            """The tower's output for some of the views, in one forward pass."""

            def select(value: Any) -> Any:
                if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
                    return value
                if rows == list(range(count)):
                    return value
                if rows == list(range(rows[0], rows[-1] + 1)):
                    return value[rows[0] : rows[-1] + 1]
                return value.index_select(0, torch.tensor(rows, device=value.device))

            for found in (self.cls, self.context.stats, self.context.keys):
                found.clear()
            self.context.numbers = [first + row for row in rows]
            named = {key: select(value) for key, value in kwargs.items()}
            output = forward(*map(select, args), **named)
            parts.append((self.cls[:], dict(self.context.stats), dict(self.context.keys)))
            return output

        if self.known is not None:
            decision, output = self.known[first], encode(self.known[first].rows)
        else:
            decision, output = self._decide(encode, pixels, first)
        self.decided[first] = decision
        self._by_view(before, parts)
        self.encoded += len(decision.rows)
        return changed(self.adapter, self.expanded, output)

    def _decide(
        self, encode: Callable[[list[int]], Any], pixels: Tensor, first: int
    ) -> tuple[Decision, Any]:
        """Encode the views that the stages choose."""
        items = [item for item in self.context.items if first <= item.views[0] < self.views]
        source = list(range(len(pixels)))
        if self.frames is not None:
            self._reuse(self.frames, items, pixels, source, first)
        own = [item for item in items if source[item.views[0] - first] == item.views[0] - first]
        if self.crops is None or all(item.views[1] - item.views[0] == 1 for item in own):
            rows = [view for view, of in enumerate(source) if of == view]
            output = encode(rows)
        else:
            rows = [self.adapter.whole_first(item)[0] - first for item in own]
            output = encode(rows)
            if crops := self._chosen(self.crops, own, first):
                output = changed(self.adapter, lambda *rows: torch.cat(rows), output, encode(crops))
                rows = rows + crops
        return Decision.of(rows, source, pixels.device), output

    def _reuse(
        self,
        stage: ViewStage,
        items: list[ItemGeometry],
        pixels: Tensor,
        source: list[int],
        first: int,
    ) -> None:
        """Set in ``source`` the views of frames that get the features of earlier frames."""
        videos: dict[int, list[ItemGeometry]] = {}
        for item in items:
            if item.video >= 0:
                videos.setdefault(item.video, []).append(item)
        for frames in videos.values():
            views = [[view - first for view in range(*item.views)] for item in frames]
            if len(views) < 2 or len({len(own) for own in views}) > 1:
                continue
            index = torch.tensor(views, device=pixels.device)
            found = stage.reused(pixels[index])
            fine = len(found) == len(views) and all(
                0 <= of <= at and found[of] == of for at, of in enumerate(found)
            )
            if not fine:
                raise RecipeError(
                    f"{stage.name} chose the frames {found} for a video of {len(views)}; each must "
                    "be the frame itself or an earlier one that is encoded"
                )
            for own, of in zip(views, found, strict=True):
                for view, other in zip(own, views[of], strict=True):
                    source[view] = other

    def _chosen(self, stage: ViewStage, items: list[ItemGeometry], first: int) -> list[int]:
        """Views of the crops that are encoded, ascending, by the statistics of the base views."""
        alone = tuple(
            replace(item, tiles=(0, 0), views=(row, row + 1)) for row, item in enumerate(items)
        )
        saliency = self.measure(replace(self.context, items=alone))
        chosen = []
        for row, item in enumerate(items):
            views = self.adapter.whole_first(item)[1:]
            if not views:
                continue
            own = tuple(saliency[asked.key][row] for asked in stage.saliencies())
            crops = stage.crops(item, own)
            if crops != sorted(set(crops) & set(range(len(views)))):
                raise RecipeError(
                    f"{stage.name} chose the crops {crops} of an image with {len(views)}; they "
                    f"must ascend, from 0 to {len(views) - 1}"
                )
            chosen += [views[crop] - first for crop in crops]
        return sorted(chosen)

    def _by_view(self, before: list[Tensor], parts: list[Collected]) -> None:
        """Statistics and CLS tokens of the forward passes of a call for all of its views."""
        cls, *found = zip(*parts, strict=True)
        for own, layers in zip((self.context.stats, self.context.keys), found, strict=True):
            own.clear()
            for layer in layers[0]:
                own[layer] = self.expanded(torch.cat([part[layer] for part in layers]))
        self.cls[:] = before
        if of_views := [tokens for part in cls for tokens in part]:
            self.cls.append(self.expanded(torch.cat(of_views)))
        self.context.numbers = None

    def expanded(self, rows: Tensor) -> Tensor:
        """Rows of the views that the last call encoded as rows of all of its views."""
        decision = self.decided[max(self.decided)]
        if decision.everything:
            return rows
        position = decision.position
        found = rows.index_select(0, position.clamp(min=0))
        return found.masked_fill((position < 0).view(-1, *[1] * (rows.dim() - 1)), 0)

    def encoded_only(self, rows: Tensor) -> Tensor:
        """The inverse of `expanded`."""
        decision = self.decided[max(self.decided)]
        if decision.everything:
            return rows
        return rows.index_select(0, decision.index)


@contextmanager
def gated(gate: Gate) -> Iterator[Gate | None]:
    """Encode only the views that the stages choose; ``None`` where there are none."""
    if not gate.stages:
        yield None
        return
    adapter, context = gate.adapter, gate.context

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if current_context.get() is not context:  # another forward pass of the same tower
                return forward(*args, **kwargs)
            return gate.call(forward, args, kwargs)

        return chosen

    def before_projector(module: nn.Module, args: tuple) -> tuple:
        return (gate.encoded_only(args[0]), *args[1:])

    def after_projector(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return gate.expanded(output)

    projector = adapter.projector()
    with (
        # Other hooks see the encoded views alone.
        projector.register_forward_pre_hook(only_in(context, before_projector), prepend=True),
        projector.register_forward_hook(only_in(context, after_projector)),
        replaced(adapter.tower(), wrapped),
    ):
        yield gate
