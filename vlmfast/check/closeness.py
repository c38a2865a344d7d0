"""How close a kernel must be to its reference.

Both compute in float32 and round to the dtype of their result, so they differ by a few roundings
there and by the order of float32 sums, whose errors add up as a random walk::

    tolerance = SAFETY * (eps(result) + eps(float32) * sqrt(terms)) * scale

``scale`` is the largest magnitude of the reference and ``terms`` the length of all sums up to one
entry. A matrix product may round its operands to ``dtype`` as well, which then takes the place of
the result's. Integers, and floats that are copied (no ``terms``), must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

SAFETY = 8.0


def deviation(got: Any, want: Any, dtype: torch.dtype, terms: int) -> float:
    """Largest difference of two results as a fraction of the tolerance; above 1 is wrong.

    Parameters
    ----------
    got, want : Tensor, or sequences, dicts and dataclasses of them
    dtype : torch.dtype
        Of the operands.
    terms : int
        0 for results that must be equal.

    Returns
    -------
    float
        Infinite where shapes, dtypes, infinities, NaN or exact values differ.
    """
    pairs = list(zip(_tensors(got), _tensors(want), strict=True))
    return max((_deviation(*pair, dtype, terms) for pair in pairs), default=math.inf)


def _deviation(got: Tensor, want: Tensor, dtype: torch.dtype, terms: int) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not got.is_floating_point() or not terms:
        return 0.0 if torch.equal(got, want) else math.inf
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return math.inf
    difference = (got - want).abs()[finite]
    if not difference.numel():
        return 0.0
    if not bool(difference.isfinite().all()):
        return math.inf
    eps = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * math.sqrt(terms)
    scale = max(float(want[finite].abs().max()), torch.finfo(torch.float32).tiny)
    return float(difference.max()) / (SAFETY * eps * scale)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        return [x for key in sorted(result) for x in _tensors(result[key])]
    if is_dataclass(result):
        return [x for field in fields(result) for x in _tensors(getattr(result, field.name))]
    if isinstance(result, Sequence) and not isinstance(result, str):
        return [x for each in result for x in _tensors(each)]
    return []
