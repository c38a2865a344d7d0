"""DivPrune: the rule in numbers, videos as one, and its properties on random images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from support.helpers_layout import REQUEST, make_image, prompt
from vlmfast.compressors.groups import together
from vlmfast.compressors.tokens.divprune import DivPrune
from vlmfast.core.counting import MOST
from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import VisionStats


def by_hand(features: Tensor, k: int) -> list[int]:
    """The paper's greedy rule in plain loops."""
    n = len(features)
    cos = torch.nn.functional.cosine_similarity
    d = [[1 - float(cos(features[i], features[j], dim=0)) for j in range(n)] for i in range(n)]
    chosen = [max(range(n), key=lambda i: min(d[i][j] for j in range(n) if j != i))]
    while len(chosen) < k:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(max(rest, key=lambda i: min(d[i][j] for j in chosen)))
    return sorted(chosen)


def as_video(stats: VisionStats) -> VisionStats:
    """The same images as frames of one video."""
    n = len(stats.items)
    frames = (replace(item, video=0, frame=(i, n)) for i, item in enumerate(stats.items))
    return VisionStats(tuple(frames), stats.rows)


def test_rule_on_a_worked_example() -> None:
    tokens, geometry = make_image((0, 0), (4, 5), seed=3)
    stats = VisionStats((geometry,), {})
    for k in (1, 2, 7, 19):
        kept = DivPrune(k / 20).reduce(tokens, stats, REQUEST)
        assert kept.layout.order.tolist() == by_hand(tokens.features, k)
    copies = VisualTokens(tokens.features[[0, 1, 2, 3] * 5], tokens.layout)
    kept = DivPrune(0.2).reduce(copies, stats, REQUEST)
    assert len({tuple(row.tolist()) for row in kept.features}) == 4  # each of them once


def test_frames_of_a_video_are_compared() -> None:
    """A static token is kept once per video; per frame it would be kept every time."""
    tokens, stats = prompt(*[{"tiles": (0, 0)}] * 3)
    still = VisualTokens(tokens.features[:16].repeat(3, 1), tokens.layout)
    video = as_video(stats)

    def kinds(stage: DivPrune, stats: VisionStats) -> int:
        kept = stage.reduce(still, stats, REQUEST)
        assert len(kept) == 15
        return len({tuple(row.tolist()) for row in kept.features})

    # Equal tokens differ by rounding only; different ones by more.
    assert kinds(DivPrune(15 / 48), video) == 15
    assert kinds(DivPrune(15 / 48, across="frame"), video) == 5
    assert kinds(DivPrune(15 / 48), stats) == 5


def test_frames_of_a_video_are_grouped() -> None:
    tokens, stats = prompt(*[{"tiles": (0, 0)}] * 4)
    a, b, c, d = stats.items
    mixed = (a, replace(b, video=0), replace(c, video=0), replace(d, video=1))
    assert [len(g) for g in together(tokens, mixed)] == [16, 32, 16]
    assert torch.equal(torch.cat(together(tokens, mixed)), torch.arange(64))
    assert [len(g) for g in together(tokens, stats.items)] == [16] * 4
    big, geometry = make_image((0, 0), (50, 60))
    parts = [
        VisualTokens(big.features, big.layout.replace(item=big.layout.item + i)) for i in range(4)
    ]
    layouts = type(big.layout).cat([p.layout for p in parts])
    long = VisualTokens(torch.cat([p.features for p in parts]), layouts)
    frames = (replace(geometry, video=0),) * 4
    assert [len(g) for g in together(long, frames)] == [6000, 6000]
    assert MOST == 8192
