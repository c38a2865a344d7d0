"""A decode step: every row emits its next token, and accepted drafts.

What fails for one row alone, such as a logits processor or a streamer of the caller, ends that
sequence and no other: the error is stored in `Sequence.error`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from functools import partial

import torch
from torch import Tensor

from vlmfast.core.drafting import Proposal
from vlmfast.core.tree import Tree
from vlmfast.models.base import Adapter

from .decode import Batch
from .forward import placed
from .sampling import Sampling
from .sequence import Sequence
from .speculation import walk
from .stats import timed

_TREE = 64  # tokens that a tree of fewer nodes may be padded to
_ULPS = 8  # near tie: within this many units in the last place of the largest logit


class Rounds:
    """The decode steps of one model.

    Parameters
    ----------
    adapter : Adapter
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._sampling = Sampling([])

    def run(self, batches: Many[Batch[Sequence]]) -> None:
        """One step of batches of one mode."""
        for batch in batches:
            self._run_decode_stages(batch)
        for batch in batches:
            if batch.rows[0].drafts is None:
                self._single(batch)
            else:
                self._checked(batch)

    def first(self, sequence: Sequence, logits: Tensor) -> None:
        """Emit the first token, from the logits (1, V) after the prompt."""
        self._take(sequence, logits)

    def _run_decode_stages(self, batch: Batch[Sequence]) -> None:
        for number, sequence in enumerate(batch.rows):
            try:
                batch.run_decode_stages(number)
            except Exception as error:
                fail(sequence, error)

    def _reserve(self, batch: Batch[Sequence], tokens: int) -> None:
        """Make room for the next tokens; rows without any end, and have left the batch."""
        for sequence, error in batch.reserve(tokens):
            fail(sequence, error)

    def _single(self, batch: Batch[Sequence]) -> None:
        """One token of every row, without drafts."""
        self._reserve(batch, 1)
        if not batch.rows:
            return
        tokens = [sequence.sampler.tokens[-1] for sequence in batch.rows]
        output = batch.feed(placed(tokens, self.adapter.device))
        self._sampling = self._sampling.of([sequence.sampler for sequence in batch.rows])
        self._sampling.take(output.logits[:, -1])
        for sequence in batch.rows:
            self._emit(sequence)

    def _checked(self, batch: Batch[Sequence]) -> None:
        """One round of rows that have drafters."""
        limits = (s.drafts.limit[0] for s in batch.rows if s.drafts is not None)
        self._reserve(batch, max(_TREE, *limits))
        if not (sequences := batch.rows):
            return
        before, spare = sequences[0].steps, batch.spare(0) if sequences[0].strict else 0
        trees = self._trees(batch)
        drafted = any(len(tree) > 1 for tree in trees)
        device, together = self.adapter.device, [sequence.stats for sequence in sequences]
        with timed("time_verify_s", device, together):
            if drafted:
                observers = [s.drafts.observer() for s in sequences if s.drafts is not None]
                output = batch.verify(trees, *([observers] if any(observers) else []))
            else:
                output = batch.feed(placed([tree.tokens[0] for tree in trees], device))
        paths = []
        for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            # A strict answer takes unambiguous tokens, or logits computed by single tokens alone.
            watched = sequence.strict and (drafted or bool(sequence.drifted))
            is_unambiguous = partial(self._is_unambiguous, sequence) if watched else None
            path, emitted = walk(
                tree, output.logits[row], partial(self._take_one, sequence), is_unambiguous
            )
            try:
                assert sequence.drafts is not None
                sequence.drafts.learn(tree, path, emitted, output, row)
            except Exception as error:
                fail(sequence, error)
            if watched:
                sequence.drifted += len(path) if drafted else 1
            paths.append(path)
        if drafted:
            batch.accept(paths)
        sequence, path = sequences[0], paths[0]
        ambiguous = not path or sequence.sampler.tokens[-1] in trees[0].children[path[-1]]
        if not sequence.strict:  # otherwise it is alone in its batch
            return
        if ambiguous and not sequence.done:
            if drafted:
                sequence.steps += 1
            else:
                batch.rewind(1)
                sequence.drifted -= 1
            self._redecode(batch, sequence)
        if sequence.done:
            if sequence.keeps_cache:  # for the next answer
                self._rewrite(batch, sequence)
        elif sequence.drifted and sequence.stages and sequence.steps - before >= spare:
            self._rewrite(batch, sequence)
            assert sequence.drafts is not None
            sequence.drafts.off = f"off: strict, {sequence.stages[0].name} modifies the cache"

    def _trees(self, batch: Batch[Sequence]) -> list[Tree]:
        """What the drafters of each row propose.

        Rows that draft with the model itself share its forward passes.
        """
        trees: list[Tree | None] = []
        waiting: dict[int, tuple[Proposal, int]] = {}  # by row, with the token that is fed next
        for row, sequence in enumerate(batch.rows):
            assert sequence.drafts is not None
            proposal = sequence.drafts.propose(batch, row, sequence.sampler.tokens[-1])
            trees.append(self._tree(sequence, proposal, None, row, waiting))
        drafted = 0
        drafts = {row: sequence.drafts for row, sequence in enumerate(batch.rows)}
        views = {row: own.view for row, own in drafts.items() if own is not None and own.view}
        while waiting:
            tokens = {row: token for row, (_, token) in waiting.items()}
            together = [batch.rows[row].stats for row in waiting]
            with timed("time_draft_s", self.adapter.device, together):
                logits = batch.draft(tokens, views, drafted)
            drafted += 1
            for row, (proposal, _) in list(waiting.items()):
                trees[row] = self._tree(batch.rows[row], proposal, logits[row], row, waiting)
        assert all(tree is not None for tree in trees)
        return trees  # type: ignore[return-value]  # see the line above

    def _tree(
        self,
        sequence: Sequence,
        proposal: Proposal,
        logits: Tensor | None,
        row: int,
        waiting: dict[int, tuple[Proposal, int]],
    ) -> Tree | None:
        """Continue a proposal: its tree, or ``None`` while it waits for logits."""
        waiting.pop(row, None)
        try:
            token = next(proposal) if logits is None else proposal.send(logits)
        except StopIteration as end:
            return end.value
        except Exception as error:
            fail(sequence, error)
            return Tree.chain([sequence.sampler.tokens[-1]])
        waiting[row] = proposal, token
        return None

    def _redecode(self, batch: Batch[Sequence], sequence: Sequence) -> None:
        """The next token of a strict answer, from a cache written by single tokens alone."""
        self._rewrite(batch, sequence)
        token = sequence.sampler.tokens[-1]
        output = batch.feed(placed([token], self.adapter.device))
        sequence.stats.redecoded += 1
        root = Tree.chain([token])
        path, emitted = walk(root, output.logits[0], partial(self._take_one, sequence))
        assert sequence.drafts is not None
        sequence.drafts.learn(root, path, emitted, output, 0)

    def _rewrite(self, batch: Batch, sequence: Sequence) -> None:
        """Write the last cached tokens of a strict answer again, as single tokens."""
        if not sequence.drifted:
            return
        fed = sequence.ids[:, -1 - sequence.drifted : -1]
        batch.rewind(sequence.drifted)
        for token in fed.split(1, dim=1):
            batch.feed(token)
        sequence.drifted = 0

    # --- tokens ----------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, logits: Tensor) -> None:
        """The next token of a row, from its logits (1, V)."""
        sequence.sampling.take(logits)
        self._emit(sequence)

    def _take_one(self, sequence: Sequence, logits: Tensor) -> tuple[int, bool]:
        """As `_take`, from logits (V,), for a walk through a tree."""
        self._take(sequence, logits[None])
        return sequence.sampler.tokens[-1], sequence.done

    def _emit(self, sequence: Sequence) -> None:
        """Stream the token that was taken, and end the sequence when it was the last."""
        if sequence.done:  # one of its stages has failed
            return
        sampler = sequence.sampler
        if sequence.first is None:
            sequence.first = time.perf_counter()
        try:
            if sampler.error is not None:
                raise sampler.error
            if sequence.streamer is not None:
                sequence.streamer.put(torch.tensor(sampler.tokens[-1:]))
            sequence.done = sampler.is_done() or sequence.count == sequence.most
            if sequence.done and sequence.streamer is not None:
                sequence.streamer.end()
            if sequence.listener is not None:
                sequence.listener()
            sequence.stats.read()  # only now: the first token has not waited for it
        except Exception as error:
            fail(sequence, error)

    def _is_unambiguous(self, sequence: Sequence, logits: Tensor) -> bool:
        """Whether the token of ``logits`` (V,) does not depend on their last bits."""
        best = sequence.sampling.ranked(logits[None]).topk(2, dim=-1).values[0]
        known = (best[0] - best[1]).double(), logits.float().abs().max().double()
        gap, largest = torch.stack(known).tolist()  # at once
        ulp = torch.finfo(self.adapter.dtype).eps * largest
        sampler = sequence.sampler
        scale = getattr(sampler.config, "temperature", None) or 1.0 if sampler.sampled else 1.0
        return gap > _ULPS * ulp / scale


def fail(sequence: Sequence, error: Exception) -> None:
    """End a sequence by an error; the first one counts."""
    sequence.done = True
    if sequence.error is None:
        sequence.error = error
