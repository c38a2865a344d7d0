"""FlashVID: segments, selection, trees and clusters in numbers, and its properties on videos."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.closeness import close
from support.helpers_layout import DIM, REQUEST, TOWER, image_arguments, prompt, stats_of
from vlmfast.compressors.tokens.flashvid import FlashVID, calibrated, means, segments
from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.diversity import cosine, max_min


def as_video(stats: VisionStats) -> VisionStats:
    n = len(stats.items)
    frames = (replace(item, video=0, frame=(i, n)) for i, item in enumerate(stats.items))
    return stats_of(tuple(frames), {TOWER - 2: stats.rows[TOWER - 2]})


def test_segments_on_a_worked_example() -> None:
    frames = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1], [0.1, 1.1], [1, 1]])
    assert segments(frames, 0.9, 1) == [0, 0, 1, 1, 1, 2]
    # One more: at the lowest similarity of the rest, between the first two.
    assert segments(frames, 0.9, 4) == [0, 1, 2, 2, 2, 3]
    assert segments(frames, 0.9, 99) == [0, 1, 2, 3, 4, 5]
    assert segments(frames[:1], 0.9, 8) == [0]


def test_selection_on_a_worked_example() -> None:
    features = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    similarity, weight = (
        cosine(features),
        torch.rand(12, generator=torch.Generator().manual_seed(1)),
    )
    assert calibrated(similarity, torch.ones(12), 5).tolist() == max_min(similarity, 5).tolist()
    d = 1 - similarity
    near = [min(float(d[i, j]) for i in range(12) if i != j) * float(weight[j]) for j in range(12)]
    chosen = [max(range(12), key=near.__getitem__)]
    while len(chosen) < 5:
        rest = [j for j in range(12) if j not in chosen]
        chosen.append(max(rest, key=lambda j: min(float(d[i, j]) for i in chosen) * weight[j]))
    assert calibrated(similarity, weight, 5).tolist() == chosen
    assert chosen != max_min(similarity, 5).tolist()  # control: weights matter
    assert calibrated(similarity, weight, 0).tolist() == []
    assert sorted(calibrated(similarity, weight, 12).tolist()) == list(range(12))


def test_means_of_groups() -> None:
    rows = torch.tensor([[1.0], [3], [10], [5]])
    assert means(rows, torch.tensor([0, 0, 1, 0]), 2).flatten().tolist() == [3, 3, 10, 3]


def test_static_content_becomes_one_tree() -> None:
    """Four frames of the same 16 tokens with a little noise; one token of each is chosen."""
    tokens, stats = prompt(*[{"tiles": (0, 0)}] * 4)
    still = tokens.features[:16].repeat(4, 1)
    still = still + 0.01 * torch.randn(64, DIM, generator=torch.Generator().manual_seed(0))
    tokens = VisualTokens(still, tokens.layout)
    stage = FlashVID(20 / 64, alpha=0.2, least=1)
    kept = stage.reduce(tokens, as_video(stats), REQUEST)
    assert len(kept) == 20
    weight = kept.layout.weight
    assert weight.sum() == 64
    merged = weight > 1
    assert int((~merged).sum()) >= 4
    assert 10 <= int(merged.sum()) <= 16
    # A tree is at the position of its first token; its features are the tree's mean.
    whole = kept.layout.select(merged & (weight == 4))
    assert len(whole) > 8
    place = torch.searchsorted(tokens.layout.order, whole.order)
    assert bool((place < 16).all())
    expected = still.view(4, 16, DIM)[:, place].mean(0)
    close(kept.features[merged & (weight == 4)], expected, terms=4)
    # Control: where every frame is a segment nothing is linked, and frames are clustered.
    cut = FlashVID(20 / 64, alpha=0.2, segment=1.0, least=4)
    kept = cut.reduce(tokens, as_video(stats), REQUEST)
    assert len(kept) == 20
    views = kept.layout.view.unique(return_counts=True)[1].tolist()
    assert views == [5] * 4


def test_links_stop_at_the_budget() -> None:
    """All frames alike: links stop where the budget is met."""
    tokens, stats = prompt(*[{"tiles": (0, 0)}] * 3)
    tokens = VisualTokens(tokens.features[:16].repeat(3, 1), tokens.layout)
    for share in (0.5, 0.75, 0.9):
        kept = FlashVID(share, least=1).reduce(tokens, as_video(stats), REQUEST)
        assert len(kept) == round(share * 48)
        assert kept.layout.weight.sum() == 48


@given(image_arguments(), st.integers(1, 4), st.floats(0.03, 0.97), st.booleans())
@settings(max_examples=20, deadline=None)
def test_kept_count_per_video(arguments: dict, frames: int, share: float, video: bool) -> None:
    tokens, stats = prompt(*[arguments] * frames)
    given = as_video(stats) if video else replace(as_video(stats), items=stats.items)
    kept = FlashVID(share).reduce(tokens, given, REQUEST)
    order = kept.layout.order
    assert bool((order[1:] > order[:-1]).all())
    assert bool(kept.layout.patches.all())
    each = int((tokens.layout.item == 0).sum())
    patches = int(tokens.layout.patches[tokens.layout.item == 0].sum())
    parts = [(each * frames, patches * frames)] if video else [(each, patches)] * frames
    assert len(kept) == sum(min(max(1, round(share * n)), p) for n, p in parts)
    assert kept.layout.weight.sum() <= patches * frames
    alone = kept.layout.weight == 1
    same = torch.isin(tokens.layout.order, order[alone])
    assert torch.equal(kept.features[alone], tokens.features[same])
