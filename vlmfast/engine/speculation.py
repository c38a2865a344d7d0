"""Speculative decoding: drafters propose tokens, the model checks them, answers do not change.

A token of the answer is a function of the model's logits, and of noise that depends on the seed and
the token's position alone (`engine.noise`). Checking a draft means taking that token at each node
that is reached and continuing at the child with this token ("sample and match"). So an answer is,
token for token, the one without drafts, whatever the drafts are: greedy, and sampled with the same
seed. In floating point a tree and a single token go through products of different shapes, whose
last bits may differ, in the logits and in the cached keys and values. A `strict` answer resolves
near ties with a cache that single tokens write again; such differences affect no other token.

Rounds of a batch check one tree of each sequence at once. A round never crosses a step at which a
decode stage modifies the cache. Of a strict answer single tokens also write again what such a stage
will read: it may round a value otherwise that differs in its last bit. That takes as many forward
passes as plain decoding, so that a strict answer is drafted up to the first such step alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.drafting import (
    Budget,
    Drafter,
    Observer,
    Proposal,
    Round,
    SlotList,
    Target,
    Traffic,
    ViewDrafter,
)
from vlmfast.core.protocols import DecodeStage, DrafterStage
from vlmfast.core.tree import Tree
from vlmfast.errors import RecipeError, VLMFastError
from vlmfast.models.base import Adapter

from .decode import Batch
from .forward import Output
from .noise import gumbel
from .sampling import ROWWISE
from .sequence import Sequence

_REMEMBERED = 32  # recipes and tenants whose drafters' state is kept


def walk(
    tree: Tree,
    logits: Tensor | Many[Tensor],
    take: Callable[[Tensor], tuple[int, bool]],
    is_unambiguous: Callable[[Tensor], bool] | None = None,
) -> tuple[list[int], list[int]]:
    """Sample and match: which nodes are accepted, and what is emitted.

    Parameters
    ----------
    tree : Tree
    logits : (N, V)
        The model's, of every node.
    take : callable
        Logits (V,) to the next token and whether the answer ends with it. Called once for every
        node that is reached, in the order of the answer.
    is_unambiguous : callable, optional
        Whether these logits (V,) determine the next token; if not, the walk ends before the node.

    Returns
    -------
    path : list of int
        Nodes whose next token was taken, the root first.
    emitted : list of int
        These tokens.
    """
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = 0
    while node is not None:
        if is_unambiguous is not None and not is_unambiguous(logits[node]):
            break
        path.append(node)
        token, done = take(logits[node])
        emitted.append(token)
        node = None if done else tree.children[node].get(token)
    return path, emitted


def check(stages: Many[DrafterStage], adapter: Adapter) -> None:
    """Check that drafters can be combined and fit this model; each is opened once.

    Raises
    ------
    RecipeError
    """
    alone = [stage for stage in stages if not stage.merges and not stage.governs]
    if len(alone) > 1:
        raise RecipeError(
            f"{alone[0].name} and {alone[1].name} cannot draft together: each needs trees of its "
            "own; only drafters without a model can be combined with another one"
        )
    if sum(stage.governs for stage in stages) > 1:
        raise RecipeError("a recipe can have at most one draft-auto")
    text = adapter.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise RecipeError(
            f"{stages[0].name}: {text.model_type} has {', '.join(sorted(odd))} layers, whose state "
            "cannot be rolled back after rejected drafts"
        )
    for stage in drafting(stages, adapter):
        stage.open(_target(adapter, stage))


class Speculation:
    """The drafts of one answer.

    Parameters
    ----------
    adapter : Adapter
    sequence : Sequence
        Its prompt has been prefilled.
    stages : list of DrafterStage
        Of the recipe.

    Raises
    ------
    RecipeError
        When a drafter does not fit the model.
    """

    def __init__(self, adapter: Adapter, sequence: Sequence, stages: Many[DrafterStage]) -> None:
        self.adapter, self.sequence = adapter, sequence
        self.seat: tuple[Batch, int] | None = None
        self.stages = drafting(stages, adapter)
        self.prompt = [] if sequence.watch is None else list(sequence.watch.reads)
        sizes = [stage.largest() for stage in self.stages]  # nodes and depth of each one's trees
        self.limit = sum(nodes - 1 for nodes, _ in sizes) + 1, max(depth for _, depth in sizes)
        governing = [stage for stage in stages if stage.governs]
        # What it measures of a model and these drafters is kept for later requests.
        known = _remembered(adapter, "drafting", *self.stages)
        self.governor = governing[0].govern(self.limit, known) if governing else None
        self.weights = _weights(adapter) if governing else 0
        self.drafters: list[Drafter] | None = None
        self.viewing: ViewDrafter | None = None
        self.warp = _warper(sequence)
        self.names = sequence.stats.speculation = "+".join(stage.name for stage in self.stages)
        self.taken, self.rows, self.began = self.limit, 1, 0.0
        self.unseen: list[Round] = []  # rounds that drafters have not seen yet
        self.first = False  # whether drafters process the prompt in this round
        # Why nothing more is drafted.
        at_every_token = [stage.name for stage in sequence.stages if _never_quiet(stage)]
        self.off = ""
        if at_every_token:
            self.off = f"off: {at_every_token[0]} modifies the cache at every token"
        if not any(stage.trained for stage in self.stages):
            with self._drafting():
                self._open()

    # --- a round ---------------------------------------------------------------------------------

    def propose(self, batch: Batch, number: int, root: int) -> Proposal:
        """A tree of drafts after ``root``, which the model has not processed yet."""
        sequence, stats = self.sequence, self.sequence.stats
        left = (
            sequence.max_new_tokens - sequence.count - 1
        )  # what is emitted beyond the round's own token
        self.began = time.perf_counter()
        nodes, depth = self.limit
        self.rows = len(batch.rows)
        if self.governor is not None:
            weights, cache = self.weights, batch.cache_bytes()
            drafts = sum(stage.draft_bytes(weights, cache) for stage in self.stages)
            read = Traffic(weights + cache, drafts)  # by the next forward passes
            count, most = sequence.count, sequence.max_new_tokens
            nodes, depth = self.governor.choose(self.rows, count, most, read)
            stats.speculation = f"{self.names}: {self.governor.reason}"
        self.taken = nodes, depth
        self.seat = batch, number
        depth = min(depth, left, batch.spare(number)) if depth and left > 0 else 0
        if self.off:
            stats.speculation, depth = self.off, 0
        if depth < 1 or nodes < 2:
            return Tree.chain([root])
        noise = self.noise if sequence.sampler.sampled else None
        drafting = self._tree(root, Budget(nodes, depth, self.warp, noise))
        go_on: Callable[[], int] = partial(next, drafting)
        while True:
            with self._drafting():  # not the forward passes that it waits for
                try:
                    token = go_on()
                except StopIteration as end:
                    return end.value
            go_on = partial(drafting.send, (yield token))

    def _tree(self, root: int, budget: Budget) -> Proposal:
        if self.drafters is None:
            self._open()
            self.first = True
        assert self.drafters is not None
        # Generators start after all others: these may write to the free slots of other rows.
        found = [drafter.propose(root, budget) for drafter in self.drafters]
        trees = []
        for each in found:
            trees.append(each if isinstance(each, Tree) else (yield from each))
        tree, *others = trees
        for other in others:
            tree = tree.joined(other)
        banned = self.adapter.placeholders()
        return tree.without(banned).first(budget.nodes, budget.depth)

    def _drafting(self) -> AbstractContextManager[None]:
        """Count the time inside the block as the drafters' work."""
        return self.sequence.stats.timed("time_draft_s", self.adapter.device)

    def noise(self, depth: int) -> Tensor:
        """The noise of the token at ``depth`` below the root."""
        sampler, adapter = self.sequence.sampler, self.adapter
        assert sampler.seed is not None
        return gumbel(sampler.seed, sampler.length + depth - 1, adapter.vocabulary, adapter.device)

    def learn(
        self, tree: Tree, path: list[int], emitted: list[int], output: Output, number: int
    ) -> None:
        """Process the model's results for ``tree``."""
        if not path:
            return
        stats, n = self.sequence.stats, len(tree)
        stats.rounds += 1
        stats.drafted += n - 1
        stats.accepted += len(path) - 1
        stats.mean_emitted = (self.sequence.count - 1) / stats.rounds
        stats.mean_accepted = stats.accepted / stats.rounds
        for depth in range(1, tree.depth + 1):
            if len(stats.drafted_at_depth) < depth:
                stats.drafted_at_depth.append(0)
                stats.accepted_at_depth.append(0)
            # Of the rounds that reached this depth and had a draft there.
            stats.drafted_at_depth[depth - 1] += len(path) >= depth
            stats.accepted_at_depth[depth - 1] += len(path) > depth
        if self.governor is not None:
            # The host has read the emitted tokens, so that the device has done this round.
            seconds = time.perf_counter() - self.began
            self.governor.observe(self.rows, self.taken, n, len(emitted), seconds, self.first)
            self.first = False
        if self.sequence.done:
            return
        aux_hidden_states = None
        if output.aux_hidden_states is not None:
            assert self.seat is not None
            batch, _ = self.seat
            at = [batch.aux_layers.index(layer) for layer in self.sequence.aux_layers]
            aux_hidden_states = output.aux_hidden_states[number, :n, at]
        # A captured step overwrites these with its next outputs.
        logits = output.logits[number, :n].clone() if self.reads("logits") else None
        features = output.hidden[number, :n].clone() if self.reads("features") else None
        self.unseen.append(Round(tree, path, emitted, logits, features, aux_hidden_states))
        if self.drafters is not None:
            with self._drafting():
                self._catch_up()

    def reads(self, what: str) -> bool:
        return any(getattr(stage, what) for stage in self.stages)

    @property
    def view(self) -> tuple[SlotList, ...] | None:
        """The slots that the tokens of `propose` read."""
        return None if self.viewing is None else self.viewing.view

    def observer(self) -> Observer | None:
        """Who reads the attention of the next verification."""
        return None if self.viewing is None else self.viewing.observer()

    def _open(self) -> None:
        adapter, ids = self.adapter, self.sequence.ids[0, : self.sequence.prompt_length].tolist()
        tenant = self.sequence.inputs.tenant
        notes = self.sequence.notes
        targets = [_target(adapter, stage, self._shallow, tenant, notes) for stage in self.stages]
        self.drafters = [stage.open(t) for stage, t in zip(self.stages, targets, strict=True)]
        self._check_view()
        for drafter in self.drafters:
            for part, read in enumerate(self.prompt):
                drafter.prefill(replace(read, ids=[] if part else ids))
        self.prompt.clear()
        self._catch_up()
        if self.governor is not None:
            self.governor.opened = True

    def _check_view(self) -> None:
        """Find the drafter that reads a view, and check that the view is of this cache.

        Raises
        ------
        VLMFastError
        """
        assert self.drafters is not None
        self.viewing = next((d for d in self.drafters if isinstance(d, ViewDrafter)), None)
        if (view := self.view) is None:
            return
        lengths = self.sequence.prompt_slots
        assert lengths is not None
        found = []
        for part, length in zip(view, lengths, strict=True):
            used = torch.arange(part.slots.shape[1], device=length.device) < part.counts[:, None]
            wrong = used & ((part.slots < 0) | (part.slots >= part.start[:, None]))
            found.append(wrong.any() | (part.start > length).any())
        for layer, bad in enumerate(torch.stack(found).tolist()):  # read at once
            if bad:
                raise VLMFastError(
                    f"{self.names}: the view of layer {layer} is of another cache: it has slots "
                    f"beyond the {int(lengths[layer].max())} of this prompt"
                )

    def _catch_up(self) -> None:
        """Show the drafters the rounds that they have not seen."""
        assert self.drafters is not None
        for done in self.unseen:
            for drafter in self.drafters:
                drafter.extend(done)
        self.unseen.clear()

    def _shallow(self, token: int, drafted: int, layers: Many[int]) -> Tensor:
        assert self.seat is not None
        batch, number = self.seat
        return batch.shallow(number, token, drafted, layers)


