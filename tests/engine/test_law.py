"""Sampling with drafts has the distribution of sampling, on a small model where it is exact.

The model has six tokens and three positions. Drafts come from another distribution; the walk, the
tree, the ranking of drafts and the noise are the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from support.engine.draws import gumbel, walk
from support.paths import DATA
from vlmfast.core.drafting import Budget
from vlmfast.core.tree import Tree

LAW = load_file(DATA / "golden" / "spec" / "exact_law_V6.safetensors")
V, PLACES, START = 6, 3, -1
N = 30_000
UNLIKELY = 1e-4

Prefix = tuple[int, ...]


def model(prefix: Prefix) -> Tensor:
    """The target's logits, (V,), after at most two tokens."""
    return LAW[f"p{len(prefix)}"][prefix].log()


def draft_model(last: int) -> Tensor:
    """The drafter's logits, from the last token only."""
    return (LAW["q0"] if last == START else LAW["q1"][last]).log()


def noise_of(seed: int, n: int = N) -> Tensor:
    """(n, PLACES, V): the noise of ``n`` answers; one call covers all answers at a position."""
    return torch.stack([gumbel(seed, t, V * n).view(n, V) for t in range(PLACES)], 1)


@dataclass(frozen=True)
class Way:
    """How answers are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    shared: bool = False  # drafts are ranked with the target's own noise
    widths: tuple[int, ...] = (3, 2)

    def warp(self, logits: Tensor) -> Tensor:
        if self.temperature != 1:
            logits = TemperatureLogitsWarper(self.temperature)(None, logits)
        return TopPLogitsWarper(self.top_p)(None, logits) if self.top_p < 1 else logits

    def law(self, prefix: Prefix) -> Tensor:
        return self.warp(model(prefix)[None])[0].softmax(-1)


@dataclass(frozen=True)
class Sampled:
    tokens: Tensor  # (n, PLACES)
    accepted: Tensor  # (n,): drafts of the first round


def alike(tokens: Tensor) -> Iterator[tuple[Prefix, Tensor]]:
    """The different rows of ``tokens``, and the index of each of them."""
    if not tokens.shape[1]:
        yield (), torch.ones(len(tokens), dtype=torch.bool)
        return
    for row in tokens.unique(dim=0):
        yield tuple(row.tolist()), (tokens == row).all(1)


def plain(way: Way, noise: Tensor) -> Tensor:
    """Token after token, with the noise of its position."""
    tokens = torch.zeros(len(noise), 0, dtype=torch.int64)
    for place in range(PLACES):
        rows = torch.empty(len(noise), V, dtype=torch.float64)
        for prefix, mine in alike(tokens):
            rows[mine] = way.warp(model(prefix)[None])[0]
        chosen = (rows + noise[:, place]).argmax(1)
        tokens = torch.cat([tokens, chosen[:, None]], 1)
    return tokens


def speculative(way: Way, noise: Tensor) -> Sampled:
    """Round after round: draft a tree, walk it."""

    @cache
    def taken(prefix: Prefix) -> list[int]:
        """The target's token in every answer, after ``prefix`` and with its position's noise."""
        return (way.warp(model(prefix)[None]) + noise[:, len(prefix)]).argmax(1).tolist()

    @cache
    def ranked(last: int, place: int, width: int) -> list[list[int]]:
        """The best drafts after ``last``, of every answer."""
        own = (lambda depth: noise[:, place]) if way.shared else None
        scores = Budget(99, 99, way.warp, own).rank(draft_model(last)[None], 1)
        return scores.topk(width).indices.expand(len(noise), -1).tolist()

    def drafted(answer: int, prefix: Prefix) -> Tree:
        root = prefix[-1] if prefix else START
        paths: tuple[Prefix, ...] = ((),)
        for depth, width in enumerate(way.widths[: PLACES - 1 - len(prefix)]):
            paths = tuple(
                (*path, token)
                for path in paths
                for token in ranked((root, *path)[-1], len(prefix) + depth, width)[answer]
            )
        return grown(root, paths)

    grown = cache(Tree.of_paths)
    fixed = cache(lambda prefix: drafted(0, prefix))
    tree_rows = cache(
        lambda tree, prefix: [
            prefix + tuple(tree.tokens[at] for at in tree.path(node)[1:])
            for node in range(len(tree))
        ]
    )
    tokens, accepted = [], []
    for answer in range(len(noise)):
        done: Prefix = ()
        while len(done) < PLACES:
            tree = drafted(answer, done) if way.shared else fixed(done)

            def take(row: Prefix, answer=answer) -> tuple[int, bool]:
                return taken(row)[answer], False

            path, emitted = walk(tree, tree_rows(tree, done), take)
            if not done:
                accepted.append(len(path) - 1)
            done += tuple(emitted)
        tokens.append(done)
    return Sampled(torch.tensor(tokens), torch.tensor(accepted))


# --- the distribution ----------------------------------------------------------------------------


def p_value(counts: Tensor, law: Tensor) -> float:
    """Of Pearson's chi-squared; cells with fewer than five expected counts are pooled."""
    expected = law.flatten() * counts.sum()
    counts = counts.flatten().double()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    there = expected > 0
    if there.sum() < 2:
        return 1.0
    chi2 = ((counts - expected)[there] ** 2 / expected[there]).sum()
    half = torch.stack((there.sum() - 1, chi2)).double() / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def tally(tokens: Tensor) -> Tensor:
    """Counts (V, V, ...) of the rows."""
    flat = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.unbind(1):
        flat = flat * V + column
    return flat.bincount(minlength=V ** tokens.shape[1]).view((V,) * tokens.shape[1])


