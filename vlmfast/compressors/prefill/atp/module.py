"""ATP's arithmetic, and the small learned head of each insertion point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from vlmfast.core.layout import TokenLayout

from ...budget import equivalent, solve

LAMBDA = 3.0  # the paper's lambda_s
TINY = 1e-12  # below any relevant softmax weight; keeps the logarithm finite
WIDTH = 16  # of the layer between the two means and the thresholds
# Initial thresholds. The spatial one starts between grids: far above a grid the soft mask is flat,
# and the tokens of that grid are kept for good.
START_R, START_S = 0.5, 0.9
MEMORY = 0.01  # update rate of the running average of the kept fractions, per sample


# --- scores --------------------------------------------------------------------------------------


def spatial_score(layout: TokenLayout, grids: int) -> Tensor:
    """``1 - lambda_s R`` of the sparsest of ``grids`` nested grids that contains a token, else 0.

    Grid ``g`` of 1.. takes every ``2^g``-th row and column of a view, ``R = 4^-g`` of its patches;
    all share their middle as far as whole patches allow. Newlines are on no grid.

    Returns
    -------
    Tensor, float32, (S,)
    """
    middle = (2**grids - 1) // 2
    y, x = layout.grid[:, 1], layout.grid[:, 2]
    placed = layout.patches
    score = torch.zeros(len(layout), device=layout.device)
    for stride in (2**g for g in range(1, grids + 1)):  # sparser grids overwrite
        on = placed & ((y - middle) % stride == 0) & ((x - middle) % stride == 0)
        score = score.masked_fill(on, 1 - LAMBDA / stride**2)
    return score


def cross_level(attention: Tensor, soft: Tensor) -> Tensor:
    """Attention of the text to a token relative to uniform attention, in nats.

    Parameters
    ----------
    attention : Tensor, (N,)
        Softmax attention of the text to the visual tokens.
    soft : Tensor, (N,)
        Soft mask of the tokens; 1 at inference. Already applied to the attention.

    Returns
    -------
    Tensor, (N,)
        ``log(n a_i)``; 0 is uniform attention.
    """
    return (attention / soft * soft.sum()).clamp(min=TINY).log()


def self_level(received: Tensor, soft: Tensor) -> Tensor:
    """Logits (N,) received from the visual tokens, minus their mean over these tokens."""
    return received - (received * soft).sum() / soft.sum()


@dataclass
class Scores:
    """Scores of ``N`` visual tokens at an insertion point.

    Parameters
    ----------
    red, spatial : Tensor, (N,)
        Both in [0, 1).
    theta_r, theta_s : Tensor, ()
        Their thresholds for this input, in (0, 1).
    """

    red: Tensor
    spatial: Tensor
    theta_r: Tensor
    theta_s: Tensor


def soft_mask(scores: Scores, temperature: float) -> Tensor:
    """``max(sigmoid(T (S_red - theta_r)), sigmoid(T (S_spatial - theta_s)))``, (N,), in (0, 1)."""
    red = temperature * (scores.red - scores.theta_r)
    spatial = temperature * (scores.spatial - scores.theta_s)
    # In float32 the sigmoid of -104 is 0, whose logarithm attention cannot use.
    return torch.maximum(red, spatial).sigmoid().clamp(min=TINY)


def hard_mask(scores: Scores) -> Tensor:
    """Tokens above one of both thresholds: bool (N,). The limit of `soft_mask` for large T."""
    return (scores.red > scores.theta_r) | (scores.spatial > scores.theta_s)


def margin(scores: Scores) -> Tensor:
    """How far both thresholds can rise together until a token is dropped: (N,), positive if kept.

    Tokens on no grid cannot be kept by their spatial score.
    """
    spatial = scores.spatial - scores.theta_s
    spatial = spatial.masked_fill(scores.spatial == 0, -torch.inf)
    return torch.maximum(scores.red - scores.theta_r, spatial)


def ranking(scores: Scores) -> Tensor:
    """Rank of each token, 0 first, by margin; on a tie the larger `red` first: (N,)."""
    first = scores.red.sort(descending=True, stable=True).indices
    order = first[margin(scores)[first].sort(descending=True, stable=True).indices]
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


# --- the learned part ----------------------------------------------------------------------------


class Point(nn.Module):
    """Scores and thresholds of one insertion point.

    Parameters
    ----------
    heads : int
        Query heads of the language model.
    learned : bool
        Whether the weights of the heads are trained; they are initialized to the mean.
    """

    share: Tensor

    def __init__(self, heads: int, learned: bool) -> None:
        super().__init__()
        self.cross_heads = nn.Parameter(torch.zeros(heads), requires_grad=learned)
        self.self_heads = nn.Parameter(torch.full((heads,), 1 / heads), requires_grad=learned)
        self.slope = nn.Parameter(torch.ones(2))
        self.offset = nn.Parameter(torch.zeros(2))
        self.hidden = nn.Linear(2, WIDTH)
        self.theta_r = nn.Linear(WIDTH, 1)
        self.theta_s = nn.Linear(WIDTH, 1)
        # Fraction of the input tokens left here, averaged over the last samples.
        self.register_buffer("share", torch.ones(()))
        for linear, start in ((self.theta_r, START_R), (self.theta_s, START_S)):
            nn.init.constant_(linear.bias, torch.tensor(start).logit().item())
            nn.init.zeros_(linear.weight)

    def forward(self, attention: Tensor, received: Tensor, spatial: Tensor, soft: Tensor) -> Scores:
        """Scores of N visual tokens.

        Parameters
        ----------
        attention, received : Tensor, float32, (H, N)
            Softmax attention of the text, mean over its rows, and logits from the visual rows.
        spatial, soft : Tensor, float32, (N,)
        """
        cross = (self.cross_heads.softmax(0)[:, None] * attention).sum(0)
        own = (self.self_heads[:, None] * received).sum(0)
        levels = torch.stack([self_level(own, soft), cross_level(cross, soft)])
        both = (self.slope[:, None] * levels + self.offset[:, None]).sigmoid()
        z = self.hidden((both * soft).sum(1) / soft.sum())
        theta_r, theta_s = self.theta_r(z).sigmoid()[0], self.theta_s(z).sigmoid()[0]
        return Scores(both.mean(0), spatial, theta_r, theta_s)


def budget_counts(
    n: int, target: float, layers: Sequence[int], shares: Sequence[float], depth: int
) -> tuple[int, ...]:
    """Tokens after each drop that bring the average over ``depth`` layers nearest to ``target``.

    Parameters
    ----------
    shares : sequence of float
        Fractions that training left after each drop; ``n`` times one common power of them is kept.
    """
    logs = [math.log(min(max(share, 1e-4), 0.999)) for share in shares]

    def counts(ratio: float) -> tuple[int, ...]:
        return tuple(max(round(n * ratio ** (log / logs[0])), 1) for log in logs)

    return counts(solve(lambda ratio: equivalent(n, layers, counts(ratio), depth), target))


class Module(nn.Module):
    """One `Point` for each insertion point.

    Parameters
    ----------
    layers : sequence of int
        Layers of the language model before which tokens are dropped.
    heads : int
    learned : bool
    grids : int
        Number of nested grids of the spatial score that the thresholds are trained for.
    """

    def __init__(self, layers: Sequence[int], heads: int, learned: bool, grids: int = 3) -> None:
        super().__init__()
        self.grids = grids
        self.points = nn.ModuleDict({str(layer): Point(heads, learned) for layer in layers})

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(int(layer) for layer in self.points)

    def point(self, layer: int) -> Point:
        return cast(Point, self.points[str(layer)])
