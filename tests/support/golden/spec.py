"""Replays the stored cases of speculative decoding.

The verifiers that draw a number for each guess in turn exist only here: the product draws one token
at each node instead (`engine.speculation.walk`), which has the same distribution and keeps an
answer as it is without drafts. Their stored draws still go through the product's walk: deciding
guess by guess is another way to draw a node's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.closeness import close
from support.engine.batched import joined_caches
from support.engine.draws import ROOT, filled, guesses, shape_of, walk
from support.engine.storage import KVCache
from support.golden.case import Reader, done
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_ngram import copied, matches
from vlmfast.drafters.draft_recycle import TEMPLATE

# Medusa's tree of 63 drafts.
MC_SIM_63 = shape_of(
    (
        (10,),
        (10, 7, 3, 2, 1, 1, 1, 1, 1, 1),
        (10, 3, 2, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1),
        (2,),
    )
)


# --- verifiers that decide guess by guess --------------------------------------------------------

Warp = Callable[[Tensor], Tensor]  # a row of logits to the row that is sampled


class Rejection:
    """`walk`'s draw of a node's token: its guesses are accepted or rejected one by one.

    Parameters
    ----------
    children : list of list of int
        Of each node, in the order in which they are tried.
    warp : callable
    draw : callable
        Node to the uniform number that decides on it.
    q : callable, optional
        Node to the distribution (V,) that its children were sampled from, without replacement.
        Without it the children are fixed guesses.
    """

    def __init__(
        self,
        tree: Tree,
        children: list[list[int]],
        warp: Warp,
        draw: Callable[[int], float],
        q: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.tree, self.children, self.warp, self.draw, self.q = tree, children, warp, draw, q
        self.node = 0
        self.left = torch.empty(0)  # the distribution after the last accepted node
        self.size = torch.empty(0)  # and the magnitude of the numbers whose difference it is
        self.sums = 1  # sums that it was divided by

    def __call__(self, logits: Tensor) -> tuple[int, bool]:
        logits = self.warp(logits)
        p = logits.softmax(-1)
        # A logit's absolute error is its probability's relative error.
        reach = float(logits[logits.isfinite()].abs().max())
        size, self.sums = max(reach, 1.0) * p, 1
        q = self.q(self.node) if self.q and self.children[self.node] else None
        for child in self.children[self.node]:
            token = self.tree.tokens[child]
            if self.draw(child) < p[token] / (1 if q is None else q[token]):
                self.node = child
                return token, False
            if q is None:
                p = p.index_fill(0, torch.tensor(token), 0.0)
            else:
                p, size = (p - q).clamp(min=0), size + q
                q = q.index_fill(0, torch.tensor(token), 0.0)
                q = q / q.sum()
            p, size = p / p.sum(), size / p.sum()
            self.sums += 1
        self.left, self.size = p, size
        return -1, True

    def same_law(self, stored: Tensor) -> None:
        """The remaining distribution equals ``stored``."""
        close(self.left, stored, terms=self.sums * len(stored), scale=self.size)


def warper(temperature: float, top_p: float = 0.0, top_k: int = 0) -> Warp:
    """Processors in EAGLE's order."""
    chosen = []
    if temperature != 1:
        chosen.append(TemperatureLogitsWarper(temperature))
    if 0 < top_p < 1:
        chosen.append(TopPLogitsWarper(top_p))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))

    def warp(logits: Tensor) -> Tensor:
        for processor in chosen:
            logits = processor(None, logits[None])[0]
        return logits

    return warp


def greedy(logits: Tensor) -> tuple[int, bool]:
    return int(logits.argmax()), False


def tree_of(tokens: Iterable[int], rows: Tensor) -> Tree:
    """The tree whose paths are ``rows`` of nodes, padded with -1."""
    tokens = tuple(tokens)
    parents = [-1] * len(tokens)
    for row in rows.tolist():
        for above, node in pairwise(row):
            if node >= 0:
                parents[node] = above
    return Tree(tokens, tuple(parents))


def in_order_of(rows: Tensor, nodes: int) -> list[list[int]]:
    """Children of each node, by their first occurrence in ``rows``."""
    children: list[list[int]] = [[] for _ in range(nodes)]
    for row in rows.tolist():
        for above, node in pairwise(row):
            if node >= 0 and node not in children[above]:
                children[above].append(node)
    return children


def same_path(data: Reader, path: list[int]) -> None:
    """The accepted nodes are a prefix of the row that the reference chose."""
    accepted = int(data["accept_length"])
    assert len(path) - 1 == accepted
    rows = data["retrieve_indices"][:, : accepted + 1].tolist()
    assert rows.index(path) == int(data["best_candidate"])  # the first that begins so


