"""MustDrop: its rules on examples and against plain loops, whole prompts against references."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.closeness import close, tolerance
from support.engine.driven import Driven, answer_logits
from support.helpers_layout import REQUEST, make_image, prompt, stats_of
from support.tiny_models import build_llava, build_llava_next
from support.tower_terms import tower
from vlmfast import VLM, RecipeError
from vlmfast.compressors.budget import drop_layers, equivalent, solve_counts
from vlmfast.compressors.encoder.mustdrop import (
    PUBLISHED,
    MustDrop,
    dual_attention,
    dual_attention_rank,
    text_attention,
    window_members,
    window_similarity,
)
from vlmfast.core.contexts import PrefillContext, VisionContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.statistics import ItemGeometry, StatRequest
from vlmfast.kernels.quantize_kv import quantize


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("published", "thresholds"),
    [
        ("192", (0.001, 0.001)),
        ("128", (0.0012, 0.001)),
        ("64", (0.011, 0.01)),
        ("64-vizwiz", (0.005, 0.001)),
    ],
)
def test_thresholds_of_the_authors_scripts(published: str, thresholds: tuple[float, float]) -> None:
    assert MustDrop(published=published).thresholds == thresholds
    # One of the thresholds of a user replaces that one alone.
    assert MustDrop(global_thr=0.5).thresholds == (0.5, 0.001)
    assert MustDrop(individual_thr=0.0).thresholds == (0.001, 0.0)


# --- merging -------------------------------------------------------------------------------------


def window_ids(side: int, window: tuple[int, int]) -> torch.Tensor:
    """Window index of each patch in raster order."""
    y, x = torch.arange(side)[:, None], torch.arange(side)[None]
    return (y // window[0] * (side // window[1]) + x // window[1]).flatten()


@pytest.mark.parametrize(("side", "window"), [(4, (2, 2)), (6, (3, 3)), (6, (2, 3)), (4, (4, 1))])
def test_window_similarity_is_the_mean_pairwise_cosine(side: int, window: tuple[int, int]) -> None:
    patches = noise(2, side * side, 5)
    ids, m = window_ids(side, window), window[0] * window[1]
    cells = patches[:, window_members((side, side), window)]
    got = window_similarity(cells)
    for view in range(2):
        for w in range(got.shape[1]):
            inside = patches[view, ids == w]
            assert torch.equal(cells[view, w], inside)
            cosines = torch.cosine_similarity(inside[:, None], inside[None], dim=-1)
            expected = (cosines.sum() - cosines.trace()) / (m * (m - 1))
            close(got[view, w], expected, terms=5 + m * m, scale=1)  # cosines, and a mean of them


def of_grid(patches: int) -> ItemGeometry:
    side = math.isqrt(patches)
    return ItemGeometry((64, 64), (0, 0), (0, 1), (side, side))


def on_block(
    stage: MustDrop, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, PrefillContext]:
    context = VisionContext(depth=4, items=(of_grid(hidden.shape[1] - 1),), specials=1)
    return *stage.expand()[0].on_block(context, 1, hidden), context


def towers(views: int = 3, side: int = 4, seed: int = 0) -> torch.Tensor:
    """Hidden states whose view ``v`` has ``v`` windows of 2 x 2 identical patches."""
    hidden, ids = noise(views, 1 + side * side, 16, seed=seed), window_ids(side, (2, 2))
    for view in range(views):
        for w in range(view):
            inside = 1 + (ids == w).nonzero().flatten()
            hidden[view, inside] = hidden[view, inside[:1]] * torch.tensor([[1], [2], [1], [3.0]])
    return hidden


def test_merge_per_view_or_per_call() -> None:
    hidden = towers()
    merged, source, step = on_block(MustDrop(), hidden)
    assert step.lengths.tolist() == [17, 14, 11]
    assert merged.shape[1] == 17
    assert (source.amax(1) + 1).tolist() == [17, 14, 11]
    same, source, step = on_block(MustDrop(merge="call"), hidden)
    assert same is hidden
    assert source is None
    assert step.lengths is None
    merged, source, step = on_block(MustDrop(merge="call"), hidden[1:])
    assert merged.shape[1] == 14
    assert step.lengths is None  # no padding


@pytest.mark.parametrize("stage", [MustDrop(similarity=2.0), MustDrop(1), MustDrop(budget=1.0)])
def test_merging_can_be_disabled(stage: MustDrop) -> None:
    hidden = towers()
    same, source, step = on_block(stage, hidden)
    assert same is hidden
    assert source is None
    assert step.lengths is None


@given(st.floats(0.01, 1), st.floats(-1, 1), st.sampled_from(["view", "call"]))
@settings(max_examples=40, deadline=None)
def test_merging_respects_the_budget(budget: float, similarity: float, merge: str) -> None:
    hidden = towers(seed=3)
    stage = MustDrop(similarity=similarity, merge=merge, budget=budget)
    _, source, _ = on_block(stage, hidden)
    free = on_block(MustDrop(similarity=similarity, merge=merge), hidden)[1]
    left, unbound = (48 if s is None else int(s.amax(1).sum()) for s in (source, free))
    assert left >= budget * 48
    assert left == unbound or unbound < budget * 48


@pytest.mark.parametrize(
    ("window", "side", "message"),
    [
        (3, 8, r"window=3 does not divide the 8x8 patches of a view; allowed are 1, 2, 4, 8"),
        (2, 7, r"window=2 does not divide the 7x7 patches of a view; allowed are 1, 7"),
        (0, 7, r"window=0 does not divide the 7x7 patches"),
        (99, 8, r"window=99 does not divide the 8x8 patches"),
    ],
)
def test_window_must_divide_the_view(window: int, side: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        on_block(MustDrop(window), noise(1, 1 + side * side, 4))


@pytest.mark.parametrize(("side", "window"), [(24, 3), (16, 2), (12, 3), (8, 2)])
def test_window_depends_on_the_grid(side: int, window: int) -> None:
    assert MustDrop().window_of((side, side)) == (window, window)
    assert MustDrop(2).window_of((side, side)) == (2, 2)


def test_merged_grid_raises() -> None:
    with pytest.raises(RecipeError, match=r"no earlier stage has merged; .* has 15 of 3x3 here"):
        on_block(MustDrop(), noise(1, 16, 4))


# --- key set -------------------------------------------------------------------------------------


@given(st.floats(0.001, 1), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_key_set_size_follows_prompt_tokens(share: float, seed: int) -> None:
    """The letterbox of crops and newlines are never candidates."""
    tokens, stats = prompt(
        {"tiles": (2, 2), "patches": (4, 4), "size": (30, 80)}, {"tiles": (0, 0)}, seed=seed
    )
    last = {23: torch.rand(6, 2, 16, generator=torch.Generator().manual_seed(seed))}
    stage = MustDrop(key=share).expand()[1]
    marked = stage.reduce(tokens, stats_of(stats.items, last), REQUEST)
    layout = marked.layout
    assert marked.features is tokens.features
    assert not layout.protected[~layout.patches].any()
    for view in range(6):
        mine = layout.select(layout.view == view)
        assert int(mine.protected.sum()) == math.ceil(len(mine) * share)
        score = last[23][view].mean(0)[(mine.grid[:, 1] * 4 + mine.grid[:, 2]).long()]
        if not mine.protected.all():
            assert score[mine.protected].min() >= score[~mine.protected].max()


def test_existing_protection_is_kept() -> None:
    tokens, geometry = make_image((0, 0), (4, 4))
    protected = torch.zeros(16, dtype=torch.bool)
    protected[5] = True
    tokens = type(tokens)(tokens.features, tokens.layout.replace(protected=protected))
    rows = torch.linspace(1, 0, 16).view(1, 1, 16)
    stage = MustDrop().expand()[1]
    marked = stage.reduce(tokens, stats_of((geometry,), {23: rows}), REQUEST).layout.protected
    assert marked.nonzero().flatten().tolist() == [0, 1, 5]


# --- filter --------------------------------------------------------------------------------------


rules = st.builds(
    MustDrop,
    global_thr=st.floats(0.001, 0.2),
    individual_thr=st.floats(0.001, 0.2),
    layers=st.sampled_from([(0.1, 0.5), (2.0, 3.0), (1.0,)]),
    budget=st.none() | st.floats(0.01, 1),
)


def prompt_step(
    seed: int, depth: int = 4, text_after: int = 5, images: tuple[int, ...] = (12, 7)
) -> PrefillContext:
    """Images with text before and after each; some tokens are protected, some merged."""
    kinds = [[Kind.TEXT] * 3 + [Kind.IMAGE] * n for n in images]
    kinds = torch.tensor([k for part in kinds for k in part] + [Kind.TEXT] * text_after)
    order, generator = torch.arange(len(kinds)), torch.Generator().manual_seed(seed)
    visual = kinds != Kind.TEXT
    layout = TokenLayout.text(order, order[None])
    layout = layout.replace(
        kind=kinds.to(torch.uint8),
        protected=visual & (torch.rand(len(kinds), generator=generator) < 0.2),
        weight=1 + 3.0 * (visual & (torch.rand(len(kinds), generator=generator) < 0.3)),
    )
    return PrefillContext(depth=depth, layout=layout)


def attend(context: PrefillContext, layer: int, seed: int) -> None:
    """Attention of the text rows after the last visual token."""
    visual = context.layout.visual.nonzero().flatten()
    rows = len(context.layout) - 1 - int(visual[-1]) if len(visual) else len(context.layout)
    logits = 3 * noise(2, rows, len(context.layout), seed=seed + layer)
    context.stats[layer - 1] = logits.softmax(-1)


@given(rules, st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_filter_keeps_text_and_key_set(stage: MustDrop, seed: int) -> None:
    part, step = stage.expand()[2], prompt_step(seed)
    key = step.layout.order[step.layout.protected]
    text = step.layout.order[~step.layout.visual]
    came_in = float(step.layout.weight[step.layout.visual].sum())
    n = int(step.layout.visual.sum())
    lengths = [n] * 4
    for layer in part.layers(4):
        attend(step, layer, seed)
        g, m = text_attention(step.stats[layer - 1][..., step.layout.visual])
        kept = part.select_tokens(step, layer)
        before = int(step.layout.visual.sum())
        if kept is not None:
            assert (kept[1:] > kept[:-1]).all()
            assert len(kept) < len(step.layout)
            step.select(kept)
        assert torch.isin(key, step.layout.order).all()
        assert torch.isin(text, step.layout.order).all()
        after = int(step.layout.visual.sum())
        lengths[layer:] = [after] * (4 - layer)
        if stage.budget is None:
            above = dual_attention(g, m, *stage.thresholds)
            assert max(int(above.sum()), len(key)) <= after <= before
        else:
            assert after <= before
    if stage.budget is not None:
        first = part.layers(4)[0]
        least = (first * n + (4 - first) * len(key)) / 4
        wanted = min(max(stage.budget * came_in, least), n)
        # One token less after the first drop is the coarsest step.
        assert sum(lengths) / 4 == pytest.approx(wanted, abs=0.5)


@given(st.floats(0.001, 0.1), st.floats(0.001, 0.1), st.floats(1, 4), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_rank_is_the_dropping_threshold(a: float, b: float, factor: float, seed: int) -> None:
    g, m = text_attention((3 * noise(2, 5, 30, seed=seed)).softmax(-1)[..., :20])
    low, high = dual_attention(g, m, a, b), dual_attention(g, m, a * factor, b * factor)
    assert not (high & ~low).any()
    rank = dual_attention_rank(g, m, a, b)
    # At the rank itself rounding decides: two heads, five rows and all tokens are summed.
    clear = (rank - factor).abs() > tolerance(torch.float32, 2 + 5 + 20, factor)
    assert torch.equal((rank >= factor)[clear], high[clear])


def test_budget_keeps_key_set_then_best_ranked() -> None:
    step = prompt_step(1)
    part = MustDrop(layers=(2.0,), budget=0.4).expand()[2]
    attend(step, 2, seed=1)
    visual = step.layout.visual.nonzero().flatten()
    g, m = text_attention(step.stats[1][..., visual])
    rank = dual_attention_rank(g, m, *PUBLISHED["192"])
    rank[step.layout.protected[visual]] = torch.inf
    kept = part.select_tokens(step, 2)
    images = kept[torch.isin(kept, visual)]
    best = visual[rank.argsort(descending=True)[: len(images)]]
    assert torch.equal(images, best.sort().values)
    assert len(images) < len(visual)


def test_no_image_or_no_trailing_text_keeps_everything() -> None:
    for step in (prompt_step(0, text_after=0), prompt_step(0, images=())):
        part = MustDrop(global_thr=1.0, individual_thr=1.0).expand()[2]
        attend(step, 1, seed=0)
        assert part.select_tokens(step, 1) is None


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "depth", "counts"),
    [
        (MustDrop().layers, 32, (3, 7, 11, 15)),
        (MustDrop().layers, 40, (4, 9, 14, 19)),
        (MustDrop().layers, 6, (1, 2, 3)),
        (MustDrop().layers, 4, (1, 2)),
        ((3.0, 7.0, 21.0), 32, (3, 7, 21)),
        ((7.0, 0.25), 32, (7, 8)),
        ((0.25, 9.0), 32, (8, 9)),
        ((0.01,), 2, (1,)),
    ],
)
def test_filter_layers(layers: tuple[float, ...], depth: int, counts: tuple[int, ...]) -> None:
    assert drop_layers("mustdrop", layers, depth, merge=True) == counts
    part = MustDrop(layers=layers).expand()[2]
    assert part.layers(depth) == counts
    assert part.text_stats(depth) == {n - 1: StatRequest("text") for n in counts}


def test_filters_keep_equal_fractions() -> None:
    counts = solve_counts(576, 256, (3, 7, 11, 15), 32, least=47)
    shares = [b / a for a, b in zip((576, *counts), counts, strict=False)]
    assert shares == pytest.approx([shares[0]] * 4, abs=5e-3)
    assert 47 < counts[3] < counts[2] < counts[1] < counts[0] < 576
    assert equivalent(576, (3, 7, 11, 15), counts, 32) == pytest.approx(256, abs=0.3)
    assert solve_counts(576, 120, (3, 7, 11, 15), 32, least=47)[-1] == 47


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[build_llava, build_llava_next])
def vlm(request) -> VLM:
    return VLM(*request.param(layers=4))


def half_flat(seed: int, width: int = 60, height: int = 44) -> np.ndarray:
    """Noise on the right, one colour on the left: only some windows are similar."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[:, : width // 2] = 40 * seed + 20
    return pixels


