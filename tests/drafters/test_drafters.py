"""Drafters without a model of their own: their memory and their drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.engine.draws import walk
from vlmfast.core.drafting import Budget, Drafter, Read, Round, Target
from vlmfast.core.layout import TokenLayout
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_ngram import NGram, continuations, copied, matches
from vlmfast.drafters.draft_recycle import SHAPE, SUCCESSORS, Recycle, Recycled

V = 32
IMAGE = 31
BOTH = pytest.mark.parametrize("stage", [NGram(), NGram(paths=3), Recycle()], ids=str)


def target(banned: tuple[int, ...] = (IMAGE,)) -> Target:
    embed = torch.nn.Embedding(V, 4)
    return Target(embed, lambda hidden: hidden @ embed.weight.T, 4, 2, V, banned)


def read(ids: list[int]) -> Read:
    order = torch.arange(len(ids))
    return Read(ids, TokenLayout.text(order, order[None]), torch.zeros(len(ids), 4))


def opened(stage: DrafterStage, *parts: list[int], banned: tuple[int, ...] = (IMAGE,)) -> Drafter:
    drafter = stage.open(target(banned))
    for part in parts:
        drafter.prefill(read(part))
    return drafter


def budget(nodes: int = 100, depth: int = 100) -> Budget:
    return Budget(nodes, depth)


def paths(tree: Tree) -> list[list[int]]:
    return [[tree.tokens[node] for node in tree.path(leaf)[1:]] for leaf in tree.leaves()]


def words(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[at] for at in tree.path(node)) for node in range(len(tree))}


def logits_of(best: list[list[int]]) -> Tensor:
    """Rows of logits that rank ``best`` first, the rest from the end of the vocabulary."""
    rows = torch.arange(V).float().repeat(len(best), 1) - V
    for row, tokens in zip(rows, best, strict=True):
        row[tokens] = torch.arange(len(tokens), 0, -1).float()
    return rows


def checked(tree: Tree, path: list[int], emitted: list[int], best: list[list[int]]) -> Round:
    return Round(tree, path, emitted, logits_of(best))


def answered(drafter: Drafter, root: int, text: list[int]) -> list[int]:
    """The target emits ``text``; returns how many tokens each round emitted."""
    emitted_by_round, done = [], 0
    while done < len(text):
        tree = drafter.propose(root, budget())
        rest = iter(text[done:])

        def take(row: Tensor, rest=rest) -> tuple[int, bool]:
            token = next(rest, None)
            return (-1, True) if token is None else (token, False)

        path, emitted = walk(tree, torch.zeros(len(tree), V), take)
        emitted = [token for token in emitted if token >= 0]
        path = path[: len(emitted)]
        drafter.extend(checked(tree, path, emitted, [text[done : done + 1]] * len(tree)))
        done += len(emitted)
        root = emitted[-1]
        emitted_by_round.append(len(emitted))
    return emitted_by_round


# --- both ----------------------------------------------------------------------------------------


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 5).map(lambda t: IMAGE if t == 5 else t), max_size=30),
    nodes=st.integers(1, 90),
    depth=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_trees_stay_within_their_budget(
    stage: DrafterStage, text: list[int], nodes: int, depth: int, seed: int
) -> None:
    """Never more than allowed or announced, never a placeholder; the same drafts each time."""
    generator = torch.Generator().manual_seed(seed)
    drafters = [opened(stage, text[:7], text[7:]) for _ in range(2)]
    root = 1
    for _ in range(4):
        trees = [drafter.propose(root, budget(nodes, depth)) for drafter in drafters]
        tree = trees[0]
        assert trees[1] == tree
        assert tree.tokens[0] == root
        most, deepest = stage.largest()
        assert len(tree) <= min(nodes, most)
        assert tree.depth <= min(depth, deepest)
        assert IMAGE not in tree.tokens
        logits = torch.randn(len(tree), V, generator=generator)
        logits[:, IMAGE] = 9  # a model may rank it first but cannot emit it
        path, emitted = walk(tree, logits, lambda row: (int(row[:5].argmax()), False))
        for drafter in drafters:
            drafter.extend(Round(tree, path, emitted, logits))
        root = emitted[-1]


@BOTH
def test_empty_memory_drafts_only_the_root(stage: DrafterStage) -> None:
    for parts in ([], [[]], [[4, 5]], [[IMAGE] * 3, []]):
        assert opened(stage, *parts).propose(9, budget()) == Tree.chain([9])
    assert len(opened(stage, [9, 4, 5]).propose(9, budget())) > 1  # control


@BOTH
def test_a_repeated_answer_is_accepted(stage: DrafterStage) -> None:
    """A repeated answer is drafted the second time; a text without repetition is not."""
    answer = [3, 8, 2, 9, 4, 7, 5, 6, 10, 11]
    drafter = opened(stage, [1, 2])
    first = answered(drafter, 3, answer[1:])
    again = answered(drafter, answer[-1], answer)
    assert len(again) < len(first) / 2
    assert max(again) >= 6
    assert sum(again) == len(answer)


def test_drafts_of_both_join_in_one_tree() -> None:
    text = [1, 2, 3, 1, 4, 5, 1, 6, 7]
    copy, filled = (opened(stage, text).propose(1, budget()) for stage in (NGram(), Recycle()))
    both = copy.joined(filled)
    assert words(both) == words(copy) | words(filled)
    assert words(copy) - words(filled) and words(filled) - words(copy)
    assert both.first(len(copy)) == copy


# --- prompt lookup -------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=14), st.integers(1, 4), st.booleans())
def test_all_matches_are_found(ids: list[int], ngram: int, latest: bool) -> None:
    found = matches(ids, ngram, latest)
    places = {start for _, start in found}
    for start in range(1, len(ids)):
        same = 0
        while same < min(ngram, start) and ids[start - 1 - same] == ids[len(ids) - 1 - same]:
            same += 1
        assert (same, start) in found if same else start not in places
    assert len(places) == len(found)
    order = [(-same, -start if latest else start) for same, start in found]
    assert order == sorted(order)


def test_copy_follows_a_repetition() -> None:
    ids = [7, 1, 2, 3, 1, 2, 3]
    assert copied(ids, 4, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert copied(ids, 6, 3) == [3, 3, 3]
    assert copied(ids, 0, 3) == [7, 1, 2]
    assert opened(NGram(tokens=5, paths=1), [7, 1, 2, 3, 1, 2]).propose(3, budget()) == (
        Tree.chain([3, 1, 2, 3, 1, 2])
    )


def test_copy_ends_before_a_placeholder() -> None:
    ids = [5, 6, IMAGE, IMAGE, 6, 7, 8]
    assert copied(ids, 0, 9, (IMAGE,)) == [5, 6]
    assert copied(ids, 2, 9, (IMAGE,)) == []
    # The longer match leads into the image; the next one is taken.
    drafter = opened(NGram(tokens=3, paths=1), [6, 9, 4, 4, 5, 6, IMAGE, 1, 4, 5])
    assert drafter.propose(6, budget()) == Tree.chain([6, 9, 4, 4])
    # A match whose continuation is only an image drafts nothing. Control: unbanned, it is drafted.
    alone = [1, 2, IMAGE, 3, 1]
    assert opened(NGram(), alone).propose(2, budget()) == Tree.chain([2])
    open_ended = opened(NGram(tokens=2, paths=1), alone, banned=())
    assert open_ended.propose(2, budget()) == Tree.chain([2, IMAGE, 3])


def test_several_copies_make_one_tree() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 8, 1, 2]
    one, two, three = (
        opened(NGram(tokens=2, paths=n), text).propose(3, budget()) for n in (1, 2, 3)
    )
    assert paths(one) == [[9, 8]]  # the latest
    assert sorted(paths(two)) == [[4, 5], [9, 8]]
    assert two.first(3) == one  # the best copy first, if the budget ends
    assert three == two  # no third one
    early = opened(NGram(tokens=2, paths=1, match="earliest"), text)
    assert paths(early.propose(3, budget())) == [[4, 5]]
    assert list(continuations([1, 2, 1, 2, 1], 2, 2, True)) == [(2, 1)]  # each once
    shared = opened(NGram(tokens=3, paths=2), [1, 4, 5, 6, 1, 4, 5, 7]).propose(1, budget())
    assert sorted(paths(shared)) == [[4, 5, 6], [4, 5, 7]]
    assert len(shared) == 5


def test_ngram_remembers_parts_and_rounds() -> None:
    drafter = opened(NGram(tokens=3, paths=1), [1, 2], [3, 4])
    assert drafter.propose(2, budget()) == Tree.chain([2, 3, 4, 2])  # across the parts
    # The target accepts 3 and 4 and emits 8: all but the 8 are now in the cache.
    drafter.extend(checked(Tree.chain([2, 3, 4, 2]), [0, 1, 2], [3, 4, 8], [[0]] * 4))
    assert drafter.ids == [1, 2, 3, 4, 2, 3, 4]
    drafter.extend(checked(Tree.chain([8]), [0], [5], [[0]]))
    assert drafter.ids == [1, 2, 3, 4, 2, 3, 4, 8]
    assert drafter.propose(4, budget()) == Tree.chain([4, 8, 4, 8])
    drafter.prefill(read([5, 9]))  # a second question
    assert drafter.propose(8, budget()) == Tree.chain([8, 5, 9, 8])


def test_proposing_twice_changes_nothing() -> None:
    for stage in (NGram(), Recycle()):
        drafter = opened(stage, [1, 2, 3, 1, 2, 4])
        assert drafter.propose(1, budget()) == drafter.propose(1, budget())


# --- token recycling -----------------------------------------------------------------------------


def remembering(banned: tuple[int, ...] = ()) -> Recycled:
    drafter = Recycle().open(target(banned))
    assert isinstance(drafter, Recycled)
    return drafter


def test_recycle_learns_from_every_node() -> None:
    """Rejected nodes too; where a token occurs twice the last one, which was accepted."""
    memory = remembering((IMAGE,))
    tree = Tree((1, 2, 3, 2, 2), (-1, 0, 0, 2, 3))
    rows = [[5, 6], [7, 8], [9], [10, IMAGE, 11], [12]]
    memory.extend(checked(tree, [0, 2], [3, 6], rows))
    assert [memory.successors(token)[0] for token in (1, 2, 3)] == [5, 12, 9]
    assert all(len(memory.successors(token)) == SUCCESSORS for token in (1, 2, 3))
    assert memory.successors(4) == ()
    memory.extend(checked(tree, [0, 2, 3], [3, 2, 6], rows))
    assert memory.successors(2)[:2] == (10, 11)  # without the placeholder, and still eight
    assert len(memory.successors(2)) == SUCCESSORS
    assert len(set(memory.successors(2))) == SUCCESSORS


def test_prompt_initializes_recycle() -> None:
    memory = remembering((IMAGE,))
    memory.prefill(read([1, 2, 1, 3, 1, 2]))
    assert memory.successors(1) == (2, 3)  # the latest neighbour first, each once
    assert memory.successors(2) == (1,)
    memory.prefill(read([4, IMAGE, IMAGE, 5]))
    assert memory.successors(2) == (4, 1)  # across parts
    assert memory.successors(4) == () and memory.successors(IMAGE) == (5,)
    tree = Tree.chain([5, 6])
    memory.extend(checked(tree, [0, 1], [6, 7], [[6], [9]]))
    memory.prefill(read([8]))
    assert memory.successors(6)[:2] == (8, 9)  # 7 was emitted last, and has not been prefilled
    assert memory.successors(5)[0] == 6 and len(memory.successors(5)) == SUCCESSORS
    long = remembering()
    long.prefill(read([token for n in range(1, 20) for token in (0, n)]))
    assert long.successors(0) == tuple(range(19, 11, -1))


def test_recycle_tree_is_filled_by_ranks() -> None:
    drafter = opened(Recycle())
    best = [[(token + 1 + rank) % 20 for rank in range(SUCCESSORS)] for token in range(20)]
    chain = Tree.chain(range(20))
    drafter.extend(checked(chain, [0], [1], best))
    tree = drafter.propose(4, budget())
    assert len(tree) == 81
    for node in range(1, 81):
        rank = SHAPE.tokens[node]
        assert tree.tokens[node] == (tree.tokens[tree.parents[node]] + 1 + rank) % 20
    # A smaller budget takes the likeliest nodes: the first guess at all depths before the last.
    few = drafter.propose(4, budget(nodes=12, depth=4))
    assert len(few) == 12
    assert few.depth == 4
    assert few == tree.first(12, 4)


def test_vocabulary_smaller_than_the_tree_width() -> None:
    memory = remembering((2,))
    memory.extend(Round(Tree.chain([0]), [0], [1], torch.tensor([[0.0, 1.0, 5.0]])))
    assert memory.successors(0) == (1, 0)
