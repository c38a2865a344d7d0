"""The tolerances of the tests, and how `make test-cpus` evaluates their use."""

from __future__ import annotations

import math

import pytest
import torch

from support.closeness import APART, apart, close, tolerance

UNIT = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These comparisons are at the edge of the tolerance on purpose."""
    monkeypatch.delenv("VLMFAST_CLOSENESS", raising=False)


def test_close_refuses_beyond_the_tolerance() -> None:
    want = torch.tensor([4.0, -0.5])
    bound = float(tolerance(None, 9, 4.0, want))
    assert bound == 8 * UNIT * 3 * 4
    assert close(want.double() + 0.9 * bound, want, terms=9) == pytest.approx(0.9 * bound)
    with pytest.raises(AssertionError, match=r"which is 1\.1 of the tolerance"):
        close(want.double() + 1.1 * bound, want, terms=9)
    with pytest.raises(AssertionError):  # a bound for each entry
        close(want.double() + 0.9 * bound, want, terms=9, scale=want.abs())


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_non_finite_values_must_match(odd: float) -> None:
    want = torch.tensor([odd, 1.0])
    close(want.clone(), want)
    for wrong in ([1.0, 1.0], [odd, odd], [math.inf if odd != math.inf else -odd, 1.0]):
        with pytest.raises(AssertionError):
            close(torch.tensor(wrong), want)
    apart(torch.ones(2), want)  # infinitely far
    with pytest.raises(AssertionError, match="only 0 tolerances"):
        apart(want.clone(), want)


def test_apart_refuses_close_values() -> None:
    got = torch.ones(3)
    step = float(tolerance(torch.float32, 4, 1.0))
    far = got.double() + torch.tensor([0, 0, 1.1 * APART * step])
    assert apart(got, far, torch.float32, 4) == pytest.approx(1.1 * APART * step)
    with pytest.raises(AssertionError, match="30 are wanted"):
        apart(got, got.double() + 0.9 * APART * step, torch.float32, 4)


# --- the tool ------------------------------------------------------------------------------------


def test_comparing_test_is_marked(request: pytest.FixtureRequest) -> None:
    close(1.0, 1.0)
    assert request.node.get_closest_marker("equality")
