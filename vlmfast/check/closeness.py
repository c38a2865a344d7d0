"""How close a kernel must be to its reference.

Both compute in float32 and round to the dtype of their result, so they differ by a few roundings
there and by the order of float32 sums, whose errors add up as a random walk::

    tolerance = SAFETY * (eps(result) + eps(float32) * sqrt(terms)) * scale

``scale`` is the largest magnitude of the reference and ``terms`` the length of all sums up to one
entry. A matrix product may round its operands to their dtype as well, which then takes the place
of the result's. Integers, and floats that are copied (no ``terms``), must be equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vlmfast.kernels.calls import Call, tensors

SAFETY = 8.0


def deviation(got: Any, want: Any, call: Call) -> float:
    """Largest difference of two results as a fraction of the tolerance; above 1 is wrong.

    Parameters
    ----------
    got, want : Tensor, or sequences, dicts and dataclasses of them
    call : Call
        With ``dtype``, ``terms`` and ``allow``.

    Returns
    -------
    float
        Infinite where shapes, dtypes, infinities, NaN or exact values differ.
    """
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    return max((_deviation(*pair, call) for pair in pairs), default=math.inf)


def _deviation(got: Tensor, want: Tensor, call: Call) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not got.numel():
        return 0.0
    if not got.is_floating_point() or not call.terms:
        differ = float((got != want).double().mean())
        return 0.0 if differ <= call.allow else math.inf
    precision = torch.finfo(max(call.dtype, got.dtype, key=lambda of: torch.finfo(of).eps)).eps
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return math.inf
    difference = (got - want).abs()[finite]
    if not bool(difference.isfinite().all()):
        return math.inf
    if ties := int(call.allow * difference.numel()):
        difference = difference.sort().values[:-ties]
    if not difference.numel():
        return 0.0
    eps = precision + torch.finfo(torch.float32).eps * math.sqrt(call.terms)
    scale = max(float(want[finite].abs().max()), torch.finfo(torch.float32).tiny)
    return float(difference.max()) / (SAFETY * eps * scale)
