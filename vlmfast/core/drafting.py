"""Inputs and outputs of drafters: the target model, the prompt, checked trees, budgets."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .layout import TokenLayout
from .tree import Tree

_NOWHERE = 1 << 60  # a slot after all others


@dataclass(frozen=True, eq=False)
class Target:
    """What a drafter may use of the model that it drafts for.

    Parameters
    ----------
    embed : callable
        Ids, int64, (...) to input embeddings (..., D).
    logits : callable
        Hidden states after the last norm (..., D) to logits (..., V).
    width, depth, vocabulary : int
        D, decoder layers, V.
    banned : tuple of int
        Ids that are never drafted: placeholders of images and videos.
    trained : Module, optional
        The drafter's own weights.
    shallow : callable, optional
        ``(token, drafted, layers) -> logits (V,)``: logits after a token by ``layers`` of the
        model alone, where ``drafted`` such tokens follow the cache.
    kept : dict
        State of the drafter for this model, kept from one request to the next.
    notes : dict
        As in `PrefillContext`, of the request; of its own method alone.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    width: int
    depth: int
    vocabulary: int
    banned: tuple[int, ...] = ()
    trained: nn.Module | None = None
    shallow: Callable[..., Tensor] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)

    def likeliest(self, logits: Tensor, budget: Budget, depth: int) -> tuple[int, float]:
        """The best token at ``depth`` by logits (V,), and its probability; read at once."""
        logits = logits.float()
        for token in self.banned:
            logits[token].fill_(-torch.inf)
        best = budget.rank(logits[None], depth)[0].argmax()[None]
        probability = logits.softmax(-1).index_select(0, best)
        token, probable = torch.cat([best.double(), probability.double()]).tolist()
        return int(token), probable


@dataclass(frozen=True, eq=False)
class SlotList:
    """The slots of one layer's cache that a draft reads: some of the first ones, and all later.

    Parameters
    ----------
    slots : Tensor, int64, (H, K), or (B, H, K) of a batch
        Indices into the tail of each KV head, below ``start``.
    counts : Tensor, int64, (H,) or (B, H)
        How many of the K each head reads; the others are padding.
    start : Tensor, int64, (H,) or (B, H)
        Every slot from here on is read, those of new tokens included.
    least : tuple of int
        The smallest ``start`` of each row, on the host.
    """

    slots: Tensor
    counts: Tensor
    start: Tensor
    least: tuple[int, ...]

    @staticmethod
    def stacked(lists: Sequence[SlotList | None]) -> SlotList:
        """The lists of the rows of a batch; a row without one reads its new tokens alone."""
        given = [part for part in lists if part is not None]
        heads, width = len(given[0].counts), max(part.slots.shape[1] for part in given)
        slots = given[0].slots.new_zeros(len(lists), heads, width)
        counts = slots.new_zeros(len(lists), heads)
        start = torch.full_like(counts, _NOWHERE)
        stacked = SlotList(slots, counts, start, (_NOWHERE,) * len(lists))
        for row, part in enumerate(lists):
            if part is not None:
                wider = stacked.put(row, part)
                assert wider is not None
                stacked = wider
        return stacked

    def put(self, row: int, part: SlotList | None) -> SlotList | None:
        """This list of a batch with another list of one row, or ``None`` where that is longer.

        The tensors are modified.
        """
        if part is None:
            self.counts[row], self.start[row] = 0, _NOWHERE
        elif (width := part.slots.shape[1]) > self.slots.shape[2]:
            return None
        else:
            self.slots[row, :, :width] = part.slots
            self.counts[row], self.start[row] = part.counts, part.start
        least = _NOWHERE if part is None else part.least[0]
        return replace(self, least=(*self.least[:row], least, *self.least[row + 1 :]))

    def new(self, lengths: Sequence[int]) -> int:
        """The most slots that a row of ``lengths`` slots reads from ``start`` on."""
        pairs = zip(lengths, self.least, strict=True)
        return max(max(length - least, 0) for length, least in pairs)


