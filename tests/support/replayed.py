"""Replays a drafter on a known answer, as if the answer were being generated."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.core.drafting import Budget, Drafter, Read, Round
from vlmfast.core.tree import Tree


def replay(drafter: Drafter, read: Read, prompt: int, nodes: int, depth: int) -> list[int]:
    """Draft a known answer as if it were being generated.

    Parameters
    ----------
    drafter : Drafter
        New.
    read : Read
        Prompt and answer; ``ids`` has one token per row, and one more where the last row's next
        token is known too.
    prompt : int
        Rows of the prompt.
    nodes, depth : int
        As in `Budget`.

    Returns
    -------
    list of int
        Accepted tokens of each round.
    """
    drafter.prefill(_part(read, prompt))
    accepted, at = [], prompt  # rows that the target has read; the next one is the root
    while at + 1 < len(read.ids):
        tree = drafter.propose(read.ids[at], Budget(nodes, depth))
        assert isinstance(tree, Tree)  # of drafters with weights of their own
        path = [0]
        while (
            at + len(path) < len(read.layout)
            and (child := tree.children[path[-1]].get(read.ids[at + len(path)])) is not None
        ):
            path.append(child)
        emitted = read.ids[at + 1 : at + 1 + len(path)]
        if len(emitted) < len(path) or at + len(path) > len(read.layout):
            break
        accepted.append(len(path) - 1)
        drafter.extend(_round(read, tree, path, emitted, at))
        at += len(path)
    return accepted


def accepts_something(drafter: Drafter, read: Read, prompt: int, least: float = 0.3) -> bool:
    """Whether `replay` accepts ``least`` tokens per round; random weights do not."""
    accepted = replay(drafter, read, prompt, nodes=26, depth=4)
    return bool(accepted) and sum(accepted) / len(accepted) > least


def _part(read: Read, rows: int) -> Read:
    index = torch.arange(rows, device=read.embeds.device)
    features = None if read.features is None else read.features[:rows]
    aux_hidden_states = None if read.aux_hidden_states is None else read.aux_hidden_states[:rows]
    return Read(
        read.ids[:rows], read.layout.select(index), read.embeds[:rows], features, aux_hidden_states
    )


def _round(read: Read, tree: Tree, path: list[int], emitted: list[int], at: int) -> Round:
    """The target's results for a tree: hidden states on the path, zeros off it (never read)."""

    def spread(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        out = rows.new_zeros(len(tree), *rows.shape[1:])
        out[torch.tensor(path, device=rows.device)] = rows[at : at + len(path)]
        return out

    logits = read.embeds.new_zeros(len(tree), 1)
    return Round(tree, path, emitted, logits, spread(read.features), spread(read.aux_hidden_states))
