"""Greedy cover: evaluating few gains gives the result of evaluating all."""

from __future__ import annotations

import pytest
import torch

from vlmfast.compressors import cover as module
from vlmfast.compressors.cover import cover


def worths(n: int, seed: int) -> torch.Tensor:
    rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 0:
        rows[n - n // 2 :] = rows[: n // 2].clone()  # duplicates: every gain is a tie
    rows = torch.nn.functional.normalize(rows)
    alike = (rows @ rows.T + 1) / 2
    return alike.round(decimals=1) if seed % 4 == 0 else alike


def greedy(worth: torch.Tensor, k: int, bonus: torch.Tensor, scale: torch.Tensor) -> list[int]:
    """The definition: one column after another."""
    covered, chosen = torch.zeros(len(worth)), []
    for _ in range(k):
        gains = (worth - covered[:, None]).clamp(min=0).sum(0) * scale + bonus
        gains[chosen] = -torch.inf
        chosen.append(int((gains >= gains.max() - 1e-5).nonzero()[0]))
        covered = torch.maximum(covered, worth[:, chosen[-1]])
    return chosen


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("n", "k"), [(9, 9), (70, 20), (200, 60), (200, 0)])
def test_lazy_gains_equal_all_gains(n, k, seed, monkeypatch):
    worth = worths(n, seed)
    generator = torch.Generator().manual_seed(seed)
    bonus = torch.rand(n, generator=generator) if seed % 2 else None
    scale = torch.rand(n, generator=generator) if seed % 5 > 2 else None
    monkeypatch.setattr(module, "_AT_ONCE", 8)
    lazily = cover(worth, k, bonus, scale)
    monkeypatch.setattr(module, "_lazily", module._all)
    assert torch.equal(lazily, cover(worth, k, bonus, scale))
    assert len(set(lazily.tolist())) == k


@pytest.mark.parametrize("seed", [1, 2, 5, 7])
def test_cover_is_greedy(seed):
    worth = worths(40, seed)
    bonus, scale = torch.rand(2, 40, generator=torch.Generator().manual_seed(seed))
    chosen = cover(worth, 12, bonus, scale).tolist()
    assert chosen == greedy(worth, 12, bonus, scale)
    assert chosen != greedy(worth, 12, bonus.flip(0), scale)  # control
