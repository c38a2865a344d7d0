"""`draft-eagle`: the layer, the tree, image rows, and whole drafts without an engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import apart, close
from support.eagle import (
    BUDGET,
    PASSES,
    PLAIN,
    SIZES,
    TERMS,
    TILED,
    VOCABULARY,
    WIDTH,
    answered,
    layout_of,
    read_of,
    rounds,
    rows_of,
    same_state,
    states,
    target,
    text_layout,
)
from support.engine.draws import RANKS, Cache, grow, gumbel
from support.replayed import accepts_something, replay
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.layout import TokenLayout
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_eagle import DraftEagle
from vlmfast.drafters.draft_eagle.drafter import EagleDrafter
from vlmfast.drafters.draft_eagle.module import EagleModule
from vlmfast.drafters.draft_eagle.stage import layers_read
from vlmfast.drafters.draft_eagle.visual import CHOICES, Visual, shortened
from vlmfast.errors import RecipeError

COMPRESSOR = {"hidden": 8, "queries": 4}


# --- a small model --------------------------------------------------------------------------------


def module_of(seed: int = 0, dtype: torch.dtype = torch.float64, **own) -> EagleModule:
    torch.manual_seed(seed)
    module = EagleModule(SIZES | own).to(dtype)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:  # norms and biases, so that using them has an effect
                weight.add_(0.3 * torch.randn_like(weight))
        if module.kind == "eagle3":
            module.restrict(torch.randperm(VOCABULARY)[: len(module.d2t)].sort().values)
    return module.eval().requires_grad_(False)


# --- the layer and the module ---------------------------------------------------------------------

KINDS = {
    "eagle": {"input_norm": False},
    "specvlm": {},
    "grouped": {"heads": 4, "kv_heads": 2, "qkv_bias": True, "bias": False},
    "msd": {"kind": "msd"},
    "eagle3": {"kind": "eagle3", "draft_vocabulary": 25},
    "eagle3.1": {
        "kind": "eagle3",
        "draft_vocabulary": 25,
        "norm_output": True,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
    },
}


@pytest.fixture(params=KINDS)
def module(request: pytest.FixtureRequest) -> EagleModule:
    return module_of(**KINDS[request.param])


def test_invalid_modules_are_refused() -> None:
    with pytest.raises(RecipeError, match="kind='medusa'"):
        EagleModule(SIZES | {"kind": "medusa"})
    with pytest.raises(RecipeError, match="3 key heads"):
        EagleModule(SIZES | {"kv_heads": 3})
    with pytest.raises(ValueError, match="3 ids for a draft vocabulary of 25"):
        module_of(kind="eagle3", draft_vocabulary=25).restrict(torch.arange(3))


# --- the tree -------------------------------------------------------------------------------------


def slow_tree(root: int, level_logits: list[Tensor], k: int, depth: int, nodes: int) -> Tree:
    """EAGLE-2's rule in plain Python: lists, one candidate at a time, exact ties by number."""
    candidates = []  # (score, number, token, parent's number)
    frontier = [(0.0, -1)]
    for level in range(depth):
        made = []
        for row, (score, number) in enumerate(frontier):
            lp = level_logits[level][row].float().log_softmax(-1).tolist()
            ranked = sorted(range(len(lp)), key=lambda t, lp=lp: (-lp[t], t))[:k]
            for token in ranked:
                total = float(torch.tensor(score) + torch.tensor(lp[token]))
                made.append((total, len(candidates) + len(made), token, number))
        candidates += made
        frontier = [(c[0], c[1]) for c in sorted(made, key=lambda c: (-c[0], c[1]))[:k]]
    best = sorted(candidates, key=lambda c: (-c[0], c[1]))[: nodes - 1]
    best = sorted((c for c in best if c[0] > -torch.inf), key=lambda c: c[1])
    place = {-1: 0} | {c[1]: i + 1 for i, c in enumerate(best)}
    return Tree((root, *(c[2] for c in best)), (-1, *(place[c[3]] for c in best)))


