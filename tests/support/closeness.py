"""How close two computations of the same thing must be, and how far a control must be from them.

Two orders of the same floating-point sum differ by rounding alone: each addition is off by half a
unit in the last place, and over ``terms`` of them the errors add up as a random walk. So the
tolerance follows from the arithmetic, and not from the output of some processor::

    tolerance = SAFETY * eps(dtype) * sqrt(terms) * scale

``scale`` is the magnitude of the summands, ``terms`` the total length of the successive sums:
a product over width D has D, a chain of L layers the sum over all of them (`network`).

Every comparison reports the fraction of its tolerance that it used, and every control how many
times the tolerance it is above; ``VLMFAST_CLOSENESS=FOLDER`` collects both (`make test-cpus`). If
`close` refuses where a test expects it (``pytest.raises``), that is a control too.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAFETY = 8.0
APART = 30.0  # minimum distance between a result and its control, in tolerances


def network(model: Any, rows: int) -> int:
    """``terms`` of a forward pass: the sums up to one logit, over ``rows`` rows of attention."""
    text = model.config.get_text_config()
    layer = 3 * text.hidden_size + text.intermediate_size + rows
    return text.num_hidden_layers * layer


def tower(model: Any) -> int:
    """``terms`` of an image feature: the sums through the vision tower."""
    vision = model.config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    layer = 3 * vision.hidden_size + vision.intermediate_size + patches
    return vision.num_hidden_layers * layer


def tolerance(
    dtype: torch.dtype | None, terms: float, scale: float | Tensor, *tensors: Tensor
) -> Tensor:
    """The largest difference that rounding explains; ``dtype`` is the coarsest of ``tensors``."""
    if dtype is None:
        dtype = max((t.dtype for t in tensors if t.is_floating_point()), key=_eps)
    scale = torch.as_tensor(scale, dtype=torch.float64).detach().cpu()
    return SAFETY * _eps(dtype) * math.sqrt(terms) * scale


def close(
    got: Any,
    want: Any,
    dtype: torch.dtype | None = None,
    terms: float = 1,
    *,
    scale: float | Tensor | None = None,
) -> float:
    """Assert that ``got`` is ``want`` up to rounding; returns the largest difference.

    Parameters
    ----------
    got, want : Tensor, array or float
        Of the same shape. Infinite or NaN entries must be equal in both.
    dtype : torch.dtype, optional
        In which the coarser of both was computed; the coarser of their own by default.
    terms : float
        Length of all sums up to one entry, added up.
    scale : float or Tensor, optional
        Magnitude of the summands, where they cancel; by default the largest of ``want``.
    """
    got, want = _tensor(got), _tensor(want)
    assert got.shape == want.shape, f"shapes differ: {tuple(got.shape)}, {tuple(want.shape)}"
    size = _largest(want) if scale is None else scale
    bound = tolerance(dtype, terms, size, got, want)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), "other entries are finite"
    here, there = got[~finite].double(), want[~finite].double()
    assert bool(((here == there) | (here.isnan() & there.isnan())).all()), "other infinities"
    difference = (got.double() - want.double()).abs().masked_fill(~finite, 0.0)
    largest = float(difference.max()) if difference.numel() else 0.0
    share = float((difference / bound.clamp(min=1e-300)).max()) if difference.numel() else 0.0
    _record("share" if share <= 1 else "control", share)
    assert share <= 1, f"differs by {largest:.3g}, which is {share:.3g} of the tolerance"
    return largest


def apart(
    got: Any,
    control: Any,
    dtype: torch.dtype | None = None,
    terms: float = 1,
    *,
    scale: float | Tensor | None = None,
) -> float:
    """Assert that a control is far from ``got``, as `close` measures it, with the same parameters.

    Returns the largest difference.
    """
    got, control = _tensor(got), _tensor(control)
    assert got.shape == control.shape
    size = _largest(got) if scale is None else scale
    bound = tolerance(dtype, terms, size, got, control).clamp(min=1e-300)
    both = got.isfinite() & control.isfinite()
    difference = (got.double() - control.double()).abs()
    differs = got.isfinite() != control.isfinite()
    times = float((difference / bound).masked_fill(~both, 0.0).max())
    _record("control", math.inf if bool(differs.any()) else times)
    assert bool(differs.any()) or times >= APART, (
        f"the control is only {times:.3g} tolerances away; {APART:g} are wanted"
    )
    return float(difference.masked_fill(~both, 0.0).max())


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs().double()
    return float(finite.max()) if finite.numel() else 0.0


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    # Python's floats are double: do not round a list of them.
    double = isinstance(value, float | list | tuple)
    return torch.as_tensor(value, dtype=torch.float64 if double else None)


def _record(kind: str, value: float) -> None:
    if not (folder := os.environ.get("VLMFAST_CLOSENESS")):
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"test": test, kind: value}) + "\n")