def _target(
    adapter: Adapter,
    stage: DrafterStage,
    shallow: Callable[..., Tensor] | None = None,
    tenant: str = "",
    notes: dict[str, dict[str, Any]] | None = None,
) -> Target:
    return Target(
        adapter.embed,
        adapter.logits,
        adapter.width,
        adapter.depth,
        adapter.vocabulary,
        adapter.placeholders(),
        adapter.trained(stage) if stage.trained else None,
        shallow,
        # Some remember answers, and which drafts are accepted would tell others of them.
        _remembered(adapter, "drafter", stage, tenant=tenant),
        (notes or {}).get(stage.name, {}),
    )


def _remembered(
    adapter: Adapter, kind: str, *stages: DrafterStage, tenant: str = ""
) -> dict[Any, Any]:
    """What drafters keep from one request to the next: for the last few recipes and tenants."""
    known = adapter.kept.setdefault("drafters", OrderedDict())
    key = (kind, tenant, *map(str, stages))
    found = known.setdefault(key, {})
    known.move_to_end(key)
    while len(known) > _REMEMBERED:
        known.popitem(last=False)
    return found


def drafting(stages: Many[DrafterStage], adapter: Adapter) -> list[DrafterStage]:
    """The drafters of a recipe, or those that its governor chooses."""
    chosen = [stage for stage in stages if not stage.governs]
    return chosen or stages[0].choice(adapter.ships)


def _weights(adapter: Adapter) -> int:
    """Bytes of the weights that a decode step reads: of the layers and of the head."""
    parts = [*adapter.decoder.layers, adapter.model.get_output_embeddings()]
    return sum(weight.nbytes for part in parts for weight in part.parameters())


def _never_quiet(stage: DecodeStage) -> bool:
    """Whether no draft can be checked before the stage has work to do, see `RowGroup.spare`."""
    quiet = type(stage).quiet is not DecodeStage.quiet or stage.every > 1
    return stage.attention_mass or not quiet


def _warper(sequence: Sequence) -> Callable[[Tensor], Tensor] | None:
    """The processors of a request that can rank drafts, as one function."""
    if not sequence.sampler.sampled:
        return None
    chosen = [p for p in sequence.sampler.processors if type(p) in ROWWISE]

    def warp(logits: Tensor) -> Tensor:
        nothing = sequence.ids.new_zeros(len(logits), 0)
        for processor in chosen:
            logits = processor(nothing, logits)
        return logits

    return warp
