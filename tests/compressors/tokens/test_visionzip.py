"""VisionZip: examples, and properties on random images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.helpers_layout import (
    DIM,
    REQUEST,
    TOWER,
    image_arguments,
    make_image,
    prompt,
    stats_of,
)
from vlmfast.compressors.tokens.visionzip import VisionZip, homes
from vlmfast.core.layout import Kind, VisualTokens
from vlmfast.core.statistics import VisionStats


def reduced(
    stage: VisionZip, *images: dict, seed: int = 0
) -> tuple[VisualTokens, VisualTokens, VisionStats]:
    tokens, stats = prompt(*images, seed=seed)
    rows = {TOWER - 2: stats.rows[TOWER - 2]}
    views, _, n = rows[TOWER - 2].shape
    # Seeded by view, so that those of an image do not depend on the others.
    drawn = [
        torch.randn(n * 4 + DIM, generator=torch.Generator().manual_seed(v)) for v in range(views)
    ]
    keys = {TOWER - 2: torch.stack([d[: n * 4].view(n, 4) for d in drawn])}
    cls = torch.stack([d[n * 4 :] for d in drawn])
    stats = stats_of(stats.items, rows, keys, cls)
    return tokens, stage.reduce(tokens, stats, REQUEST), stats


# --- rules ---------------------------------------------------------------------------------------


def test_homes_example() -> None:
    """Patches 1 and 4 are dominant; every second of 0, 2, 3, 5, 6 is a target, two in all."""
    attention = torch.tensor([0.1, 0.9, 0.2, 0.1, 0.8, 0.3, 0.1])
    keys = torch.tensor([[1, 0], [0, 1], [9, 1], [0, 1], [0, 0], [1, 2], [2, 1]]).float()
    assert homes(attention, keys, 2, 2).tolist() == [0, 1, 0, 3, 4, 3, 0]
    assert homes(attention, keys, 2, 0).tolist() == [-1, 1, -1, -1, 4, -1, -1]
    assert homes(attention, keys, 0, 7).tolist() == list(range(7))
    assert homes(attention, keys, 2, 4).tolist() == [0, 1, 2, 3, 4, 5, 2]  # step 1: the first four
    alike = torch.ones(7, 2)
    assert homes(attention, alike, 2, 2).tolist() == [0, 1, 0, 3, 4, 0, 0]  # the first of equals


@pytest.mark.parametrize(
    ("total", "sizes", "counts"),
    [
        (64, [576], [(54, 10)]),
        (128, [576], [(108, 20)]),
        (192, [576], [(162, 30)]),
        (640, [576] * 5, [(108, 20)] * 5),
        (13, [4, 4, 0, 20], [(4 - 1, 1), (4 - 1, 1), (0, 0), (5 - 1, 1)]),
        (1, [9, 9], [(1, 0), (0, 0)]),
    ],
)
def test_counts_have_the_published_proportion(
    total: int, sizes: list[int], counts: list[tuple[int, int]]
) -> None:
    assert VisionZip().counts(total, sizes) == counts


def test_explicit_counts() -> None:
    assert VisionZip(dominant=108, contextual=20).counts(0, [576, 120, 50]) == [
        (108, 20),
        (108, 12),
        (50, 0),
    ]
    assert VisionZip(contextual=5).counts(0, [9]) == [(0, 5)]
    assert VisionZip(budget=0.5).counts(32, [64]) == [(27, 5)]


# --- properties ----------------------------------------------------------------------------------


@given(image_arguments(), st.floats(0.02, 0.98), st.sampled_from(["keep", "budget"]))
@settings(max_examples=30, deadline=None)
def test_kept_tokens(arguments: dict, share: float, name: str) -> None:
    stage = VisionZip(**{name: share})
    tokens, kept, stats = reduced(stage, arguments, arguments)
    order = kept.layout.order.tolist()
    assert order == sorted(set(order))
    for item in (0, 1):
        mine, before = kept.layout.item == item, tokens.layout.item == item
        patches = int(tokens.layout.patches[before].sum())
        assert int(mine.sum()) == min(max(1, round(share * int(before.sum()))), patches)
        # Together they represent all patches of the views that merge.
        weight = kept.layout.weight[mine & kept.layout.patches]
        assert float(weight.sum()) <= patches
        assert (kept.layout.weight[mine & ~kept.layout.patches] == 1).all()
    special = kept.layout.kind == Kind.SPECIAL
    assert (kept.layout.patches | special).all()
    assert kept.layout.box[special].isnan().all()
    assert (kept.layout.view[special] == -1).all()
    # CLS of each view replaces a patch of the same view.
    row = torch.searchsorted(tokens.layout.order, kept.layout.order[special])
    view = tokens.layout.view[row].long()
    assert torch.equal(kept.features[special], stats.cls[view])
    assert len(view.unique()) == len(view)
    alone = kept.layout.patches & (kept.layout.weight == 1)
    same = torch.isin(tokens.layout.order, kept.layout.order[alone])
    assert torch.equal(kept.features[alone], tokens.features[same])


def test_weights_protection_and_extra_features_are_kept() -> None:
    tokens, geometry = make_image((0, 0), (2, 2))
    weight, protected = torch.tensor([1.0, 2, 3, 4]), torch.tensor([False, False, True, False])
    tokens = VisualTokens(
        tokens.features,
        tokens.layout.replace(weight=weight, protected=protected),
        (torch.tensor([[1.0], [2], [4], [8]]),),
    )
    rows = {22: torch.tensor([[[0.1, 0.6, 0.2, 0.1]]])}
    keys = {22: torch.tensor([[[1.0, 0], [0, 1], [0, 1], [1, 0.1]]])}
    stats = stats_of((geometry,), rows, keys, torch.full((1, DIM), 9.0))
    kept = VisionZip(dominant=2, contextual=1).reduce(tokens, stats, REQUEST)
    # Patch 1 is dominant, 2 and 3 are merged into 0, and CLS replaces 2.
    assert kept.layout.order.tolist() == [0, 1, 2]
    assert kept.layout.kind.tolist() == [Kind.IMAGE, Kind.IMAGE, Kind.SPECIAL]
    assert kept.layout.weight.tolist() == [1 + 3 + 4, 2, 1]
    assert kept.layout.protected.tolist() == [True, False, False]
    assert kept.extra[0].flatten().tolist() == [1 + (4 + 8) / 2, 2, 0]
    assert (kept.features[2] == 9).all()
