"""How near two computations of the same thing must be, and how far from them a control must lie.

Two orders of the same floating-point sum differ by rounding alone: each addition is off by half a
unit in the last place, and over ``terms`` of them the errors walk at random. So the tolerance
follows from the arithmetic, and not from what some processor printed::

    tolerance = SAFETY * eps(dtype) * sqrt(terms) * scale

``scale`` is the magnitude of what is summed, ``terms`` the length of the sums one behind the other:
a product over width D has D, a chain of L layers the sum over all of them (`network`).

Every comparison reports the share of its tolerance that it used, and every control how many times
the tolerance it lies above; ``VLMFAST_CLOSENESS=FOLDER`` collects both (`make test-cpus`). What
`close` refuses, where a test wants it refused (``pytest.raises``), is a control too.
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
APART = 30.0  # tolerances that lie between a result and its control, at least


def network(model: Any, rows: int) -> int:
    """``terms`` of a forward pass: the sums behind one logit, over ``rows`` rows of attention."""
    text = model.config.get_text_config()
    layer = 3 * text.hidden_size + text.intermediate_size + rows
    return text.num_hidden_layers * layer


def tower(model: Any) -> int:
    """``terms`` of a feature of a picture: the sums through the vision tower."""
    vision = model.config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    layer = 3 * vision.hidden_size + vision.intermediate_size + patches
    return vision.num_hidden_layers * layer


def tolerance(
    dtype: torch.dtype | None, terms: float, scale: float | Tensor, *of: Tensor
) -> Tensor:
    """The largest difference that rounding explains; ``dtype`` is the coarsest of ``of``."""
    if dtype is None:
        dtype = max((t.dtype for t in of if t.is_floating_point()), key=_eps)
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
        Of the same shape. What is infinite or NaN in one must be the same in the other.
    dtype : torch.dtype, optional
        In which the coarser of both was computed; the coarser of their own by default.
    terms : float
        Numbers that are summed on the way to one entry, one sum behind the other.
    scale : float or Tensor, optional
        Magnitude of what is summed, where it cancels; by default the largest of ``want``.
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
    """Assert that a control lies far from ``got``, as `close` measures it; parameters are its own.

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


def _largest(of: Tensor) -> float:
    of = of[of.isfinite()].abs().double()
    return float(of.max()) if of.numel() else 0.0


def _tensor(of: Any) -> Tensor:
    if isinstance(of, Tensor):
        return of.detach().cpu()
    # Python's floats are double: a list of them is not to be rounded.
    double = isinstance(of, float | list | tuple)
    return torch.as_tensor(of, dtype=torch.float64 if double else None)


def _record(kind: str, value: float) -> None:
    if not (folder := os.environ.get("VLMFAST_CLOSENESS")):
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"test": test, kind: value}) + "\n")
