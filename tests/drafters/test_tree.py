"""Properties of draft trees."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.draws import ROOT, filled, guesses, likeliest_first, shape_of
from vlmfast.core.tree import Tree

quick = settings(max_examples=150, deadline=None)


@st.composite
def trees(draw: st.DrawFn, most: int = 16, alphabet: int = 5) -> Tree:
    """Any tree: wide, deep, or the root alone."""
    tokens, parents = [draw(st.integers(0, alphabet - 1))], [-1]
    for node in range(1, draw(st.integers(1, most))):
        parent = draw(st.integers(0, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [token for token in range(alphabet) if token not in taken]
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
        else:
            break
    return Tree(tuple(tokens), tuple(parents))


def above(tree: Tree, node: int) -> list[int]:
    """The path to a node, by following its parents."""
    return [node] if node == 0 else [*above(tree, tree.parents[node]), node]


def token_paths(tree: Tree) -> set[tuple[int, ...]]:
    """The token paths of all nodes."""
    return {tuple(tree.tokens[at] for at in above(tree, node)) for node in range(len(tree))}


def valid(tree: Tree) -> None:
    """Check that parents precede children, siblings differ, and one root has no parent."""
    assert len(tree.tokens) == len(tree.parents) == len(tree) >= 1
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    assert len(token_paths(tree)) == len(tree)


@quick
@given(trees())
def test_parents_children_and_depths(tree: Tree) -> None:
    valid(tree)
    n = len(tree)
    for node in range(n):
        assert tree.path(node) == above(tree, node)
        assert tree.depths[node] == len(above(tree, node)) - 1
        below = [other for other in range(n) if tree.parents[other] == node]
        assert list(tree.children[node].values()) == below
        assert list(tree.children[node]) == [tree.tokens[other] for other in below]
    assert tree.depth == max(tree.depths)
    assert tree.leaves() == [node for node in range(n) if node not in tree.parents]


@quick
@given(trees())
def test_mask_is_the_transitive_closure(tree: Tree) -> None:
    n = len(tree)
    step = torch.eye(n)
    for node, parent in enumerate(tree.parents):
        if node:
            step[node, parent] = 1
    closure = torch.linalg.matrix_power(step, n) > 0
    assert torch.equal(tree.mask(), closure)
    assert (tree.mask().sum(1) - 1).tolist() == list(tree.depths)


@quick
@given(trees())
def test_paths_lead_from_root_to_leaves(tree: Tree) -> None:
    rows = [tree.path(leaf) for leaf in tree.leaves()]
    assert rows == [above(tree, leaf) for leaf in tree.leaves()]
    assert set().union(*rows) == set(range(len(tree)))
    # A tree is determined by its paths.
    again = Tree.of_paths(tree.tokens[0], [[tree.tokens[at] for at in row[1:]] for row in rows])
    valid(again)
    assert token_paths(again) == token_paths(tree)


@quick
@given(trees(), st.integers(0, 18), st.integers(0, 6))
def test_first(tree: Tree, nodes: int, depth: int) -> None:
    part = tree.first(nodes, depth)
    valid(part)
    assert len(part) <= max(nodes, 1)
    assert part.depth <= depth
    assert token_paths(part) <= token_paths(tree)
    fitting = sum(d <= depth for d in tree.depths)
    assert len(part) == min(max(nodes, 1), fitting)  # no more than necessary is dropped
    assert tree.first(len(tree)) == tree.first(len(tree), tree.depth) == tree
    assert tree.first(1) == tree.first(9, 0) == Tree.chain([tree.tokens[0]])


@quick
@given(trees(), st.lists(st.integers(0, 4), max_size=3))
def test_without(tree: Tree, banned: list[int]) -> None:
    part = tree.without(banned)
    valid(part)
    assert part.tokens[0] == tree.tokens[0]  # the root is fixed
    assert token_paths(part) == {
        path for path in token_paths(tree) if not set(path[1:]) & set(banned)
    }
    assert part.without(banned) == part


@quick
@given(trees(), trees())
def test_joined(one: Tree, other: Tree) -> None:
    other = Tree((one.tokens[0], *other.tokens[1:]), other.parents)
    both = one.joined(other)
    valid(both)
    assert token_paths(both) == token_paths(one) | token_paths(other)
    assert both.first(len(one)) == one  # the nodes of `one` come first
    assert one.joined(one) == one == one.joined(Tree.chain([one.tokens[0]]))
    apart = Tree((one.tokens[0] + 1, *other.tokens[1:]), other.parents)
    with pytest.raises(ValueError, match="different roots"):
        one.joined(apart)


def test_root_only() -> None:
    tree = Tree.chain([7])
    assert (len(tree), tree.depth, tree.leaves(), tree.path(0)) == (1, 0, [0], [0])
    assert tree.mask().tolist() == [[True]]
    assert tree.children == ({},)
    assert tree == Tree.of_paths(7, []) == Tree.of_paths(7, [[]]) == tree.without([7])


def test_chain() -> None:
    tree = Tree.chain([3, 3, 3])
    assert tree.parents == (-1, 0, 1)
    assert tree.path(2) == [0, 1, 2]
    assert torch.equal(tree.mask(), torch.ones(3, 3, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "needs equal numbers of both, and a root"),
        ((1, 2), (-1,), "needs equal numbers of both"),
        ((1,), (0,), "a parent must come before"),
        ((1, 2), (-1, 1), "a parent must come before"),
        ((1, 2, 3), (-1, 2, 0), "a parent must come before"),
        ((1, 2), (-1, -1), "a parent must come before"),
        ((1, 2, 2), (-1, 0, 0), "one token twice after the same node"),
        ((1, 2, 3, 3), (-1, 0, 1, 1), "one token twice after the same node"),
    ],
)
def test_invalid_trees_raise(tokens: tuple, parents: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree(tokens, parents)


# --- static shapes -------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Tree, list[list[int]]]:
    width, widths = 1, []
    for _ in range(draw(st.integers(0, 4))):
        counts = draw(st.lists(st.integers(0, 3), min_size=0, max_size=width))
        widths.append(counts)
        width = sum(counts)
    return shape_of(widths), widths


@quick
@given(shapes())
def test_shape_has_the_requested_children(drawn: tuple) -> None:
    shape, widths = drawn
    valid(shape)
    for depth, counts in enumerate(widths):
        level = [node for node, d in enumerate(shape.depths) if d == depth]
        counts = counts + [0] * (len(level) - len(counts))
        for node, count in zip(level, counts, strict=True):
            assert list(shape.children[node]) == list(range(count))
    assert len(shape) == 1 + sum(map(sum, widths))


@quick
@given(shapes())
def test_likeliest_first_keeps_the_shape(drawn: tuple) -> None:
    shape, _ = drawn
    ordered = likeliest_first(shape)
    valid(ordered)
    assert token_paths(ordered) == token_paths(shape)

    def likelihood(tree: Tree, node: int) -> float:
        odds = 1.0
        for at in above(tree, node)[1:]:
            odds /= (tree.tokens[at] + 1) * 1.3
        return odds

    odds = [likelihood(ordered, node) for node in range(len(ordered))]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(odds))


@quick
@given(shapes(), st.dictionaries(st.integers(0, 9), st.permutations(range(10)), max_size=10))
def test_filled_skips_unknown_tokens(drawn: tuple, known: dict) -> None:
    shape, _ = drawn
    known = {token: row[: token % 4] for token, row in known.items()}
    children_of = lambda token: known.get(token, ())  # noqa: E731
    tree = filled(shape, 0, children_of)
    valid(tree)
    expected = {(0,)}
    for path in token_paths(shape) - {(ROOT,)}:
        tokens = [0]
        for rank in path[1:]:
            row = children_of(tokens[-1])
            if rank >= len(row):
                break
            tokens.append(row[rank])
        else:
            expected.add(tuple(tokens))
    assert token_paths(tree) == expected
    listed = guesses(shape, 0, children_of)
    assert [token for token in listed if token is not None] == list(tree.tokens)
    assert all(
        listed[node] is None
        for node, parent in enumerate(shape.parents)
        if node and listed[parent] is None
    )