def same_candidates(tree: Tree, data: Reader) -> None:
    """The tokens of each row of the table of paths, padded with -1."""
    for row, tokens in zip(
        data["retrieve_indices"].tolist(), data["candidates"].tolist(), strict=True
    ):
        path = [node for node in row if node >= 0]
        assert [tree.tokens[node] for node in path] == tokens[: len(path)]
        assert set(tokens[len(path) :]) <= {-1}


def warped_greedy(meta: Reader) -> Warp:
    """A walk that draws nothing: temperature 0, and processors that change no maximum."""
    assert meta.number("temperature") == 0
    top_p, top_k = meta.number("top_p"), meta.count("top_k")
    assert 0 <= top_p <= 1
    assert top_k >= 0
    return greedy


def counting(uniforms: Tensor, used: list[float]) -> Callable[[int], float]:
    """One number after the other; ``used`` collects them."""
    left: Iterator[float] = iter(uniforms.tolist())

    def draw(node: int) -> float:
        used.append(next(left))
        return used[-1]

    return draw


# --- shapes --------------------------------------------------------------------------------------


def same_shape(tree: Tree, mask: Tensor, depths: Tensor, rows: Tensor) -> None:
    """Mask, depths and paths; the order of the paths and their padding may differ."""
    assert torch.equal(tree.mask().to(mask.dtype), mask)
    assert list(tree.depths) == depths.tolist()
    mine = [tree.path(leaf) for leaf in tree.leaves()]
    theirs = [[node for node in row if node >= 0] for row in rows.tolist()]
    assert sorted(mine) == sorted(theirs)


def choices_of(meta: Reader) -> Tree:
    """The shape of a list of rank paths, level by level."""
    choices = meta.literal("choices")
    return Tree.of_paths(ROOT, sorted(choices, key=lambda path: (len(path), path)))


def medusa_buffers(data: Reader, meta: Reader) -> None:
    """Heads of Medusa guess by depth alone."""
    shape, top = choices_of(meta), meta.count("TOPK")
    mask, depths = data["medusa_attn_mask"][0, 0], data["medusa_position_ids"]
    same_shape(shape, mask, depths, data["retrieve_indices"])
    at = [
        1 + top * (depth - 1) + rank if depth else 0
        for rank, depth in zip(shape.tokens, shape.depths, strict=True)
    ]
    assert at == data["tree_indices"].tolist()


def blocks(shape: Tree, top: int) -> list[int]:
    """Positions of EAGLE's guesses: one block of ``top`` for each node that has children."""
    order = [node for node, below in enumerate(shape.children) if below]
    return [0] + [
        1 + top * order.index(parent) + rank
        for rank, parent in zip(shape.tokens[1:], shape.parents[1:], strict=True)
    ]


def eagle_buffers(data: Reader, meta: Reader) -> None:
    shape = choices_of(meta)
    mask, depths = data["tree_attn_mask"][0, 0], data["tree_position_ids"]
    same_shape(shape, mask, depths, data["retrieve_indices"])
    assert blocks(shape, meta.count("TOPK")) == data["tree_indices"].tolist()


def recycling(data: Reader, meta: Reader) -> None:
    """The template, and its tree for a matrix of successors."""
    choices = meta.literal("template")
    assert Tree.of_paths(ROOT, choices) == TEMPLATE
    ends = [sum(d < depth for d in TEMPLATE.depths) for depth in range(1, TEMPLATE.depth + 2)]
    assert ends == meta.literal("deep_split")
    assert TEMPLATE.tokens == tuple(data["candi_index"].tolist())
    assert TEMPLATE.parents == tuple(data["father_index"].tolist())
    same_shape(
        TEMPLATE,
        data["attention_mask"][0],
        data["position_ids"][0],
        data["search_path"],
    )
    matrix, root = data["adjacency"].tolist(), int(data["root"])
    wanted = data["tree_input_ids"][0].tolist()
    assert guesses(TEMPLATE, root, matrix.__getitem__) == wanted
    # As a tree, with distinct successors: every path of the template.
    distinct = [list(dict.fromkeys(row)) for row in matrix]
    tree = filled(TEMPLATE, root, distinct.__getitem__)
    expected = [root]
    for node in range(1, len(TEMPLATE)):
        token = root
        for rank in (TEMPLATE.tokens[at] for at in TEMPLATE.path(node)[1:]):
            known = distinct[token]
            if rank >= len(known):
                break
            token = known[rank]
        else:
            expected.append(token)
    assert list(tree.tokens) == expected