CASES = {
    "one image": [half_flat(0, 64, 64)],
    "three images": [half_flat(0), half_flat(1, 30, 70), half_flat(2, 90, 33)],
}
# Random weights spread their attention; these thresholds and this similarity take effect.
STRONG = {"similarity": 0.35, "global_thr": 0.08, "individual_thr": 0.1}


def test_padding_does_not_change_statistics(vlm: VLM) -> None:
    @dataclass(frozen=True)
    class Look(EncodeStage):
        name: ClassVar[str] = "test-look"
        positions: ClassVar[str] = "keep"

        def vision_stats(self, depth):
            return {1: StatRequest("columns"), 2: StatRequest("cls")}

        def reduce(self, tokens, stats, request):
            seen.append(stats.rows)
            return tokens

    seen: list[dict] = []
    for images in (CASES["three images"][:1], CASES["three images"]):
        answer_logits(vlm, Driven.of(vlm, (MustDrop(**STRONG), Look()), images), [])
    for layer in (1, 2):
        alone, together = (rows[layer] for rows in seen)
        assert len(together) > len(alone)
        close(together[: len(alone)], alone, terms=tower(vlm))


def test_cache_stage_example() -> None:
    """Heads of different lengths, as an earlier stage may produce."""
    order = torch.tensor([[0, 2, 3, 5, 6], [1, 2, 5, 6, 6]])
    kv = KV(
        keys=noise(2, 5, 4),
        values=noise(2, 5, 4, seed=1),
        order=order,
        position=order,
        visual=(order > 1) & (order < 6),
        lengths=torch.tensor([5, 4]),
        bias=order.float(),
    )
    left = torch.tensor([0, 1, 5, 6])
    context = PrefillContext(depth=4, layout=TokenLayout.text(left, left[None]))
    part = MustDrop(layers=(2, 3)).expand()[3]
    first, *others = part.finish(context, [kv] * 4)
    assert first is kv
    for got in others:
        assert got.lengths.tolist() == [3, 3]
        assert got.order.tolist() == [[0, 5, 6], [1, 5, 6]]
        assert torch.equal(got.keys, torch.stack([kv.keys[0, [0, 3, 4]], kv.keys[1, [0, 2, 3]]]))
        assert torch.equal(got.bias, got.order.float())
    # Control: if nothing was dropped, nothing is copied.
    every = torch.arange(7)
    context.layout = TokenLayout.text(every, every[None])
    assert all(got is kv for got in part.finish(context, [kv] * 4))
    codes = quantize(kv.keys, kv.values, kv.order, kv.lengths, 4)
    with pytest.raises(RecipeError, match=r"mustdrop: a later stage .* use cache=false"):
        part.finish(context, [replace(kv, segments=(codes,))] * 4)


def test_budget_below_floor_keeps_key_set(vlm: VLM) -> None:
    run = Driven.of(vlm, MustDrop(budget=0.01), CASES["three images"])
    answer_logits(vlm, run, [])
    key = int(run.prompt.layout.protected.sum())
    n = int(run.prompt.layout.visual.sum())
    assert run.stats.visual_tokens_per_layer == [n, key, key, key]
    assert run.stats.visual_tokens_kept["mustdrop"] == key
    left = run.trace.layout.select(run.trace.depth == 4)
    assert set(left.item.tolist()) == {0, 1, 2}  # every image keeps some tokens