def deviations(sampled: Sampled, way: Way) -> set[str]:
    """Statistics that deviate from the distribution."""
    tokens, found = sampled.tokens, set()
    p0 = way.law(())
    p1 = torch.stack([way.law((x,)) for x in range(V)])
    p2 = torch.stack([torch.stack([way.law((x, y)) for y in range(V)]) for x in range(V)])
    if p_value(tally(tokens[:, :1]), p0) < UNLIKELY:
        found.add("first")
    pairs = tally(tokens[:, :2])
    if any(p_value(pairs[x], p1[x]) < UNLIKELY for x in range(V)):
        found.add("second")
    full = tokens[sampled.accepted == PLACES - 1]
    assert len(full) > len(tokens) / 25, "hardly any draft was accepted: nothing is tested"
    counts = tally(full)
    seen = counts.sum(2, keepdim=True)
    law = seen * p2 / len(full)  # of the third, given that two were accepted
    if p_value(counts, law) < UNLIKELY:
        found.add("bonus")
    if p_value(tally(tokens), p0[:, None, None] * p1[:, :, None] * p2) < UNLIKELY:
        found.add("joint")
    return found


WAYS = [
    replace(way, shared=shared)
    for way in (Way(0.5), Way(1.0), Way(1.0, top_p=0.9))
    for shared in (False, True)
]
ways = pytest.mark.parametrize(
    "way", WAYS, ids=lambda w: f"T{w.temperature}-p{w.top_p}-{'shared' if w.shared else 'fixed'}"
)


@pytest.fixture(scope="module")
def noise() -> Tensor:
    return noise_of(2024)


@pytest.mark.cases(1)
@ways
def test_drafted_answers_have_the_distribution_and_equal_plain_ones(
    way: Way, noise: Tensor
) -> None:
    """First, second, bonus and joint; and each answer equals the one without drafts."""
    sampled = speculative(way, noise)
    assert deviations(sampled, way) == set()
    assert torch.equal(sampled.tokens, plain(way, noise))
    for depth in range(PLACES):  # all cases occur: no draft, one or two are accepted
        assert (sampled.accepted == depth).sum() > 300


def test_plain_answers_have_the_distribution(noise: Tensor) -> None:
    for way in WAYS[::2]:
        tokens = plain(way, noise)
        assert deviations(Sampled(tokens, torch.full((N,), PLACES - 1)), way) == set()
        # Control: another temperature.
        other = replace(way, temperature=way.temperature * 1.1)
        assert "joint" in deviations(Sampled(tokens, torch.full((N,), PLACES - 1)), other)


@pytest.mark.parametrize("shared", [False, True])
def test_removed_tokens_never_appear(shared: bool) -> None:
    """Half of the first position's vocabulary is cut off: none of it in 100,000 draws."""
    way = Way(top_p=0.7, shared=shared)
    assert (way.law(()) == 0).sum() == V / 2
    noise = noise_of(7, 34_000)
    tokens = speculative(way, noise).tokens
    assert tokens.numel() > 100_000
    assert removed(tokens, way) == 0


def removed(tokens: Tensor, way: Way) -> int:
    """How many tokens have no probability at their position."""
    count = 0
    for place in range(PLACES):
        for (*prefix, token), where in alike(tokens[:, : place + 1]):
            count += int(where.sum()) * int(way.law(tuple(prefix))[token] == 0)
    return count


# --- how many drafts are accepted ----------------------------------------------------------------


def test_acceptance_of_a_small_tree(noise: Tensor) -> None:
    sampled = speculative(Way(widths=(2, 2)), noise)
    rates = [float((sampled.accepted >= d).double().mean()) for d in (1, 2)]
    assert rates == pytest.approx(LAW["topk2x2_tree_level_accept"].tolist(), abs=0.012)
