"""MustDrop's windows on towers that make one visual token of several patches: whole cells merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from support.look import BUILD, CASES, built, family, looked
from vlmfast import VLM, RecipeError
from vlmfast.compressors.encoder.mustdrop import MustDrop, window_members, window_similarity
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ItemGeometry

pytestmark = pytest.mark.cold


def merging(similarity: float = -1.0, **more) -> MustDrop:
    """Merges windows and drops nothing else; a budget needs thresholds above 0."""
    least = 1e-9 if "budget" in more else 0.0
    more |= {"global_thr": least, "individual_thr": least}
    return MustDrop(similarity=similarity, key=1.0, cache=False, **more)


@pytest.fixture(scope="module", params=BUILD)
def vlm(request) -> VLM:
    return built(request.param)


@pytest.fixture(params=CASES)
def media(request, vlm) -> dict:
    if family(vlm) == "smolvlm" and request.param == "both":
        pytest.skip("smolvlm reads images or one video")
    return CASES[request.param]


def expected_groups(item: ItemGeometry, window: tuple[int, int]) -> Tensor:
    """The group of each token of a view if all windows merge: int64, (N,)."""
    (rows, columns), (down, across) = item.patches, window
    group = torch.arange(rows * columns).view(rows, columns)
    for y in range(0, rows - down + 1, down):
        for x in range(0, columns - across + 1, across):
            group[y : y + down, x : x + across] = rows * columns + int(group[y, x])
    return group.flatten().unique(return_inverse=True)[1]


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "window", "count"),
    [((4, 4), (2, 2), 4), ((3, 4), (2, 2), 2), ((5, 7), (3, 3), 2), ((1, 6), (2, 2), 0)],
)
def test_window_members(grid, window, count) -> None:
    members = window_members(grid, window)
    assert members.shape == (count, window[0] * window[1])
    assert len(members.unique()) == members.numel()  # none is in two windows
    for inside in members:
        y, x = inside // grid[1], inside % grid[1]
        assert [len(y.unique()), len(x.unique())] == list(window)
        assert int(y.min()) % window[0] == int(x.min()) % window[1] == 0


def test_border_of_own_sizes() -> None:
    """Where each image has its own grid, windows need not divide it."""
    assert MustDrop().window_of((6, 9), border=True) == (3, 3)
    assert MustDrop().window_of((6, 8), border=True) == (2, 2)
    assert MustDrop().window_of((5, 7), border=True) == (2, 2)
    assert MustDrop(3).window_of((5, 7), border=True) == (3, 3)
    with pytest.raises(RecipeError, match="does not divide the 5x7 patches"):
        MustDrop().window_of((5, 7))


# --- every family ---------------------------------------------------------------------------------


@pytest.mark.cases(7)
def test_similarity_2_is_identity(vlm, media) -> None:
    plain, _ = looked(vlm, **media)
    tokens, _ = looked(vlm, merging(2.0), **media)
    assert torch.equal(tokens.features, plain.features)
    for level, other in zip(tokens.extra, plain.extra, strict=True):
        assert torch.equal(level, other)
    merged, _ = looked(vlm, merging(), **media)  # control
    assert len(merged) < len(tokens)


@pytest.mark.cases(10)
def test_all_windows_merge_into_one_token(vlm, media) -> None:
    """Also tokens outside of whole windows, which stay, in every view of every image."""
    plain, stats = looked(vlm, **media)
    tokens, _ = looked(vlm, merging(), **media)
    border = vlm.adapter.packed
    for item in stats.items:
        group = expected_groups(item, MustDrop().window_of(item.patches, border=border))
        for view in range(*item.views):
            before = plain.layout.select(plain.layout.view == view)
            slot = (before.grid[:, 1] * item.patches[1] + before.grid[:, 2]).long()
            mine = tokens.layout.select(tokens.layout.view == view)
            counts = group[slot].unique(return_counts=True)[1]
            if len(slot) == len(group):  # no letterbox
                assert len(mine) == int(group.max()) + 1
                assert sorted(mine.weight.tolist()) == sorted(counts.tolist())
            assert len(mine) == len(counts)


@pytest.mark.cases(12)
def test_budget_limits_the_windows(vlm, media) -> None:
    """Of the tower's tokens at least the budget's fraction is left."""
    stage = merging(budget=0.7)
    plain, stats = looked(vlm, **media)
    tokens, _ = looked(vlm, stage, **media)
    kept = (plain.layout.kind <= 2).sum(), (tokens.layout.kind <= 2).sum()
    if all(item.tiles == (0, 0) for item in stats.items):
        assert kept[1] >= 0.7 * kept[0]
    # Packed towers share no budget between images, and 2 x 2 tokens are a single window.
    small = vlm.adapter.packed and all(item.patches == (2, 2) for item in stats.items)
    assert len(tokens) < len(plain) or small


# --- against references ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_windows_of_packed_towers_are_those_of_the_grid(name) -> None:
    """The rows of Qwen2.5-VL are in the order of its attention windows, not in raster order."""
    vlm = built(name)
    image = np.random.default_rng(2).integers(0, 256, (96, 96, 3), np.uint8)
    seen: dict = {}
    block = vlm.adapter.vision_blocks()[1]
    handle = block.register_forward_pre_hook(lambda module, args: seen.update(rows=args[0].clone()))
    _, stats = looked(vlm, images=image)
    handle.remove()
    (item,) = stats.items
    window = MustDrop().window_of(item.patches, border=True)
    assert len(window_members(item.patches, window)) > 1
    cells = seen["rows"].unflatten(0, (-1, 4)).flatten(1)[vlm.adapter.cells(item)[:, 0] // 4]
    members = window_members(item.patches, window)
    similarity = window_similarity(cells[members][None])[0]
    best = int(similarity.argmax())
    threshold = float(similarity.sort().values[-2:].mean())
    tokens, _ = looked(vlm, merging(threshold), images=image)
    heavy = tokens.layout.weight > 1
    assert int(heavy.sum()) == 1
    place = tokens.layout.grid[heavy][0]
    assert int(place[1] * item.patches[1] + place[2]) in members[best].tolist()
    assert int(tokens.layout.weight[heavy]) == window[0] * window[1]


def test_window_1_and_recipe_text() -> None:
    vlm = built("internvl")
    plain, _ = looked(vlm, **CASES["image"])
    tokens, _ = looked(vlm, merging(window=1), **CASES["image"])
    assert torch.equal(tokens.features, plain.features)
    with pytest.raises(RecipeError, match="window=9 does not divide the 2x2 patches of a view"):
        vlm.ask("what ?", **CASES["image"], recipe=Recipe.parse("mustdrop:window=9"))
