"""A decode step: every row emits its next token, and accepted drafts.

What fails for one row alone, such as a logits processor or a streamer of the caller, concerns that
sequence and no other: the error is stored in `Sequence.error`.
"""

from __future__ import annotations

import time
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

    def run(self, batch: Batch) -> None:
        """One step of a batch."""
        for number, sequence in enumerate(batch.rows):
            try:
                batch.run_decode_stages(number)
            except Exception as error:
                sequence.fall_short(error)
        if batch.rows[0].drafts is None:
            self._single(batch)
        else:
            self._checked(batch)

    def _reserve(self, batch: Batch, tokens: int) -> None:
        """Make room for the next tokens; rows without any have left the batch."""
        for sequence, error in batch.reserve(tokens):
            sequence.fall_short(error)

    def _single(self, batch: Batch) -> None:
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

    def _checked(self, batch: Batch) -> None:
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
                sequence.fall_short(error)
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
            if sequence.keeps_cache and sequence.error is None:  # for the next answer
                self._rewrite(batch, sequence)
        elif sequence.drifted and sequence.stages and sequence.steps - before >= spare:
            self._rewrite(batch, sequence)
            assert sequence.drafts is not None
            sequence.drafts.off = f"off: strict, {sequence.stages[0].name} modifies the cache"

    def _trees(self, batch: Batch) -> list[Tree]:
        """What the drafters of each row propose.

        Rows that draft with the model itself share its forward passes.
        """
        trees: dict[int, Tree] = {}
        waiting: dict[int, tuple[Proposal, int]] = {}  # by row, with the token that is fed next

        def go_on(row: int, proposal: Proposal, logits: Tensor | None = None) -> None:
            """Continue a proposal up to its tree, or to the next token whose logits it needs."""
            waiting.pop(row, None)
            sequence = batch.rows[row]
            try:
                token = next(proposal) if logits is None else proposal.send(logits)
                waiting[row] = proposal, token
            except StopIteration as end:
                trees[row] = end.value
            except Exception as error:
                sequence.fall_short(error)
                trees[row] = Tree.chain([sequence.sampler.tokens[-1]])

        views = {}
        for row, sequence in enumerate(batch.rows):
            drafts = sequence.drafts
            assert drafts is not None
            go_on(row, drafts.propose(batch, row, sequence.sampler.tokens[-1]))
            if view := drafts.view:
                views[row] = view
        drafted = 0
        while waiting:
            tokens = {row: token for row, (_, token) in waiting.items()}
            together = [batch.rows[row].stats for row in waiting]
            with timed("time_draft_s", self.adapter.device, together):
                logits = batch.draft(tokens, views, drafted)
            drafted += 1
            for row, (proposal, _) in list(waiting.items()):
                go_on(row, proposal, logits[row])
        return [trees[row] for row in range(len(batch.rows))]

    def _redecode(self, batch: Batch, sequence: Sequence) -> None:
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

    def take(self, sequence: Sequence, logits: Tensor) -> None:
        """The next token of a row, from its logits (1, V)."""
        sequence.sampling.take(logits)
        self._emit(sequence)

    def _take_one(self, sequence: Sequence, logits: Tensor) -> tuple[int, bool]:
        """As `take`, from logits (V,), for a walk through a tree."""
        self.take(sequence, logits[None])
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
            sequence.emitted = sequence.count
            if sequence.streamer is not None:
                sequence.streamer.put(torch.tensor(sampler.tokens[-1:]))
            sequence.done = sampler.is_done() or sequence.count == sequence.most
            if sequence.done and sequence.streamer is not None:
                sequence.streamer.end()
            if sequence.listener is not None:
                sequence.listener()
            sequence.stats.read()  # only now: the first token has not waited for it
        except Exception as error:
            sequence.fail(error)

    def _is_unambiguous(self, sequence: Sequence, logits: Tensor) -> bool:
        """Whether the token of ``logits`` (V,) does not depend on their last bits."""
        best = sequence.sampling.ranked(logits[None]).topk(2, dim=-1).values[0]
        known = (best[0] - best[1]).double(), logits.float().abs().max().double()
        gap, largest = torch.stack(known).tolist()  # at once
        ulp = torch.finfo(self.adapter.dtype).eps * largest
        sampler = sequence.sampler
        scale = getattr(sampler.config, "temperature", None) or 1.0 if sampler.sampled else 1.0
        return gap > _ULPS * ulp / scale
