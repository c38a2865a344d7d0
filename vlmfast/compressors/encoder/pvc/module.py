"""Trained modules of PVC: temporal attention in the vision tower, and the compression of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

SINUSOID = 256  # width of the sinusoid of a timestamp
TURNS = 4  # patches of a cell that take turns as the position of its token
FRAMES = 16  # with more, the logits of attention over frames are not materialized
PRIOR = 3.0  # initial logit of a token for its own patch, and for the patches it represents


# --- cells ---------------------------------------------------------------------------------------


def to_cells(patches: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Patches (R, N, D) of an ``h x w`` grid as (R, C, m, D): cells of ``m = side x side`` patches.

    Space-to-depth; a grid that cells do not divide is zero-padded at the bottom and on the right.
    """
    (h, w), s = grid, side
    x = pad(patches.unflatten(1, grid), (0, 0, 0, -w % s, 0, -h % s))
    x = x.unflatten(2, (-1, s)).unflatten(1, (-1, s))  # (R, H, s, W, s, D)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def to_patches(cells: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """The inverse of `to_cells`."""
    (h, w), s = grid, side
    x = cells.unflatten(2, (s, s)).unflatten(1, (-(-h // s), -(-w // s))).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)[:, :h, :w].flatten(1, 2)


def places(side: int) -> list[int]:
    """Patches of a cell, those nearest to its centre first, and of these opposite ones first."""

    def key(patch: tuple[int, ...]) -> tuple[int, int, int]:
        y, x = patch
        far = (2 * y + 1 - side) ** 2 + (2 * x + 1 - side) ** 2
        return far, abs(y - x), y

    return [y * side + x for y, x in sorted(product(range(side), repeat=2), key=key)]


def ranks(side: int) -> Tensor:
    """For every turn the rank of each patch of a cell: int64, (TURNS, m).

    The first `TURNS` of `places` are rotated by the turn.
    """
    order = torch.tensor(places(side))
    rank = torch.empty(TURNS, side * side, dtype=torch.int64)
    for turn in range(TURNS):
        rank[turn, torch.cat([order[:TURNS].roll(-turn), order[TURNS:]])] = torch.arange(side**2)
    return rank


# --- layers --------------------------------------------------------------------------------------


def sinusoid(time: Tensor) -> Tensor:
    """Timestamps in [0, 1], (...,), as (..., SINUSOID): sines and cosines of 1000 t / 10000^k."""
    half = SINUSOID // 2
    steps = torch.arange(half, device=time.device, dtype=torch.float32) / half
    angle = 1000 * time[..., None] * torch.exp(-math.log(10000) * steps)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class AdaptiveNorm(nn.Module):
    """``(1 + scale(t)) LN(x) + shift(t)``; scale and shift are initially zero."""

    def __init__(self, width: int, time_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = zeroed(nn.Linear(time_width, 2 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``x`` (..., D) under embedded times that broadcast with it, (..., E)."""
        scale, shift = self.modulation(time).chunk(2, dim=-1)
        return (1 + scale) * self.norm(x) + shift


def temporal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over frames, separately at every position: (S, T, N, H, d) all four.

    Few frames are many tiny products, which fused attention would pad to its tiles; their logits
    (S, N, H, T, T) are smaller than the query. Fused attention takes four axes.
    """
    q, k, v = (x.permute(0, 2, 3, 1, 4) for x in (query, key, value))  # (S, N, H, T, d)
    if query.shape[1] <= FRAMES:
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        mixed = scaled_dot_product_attention(flat[0], flat[1], flat[2], is_causal=True)
        mixed = mixed.unflatten(0, q.shape[:2])
    return mixed.permute(0, 3, 1, 2, 4).contiguous()


class TemporalAttention(nn.Module):
    """``x + out(attention(norm(x, t)))`` over earlier frames at one position; initially ``x``."""

    def __init__(self, width: int, heads: int, time_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = AdaptiveNorm(width, time_width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = zeroed(nn.Linear(width, width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Sequences (S, T, N, D) of frames under their embedded times (T, E)."""
        qkv = self.qkv(self.norm(x, time[:, None])).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(3)  # each (S, T, N, heads, d)
        return x + self.out(temporal_attention(q, k, v).flatten(3))


class Compressor(nn.Module):
    """One token per cell: a weighted mean of its patches plus an MLP of all of them.

    With ``y_j = norm(x_j, t)`` for patch ``x_j`` of the ``m`` of a cell, ``h`` the token's own
    patch and ``G`` the patches that it represents when the cell has ``R`` tokens::

        a = softmax_j(rest score(y_j) + home [j = h] + share [j in G])
        z = sum_j a_j x_j + rest mlp(concat_j y_j)        rest = (m - R) / (m - 1)

    ``score`` and the MLP's last layer are initially zero. ``rest`` is the fraction of the other
    patches that a token represents: 1 for a single token, 0 if each patch has a token.
    """

    def __init__(self, width: int, side: int, hidden: int, time_width: int) -> None:
        super().__init__()
        self.norm = AdaptiveNorm(width, time_width)
        self.score = zeroed(nn.Linear(width, 1, bias=False))
        self.home = nn.Parameter(torch.tensor(PRIOR))
        self.share = nn.Parameter(torch.tensor(PRIOR))
        self.mlp = nn.Sequential(
            nn.Linear(side * side * width, hidden), nn.GELU(), zeroed(nn.Linear(hidden, width))
        )

    def forward(
        self,
        cells: Tensor,
        time: Tensor,
        home: Tensor,
        share: Tensor,
        there: Tensor,
        rest: float,
    ) -> Tensor:
        """Tokens (R, C, D).

        Parameters
        ----------
        cells : Tensor, (R, C, m, D)
        time : Tensor, (R, E)
        home, share : Tensor, bool, (R, m)
            ``h`` and ``G`` of the tokens of each row.
        there : Tensor, bool, (C, m)
            Patches that exist.
        rest : float
        """
        y = self.norm(cells, time[:, None, None])
        prior = (self.home * home + self.share * share)[:, None]
        logits = rest * self.score(y)[..., 0] + prior
        weights = logits.masked_fill(~there, -torch.inf).softmax(-1)
        mean = (weights[..., None] * cells).sum(2)
        return mean + rest * self.mlp(y.masked_fill(~there[..., None], 0.0).flatten(2))


class ProgressiveEncoder(nn.Module):
    """All trained parameters.

    Parameters
    ----------
    width, heads : int
        Of the vision tower.
    blocks : sequence of int
        Vision blocks with temporal attention before them.
    sides : sequence of int
        Sides of the cells, each with its own compressor.
    repeats : sequence of int
        Repeats of a view in training, from which a budget chooses.
    hidden : int
        Width inside the compressors, halved from the second side on (cells grow as it shrinks).
    time_width : int
        Width of an embedded timestamp.
    token_width : int, optional
        Width of the projector's input for one visual token; by default the tower's.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        blocks: Sequence[int],
        sides: Sequence[int],
        repeats: Sequence[int],
        hidden: int,
        time_width: int,
        token_width: int | None = None,
    ) -> None:
        super().__init__()
        self.blocks, self.sides, self.repeats = tuple(blocks), tuple(sides), tuple(repeats)
        self.width, self.token_width = width, token_width or width
        self.embed = nn.Sequential(
            nn.Linear(SINUSOID, time_width), nn.SiLU(), nn.Linear(time_width, time_width), nn.SiLU()
        )
        self.temporal = nn.ModuleDict(
            {str(b): TemporalAttention(width, heads, time_width) for b in self.blocks}
        )
        self.compress = nn.ModuleDict(
            {
                str(side): Compressor(self.token_width, side, hidden >> bool(number), time_width)
                for number, side in enumerate(self.sides)
            }
        )

    @property
    def patches(self) -> int:
        """Number of patches per visual token of the tower."""
        return self.token_width // self.width

    def time(self, time: Tensor) -> Tensor:
        """Embedded timestamps: (...,) to (..., E)."""
        return self.embed(sinusoid(time))


def zeroed(layer: nn.Linear) -> nn.Linear:
    """``layer`` with weights of zero."""
    for weight in layer.parameters():
        nn.init.zeros_(weight)
    return layer