# --- verification --------------------------------------------------------------------------------


def posterior_greedy(data: Reader, meta: Reader) -> None:
    rows, logits = data["retrieve_indices"], data["tree_logits"]
    tree = tree_of(data["draft_tokens"][0].tolist(), rows)
    same_shape(tree, tree.mask(), torch.tensor(tree.depths), rows)
    path, emitted = walk(tree, logits, warped_greedy(meta))
    same_path(data, path)
    same_candidates(tree, data)
    assert not int(data["uniforms_consumed"])  # nothing is drawn
    assert len(data["uniforms"])
    best = data["candidates"][int(data["best_candidate"])]
    assert [tree.tokens[0], *emitted[:-1]] == best[: len(path)].tolist()
    assert torch.equal(logits[path[-1]], data["sample_p"])
    assert emitted[-1] == int(data["sample_p"].argmax())


def posterior_sample(data: Reader, meta: Reader) -> None:
    """EAGLE-2: fixed guesses, one number for each that is tried."""
    rows, used = data["retrieve_indices"], []
    tree = tree_of(data["draft_tokens"][0].tolist(), rows)
    warp = warper(meta.number("temperature"), meta.number("top_p"), meta.count("top_k"))
    verifier = Rejection(tree, in_order_of(rows, len(tree)), warp, counting(data["uniforms"], used))
    path, _ = walk(tree, data["tree_logits"], verifier)
    same_path(data, path)
    same_candidates(tree, data)
    assert len(used) == int(data["uniforms_consumed"])
    verifier.same_law(data["sample_p"])


def posterior_vispec(data: Reader, meta: Reader) -> None:
    """ViSpec: as EAGLE-2, with a number for each position of its table of paths."""
    rows = data["retrieve_indices"]
    tree = tree_of(data["draft_tokens"][0].tolist(), rows)
    where = {}
    for j, row in enumerate(rows.tolist()):
        for i, node in enumerate(row):
            where.setdefault(node, (j, i))
    verifier = Rejection(
        tree,
        in_order_of(rows, len(tree)),
        warper(meta.number("temperature"), meta.number("top_p", 0.0), meta.count("top_k", 0)),
        lambda node: float(data["uniform_matrix"][where[node]]),
    )
    path, _ = walk(tree, data["tree_logits"], verifier)
    same_path(data, path)
    same_candidates(tree, data)
    verifier.same_law(data["sample_p"])


def multiround(data: Reader, meta: Reader) -> None:
    """EAGLE-1: children that were sampled, through its static tree."""
    shape = Tree.of_paths(ROOT, meta.literal("tree_choices"))
    guessed = torch.cat([data["sample_token"][0], data["ss_token"].flatten()])
    at = blocks(shape, data["ss_token"].shape[1])
    assert at == data["tree_indices"].tolist()
    tree = Tree(tuple(guessed[at].tolist()), shape.parents)
    assert list(tree.tokens) == data["tree_candidates"][0].tolist()
    rows = data["retrieve_indices"]
    same_shape(tree, data["tree_attn_mask"][0, 0], data["tree_position_ids"], rows)
    same_candidates(tree, data)

    warp, used = warper(meta.number("temperature")), []
    asked = [node for node, below in enumerate(tree.children) if below]

    def q(node: int) -> Tensor:
        level = tree.depths[node]
        row = [other for other in asked if tree.depths[other] == level].index(node)
        logits = warp(data[f"draft_logits_{level}"][row])
        drafted, stored = logits.softmax(-1), data[f"op_{level}"][row]
        close(drafted, stored, terms=len(stored), scale=float(logits.abs().max()) * stored)
        return drafted

    children = in_order_of(rows, len(tree))
    same_siblings(tree, asked, children, data, meta)
    same_guesses(tree, asked, q, data)
    verifier = Rejection(tree, children, warp, counting(data["uniforms"], used), q)
    path, _ = walk(tree, data["tree_logits"], verifier)
    same_path(data, path)
    assert len(used) == int(data["uniforms_consumed"])
    verifier.same_law(data["sample_p"])


def same_siblings(
    tree: Tree, asked: list[int], children: list[list[int]], data: Reader, meta: Reader
) -> None:
    """Of each entry of the table of paths: the row of its parent's level, and earlier siblings."""
    levels = {
        node: [other for other in asked if tree.depths[other] == tree.depths[node]].index(node)
        for node in asked
    }
    parents, before = meta.literal("p_indices"), meta.literal("b_indices")
    for j, row in enumerate(data["retrieve_indices"].tolist()):
        for i, (above, node) in enumerate(pairwise(row), start=1):
            if node >= 0:
                assert parents[j][i] == levels[above]
                siblings = children[above]
                assert before[j][i] == siblings[: siblings.index(node)]


