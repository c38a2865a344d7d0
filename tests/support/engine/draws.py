"""Sampling and its noise, drafts and their verification, and drafters.

Functions whose first argument is a ``patch`` change the library until it is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmfast import VLM, Session
from vlmfast.api.generation import gate
from vlmfast.api.request import messages_of, sequence_of
from vlmfast.core.drafting import SlotList
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.drafters._grow import RANKS, grow
from vlmfast.drafters._layer import Cache, Layer, causal
from vlmfast.drafters._loading import load_published, published
from vlmfast.drafters._losses import distance_loss, feature_loss, ranking_loss, token_loss
from vlmfast.drafters._static import ROOT, filled, guesses, likeliest_first, shape_of
from vlmfast.drafters._training import Drafting, Teacher, accepted, unroll
from vlmfast.engine import decode, prefiller, rounds, sampling, speculation
from vlmfast.engine.cache import KVCache, RowSlots
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.noise import gumbel, gumbels
from vlmfast.engine.rounds import Rounds
from vlmfast.engine.sampling import Parameters, Sampler, Sampling
from vlmfast.engine.sequence import Sequence as Answering
from vlmfast.engine.speculation import walk

__all__ = [
    "RANKS",
    "ROOT",
    "Cache",
    "Drafting",
    "Layer",
    "Parameters",
    "Sampler",
    "Sampling",
    "Teacher",
    "accepted",
    "causal",
    "distance_loss",
    "feature_loss",
    "filled",
    "grow",
    "guesses",
    "gumbel",
    "gumbels",
    "likeliest_first",
    "load_published",
    "published",
    "ranking_loss",
    "shape_of",
    "token_loss",
    "unroll",
    "walk",
]

Patch = pytest.MonkeyPatch

# --- sampling ------------------------------------------------------------------------------------

entropy = sampling._entropy


def scores_of(rows: Sampling, logits: Tensor) -> list[Tensor]:
    """The processed scores from which the next tokens of ``rows`` are chosen."""
    return rows._scores(rows._raw(logits))


def processed_alone(rows: Sampling) -> list[int]:
    """Rows whose own list of processors is called."""
    return rows._apart


def processed(rows: Sequence[Parameters], logits: Tensor, seen: Tensor, device: Any) -> Tensor:
    """The scores on a device; ``seen``: ids that a repetition penalty counts."""
    return sampling.Columns(rows, device)(logits, seen)


def while_choosing(
    patch: Patch, watch: Callable[[], AbstractContextManager[Any]]
) -> list[tuple[int, Any]]:
    """The tokens of each step without drafts are chosen inside ``watch()``.

    Returns the number of rows that go on after each step, and what has watched it.
    """
    found, step = [], Rounds._single

    def single(self: Rounds, batch: Batch) -> None:
        before, feed = list(batch.rows), batch.feed
        with ExitStack() as watched, Patch.context() as inner:
            watches = []

            def fed(tokens: Tensor) -> Any:
                output = feed(tokens)
                watches.append(watched.enter_context(watch()))
                return output

            inner.setattr(batch, "feed", fed)
            step(self, batch)
        found.append((sum(not row.done for row in before), *watches))

    patch.setattr(Rounds, "_single", single)
    return found


# --- verification --------------------------------------------------------------------------------

REMEMBERED = speculation._REMEMBERED  # recipes and tenants whose drafters' state is kept


def remembered(vlm: VLM) -> tuple[int, int]:
    """For how many recipes and tenants a model keeps what drafters have learned; and elsewhere."""
    others = [key for key in vlm.adapter.kept if "draft" in str(key) and key != "drafters"]
    return len(vlm.adapter.kept["drafters"]), len(others)


def near_ties(patch: Patch, ulps: float) -> None:
    """Logits within ``ulps`` units in the last place of the largest are near ties."""
    patch.setattr(rounds, "_ULPS", ulps)


def verified(patch: Patch) -> list[Tree]:
    """The trees that are verified from now on."""
    found, verify = [], Batch.verify

    def noted(self: Batch, trees: Sequence[Tree], *observers: Any) -> Any:
        found.extend(trees)
        return verify(self, trees, *observers)

    patch.setattr(Batch, "verify", noted)
    return found


def drifting(patch: Patch, by: float) -> None:
    """Trees write values that differ from those of single tokens by ``by``."""
    verify = Batch.verify

    def drifts(self: Batch, trees: Sequence[Tree]) -> Any:
        output = verify(self, trees)
        for layer in self.groups[0].cache.layers:
            layer.values[:, :, layer.max_lengths[0] : layer.max_lengths[0] + 8] += by
        return output

    patch.setattr(Batch, "verify", drifts)


def unmoved(patch: Patch) -> None:
    """A planted bug: the keys and values of accepted drafts stay where they were written."""
    accept = KVCache.accept

    def stay(self: KVCache, index: Tensor, counts: Any, moves: bool = True) -> Any:
        return accept(self, index, counts, moves=False)

    patch.setattr(KVCache, "accept", stay)


def drafted_scores(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """``change`` modifies the scores from which tokens of answers with drafts are chosen."""
    ranked, draft, samplers = sampling._ranked, Engine._draft, set()

    def drafted(self: Engine, sequence: Answering) -> None:
        draft(self, sequence)
        if sequence.drafts is not None:
            samplers.add(sequence.sampler)

    def changed(scores: Tensor, rows: Sequence[Sampler]) -> Tensor:
        scores = ranked(scores, rows)
        return change(scores.clone()) if rows[0] in samplers else scores

    patch.setattr(Engine, "_draft", drafted)
    patch.setattr(sampling, "_ranked", changed)


def without_prefill(patch: Patch) -> None:
    """What prefills a prompt fails."""
    patch.setattr(prefiller, "prefill", None)


def quantized(patch: Patch) -> list[Tensor]:
    """The keys and values that decode stages quantize from now on."""
    found, quantize = [], RowSlots.quantize

    def noted(self: RowSlots, count: int, make: Any) -> None:
        found.extend(x[:, :count].clone() for x in (self.keys, self.values))
        quantize(self, count, make)

    patch.setattr(RowSlots, "quantize", noted)
    return found


def answered(vlm: VLM, question: str, images: Any, recipe: Recipe, **generation: Any) -> Answering:
    """The sequence of an answer, which keeps its cache."""
    passed = gate(vlm.adapter, generation)
    sequence = sequence_of(vlm.adapter, messages_of(question, images), recipe, passed)
    sequence.keeps_cache = True
    vlm.engine.submit(sequence, lambda sequence: None).result()
    return sequence


def left_by(sequence: Answering) -> tuple[list[Any], list[Tensor], int]:
    """What an answer has left in the cache.

    Its positions and lengths, which are exact, the keys and values of each head, and the number of
    tokens.
    """
    group, cache = sequence.group, sequence.group.cache
    counts, stored = [group.position.tolist(), sequence.steps, cache.logical], []
    for layer in cache.layers:
        counts += [layer.length.tolist(), layer.max_lengths, layer.stored]
        for head, length in enumerate(layer.length[0].tolist()):
            stored += [layer.keys[0, head, :length], layer.values[0, head, :length]]
    return counts, stored, max(cache.lengths())


def values_kept(session: Session) -> Tensor:
    """The values that a session keeps for its next question, of all layers."""
    layers = session._entries[-1].value.cache.layers
    return torch.stack([layer.values[0, :, : layer.max_lengths[0]] for layer in layers])


def drafting_passes(patch: Patch) -> list[tuple[int, int]]:
    """Rows that draft and groups of each forward pass that drafts with the model itself."""
    found, draft = [], decode.draft

    def noted(groups: Sequence[RowGroup], tokens: Tensor, views: Any, drafted: int) -> Tensor:
        drafting = sum(view is not None for own in views for view in own)
        found.append((drafting, len(groups)))
        return draft(groups, tokens, views, drafted)

    patch.setattr(decode, "draft", noted)
    return found


def slot_lists(layers: int) -> Callable[[list[tuple[SlotList, ...] | None]], list[SlotList]]:
    """Lists the slots that the rows of one group read, by layer, for their views of each step."""
    group = SimpleNamespace(cache=SimpleNamespace(layers=range(layers)), _listed=([], []))
    return partial(RowGroup.listed, group)
