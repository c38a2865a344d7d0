"""Methods that distribute a budget over layers: CAKE, VL-Cache, FastKV (numbers: test_golden)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import close
from support.fake_slots import columns, prompt_kv, prompt_step
from vlmfast import RecipeError
from vlmfast.compressors.cache.cake import CAKE, adjust_budgets, most, parts
from vlmfast.compressors.cache.fastkv import FastKV
from vlmfast.compressors.cache.vlcache import VLCache, budgets
from vlmfast.compressors.layered import Scored
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnRequest, ColumnStats

N, HEADS, GROUPS, DIM = 96, 2, 2, 8
STAGES = (VLCache(), CAKE(window=8), FastKV())


def prompt(seed: int, layer: int = 0, n: int = N, sharp: float = 1.0) -> tuple[Tensor, KV]:
    """Queries and cache of one layer; ``sharp`` layers attend to few keys."""
    g = torch.Generator().manual_seed(100 * seed + layer)
    query = torch.randn(HEADS * GROUPS, n, DIM, generator=g) * sharp
    key, value = torch.randn(2, HEADS, n, DIM, generator=g)
    return query, prompt_kv(key, value, visual_rows(n))


def visual_rows(n: int) -> Tensor:
    """Text, an image, a question of 16 tokens."""
    rows = torch.arange(n)
    return (rows >= 4) & (rows < n - 16)


def asked(query: Tensor, kv: KV, request: ColumnRequest) -> ColumnStats:
    """Statistics over the rows of ``request``; over the question where it names text rows."""
    if request.rows != "text":
        return columns(query, kv.keys, request)
    stats = columns(query, kv.keys, ColumnRequest("window", 16))
    reach = [
        torch.stack([(p >= request.threshold * p.amax(-1, keepdim=True)) & (p > 0) for p in group])
        for group in maps(query, kv, 16)
    ]
    return replace(stats, count=torch.stack(reach).sum(2).int())


def maps(query: Tensor, kv: KV, rows: int) -> Tensor:
    """Causal attention of the last rows: (H, G, rows, N)."""
    n = len(kv)
    logits = query[:, n - rows :].unflatten(0, (HEADS, GROUPS)) @ kv.keys[:, None].mT * DIM**-0.5
    later = torch.arange(n) > torch.arange(n - rows, n)[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1)


SHARP = (0.5, 2.0, 1.0, 4.0, 1.5, 3.0)


def run(
    stage: CacheStage, seed: int = 0, sharp: tuple[float, ...] = SHARP, n: int | list[int] = N
) -> tuple[list[KV], list[KV], PrefillContext]:
    """A whole prompt: the cache after the last layer, the final cache, and the context."""
    depth = len(sharp)
    lengths = n if isinstance(n, list) else [n] * depth
    step, along = prompt_step(lengths[0], depth, visual_rows(lengths[0])), []
    for layer, request in stage.text_stats(depth).items():
        query, kv = prompt(seed, layer, lengths[layer], sharp[layer])
        along.append(stage.compress(step, layer, kv, asked(query, kv, request)))
        along = stage.trim(step, along)
    return along, stage.finish(step, list(along)), step


def lengths(cache: list[KV]) -> list[int]:
    return [len(kv) for kv in cache]


def same(a: list[KV], b: list[KV]) -> bool:
    return all(torch.equal(x.order, y.order) for x, y in zip(a, b, strict=True))


# --- common properties ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_window_beyond_the_budget_is_kept(stage):
    _, cache, _ = run(replace(stage, keep=0.01))
    for kv in cache:
        window = stage.last(len(kv))
        assert window <= len(kv) <= window + len(cache)
        assert torch.equal(kv.order[:, -window:], torch.arange(N - window, N).expand(HEADS, -1))


@pytest.mark.parametrize("stage", [VLCache(), CAKE(window=8)], ids=str)
def test_heads_of_different_lengths_keep_valid_slots(stage):
    """A head that an earlier stage shortened is cut like the other, down to its own length."""
    stage, step, cache = replace(stage, keep=0.5), prompt_step(N, 2), []
    for layer, request in stage.text_stats(2).items():
        query, kv = prompt(0, layer, N)
        stats = asked(query, kv, request)
        keep = torch.ones(HEADS, N, dtype=torch.bool)
        keep[1, 12:86] = False
        short = kv.select_mask(keep)
        at = short.order[:, None].expand(-1, GROUPS, -1)
        moved = {
            name: getattr(stats, name).gather(2, at)
            for name in ("sum", "sumsq", "entropy", "count")
        }
        stats = replace(stats, **moved, nnz=stats.nnz.gather(1, short.order))
        cache.append(stage.compress(step, layer, short, stats))
    for kv in stage.finish(step, cache):
        assert kv.lengths.tolist() == [len(kv), 22]
        for head, length in zip(kv.order, kv.lengths.tolist(), strict=True):
            assert bool((head[:length].diff() > 0).all())
        assert kv.order[1, :22].tolist() == [*range(12), *range(86, 96)]


# --- VL-Cache ------------------------------------------------------------------------------------


@given(
    densities=st.lists(st.floats(0.001, 1), min_size=1, max_size=40),
    share=st.floats(0.01, 1),
    recent=st.floats(0, 0.9),
)
def test_vlcache_budgets_sum_to_the_target_within_bounds(densities, share, recent):
    betas = budgets(densities, share, recent)
    low, high = 0.01 * (1 - recent), 1.0
    assert all(low <= beta <= high for beta in betas)
    if all(low < beta < high for beta in betas):
        close(sum(betas) / len(betas), share * (1 - recent), terms=2 * len(betas))
    by_density = sorted(zip(densities, betas, strict=True))
    assert [beta for _, beta in by_density] == sorted(betas)


def test_vlcache_bounds_bind():
    assert budgets([1.0, 1e-4], 0.9, 0.0) == [1.0, 0.01]
    for beta in budgets([0.5, 0.5], 0.2, 0.1):
        close(beta, 0.18, terms=2)


def test_vlcache_budgets_are_fractions_of_each_layers_slots():
    """After a reducer that left later layers fewer rows."""
    lengths_in = [96, 96, 64, 64]
    _, cache, _ = run(VLCache(keep=0.25), sharp=(0.02,) * 4, n=lengths_in)
    assert all(abs(len(kv) - 0.25 * n) <= 2 for kv, n in zip(cache, lengths_in, strict=True))


def test_vlcache_windows_are_within_the_budget_or_beside_it():
    for own, count in ((False, 21), (True, 24)):  # of 24 slots, a tenth of which is the window
        _, cache, _ = run(VLCache(keep=0.25, layer_windows=own, layer_adaptive=False))
        assert lengths(cache) == [count + 2] * 6


def test_vlcache_heads_keep_the_same_tokens():
    _, cache, _ = run(VLCache(keep=0.3, head_adaptive=False))
    assert all(torch.equal(kv.order[0], kv.order[1]) for kv in cache)
    _, kv = prompt(0)
    moved = torch.stack([torch.arange(90), torch.arange(2, 92)])
    stats = asked(*prompt(0), ColumnRequest("text", threshold=0.01))
    with pytest.raises(RecipeError, match=r"head_adaptive=false.*use head_adaptive=true"):
        VLCache(head_adaptive=False).score(kv.select(moved), stats, None)


def test_later_stage_may_drop_slots_before_finish():
    """`finish` finds its scores by token, not by slot."""
    stage = VLCache(keep=0.2)
    along, cache, _ = run(stage)
    step, thinned = prompt_step(N, 6, visual_rows(N)), []
    for layer, request in stage.text_stats(6).items():
        query, kv = prompt(0, layer, N, SHARP[layer])
        kv = stage.compress(step, layer, kv, asked(query, kv, request))
        kept = torch.zeros_like(kv.order, dtype=torch.bool).scatter(1, cache[layer].order, True)
        kept[:, layer] = True  # an arbitrary choice of the later stage
        thinned.append(kv.select_mask(kept))
    assert lengths(thinned) != lengths(along)
    again = stage.finish(step, thinned)
    for ours, full in zip(again, cache, strict=True):
        for mine, theirs, n in zip(ours.order, full.order, ours.lengths.tolist(), strict=True):
            assert torch.equal(mine[:n], theirs)


# --- CAKE ----------------------------------------------------------------------------------------


@given(
    claims=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40),
    share=st.floats(0.01, 1.2),
    limit=st.integers(1, 400),
)
def test_cake_budgets_conserve_the_total_within_the_limits(claims, share, limit):
    limits = [limit + i % 3 for i in range(len(claims))]
    total = int(share * sum(limits))
    parts = adjust_budgets([c / sum(claims) * total for c in claims], total, limits)
    assert sum(parts) == min(total, sum(limits))
    assert all(0 <= part <= most for part, most in zip(parts, limits, strict=True))


def test_cake_redistributes_surplus_budget():
    # 90 left: 45 each; the second then has 5 above its limit, which the first takes.
    assert adjust_budgets([0.0, 60.0, 190.0], 250, [100, 100, 100]) == [50, 100, 100]


def at_the_end(stage: CAKE, *args) -> list[KV]:
    """The same without the cascade: no layer is cut before all have run."""

    class Late(CAKE):
        trim = CacheStage.trim

    along, cache, _ = run(Late(**vars(stage)), *args)
    assert lengths(along) == args[2]
    return cache


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0.15, 0.95),
    layers=st.lists(st.tuples(st.floats(0.3, 4), st.integers(40, N)), min_size=1, max_size=20),
    tau=st.sampled_from([0.2, 0.9, 2.3]),
)
def test_cascade_equals_cutting_at_the_end(seed, share, layers, tau):
    """For any preferences of the layers, also where reducers shortened later ones."""
    sharp = tuple(s for s, _ in layers)
    n = sorted((n for _, n in layers), reverse=True)
    stage = CAKE(keep=share, window=4, tau1=tau, tau2=tau)
    along, cache, _ = run(stage, seed, sharp, n)
    assert same(cache, at_the_end(stage, seed, sharp, n))
    assert all(len(a) >= len(b) for a, b in zip(along, cache, strict=True))


def test_cascade_cuts_during_the_prefill():
    stage, sharp = CAKE(keep=0.1, window=4), (1.0,) * 20
    along, cache, _ = run(stage, 0, sharp, [400] * 20)
    assert same(cache, at_the_end(stage, 0, sharp, [400] * 20))
    assert max(lengths(along[:16])) < 200 and lengths(along[16:]) == [400] * 4
    assert sum(lengths(cache)) == 20 * 40


def test_budget_of_a_layer_may_grow_again():
    """Control: a layer's first offer is no upper bound, `most` is."""
    nothing = torch.zeros(0)

    def layer(claim: float) -> Scored:
        return Scored(nothing, nothing, claim, n=68, average=33, window=8)

    layers = [layer(claim) for claim in (10, 10, 0.1, 1e6)]
    ideal, total = parts(layers[:3], 4)
    assert total == 100
    assert adjust_budgets(ideal, total, [60] * 3) == [50, 50, 0]
    # The last layer can take only 60, and leaves 40 to the other three.
    assert CAKE(window=8).counts(layers) == [22, 21, 21, 68]
    assert 21 <= most(layers[:3], 4)[2] < 68


