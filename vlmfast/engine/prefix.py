"""Prefix cache: a cache that is reused by the next prompt with the same beginning."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.drafting import Read
from vlmfast.core.protocols import DecodeStage
from vlmfast.core.snapshot import moved

from .cache import KVCache
from .decode import RowGroup
from .sequence import Sequence
from .stats import Stats, Trace

BUFFERS = ("keys", "values", "order", "rank", "attention_mass", "bias")
# Statistics of the prefix, which every sequence that continues from it reports.
_SHARED = (
    "saliency",
    "left_out",
    "visual_tokens_in",
    "visual_tokens_kept",
    "visual_tokens_per_layer",
    "equivalent_tokens",
)


@dataclass(eq=False)
class Prefix:
    """The beginning of a prompt, prefilled under a recipe.

    Parameters
    ----------
    group : RowGroup
        Of one row; its cache has consumed ``ids``.
    ids : list of int
    base : int
        How many of them were prefilled first, under the recipe.
    stages, notes, prompt_slots, steps
        As in `Sequence`.
    stats, trace
        As they were after prefilling the first part.
    reads : list of Read
        What drafters read of the first part.
    """

    group: RowGroup
    ids: list[int]
    base: int
    stats: Stats
    trace: Trace
    stages: list[DecodeStage] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompt_slots: Tensor | None = None
    steps: int = 0
    reads: list[Read] = field(default_factory=list)

    @staticmethod
    def of(sequence: Sequence, ids: list[int]) -> Prefix:
        """The state of ``sequence``, which has prefilled ``ids`` so far."""
        assert sequence.group is not None
        return Prefix(
            sequence.group,
            ids,
            len(ids),
            copy.deepcopy(sequence.stats),
            copied(sequence.trace, "cpu", []),
            sequence.stages,
            sequence.notes,
            sequence.prompt_slots,
            sequence.steps,
            [] if sequence.watch is None else list(sequence.watch.reads),
        )

    @property
    def cache(self) -> KVCache:
        return self.group.cache

    @property
    def bytes(self) -> int:
        """Size of the cache on the device, free slots included."""
        total = 0
        for layer in self.cache.layers:
            buffers = [getattr(layer, name) for name in BUFFERS]
            for segment in layer.segments:
                buffers += [x for x in vars(segment).values() if isinstance(x, Tensor)]
            total += sum(x.nbytes for x in buffers if x is not None)
        return total

    def rewind(self, ids: int) -> bool:
        """Remove all but the first ``ids``. Returns whether that was possible."""
        removed = len(self.ids) - ids
        if removed == 0:
            return True
        try:
            self.group.rewind(removed)
        except ValueError:
            return False
        self.prompt_slots = self.cache.length[:, 0].clone()
        self.ids = self.ids[:ids]
        return True

    def clone(self) -> Prefix:
        """A copy that shares no mutable state."""
        position = self.group.position.clone()
        group = RowGroup(self.group.adapter, self.cache.clone(), position, [])
        return replace(
            self,
            group=group,
            ids=list(self.ids),
            notes=copy.deepcopy(self.notes),
            prompt_slots=None if self.prompt_slots is None else self.prompt_slots.clone(),
        )

    def resume(self, sequence: Sequence) -> None:
        """Continue ``sequence`` from here; it keeps the images of its trace."""
        sequence.group, sequence.stages, sequence.notes = self.group, self.stages, self.notes
        sequence.prompt_slots, sequence.steps = self.prompt_slots, self.steps
        if sequence.watch is not None:
            sequence.watch.reads = list(self.reads)
        self.group.seat([sequence])
        for name in _SHARED:
            setattr(sequence.stats, name, copy.copy(getattr(self.stats, name)))
        images = sequence.trace.images
        sequence.trace = copied(self.trace, self.group.adapter.device, images)

    def reclaim(self, sequence: Sequence) -> None:
        """Take the cache back from a sequence that has ended."""
        if sequence.group is not None:
            self.group, sequence.group = sequence.group, None
        self.group.seat([])
        self.group.detach()  # other requests may use the captured steps meanwhile

    def update(self, sequence: Sequence) -> None:
        """Extend the prefix by what ``sequence`` has prefilled and answered."""
        self.prompt_slots, self.steps = sequence.prompt_slots, sequence.steps
        self.ids = sequence.ids[0, :-1].tolist()  # the last token of an answer is never fed
        self.reclaim(sequence)

    def release(self) -> None:
        """Return the buffers of the cache."""
        self.group.release()


def copied(trace: Trace, device: torch.device | str, images: list[Any]) -> Trace:
    """A copy of a trace, which stages may modify."""
    depth = None if trace.depth is None else trace.depth.clone()
    return moved(replace(trace, depth=depth, images=images), device)
