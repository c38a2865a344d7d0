"""SCOPE: selection against a reference, on images and videos, and its properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from support.helpers_layout import REQUEST, TOWER, prompt, stats_of
from vlmfast.compressors.tokens.scope import SCOPE
from vlmfast.core.statistics import VisionStats


def one_layer(stats: VisionStats) -> VisionStats:
    return stats_of(stats.items, {TOWER - 2: stats.rows[TOWER - 2]})


def by_hand(x: Tensor, attention: Tensor, k: int, alpha: float) -> list[int]:
    sim = torch.stack([cosine_similarity(v[None], x).clamp(min=0) for v in x])
    chosen: list[int] = []
    for _ in range(k):
        now = sim[:, chosen].amax(1) if chosen else torch.zeros(len(x))
        score = [
            -1.0
            if j in chosen
            else float(torch.maximum(sim[:, j], now).sum() - now.sum())
            * float(attention[j]) ** alpha
            for j in range(len(x))
        ]
        chosen.append(max(range(len(x)), key=score.__getitem__))
    return sorted(chosen)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25])
def test_selection_equals_greedy_reference(alpha) -> None:
    tokens, stats = prompt({"tiles": (0, 0), "patches": (4, 5)}, seed=4)
    stats = one_layer(stats)
    attention = stats.rows[TOWER - 2].mean(1)[0]
    kept = SCOPE(0.35, alpha=alpha).reduce(tokens, stats, REQUEST)
    expected = by_hand(tokens.features, attention, 7, alpha)
    assert (kept.layout.order - 3).tolist() == expected
    # Controls: the most salient tokens, and the selection with another exponent.
    assert expected != attention.topk(7).indices.sort().values.tolist()
    assert expected != by_hand(tokens.features, attention, 7, alpha + 5)


def test_video_frames_cover_each_other() -> None:
    tokens, stats = prompt(*[{"tiles": (0, 0)}] * 3)
    stats = one_layer(stats)
    video = stats_of(
        tuple(replace(item, video=0, frame=(i, 3)) for i, item in enumerate(stats.items)),
        stats.rows,
    )
    kept = SCOPE(0.25).reduce(tokens, video, REQUEST)
    attention = stats.rows[TOWER - 2].mean(1).flatten()
    chosen = by_hand(tokens.features, attention, 12, 1.0)
    assert torch.equal(kept.layout.order, tokens.layout.order[chosen])
    alone = SCOPE(0.25).reduce(tokens, stats, REQUEST)
    assert not torch.equal(alone.layout.order, kept.layout.order)
