"""HiRED: the rules in numbers worked out by hand, then its properties on random images."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.helpers_layout import REQUEST, image_arguments, make_image, prompt, stats_of
from vlmfast.compressors.select import apportion, count
from vlmfast.compressors.tokens.hired import (
    HiRED,
    content_by_area,
    content_by_stripe,
    crop_budgets,
    open_rows,
    packed,
)
from vlmfast.core.layout import Kind, VisualTokens

stages = st.builds(
    HiRED,
    keep=st.floats(0.02, 1),
    alpha=st.floats(0, 1),
    rule=st.sampled_from(["paper", "code"]),
    grid_compat=st.booleans(),
    newline=st.sampled_from(["drop", "keep", "rows"]),
    budget=st.none(),
)
to_budget = st.builds(
    HiRED,
    alpha=st.floats(0, 1),
    rule=st.sampled_from(["paper", "code"]),
    newline=st.sampled_from(["drop", "keep", "rows"]),
    budget=st.floats(0.01, 1),
)


def orders(tokens: VisualTokens) -> list[int]:
    return tokens.layout.order.tolist()


def newlines(tokens: VisualTokens) -> int:
    return int((tokens.layout.kind == Kind.NEWLINE).sum())


def reduced(stage: HiRED, *images: dict, seed: int = 0) -> tuple[VisualTokens, VisualTokens]:
    tokens, stats = prompt(*images, seed=seed)
    return tokens, stage.reduce(tokens, stats, REQUEST)


# --- the rules -----------------------------------------------------------------------------------


def test_content_by_area_follows_the_crops() -> None:
    content = torch.arange(16.0)  # 4 x 4
    quadrants = [0 + 1 + 4 + 5, 2 + 3 + 6 + 7, 8 + 9 + 12 + 13, 10 + 11 + 14 + 15]
    assert content_by_area(content, (4, 4), (2, 2)).tolist() == quadrants
    assert content_by_area(content, (4, 4), (1, 2)).tolist() == [52, 68]
    # The middle row of an odd number has its centre on the border and belongs to the lower crop.
    assert content_by_area(torch.ones(9), (3, 3), (2, 1)).tolist() == [3, 6]


def test_content_by_stripe_counts_the_most_attended() -> None:
    content = torch.tensor([9.0, 8, 0, 0, 7, 0, 0, 6])
    assert content_by_stripe(content, 4, 0.5).tolist() == [2, 0, 1, 1]
    assert content_by_stripe(content, 2, 0.75).tolist() == [2, 0]
    assert content_by_stripe(content, 4, 1.0).tolist() == [0, 0, 0, 0]


def test_crop_budgets_are_truncated_and_clamped() -> None:
    assert crop_budgets(torch.tensor([1.0, 1, 1, 0]), 10, 4) == [3, 3, 3, 0]
    assert crop_budgets(torch.tensor([3.0, 1]), 8, 4) == [4, 2]
    assert crop_budgets(torch.zeros(4), 8, 4) == [2, 2, 2, 2]
    # In the precision of the content: 94 / 288 * 288 is 94 in float64, less in float32 for some.
    stripes = torch.tensor([61.0, 94, 71, 62])
    ours = crop_budgets(stripes, 288, 576)
    assert ours == ((stripes / stripes.sum()) * 288).int().tolist()


def test_newline_policies() -> None:
    """Only the right crop has a choice in its lower row: one canvas row of two is open."""
    tokens, geometry = make_image((1, 2), (2, 2))
    rows = torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 0, 0, 0]], [[0.0, 0, 0, 1]]])
    content = torch.tensor([[[0.0, 1, 0, 1]]] * 3)
    stats = stats_of((geometry,), {0: content, 22: rows})
    kept = {
        policy: HiRED(0.17, newline=policy).reduce(tokens, stats, REQUEST).layout
        for policy in ("drop", "keep", "rows")
    }
    assert [len(kept[policy]) for policy in ("drop", "keep", "rows")] == [2, 4, 3]
    assert kept["keep"].grid[kept["keep"].kind == Kind.NEWLINE, 1].tolist() == [0, 1]
    assert kept["rows"].grid[kept["rows"].kind == Kind.NEWLINE, 1].tolist() == [1]


def test_open_rows_of_an_image_without_crops() -> None:
    tokens, _ = make_image((1, 1), (2, 2))
    layout = tokens.layout  # four base tokens, then two rows of two and a newline
    kept = torch.zeros(len(layout), dtype=torch.bool)
    kept[0] = True
    assert open_rows(kept, layout, tiled=True).tolist() == [True] * 4 + [False] * 6
    assert open_rows(kept, layout, tiled=False).tolist() == [True] * 7 + [False] * 3
    kept[8] = True
    assert open_rows(kept, layout, tiled=True).tolist() == [True] * 4 + [False] * 3 + [True] * 3


def test_packed_order_equals_the_prompt_order() -> None:
    for tiles in [(2, 2), (1, 2), (3, 1), (2, 3)]:
        for size in [(100, 100), (60, 200), (210, 70)]:
            tokens, _ = make_image(tiles, (4, 4), size, newlines=False)
            ids = tokens.layout.tile * 16 + tokens.layout.grid[:, 1] * 4 + tokens.layout.grid[:, 2]
            assert packed(tiles, (4, 4), size, transposed=False).tolist() == ids.tolist()


# --- properties ----------------------------------------------------------------------------------


@given(stages | to_budget, st.lists(image_arguments(patches=(4, 4)), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_choice_is_ascending_repeatable_and_visual(stage: HiRED, images: list[dict]) -> None:
    tokens, kept = reduced(stage, *images)
    assert orders(kept) == sorted(set(orders(kept)))
    assert set(orders(kept)) <= set(orders(tokens))
    assert kept.layout.visual.all()
    assert set(kept.layout.item.tolist()) == set(range(len(images)))
    assert kept.layout.patches.any()
    if stage.newline == "drop" and len(kept) < len(tokens):
        for item in set(range(len(images))):
            mine, all_ = kept.layout.item == item, tokens.layout.item == item
            if mine.sum() < all_.sum():
                assert kept.layout.patches[mine].all()
    rows = torch.isin(tokens.layout.order, kept.layout.order)
    assert torch.equal(kept.features, tokens.features[rows])
    assert orders(reduced(stage, *images)[1]) == orders(kept)


@given(to_budget, image_arguments())
@settings(max_examples=80, deadline=None)
def test_budget_is_met_exactly(stage: HiRED, arguments: dict) -> None:
    tokens, kept = reduced(stage, arguments)
    if stage.budget == 1:
        assert kept is tokens
        return
    target, lines = count(stage.budget, len(tokens)), newlines(tokens)
    if stage.newline == "drop":
        assert len(kept) == min(target, len(tokens) - lines)
    elif stage.newline == "keep":
        assert len(kept) == max(target, lines + 1)
        assert newlines(kept) == lines
    else:
        mine = torch.isin(tokens.layout.order, kept.layout.order)
        tiled = arguments["tiles"] != (0, 0)
        is_open = open_rows(mine & tokens.layout.patches, tokens.layout, tiled)
        assert torch.equal(
            mine & ~tokens.layout.patches, (tokens.layout.kind == Kind.NEWLINE) & is_open
        )
        # One more patch would add a newline too, and no open row has a patch to spare.
        if len(kept) != target:
            assert len(kept) == (2 if target == 1 else target - 1)
            assert target == 1 or not (is_open & tokens.layout.patches & ~mine).any()


# --- counting ------------------------------------------------------------------------------------


@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(st.floats(0, 10) | st.just(0.0), st.integers(0, 12)), min_size=1, max_size=6
    ),
)
def test_apportion(total: int, parts: list[tuple[float, int]]) -> None:
    weights, caps = [w for w, _ in parts], [c for _, c in parts]
    shares = apportion(total, weights, caps)
    assert sum(shares) == min(total, sum(caps))
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))


def test_apportion_by_largest_remainder() -> None:
    assert apportion(10, [1, 1, 1], [10, 10, 10]) == [4, 3, 3]
    assert apportion(10, [5, 3, 2], [10, 10, 10]) == [5, 3, 2]
    assert apportion(10, [8, 1, 1], [4, 10, 10]) == [4, 3, 3]
    assert apportion(5, [0, 0], [1, 9]) == [1, 4]
    assert apportion(9, [1, 1], [2, 3]) == [2, 3]
