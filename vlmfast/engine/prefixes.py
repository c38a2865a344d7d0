"""Keys and values of the beginnings of prompts, in the prefix cache.

An entry is what the language model has computed for the first ids of a prompt. A later prompt with
the same images that begins with the same ids continues from a copy of it. Entries are found by the
longest common beginning. A cache that nothing has compressed is cut to any length within the text
after its last image; any other one is used as a whole.

A prompt that is prefilled at once may only continue from what gives the same answer: recipes whose
stages neither read the question nor work in the language model. A session prefills its images
before any question, so under all recipes that do not read the question its prompts continue from
the images that were compressed without one. These entries are kept apart where it matters.

A `Prefix` owns the buffers of its cache until it is stored, resumed by a sequence or released;
`Prefixes` owns nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vlmfast.core.buffers import caught_shortage
from vlmfast.core.drafting import Read
from vlmfast.core.nested import moved
from vlmfast.core.protocols import DecodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.errors import RecipeError
from vlmfast.models.base import Adapter

from .cache import KVCache
from .chunks import splits
from .decode import RowGroup
from .features import is_hashable, model_parts, surroundings
from .fingerprint import fingerprints, structures_of
from .kv_layer import SLOTWISE
from .memory import free_bytes
from .prefix_cache import Entry, Key, PrefixCache, prefix_cache_of
from .sequence import Sequence
from .stats import Stats, Trace

KIND = "prefixes"
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


class Scope(NamedTuple):
    """What prefixes that can be exchanged have in common, except their ids.

    Parameters
    ----------
    tenant : str
    content : Hashable
    weights : tuple of bytes
        The fingerprints of tower, language model and trained stages, a part of ``content``.
    trained : tuple of Module
        These stages.
    """

    tenant: str
    content: Hashable
    weights: tuple[bytes | None, ...] = ()
    trained: tuple[nn.Module, ...] = ()

    def key(self, ids: Many[int]) -> Key:
        """Of a prefix with these ids."""
        return Key(KIND, self.tenant, self.content, tuple(ids))


def parts(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe and the stages that they expand to."""
    return [part for stage in recipe for part in (stage, *stage.expand())]


class Prefixes:
    """The prefixes of prompts to one model.

    Parameters
    ----------
    adapter : Adapter
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    @property
    def cache(self) -> PrefixCache:
        return prefix_cache_of(self.adapter)

    def scope(
        self,
        recipe: Recipe,
        digests: tuple[str, ...] = (),
        sizes: Many[tuple[int, int]] = (),
        frames: Many[tuple] = (),
        *,
        tenant: str = "",
        apart: bool = False,
    ) -> Scope | None:
        """Of prompts with the same images; ``None`` where nothing is shared.

        Parameters
        ----------
        digests : tuple of str
            Of the content of the images, see `features.Hashed`.
        sizes, frames
            As in `Inputs`.
        tenant : str
            As in `Key`.
        apart : bool
            Whether the images are prefilled before the text, as in a session.
        """
        adapter, model = self.adapter, self.adapter.model
        stages = parts(recipe)
        whole = all(map(splits, recipe))
        if not self.cache.enabled or model.training or torch.is_inference_mode_enabled():
            return None
        if not adapter.reusable:
            return None
        if any(part.query_dependent for part in stages) or not (whole or apart):
            return None
        if sizes and not digests:
            return None
        try:
            trained = [adapter.trained(stage) for stage in recipe if stage.trained]
        except RecipeError:  # the prefill has more to say about it
            return None
        modules = tuple(own for own in trained if isinstance(own, nn.Module))
        weights = self._weights(modules)
        if None in weights:
            return None
        content = (
            weights,
            tuple((type(stage), stage) for stage in recipe),
            not whole,
            digests,
            tuple(sizes),
            tuple(frames),
            surroundings(adapter),
        )
        if not is_hashable(content):
            return None
        return Scope(tenant, content, weights, modules)

    def _weights(self, trained: tuple[nn.Module, ...]) -> tuple[bytes | None, ...]:
        """Fingerprints of the tower, the language model and trained stages."""
        parts = *model_parts(self.adapter), *(([own], []) for own in trained)
        # What hooks do may change at any time.
        return tuple(fingerprints(*parts, kept=structures_of(self.adapter)))

    def resume(self, scope: Scope | None, sequence: Sequence, least: int) -> Prefix | None:
        """Continue a sequence from a copy of the longest prefix of its prompt.

        Parameters
        ----------
        least : int
            Ids that must be part of it: up to the last image.

        Returns
        -------
        Prefix or None
            The copy, whose ``ids`` are those that need not be prefilled.
        """
        ids = sequence.inputs.ids.tolist()[:-1]  # the logits after the last one are needed
        use = Lock()
        with use:
            if scope is None:
                return None
            entry, count = self.cache.search(scope.key(ids), least, use)
            if entry is None:
                return None
            prefix = entry.value.clone(count)
        prefix.resume(sequence)
        return prefix

    def keep(self, scope: Scope | None, prefix: Prefix, *, at_once: bool = False) -> Entry | None:
        """Store a prefix, whose buffers are no one else's, in place of entries that it contains.

        Where it is not stored, its buffers are returned: if the model has changed since the scope
        was found, for example.

        Parameters
        ----------
        at_once : bool
            Whether nothing else can have run since the scope was found.
        """
        # Layers of a short prompt may have been prefilled as if they had no window.
        windows = [layer.window for layer in prefix.cache.layers]
        size, entry = prefix.bytes, None
        fits = size <= self.cache.limit and windows == list(self.adapter.windows)
        if scope is not None and fits and (at_once or self._is_same(scope)):
            key = scope.key(prefix.ids)
            entry = self.cache.put(key, prefix, size, prefix.release, least=prefix.least)
        if entry is None:
            prefix.release()
        return entry

    def keep_copy(
        self, scope: Scope | None, prefix: Prefix, *, at_once: bool = False
    ) -> Entry | None:
        """As `keep`, a copy of a prefix whose buffers remain the caller's.

        There is none where it would take more than half of the memory that is free.
        """
        if scope is None or prefix.bytes > self.cache.limit:
            return None
        if prefix.bytes > free_bytes(self.adapter.device) / 2:
            return None
        with caught_shortage() as short:
            copy = prefix.clone()
        if short:  # the request itself needs no copy
            return None
        return self.keep(scope, copy, at_once=at_once)

    def _is_same(self, scope: Scope) -> bool:
        """Whether the model is still the one of a scope."""
        return scope.weights == self._weights(scope.trained)

    def bytes(self, scope: Scope | None, ids: list[int]) -> int:
        """The size of the entry that shares the most of ``ids``; 0 without any."""
        entry = None if scope is None else self.cache.search(scope.key(ids), counted=False)[0]
        return 0 if entry is None else entry.bytes