def test_each_cake_parameter_has_an_effect():
    stage = CAKE(keep=0.3, window=8)
    usual = run(stage)[1]
    for other in ({"keep": 0.35}, {"gamma": 0.0}, {"tau1": 3.0}, {"tau2": 0.5}, {"kernel": 1}):
        changed = run(replace(stage, **other))[1]
        assert lengths(changed) != lengths(usual) or not same(changed, usual), other


def test_cake_limits_follow_each_layers_length():
    _, cache, _ = run(CAKE(keep=0.7, window=8, tau1=0.3), sharp=(1, 3, 3, 1), n=[96, 96, 40, 40])
    counts = lengths(cache)
    assert all(k <= n for k, n in zip(counts, [96, 96, 40, 40], strict=True))
    assert sum(counts) <= 2 * int(0.7 * 96) + 2 * int(0.7 * 40)


def test_window_may_be_a_fraction_of_the_budget():
    stage = CAKE(keep=0.2, window=0.25)
    want = ("sum", "sumsq", "entropy")
    assert stage.text_stats(2)[0] == ColumnRequest("window", 32, want=want)
    _, cache, step = run(stage)
    assert step.notes["cake"]["windows"] == [4] * 6  # of int(0.2 * 96) = 19
    assert all(kv.order[0, -4:].tolist() == [92, 93, 94, 95] for kv in cache)