def same_guesses(tree: Tree, asked: list[int], q: Callable[[int], Tensor], data: Reader) -> None:
    """Probability of each guess, among the tokens that were not drawn before it."""
    for node, tokens, stored in zip(asked, data["ss_token"], data["ss_prob"], strict=True):
        drawn = q(node)[tokens]
        left = 1 - (drawn.cumsum(0) - drawn)
        # A sum over the vocabulary, and the difference of sums of as many as were drawn.
        terms = len(q(node)) + len(tokens)
        close(drawn / left, stored, terms=terms, scale=stored.double() / left.double())
    # In the table of paths; the root is certain.
    ranks = {0: 1.0}
    for node, stored in zip(asked, data["ss_prob"].tolist(), strict=True):
        below = [child for child in range(len(tree)) if tree.parents[child] == node]
        ranks |= {child: stored[rank] for rank, child in enumerate(below)}
    for row, stored in zip(
        data["retrieve_indices"].tolist(), data["cart_candidates_prob"].double(), strict=True
    ):
        path = [node for node in row if node >= 0]
        assert stored[: len(path)].tolist() == [ranks[node] for node in path]


def chain_rejection(data: Reader, meta: Reader) -> None:
    """Hugging Face's chain, whose drafts were sampled too."""
    logits, q = data["new_logits"][0], data["candidate_logits"][0].softmax(-1)
    ids = data["candidate_input_ids"][0].tolist()
    tree = Tree.chain(ids[-len(q) - 1 :])
    children = [list(below.values()) for below in tree.children]
    draw = data["uniforms"].tolist()
    verifier = Rejection(
        tree, children, warper(1.0), lambda node: draw[node - 1], lambda node: q[node]
    )
    path, emitted = walk(tree, logits, verifier)
    assert len(path) - 1 == int(data["n_matches"])
    verifier.same_law(data["next_token_distribution"][0])
    valid = data["valid_tokens_argmax"][0].tolist()
    assert [*emitted[:-1], int(verifier.left.argmax())] == valid


def medusa_greedy(data: Reader, meta: Reader) -> None:
    meta.choice("mode", {"greedy": True})
    assert meta.number("temperature") == 0
    meta.without_effect("posterior_threshold", "posterior_alpha")  # of typical acceptance
    shape = meta.choice("choices", {"mc_sim_7b_63": MC_SIM_63})
    root = int(data["logits"][0, -1].argmax())
    best = data["medusa_logits"][:, 0, -1].topk(10).indices
    tokens = [root]
    for rank, depth in zip(shape.tokens[1:], shape.depths[1:], strict=True):
        tokens.append(int(best[depth - 1, rank]))
    assert tokens == data["tree_candidates"][0].tolist()
    tree = Tree(tuple(tokens), shape.parents)
    path, _ = walk(tree, data["tree_logits"], greedy)
    assert len(path) - 1 == int(data["accept_length"])
    row = data["candidates"][int(data["best_candidate"])]
    assert row[: len(path)].tolist() == [tree.tokens[node] for node in path]
    every = [[tree.tokens[node] for node in tree.path(leaf)] for leaf in tree.leaves()]
    width = data["candidates"].shape[1]
    every = sorted(row + [0] * (width - len(row)) for row in every)
    assert sorted(data["candidates"].tolist()) == every


# --- a batch -------------------------------------------------------------------------------------


def ragged_batch(data: Reader, meta: Reader) -> None:
    """Each row's contents when its drafts are accepted; it is not moved to the right for that."""
    pads, contents = (
        data[f"{name}s"].tolist() for name in ("old_padding_length", "original_content_length")
    )
    counts, layers = data["matched_tokens_incl_bonus"].tolist(), (0, 1)
    written = data["k_in_0"].shape[2] - (pads[0] + contents[0] - 1)  # the root and its drafts
    rows = []
    for row, (pad, content) in enumerate(zip(pads, contents, strict=True)):
        cache, old = KVCache(len(layers)), slice(pad, pad + content - 1)
        for at, layer in zip(layers, cache.layers, strict=True):
            layer.update(*(data[f"{kind}_in_{at}"][row, None, :, old] for kind in "kv"))
        cache.freeze(written, content - 1)
        rows.append(cache)
    cache = joined_caches(rows)
    for at, layer in zip(layers, cache.layers, strict=True):
        layer.update(*(data[f"{kind}_in_{at}"][:, :, -written:] for kind in "kv"))
    cache.accept(torch.arange(written).expand(len(rows), -1), counts)
    ids, padding = data["new_generated_ids"], meta.count("pad_token_id")
    for row, (pad, content) in enumerate(zip(pads, contents, strict=True)):
        there = int(data["new_padding_lengths"][row])
        held = cache.lengths(row)
        assert held == [content - 1 + counts[row]] * len(layers)
        for at, layer in zip(layers, cache.layers, strict=True):
            for name, kind in (("keys", "k"), ("values", "v")):
                mine = getattr(layer, name)[row, :, : held[at]]
                assert torch.equal(mine, data[f"{kind}_out_{at}"][row, :, there:])
        assert ids[row, :there].eq(padding).all()
        assert data["generated_ids"][row, :pad].eq(padding).all()
        emitted = data[f"accepted_{row}"].tolist()
        assert len(emitted) == counts[row]
        assert ids[row, there:].tolist() == [*data["generated_ids"][row, pad:].tolist(), *emitted]


