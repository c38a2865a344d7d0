"""Gumbel noise that depends only on a seed and a position in the sequence.

``argmax(logits + noise)`` is a draw from the softmax of the logits. With noise keyed by position, a
token is a function of its logits: the same logits always give the same token, whether computed one
token after the other or for a whole tree at once. The numbers are a counter passed through the
finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same bits on every device. The two
logarithms that follow, in float64, may differ in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(x: int) -> int:
    """The int64 with the bits of ``x`` mod 2**64."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mixed(x: Tensor) -> Tensor:
    for by, factor in zip((30, 27), _MIX, strict=True):
        x = (x ^ _shift(x, by)) * _signed(factor)
    return x ^ _shift(x, 31)


def gumbel(seed: int, place: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise for one position of a sequence.

    Parameters
    ----------
    seed, place : int
    size : int
        Of the vocabulary.

    Returns
    -------
    Tensor, float64, (size,)
        Always finite: 52 random bits each, so no token without probability can be drawn.
    """
    return gumbels([seed], [place], size, device)[0]


def gumbels(
    seeds: Sequence[int], places: Sequence[int], size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """`gumbel` of several rows at once, each with its own seed and position.

    Parameters
    ----------
    seeds, places : sequence of int, B of each
    size : int
        Of the vocabulary.

    Returns
    -------
    Tensor, float64, (B, size)
    """
    steps = [_signed(place * _GOLDEN) for place in places]
    numbers = torch.tensor([[_signed(seed) for seed in seeds], steps], device=device)
    key = (_mixed(numbers[0]) + numbers[1])[:, None]
    counter = torch.arange(1, size + 1, device=device) * _signed(_GOLDEN)
    bits = _shift(_mixed(_mixed(key) + counter), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # exact, never 0 or 1
    return -torch.log(-torch.log(uniform))
