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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import VisionContext, current_context
from vlmfast.core.protocols import ViewStage
from vlmfast.core.saliency import Saliency
from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import RecipeError
from vlmfast.models.base import Adapter

from .tower import replaced

Measure = Callable[[VisionContext], dict[str, tuple[Saliency, ...]]]


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
    decided : dict of int to Decision, optional
        Decisions of an earlier pass over the same images, by the first view of the call.

    Attributes
    ----------
    decided : dict of int to Decision
        Those of this pass.
    """

    def __init__(
        self,
        adapter: Adapter,
        stages: tuple[ViewStage, ...],
        context: VisionContext,
        cls: list[Tensor],
        measure: Measure,
        decided: dict[int, Decision] | None = None,
    ) -> None:
        self.adapter, self.context, self.cls, self.measure = adapter, context, cls, measure
        self.crops = next((stage for stage in stages if stage.chooses_crops), None)
        self.frames = next((stage for stage in stages if stage.reuses_frames), None)
        self.known = decided
        self.decided: dict[int, Decision] = {}
        self.views = 0  # of all calls so far
        self.encoded = 0  # of these

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
        first, self.views = self.views, self.views + len(pixels)
        call = _Call(self, forward, args, kwargs, first, len(pixels))
        if self.known is not None:
            self.decided[first] = self.known[first]
            output = call.encode(self.known[first].rows)
        else:
            self.decided[first], output = self._decide(call, pixels)
        self._by_view(call)
        self.encoded += len(self.decided[first].rows)
        return self.changed(self.expanded, output)

    def changed(self, made: Callable[..., Tensor], *outputs: Any) -> Any:
        """The first of the tower's outputs, with ``made(*tensors)`` of all of them.

        Of its levels, only those that the family reads are changed.
        """
        output = outputs[0]
        output.last_hidden_state = made(*(each.last_hidden_state for each in outputs))
        if getattr(output, "hidden_states", None) is not None:
            wanted = [block + 1 for block in self.adapter.feature_blocks()]
            levels = zip(*(each.hidden_states for each in outputs), strict=True)
            output.hidden_states = tuple(
                made(*level) if i in wanted else level[0] for i, level in enumerate(levels)
            )
        return output

    def _decide(self, call: _Call, pixels: Tensor) -> tuple[Decision, Any]:
        """Encode the views that the stages choose."""
        items = [item for item in self.context.items if call.first <= item.views[0] < self.views]
        source = list(range(call.count))
        if self.frames is not None:
            self._reuse(self.frames, items, pixels, source, call.first)
        start = call.first
        own = [item for item in items if source[item.views[0] - start] == item.views[0] - start]
        if self.crops is None or all(item.views[1] - item.views[0] == 1 for item in own):
            rows = [view for view in range(call.count) if source[view] == view]
            output = call.encode(rows)
        else:
            rows = [self.adapter.whole_first(item)[0] - call.first for item in own]
            output = call.encode(rows)
            crops = self._chosen(self.crops, own, call.first)
            if crops:
                more = call.encode(crops)
                output = self.changed(lambda *rows: torch.cat(rows), output, more)
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

    def _by_view(self, call: _Call) -> None:
        """Statistics and CLS tokens of a call for all of its views."""
        for found in (self.context.stats, self.context.keys):
            found.clear()
        for found, parts in zip((self.context.stats, self.context.keys), call.found, strict=True):
            for layer in parts[0] if parts else ():
                found[layer] = self.expanded(torch.cat([part[layer] for part in parts]))
        self.cls[:] = call.before
        if call.cls:
            self.cls.append(self.expanded(torch.cat(call.cls)))
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


class _Call:
    """One call of the tower by the family, as one or two forward passes."""

    def __init__(
        self,
        gate: Gate,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        first: int,
        count: int,
    ) -> None:
        self.gate, self.forward, self.args, self.kwargs = gate, forward, args, kwargs
        self.first, self.count = first, count
        self.before = gate.cls[:]
        self.cls: list[Tensor] = []
        self.found: tuple[list[dict[int, Tensor]], list[dict[int, Tensor]]] = ([], [])

    def encode(self, rows: list[int]) -> Any:
        """The tower's output for some of the views."""
        gate, context = self.gate, self.gate.context
        for found in (gate.cls, context.stats, context.keys):
            found.clear()
        context.numbers = [self.first + row for row in rows]
        if rows == list(range(self.count)):
            output = self.forward(*self.args, **self.kwargs)
        else:
            args = [self._select(value, rows) for value in self.args]
            kwargs = {key: self._select(value, rows) for key, value in self.kwargs.items()}
            output = self.forward(*args, **kwargs)
        self.cls += gate.cls
        for parts, of in zip(self.found, (context.stats, context.keys), strict=True):
            parts.append(dict(of))
        return output

    def _select(self, value: Any, rows: list[int]) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != self.count:
            return value
        if rows == list(range(rows[0], rows[-1] + 1)):
            return value[rows[0] : rows[-1] + 1]
        return value.index_select(0, torch.tensor(rows, device=value.device))


@contextmanager
def gated(
    adapter: Adapter,
    stages: tuple[ViewStage, ...],
    context: VisionContext,
    cls: list[Tensor],
    measure: Measure,
    decided: dict[int, Decision] | None = None,
) -> Iterator[Gate | None]:
    """Encode only the views that ``stages`` choose; the parameters are those of `Gate`."""
    if not stages:
        yield None
        return
    gate = Gate(adapter, stages, context, cls, measure, decided)

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if current_context.get() is not context:  # another forward pass of the same tower
                return forward(*args, **kwargs)
            return gate.call(forward, args, kwargs)

        return chosen

    def before_projector(module: nn.Module, args: tuple) -> tuple | None:
        if current_context.get() is not context:
            return None
        return (gate.encoded_only(args[0]), *args[1:])

    def after_projector(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        return gate.expanded(output) if current_context.get() is context else None

    projector = adapter.projector()
    with (
        # Other hooks see the encoded views alone.
        projector.register_forward_pre_hook(before_projector, prepend=True),
        projector.register_forward_hook(after_projector),
        replaced(adapter.tower(), wrapped),
    ):
        yield gate