@dataclass(frozen=True, eq=False)
class Read:
    """A part of a prompt after the target's last layer.

    Parameters
    ----------
    ids : list of int
        The full part, placeholders and dropped rows included.
    layout : TokenLayout
        The S rows that are left after the last layer.
    embeds : Tensor, (S, D)
        Input of the first layer for these rows.
    features : Tensor, (S, D), optional
        After the last norm; where the stage sets `DrafterStage.features`.
    aux_hidden_states : Tensor, (S, K, D), optional
        Input of the K layers of `DrafterStage.aux_hidden_state_layers`.
    """

    ids: list[int]
    layout: TokenLayout
    embeds: Tensor
    features: Tensor | None = None
    aux_hidden_states: Tensor | None = None

    def first(self, ids: int) -> Read:
        """The rows of the first ``ids`` of the prompt."""
        rows = (self.layout.order < ids).nonzero().flatten()
        cut = [
            x if x is None else x.index_select(0, rows[: len(x)])
            for x in (self.embeds, self.features, self.aux_hidden_states)
        ]
        assert cut[0] is not None
        return Read(self.ids[:ids], self.layout.select(rows), cut[0], cut[1], cut[2])

    def tensors(self) -> list[Tensor]:
        """Its tensors, without those of the layout."""
        found = (self.embeds, self.features, self.aux_hidden_states)
        return [x for x in found if x is not None]


@dataclass(frozen=True, eq=False)
class Round:
    """A tree that the target has checked.

    Parameters
    ----------
    tree : Tree
    path : list of int
        Nodes that were accepted, the root first.
    emitted : list of int
        The tokens of ``path`` after the root, and the target's own next one.
    logits : Tensor, (N, V), optional
        The target's, of every node; where a stage of the recipe sets `DrafterStage.logits`.
    features, aux_hidden_states : Tensor, (N, D) and (N, K, D), optional
        As in `Read`, of every node.
    """

    tree: Tree
    path: list[int]
    emitted: list[int]
    logits: Tensor | None = None
    features: Tensor | None = None
    aux_hidden_states: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Budget:
    """How large a tree may be, and how its tokens are ranked.

    Parameters
    ----------
    nodes : int
        Of the whole tree, the root included.
    depth : int
        Drafted tokens on one path.
    warp : callable, optional
        Logits (K, V) to logits as the request samples from them. ``None`` when it is greedy.
    noise : callable, optional
        Depth (1, 2, ...) to the Gumbel noise (V,) that the target will add at that depth.
    """

    nodes: int
    depth: int
    warp: Callable[[Tensor], Tensor] | None = None
    noise: Callable[[int], Tensor] | None = None

    def rank(self, logits: Tensor, depth: int) -> Tensor:
        """Scores that rank children at ``depth``: (K, V), log-probabilities, or these with noise.

        With the target's own noise, the best child is the token that the target takes wherever the
        drafter has the target's probabilities: sampling without replacement, coupled to it.
        """
        if self.noise is None:
            return logits.float().log_softmax(-1)
        assert self.warp is not None  # there is noise only where the request samples
        return self.warp(logits.float()).log_softmax(-1) + self.noise(depth)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a batch reads.

    Parameters
    ----------
    step : int
        In a decode step: the weights, and the caches of all rows.
    draft : int
        For one drafted token of each row; see `DrafterStage.draft_bytes`.
    """

    step: int
    draft: int

    def relative(self, drafted: int) -> float:
        """Bytes of a round that drafts a chain of ``drafted`` tokens, relative to a step's."""
        return 1 + drafted * self.draft / self.step


Proposal = Generator[int, Tensor, Tree]


class Drafter(Protocol):
    """Drafts the answer of one request."""

    def prefill(self, read: Read) -> None:
        """Process a prompt, or the next part of one."""

    def propose(self, root: int, budget: Budget) -> Tree | Proposal:
        """A tree below ``root``, the token that was emitted last; it may be the root alone.

        A `ViewDrafter` returns a generator of it.
        """

    def extend(self, done: Round) -> None:
        """Process the target's results for a tree."""


# ``(layer, attention (Hq, T, N), keys (H, N, D), values (H, N, D))``: float32 attention that the T
# nodes of a tree gave to the first N slots of one sequence's tail.
Observer = Callable[[int, Tensor, Tensor, Tensor], None]


class ViewDrafter:
    """Base of drafters that run the model itself over a part of its cache.

    `propose` is a generator: it yields a token, which follows those that it has yielded before in
    the round, and receives the model's logits (V,) after it. The drafters of a batch share these
    forward passes.

    Attributes
    ----------
    view : tuple of SlotList, optional
        One for each layer; without it nothing is drafted. Not modified, but replaced.
    """

    view: tuple[SlotList, ...] | None = None

    def observer(self) -> Observer | None:
        """Called with the attention of the next verification, where the drafter reads it."""
        return None
