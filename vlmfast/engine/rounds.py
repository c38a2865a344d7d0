"""A decode step: every row emits its next token, and accepted drafts.

What fails for one row alone, such as a logits processor or a streamer of the caller, ends that
sequence and no other: the error is stored in `Sequence.error`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial

import torch
from torch import Tensor

from vlmfast.core.tree import Tree
from vlmfast.models.base import Adapter

from .batch import Group
from .decode import Decoder
from .sampling import Sampling
from .sequence import Sequence
from .speculation import walk
from .stats import clock

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

    def run(self, groups: Many[Group]) -> None:
        """One step of groups of one mode."""
        for group in groups:
            self._modify_caches(group)
        plain = [group for group in groups if not group.drafted]
        if plain:
            self._single(plain)
        for group in groups:
            if group.drafted:
                self._checked(group)

    def first(self, sequence: Sequence, logits: Tensor) -> None:
        """Emit the first token, from the logits (1, V) after the prompt."""
        self._take(sequence, logits)

    def _modify_caches(self, group: Group) -> None:
        group.decoder.run_decode_stages()

    def _single(self, groups: Many[Group]) -> None:
        """One token of every row, without drafts."""
        logits = []
        for group in groups:
            tokens = [sequence.sampler.tokens[-1:] for sequence in group.sequences]
            device = group.decoder.position.device
            logits.append(group.decoder.feed(torch.tensor(tokens, device=device)).logits[:, -1])
        rows = [sequence for group in groups for sequence in group.sequences]
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        # In the order of arrival, in which tokens without a seed are drawn.
        order = sorted(range(len(rows)), key=lambda row: rows[row].arrived)
        if order != list(range(len(rows))):
            joined = joined[torch.tensor(order, device=joined.device)]
            rows = [rows[row] for row in order]
        self._sampling = self._sampling.of([sequence.sampler for sequence in rows])
        self._sampling.take(joined)
        for sequence in rows:
            self._emit(sequence)

    def _checked(self, group: Group) -> None:
        """One round of rows that have drafters."""
        decoder, sequences = group.decoder, group.sequences
        trees = [self._tree(decoder, row, sequence) for row, sequence in enumerate(sequences)]
        start = clock(decoder.position.device)
        drafted = any(len(tree) > 1 for tree in trees)
        if drafted:
            output = decoder.verify(trees)
        else:
            roots = [[tree.tokens[0]] for tree in trees]
            output = decoder.feed(torch.tensor(roots, device=decoder.position.device))
        seconds = clock(decoder.position.device) - start
        paths = []
        for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            sequence.stats.time_verify_s += seconds
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
            decoder.accept(paths)
        sequence, path = sequences[0], paths[0]
        ambiguous = not path or sequence.sampler.tokens[-1] in trees[0].children[path[-1]]
        if sequence.strict and not sequence.done and ambiguous:  # it is alone in its group
            if not drafted:
                decoder.rewind(1)
                sequence.drifted -= 1
            self._redecode(decoder, sequence)

    def _tree(self, decoder: Decoder, row: int, sequence: Sequence) -> Tree:
        """What a row's drafters propose."""
        root = sequence.sampler.tokens[-1]
        try:
            assert sequence.drafts is not None
            return sequence.drafts.propose(decoder, row, root)
        except Exception as error:
            fail(sequence, error)
            return Tree.chain([root])

    def _redecode(self, decoder: Decoder, sequence: Sequence) -> None:
        """The next token of a strict answer, from a cache written by single tokens alone."""
        fed = sequence.ids[:, -1 - sequence.drifted :]
        decoder.rewind(sequence.drifted)
        for token in fed.split(1, dim=1):
            output = decoder.feed(token)
        sequence.drifted = 0
        sequence.stats.redecoded += 1
        root = Tree.chain([int(fed[0, -1])])
        path, emitted = walk(root, output.logits[0], partial(self._take_one, sequence))
        assert sequence.drafts is not None
        sequence.drafts.learn(root, path, emitted, output, 0)

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
        device, sampler = self.adapter.device, sequence.sampler
        if sequence.first is None:
            sequence.first = clock(device)
        try:
            if sampler.error is not None:
                raise sampler.error
            if sequence.streamer is not None:
                sequence.streamer.put(torch.tensor(sampler.tokens[-1:]))
            sequence.done = sampler.is_done() or sequence.count == sequence.most
            if sequence.done and sequence.streamer is not None:
                sequence.streamer.end()
        except Exception as error:
            fail(sequence, error)

    def _is_unambiguous(self, sequence: Sequence, logits: Tensor) -> bool:
        """Whether the token of ``logits`` (V,) does not depend on their last bits."""
        ulp = torch.finfo(self.adapter.dtype).eps * float(logits.float().abs().max())
        best = sequence.sampling.ranked(logits[None]).topk(2, dim=-1).values[0]
        sampler = sequence.sampler
        scale = getattr(sampler.config, "temperature", None) or 1.0 if sampler.sampled else 1.0
        return float(best[0] - best[1]) > _ULPS * ulp / scale


def fail(sequence: Sequence, error: Exception) -> None:
    """End a sequence by an error; the first one counts."""
    sequence.done = True
    if sequence.error is None:
        sequence.error = error