@st.composite
def levels(draw: st.DrawFn) -> tuple[list[Tensor], int, int, int]:
    k, depth = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    vocabulary, nodes = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    kind = draw(st.sampled_from(["normal", "ties", "one-hot", "closed"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = []
    for level in range(depth):
        logits = torch.randn(k if level else 1, vocabulary, generator=generator)
        if kind == "ties":
            logits = logits.round()
        elif kind == "one-hot":  # a probability of exactly 1: the child's score is its parent's
            logits = torch.full_like(logits, -1e4).scatter(1, logits.argmax(1, keepdim=True), 0.0)
        elif kind == "closed":
            logits = logits.masked_fill(logits > 0.5, -torch.inf)
            logits[:, 0] = 0.0
        found.append(logits)
    return found, k, depth, nodes


@given(levels())
@settings(max_examples=150, deadline=None)
def test_tree_follows_the_eagle2_rule(drawn: tuple) -> None:
    logits, k, depth, nodes = drawn
    calls, lines = [], []

    def step(tokens: Tensor, origin: Tensor, mask: Tensor, level: int) -> Tensor:
        rows = len(tokens)
        assert mask.shape == (rows, rows * (level + 1))
        above = lines[-1] if lines else [set()] * rows
        lines.append([above[row] | {rows * level + j} for j, row in enumerate(origin.tolist())])
        assert [set(seen.nonzero().flatten().tolist()) for seen in mask] == lines[-1]
        calls.append(level)
        return logits[level + 1][:rows]

    rank = Budget(nodes, depth).rank
    tree = grow(3, logits[0], step, rank, top_k=k, depth=depth, nodes=nodes)
    if nodes == 1:
        assert len(tree) == 1 and not calls
        return
    assert calls == list(range(depth - 1))
    assert len(tree) <= nodes and tree.depth <= depth
    # At most N - 1 of a level are ever kept, so a narrower frontier finds the same tree; a
    # wide one has the same order.
    narrow = min(k, nodes - 1, logits[0].shape[1])
    assert tree == slow_tree(3, logits, narrow, depth, nodes)


def test_tree_with_probability_one_and_nan_logits() -> None:
    certain = torch.tensor([[0.0, -1e4, -1e4]])

    def step(tokens: Tensor, origin: Tensor, mask: Tensor, level: int) -> Tensor:
        return certain.expand(len(tokens), -1)

    size = {"top_k": 2, "depth": 5, "nodes": 6}
    tree = grow(9, certain, step, Budget(6, 5).rank, **size)
    assert tree == Tree.chain([9, 0, 0, 0, 0, 0])
    broken = torch.full_like(certain, torch.nan)
    assert len(grow(9, broken, step, Budget(6, 5).rank, **size)) == 1
    with_noise = Budget(6, 5, lambda logits: logits, lambda depth: torch.zeros(3)).rank
    assert len(grow(9, broken, step, with_noise, **size, shared_noise=True)) == 1


def test_shared_noise_drafts_the_targets_choice() -> None:
    """With the target's own distribution the first child is its draw; other noise breaks this."""
    torch.manual_seed(0)
    table = 2 * torch.randn(12, 12)  # next-token logits of a chain

    def draft(noise: Callable[[int], Tensor]) -> Tree:
        def step(tokens: Tensor, origin: Tensor, mask: Tensor, level: int) -> Tensor:
            return table[tokens]

        budget = Budget(9, 4, lambda logits: logits / 0.7, noise)
        size = {"top_k": 3, "depth": 4, "nodes": 9}
        return grow(5, table[[5]], step, budget.rank, **size, shared_noise=True)

    full, other = 0, 0
    for seed in range(40):

        def own(depth: int, seed: int = seed) -> Tensor:
            return gumbel(seed, depth, 12)

        def wrong(depth: int, seed: int = seed) -> Tensor:
            return gumbel(seed + 1000, depth, 12)

        drawn, token = [], 5
        for depth in range(1, 5):
            token = int(((table[token] / 0.7).log_softmax(-1) + own(depth)).argmax())
            drawn.append(token)
        for noise, count in ((own, True), (wrong, False)):
            tree, node, found = draft(noise), 0, 0
            while found < 4 and (child := tree.children[node].get(drawn[found])) is not None:
                node, found = child, found + 1
                if count:
                    assert next(iter(tree.children[tree.parents[node]])) == drawn[found - 1]
            full, other = full + found * count, other + found * (not count)
    assert full == 40 * 4
    assert other < 40 * 2
    assert list(RANKS) == sorted(RANKS, reverse=True) and sum(RANKS) < 1


# --- image rows -----------------------------------------------------------------------------------


def shorten(choice: str, layout: TokenLayout, **own) -> tuple:
    """Rows whose hidden states are twice their embeddings, shortened."""
    module = module_of(dtype=torch.float32, compressor=COMPRESSOR)
    torch.manual_seed(3)
    embeds = torch.randn(len(layout), WIDTH)
    position = layout.position[0] - 1
    made, chosen = shortened(
        Visual(choice, **own),
        module.compressor,
        embeds,
        2 * embeds,
        position,
        layout,
        torch.randn(4, WIDTH),
    )
    return embeds, position, made, chosen


@pytest.mark.parametrize("choice", CHOICES)
def test_text_is_kept_and_images_are_shortened_equally(choice: str) -> None:
    layout = layout_of(3, TILED, 2, PLAIN, 4)
    embeds, position, made, chosen = shorten(choice, layout)
    text = (~layout.visual).nonzero().flatten()
    stay = made.image < 0
    assert torch.equal(made.embeds[stay], embeds[text])
    assert torch.equal(made.features[stay], 2 * embeds[text])
    assert torch.equal(made.position[stay], position[text])
    assert made.position.diff().min() > 0  # still the order of the prompt
    rest = int((~stay).sum())
    tiled, plain = (int((layout.item == item).sum()) for item in (0, 1))  # 52 and 36
    expected = {
        "all": tiled + plain,
        "prune": round(0.05 * tiled) + round(0.05 * plain),
        "resample": 4,
        "text": 0,
    }
    if choice in expected:
        assert rest == expected[choice]
    else:
        assert 0 < rest <= 0.6 * (tiled + plain)
    if choice == "all":
        assert torch.equal(made.embeds, embeds)
        assert chosen.branch == "all"
        return
    for item in (0, 1):
        at = made.position[made.image == item]
        own = position[(layout.item == item) & layout.visual]
        if choice == "prune":
            rows = torch.isin(position, at).nonzero().flatten()
            assert torch.equal(made.embeds[made.image == item], embeds[rows])
            assert layout.patches[rows].all()
        elif choice != "text" and chosen.branch != "prune":
            assert torch.equal(at, own[len(own) - len(at) :])
    if choice == "pool":  # hidden states are averaged as embeddings are
        close(made.features, 2 * made.embeds, terms=len(embeds))  # means
        mean = embeds[layout.patches & (layout.item == 1)].mean(0)
        scale = embeds.abs().max()
        close(made.embeds[made.image == 1].mean(0), mean, terms=2 * len(embeds), scale=scale)
    if choice in ("select", "weighted"):
        assert chosen.logits.shape == (5,)
        assert chosen.logits[4] == -torch.inf  # text-only was not trained


def test_share_and_seed_of_the_choice() -> None:
    layout = layout_of(3, PLAIN, 4)
    for choice in ("prune", "pool", "conv"):
        made = shorten(choice, layout, share=0.25)[2]
        assert int((made.image >= 0).sum()) == 9, choice
    rows = [shorten("prune", layout, share=0.25, seed=seed)[2].position for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    with pytest.raises(RecipeError, match="at most 4"):
        shorten("resample", layout, share=0.25)
    with pytest.raises(RecipeError, match="queries=9"):
        shorten("resample", layout, queries=9)
    assert int((shorten("concat", layout, share=0.25)[2].image >= 0).sum()) <= 11


def test_small_and_reduced_images() -> None:
    """Images of which a reducer left almost nothing."""
    layout = layout_of(3, TILED, 4)
    for kept in (1, 2, 5):
        patches = layout.patches.nonzero().flatten()
        index = torch.cat([torch.arange(3), patches[:: len(patches) // kept][:kept]])
        index = torch.cat([index, torch.arange(len(layout) - 4, len(layout))])
        thin = layout.select(index)
        for choice in CHOICES:
            made = shorten(choice, thin)[2]
            assert int((made.image < 0).sum()) == 7
            assert choice == "text" or 1 <= int((made.image >= 0).sum()) <= kept


def test_weights_without_a_compressor_are_refused() -> None:
    layout = layout_of(3, PLAIN, 4)
    embeds = torch.randn(len(layout), WIDTH)
    before = torch.get_rng_state()
    for choice in CHOICES:
        args = (Visual(choice), None, embeds, embeds, layout.position[0], layout, embeds[:2])
        if choice in ("all", "prune", "pool", "text"):
            shortened(*args)
        else:
            with pytest.raises(RecipeError, match=f"visual={choice} needs weights"):
                shortened(*args)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_reach_the_compressor() -> None:
    layout = layout_of(3, PLAIN, 4)
    module = EagleModule(SIZES | {"compressor": COMPRESSOR})
    embeds = torch.randn(len(layout), WIDTH)
    for choice, part in (("conv", "conv"), ("resample", "resample"), ("weighted", "gate")):
        args = (Visual(choice), module.compressor, embeds, embeds, layout.position[0], layout)
        rows, _ = shortened(*args, torch.randn(3, WIDTH))
        module.zero_grad()
        module.rows(rows.embeds[None], rows.features[None]).square().sum().backward()
        found = getattr(module.compressor, part).parameters()
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in found), choice


# --- whole drafts ---------------------------------------------------------------------------------


def open_drafter(
    module: EagleModule, read: Read, visual: str = "all", nodes: int = 9, **own
) -> EagleDrafter:
    stage = DraftEagle(visual, kind=module.kind, top_k=3, depth=3, nodes=nodes)
    drafter = stage.open(target(module, **own))
    drafter.prefill(read)
    return drafter


def reading(module: EagleModule, layout: TokenLayout, **own) -> Read:
    return read_of(layout, aux_hidden_states=module.kind == "eagle3", **own)


@pytest.mark.parametrize("visual", ["all", "prune", "pool", "text"])
def test_cache_after_rounds_equals_one_prefill(module: EagleModule, visual: str) -> None:
    read = reading(module, layout_of(3, PLAIN, 4))
    drafter = open_drafter(module, read, visual)
    root, whole = rounds(drafter, read, [0, 2, 1, 3, 0])
    same_state(drafter, open_drafter(module, whole, visual), root)


def test_parts_of_a_prompt_continue(module: EagleModule) -> None:
    layout = layout_of(3, PLAIN, 4, TILED, 3)
    read = reading(module, layout)
    one = open_drafter(module, read)
    cut = [0, 1, 3, 20, 41, len(layout)]
    several = open_drafter(module, rows_of(read, 0, 1))
    for first, last in pairwise(cut[1:]):
        several.prefill(rows_of(read, first, last))
    assert one.propose(4, BUDGET) == several.propose(4, BUDGET)
    close(one.cache.keys, several.cache.keys, terms=PASSES * TERMS)
    # A later question after an answer: the pending row gets the next part's first token.
    tree = one.propose(4, BUDGET)
    answered(one, tree, [0], 9, 1)
    later = reading(module, text_layout(3, len(layout) + 1), seed=8)
    one.prefill(later)
    one.propose(2, BUDGET)
    assert one.cache.length == len(layout) + 4
    assert one.next == len(layout) + 4


def test_rounds_without_a_draft_reach_the_cache(module: EagleModule) -> None:
    read = reading(module, layout_of(6))
    eager, lazy = open_drafter(module, read), open_drafter(module, read)
    assert len(lazy.propose(4, Budget(1, 4))) == len(lazy.propose(4, Budget(9, 0))) == 1
    assert lazy.cache.length == 0  # nothing is computed before it is needed
    tree = eager.propose(4, BUDGET)
    for drafter, drafted in ((eager, tree), (lazy, Tree.chain([4]))):
        n = len(drafted)
        drafter.extend(Round(drafted, [0], [9], torch.zeros(n, VOCABULARY), *states(module, n)))
    assert eager.propose(9, BUDGET) == lazy.propose(9, BUDGET)
    close(eager.cache.keys, lazy.cache.keys, terms=PASSES * TERMS)
    # Other hidden states or another token do have an effect.
    other = open_drafter(module, read)
    answered(other, Tree.chain([4]), [0], 9, 1)
    assert other.propose(9, BUDGET) != lazy.propose(9, BUDGET)
    apart(other.cache.keys, lazy.cache.keys, terms=PASSES * TERMS)


def test_rows_pair_with_the_next_row_that_survived() -> None:
    """Row t: hidden state t, embedding of the next row, rotary id of t."""
    module = module_of()
    layout = layout_of(3, PLAIN, 4).select(torch.tensor([0, 1, 2, 5, 11, 30, 39, 40, 41, 42]))
    read = reading(module, layout)
    drafter = open_drafter(module, read)
    tree = drafter.propose(4, BUDGET)
    root = drafter.target.embed(torch.tensor([4]))
    embeds = torch.cat([read.embeds[1:], root])
    cache = Cache()
    rows = module.rows(embeds[None], read.features[None])
    out = module.run(rows, layout.position, cache.attend())
    close(drafter.cache.keys, cache.keys, terms=TERMS)
    first = drafter.target.logits(out[0, -1]).topk(3).indices
    assert sorted(tree.children[0]) == sorted(first.tolist())
    assert drafter.next == 43


def test_banned_tokens_are_never_drafted(module: EagleModule) -> None:
    read = reading(module, layout_of(6))
    free = open_drafter(module, read).propose(4, BUDGET)
    banned = tuple(sorted(set(free.tokens[1:])))[:10]
    tree = open_drafter(module, read, banned=banned).propose(4, BUDGET)
    assert len(tree) > 1 and not set(banned) & set(tree.tokens[1:])
    if module.kind == "eagle3":
        assert set(tree.tokens[1:]) <= set(module.vocabulary().tolist())


def test_tree_shape_follows_the_ranks_under_noise() -> None:
    """For any logits: a node's score is how often the children on its path are accepted."""
    shapes = set()
    for seed in range(3):
        read = reading(module_of(), layout_of(6), seed=seed)
        budget = Budget(9, 3, lambda logits: logits, lambda d, s=seed: gumbel(s, d, VOCABULARY))
        tree = open_drafter(module_of(), read).propose(4, budget)
        shapes.add(tree.parents)
        worth = [1.0]
        for node, parent in enumerate(tree.parents[1:], start=1):
            rank = list(tree.children[parent].values()).index(node)
            worth.append(worth[parent] * RANKS[rank])
    assert len(shapes) == 1
    paths = product(range(-1, 3), repeat=3)  # ranks along a path, -1 after its end
    real = {p for p in paths if p[0] >= 0 and not (p[1] < 0 <= p[2])}
    best = sorted((prod(RANKS[r] for r in p if r >= 0) for p in real), reverse=True)[:8]
    # Products of as many ranks as a path is long, in any order.
    worth = torch.tensor(sorted(worth[1:], reverse=True), dtype=torch.float64)
    wanted = torch.tensor(best, dtype=torch.float64)
    close(worth, wanted, terms=tree.depth, scale=wanted)


# --- a target that can be learned -----------------------------------------------------------------


def cyclic() -> tuple[Target, EagleModule, Read]:
    """A target that emits a permutation of its last token, and a drafter that knows it.

    Embeddings are unit vectors and hidden states those of the next token, so ``fc`` is the
    permutation of the embedding and the layer adds nothing.
    """
    n = 16
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(n, generator=generator)
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)  # one cycle
    unit = torch.eye(n)
    module = EagleModule({"width": n, "heads": 2, "input_norm": True})
    with torch.no_grad():
        for weight in (module.layer.self_attn.o_proj.weight, module.layer.mlp.down_proj.weight):
            weight.zero_()
        module.fc.bias.zero_()
        module.fc.weight.zero_()
        module.fc.weight[:, :n] = unit[follows].T
    ids = [0]
    while len(ids) < 41:
        ids.append(int(follows[ids[-1]]))
    rows = torch.tensor(ids[:-1])
    read = Read(ids, text_layout(40), unit[rows], unit[follows[rows]])
    whole = Target(lambda t: unit[t], lambda x: 20 * x, n, 12, n, trained=module)
    return whole, module, read


def test_drafter_that_knows_the_target_is_always_accepted() -> None:
    whole, _, read = cyclic()
    stage = DraftEagle()
    accepted = replay(stage.open(whole), read, prompt=10, nodes=26, depth=4)
    assert accepted == [4] * 6  # five tokens a round
    assert replay(stage.open(whole), read, 10, nodes=26, depth=2) == [2] * 10
    assert replay(stage.open(whole), read, 10, nodes=1, depth=2) == [0] * 30
    assert accepts_something(stage.open(whole), read, 10)


# --- the stage ------------------------------------------------------------------------------------


def test_requests_of_a_recipe() -> None:
    assert DraftEagle().largest() == (26, 4)
    assert (DraftEagle().features, DraftEagle().aux_hidden_state_layers(32)) == (True, ())
    third = DraftEagle(kind="eagle3")
    assert not third.features
    assert [third.aux_hidden_state_layers(n) for n in (32, 28)] == [(2, 16, 29), (2, 14, 25)]
    assert DraftEagle(top_k=2, depth=2, nodes=7).nodes == 7


@pytest.mark.parametrize("depth", range(3, 40))
def test_eagle3_reads_three_layers(depth: int) -> None:
    low, middle, high = layers_read(depth)
    assert 0 <= low < middle < high < depth


def test_models_that_do_not_fit() -> None:
    with pytest.raises(RecipeError, match="reads three layers, the model has 2"):
        layers_read(2)
    with pytest.raises(RecipeError, match="no weights"):
        DraftEagle().open(target(None))
    module = module_of()
    with pytest.raises(RecipeError, match="width 8, this one has 16"):
        DraftEagle().open(target(module, width=16))
    with pytest.raises(RecipeError, match="are of kind=eagle, not kind=eagle3"):
        DraftEagle(kind="eagle3").open(target(module))
    with pytest.raises(RecipeError, match="needs weights that were trained with a compressor"):
        DraftEagle("conv").open(target(module))
    third = module_of(kind="eagle3", draft_vocabulary=25)
    with pytest.raises(RecipeError, match="draft tokens up to"):
        DraftEagle(kind="eagle3").open(target(third, vocabulary=20))
    drafter = DraftEagle().open(target(module))
    with pytest.raises(ValueError, match="needs a prompt"):
        drafter.propose(3, BUDGET)
    with pytest.raises(ValueError, match="needs the target's hidden states"):
        drafter.prefill(read_of(layout_of(4), aux_hidden_states=True))
