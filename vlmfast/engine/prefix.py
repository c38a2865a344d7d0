"""Prefix cache: a cache that is reused by the next prompt with the same beginning."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.drafting import Read
from vlmfast.core.protocols import DecodeStage
from vlmfast.core.snapshot import moved

from .cache import KVCache
from .decode import RowGroup
from .kv_layer import SLOTWISE
from .sequence import Sequence
from .stats import Stats, Trace

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
    stages, notes, prompt_slots, steps
        As in `Sequence`.
    stats, trace
        As they were after prefilling the first part.
    reads : list of Read
        What drafters read of the first part.
    """

    group: RowGroup
    ids: list[int]
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
            Stats(**asdict(sequence.stats)),
            copied(sequence.trace, sequence.group.adapter.device, []),
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
    def least(self) -> int:
        """To how many ids it can be cut."""
        return len(self.ids) if self.cache.track else min(self.cache.base[0], len(self.ids))

    @property
    def bytes(self) -> int:
        """Its size on the device, free slots included."""
        total = sum(x.nbytes for read in self.reads for x in read.tensors())
        for layer in self.cache.layers:
            buffers = [getattr(layer, name) for name in SLOTWISE]
            for segment in layer.segments:
                buffers += [x for x in vars(segment).values() if isinstance(x, Tensor)]
            total += sum(x.nbytes for x in buffers if x is not None)
        return total

    def clone(self, ids: int | None = None) -> Prefix:
        """A copy of the first ``ids``, at least `least`, that shares no mutable state."""
        count = len(self.ids) if ids is None else ids
        cache = self.cache.clone(0)
        assert cache.position is not None
        group = RowGroup(self.group.adapter, cache, cache.position, [])
        try:
            slots = None if self.prompt_slots is None else self.prompt_slots.clone()
            reads = self.reads
            if count < len(self.ids):
                group.rewind(len(self.ids) - count)
                slots = group.cache.length[:, 0].clone()
                reads = [read.first(count) for read in reads]
            notes = copy.deepcopy(self.notes)
        except BaseException:
            group.release()
            raise
        return replace(
            self, group=group, ids=self.ids[:count], notes=notes, prompt_slots=slots, reads=reads
        )

    def resume(self, sequence: Sequence) -> None:
        """Continue ``sequence`` from here; it keeps the images of its trace."""
        sequence.group, sequence.stages, sequence.notes = self.group, self.stages, self.notes
        sequence.prompt_slots, sequence.steps = self.prompt_slots, self.steps
        if sequence.watch is not None:
            sequence.watch.reads = list(self.reads)
        self.group.rows = [sequence]
        for name in _SHARED:
            setattr(sequence.stats, name, copy.copy(getattr(self.stats, name)))
        images = sequence.trace.images
        sequence.trace = copied(self.trace, self.group.adapter.device, images)

    def after(self, sequence: Sequence, ids: list[int]) -> Prefix:
        """The prefix after a sequence has consumed ``ids``; it has the cache of the sequence."""
        assert sequence.group is not None
        return replace(
            self,
            group=sequence.group,
            ids=ids,
            prompt_slots=sequence.prompt_slots,
            steps=sequence.steps,
            notes=sequence.notes,
        )

    def extended(self, sequence: Sequence) -> Prefix:
        """The prefix after a prompt and its answer; the sequence loses its cache."""
        # The last token of an answer is never fed.
        prefix = self.after(sequence, sequence.ids[0, :-1].tolist())
        prefix.group.detach()  # other requests may use the captured steps meanwhile
        sequence.group = None
        prefix.group.rows = []
        return prefix

    def release(self) -> None:
        """Return the buffers of the cache."""
        self.group.release()


def copied(trace: Trace, device: torch.device | str, images: list[Any]) -> Trace:
    """A copy of a trace, to which stages may add."""
    return moved(replace(trace, images=images), device)