# --- FastKV --------------------------------------------------------------------------------------

DEPTH = 6


def propagate(
    stage: FastKV, n: int = N, visual: Tensor | None = None
) -> tuple[Tensor | None, PrefillContext]:
    """Rows that are propagated, and the context."""
    tsp, _ = stage.expand()
    visual = visual_rows(n) if visual is None else visual
    step = prompt_step(n, DEPTH, visual)
    ((layer, request),) = tsp.text_stats(DEPTH).items()
    step.stats[layer] = maps(*prompt(0, layer, n), request.n).flatten(0, 1)
    return tsp.select_tokens(step, layer + 1), step


def test_propagated_rows_include_all_text_and_the_window():
    rows, step = propagate(FastKV(tsp=0.4))
    assert len(rows) == int(0.4 * N)
    assert bool((rows.diff() > 0).all())
    assert bool(torch.isin((~step.layout.visual).nonzero().flatten(), rows).all())
    # An image at the very end: its last tokens are the window.
    rows, _ = propagate(FastKV(tsp=0.4), visual=torch.arange(N) >= 10)
    assert set(range(N - 8, N)) <= set(rows.tolist())


def test_as_many_rows_propagate_as_slots_are_kept():
    assert len(propagate(FastKV(keep=0.6, tsp=0.3))[0]) == int(0.6 * N)
    assert propagate(FastKV(keep=1.0))[0] is None
    assert propagate(FastKV(tsp=1.0))[0] is None
    assert propagate(FastKV(), visual=torch.zeros(N, dtype=torch.bool))[0] is None


def test_text_beyond_the_share_of_rows_propagates():
    for share in (0.01, 0.2):
        rows, step = propagate(FastKV(tsp=share))
        assert torch.equal(rows, (~step.layout.visual).nonzero().flatten())
    assert len(propagate(FastKV(tsp=0.4))[0]) > len(rows)  # control


def test_cut_layer_is_a_fraction_of_the_depth_or_an_index():
    assert FastKV().cut(32) == 16
    assert FastKV().floor(32) == 0.5
    assert FastKV().expand()[0].text_stats(32).keys() == {15}
    assert FastKV(layer=2).expand()[0].layers(6) == (2,)
    with pytest.raises(RecipeError, match="stay below 6"):
        FastKV(layer=6).cut(6)