# --- prompt lookup -------------------------------------------------------------------------------


def prompt_lookup(data: Reader, meta: Reader) -> None:
    """Earliest match; Hugging Face ends a copy at the end of the text and before an end token."""
    assert data["cases"]
    data.without_effect("ref")
    for values in data["cases"]:
        case = Reader(values, "field")
        ids, wanted = case["input_ids"], case["candidates"]
        found = matches(ids, case["max_matching_ngram_size"], latest=False)
        room, most = case["max_length"] - len(ids), case["num_output_tokens"]
        copy = []
        if found:
            start = found[0][1]
            end = [] if case["eos"] is None else [case["eos"]]
            copy = copied(ids, start, most, end)[: len(ids) - start]
        assert copy[: max(room, 0)] == wanted
        case.without_effect("eos")  # read where a match was found
        done(case)


# --- the exact distribution ----------------------------------------------------------------------


def accepted_by(p: Tensor, q: Tensor, guesses_left: int) -> tuple[Tensor, Tensor]:
    """Sampled siblings at one node, enumerated: P(one is accepted), and the resulting distribution.

    Parameters
    ----------
    p, q : Tensor, (V,)
        The remaining target and drafter distributions.
    """
    if not guesses_left:
        return p.new_zeros(()), p
    ratio = (p / q).clamp(max=1).nan_to_num(0)
    take = q * ratio
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum()
    accept, law = take.sum(), take.clone()
    for token, refused in enumerate((q - take).tolist()):
        if refused > 0:
            rest = q.index_fill(0, torch.tensor(token), 0.0)
            later, below = accepted_by(residual, rest / rest.sum(), guesses_left - 1)
            accept, law = accept + refused * later, law + refused * below
    return accept, law


def exact_law(data: Reader, meta: Reader) -> None:
    """Closed forms of the demo model; the counts of its other tests must be close to them."""
    p0, p1, p2, q0, q1 = (data[name] for name in ("p0", "p1", "p2", "q0", "q1"))
    joint = p0[:, None, None] * p1[:, :, None] * p2
    close(joint, data["joint_first3"], terms=3, scale=joint)  # products of three

    both = torch.minimum(p0, q0)
    chain = torch.stack([both.sum(), (both * torch.minimum(p1, q1).sum(1)).sum()])
    close(chain, data["chain_gamma2_level_accept"], terms=2 * len(p0))

    pairs = [(x, y) for x in q0.topk(2).indices.tolist() for y in q1[x].topk(2).indices.tolist()]
    tree = Tree.of_paths(ROOT, pairs)
    reached = [1.0]
    for node in range(1, len(tree)):
        path = [tree.tokens[at] for at in tree.path(node)[1:]]
        reached.append(float(p0[path[0]] * (p1[tuple(path)] if len(path) == 2 else 1)))
    levels = [
        sum(p for p, depth in zip(reached, tree.depths, strict=True) if depth == d) for d in (1, 2)
    ]
    levels = torch.tensor(levels, dtype=torch.float64)
    close(levels, data["topk2x2_tree_level_accept"], terms=len(tree))
    several = [accepted_by(p0, q0, k) for k in (1, 2, 3, 4)]
    accepted = torch.stack([accept for accept, _ in several])
    # Each guess sums over the tokens, twice: the accepted part, and the rest.
    terms = 2 * len(several) * len(p0)
    close(accepted, data["multiround_root_accept_K1..4"], terms=terms, scale=1)
    close(several[-1][1], data["multiround_root_law_K4"], terms=terms, scale=1)
    close(several[-1][1], p0, terms=terms, scale=1)
