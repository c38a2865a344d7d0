"""Scores and intervals of the evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.closeness import close
from vlmfast.eval.scores import bootstrap, mcnemar, normalise, wilson


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" Red. ", "red"), ("top left", "top left"), ("2.", "2"), ("...", ".."), ("", ""), ("A", "a")],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_fraction_and_stays_in_0_1(counts):
    right, n = counts
    share, low, high = wilson(right, n)
    assert share == right / n
    assert 0 <= low <= share <= high <= 1
    assert low < high


@given(st.integers(2, 500), st.data())
def test_wilson_is_symmetric_and_narrows(n, data):
    right = data.draw(st.integers(0, n))
    _, low, high = wilson(right, n)
    _, low_wrong, high_wrong = wilson(n - right, n)
    # A root and a quotient of numbers around n.
    close(low, 1 - high_wrong, terms=10, scale=1)
    close(high, 1 - low_wrong, terms=10, scale=1)
    _, low_more, high_more = wilson(4 * right, 4 * n)
    assert high_more - low_more < high - low


def test_wilson_against_published_values():
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for right, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(right, n)[1:] == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("counts", [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(counts):
    with pytest.raises(ValueError, match="wilson"):
        wilson(*counts)


def test_bootstrap_of_no_samples():
    assert bootstrap([]) is None


def test_bootstrap_is_a_mean_over_types():
    rows = [("p1", "often", 1.0)] * 9 + [("p2", "often", 1.0), ("p3", "rare", 0.0)]
    mean, low, high = bootstrap(rows)
    assert mean == 0.5
    assert low <= mean <= high


def test_bootstrap_does_not_depend_on_the_order_of_rows():
    rng = np.random.default_rng(1)
    rows = [(f"p{i % 17}", f"t{i % 3}", float(rng.random() < 0.6)) for i in range(90)]
    assert bootstrap(rows) == bootstrap(rows[::-1])
    assert bootstrap(rows) == bootstrap(rows)
    assert bootstrap(rows, seed=1) != bootstrap(rows)


def test_bootstrap_resamples_whole_images():
    """Ten perfectly correlated questions count as one question."""
    fates = [float(i % 2) for i in range(40)]
    clustered = [(f"p{i}", "t", fate) for i, fate in enumerate(fates) for _ in range(10)]
    single = [(f"p{i}-{k}", "t", fate) for i, fate in enumerate(fates) for k in range(10)]
    _, low, high = bootstrap(clustered)
    _, low_single, high_single = bootstrap(single)
    assert high - low > 2.5 * (high_single - low_single)


def test_bootstrap_resamples_draws():
    """Draws of a control that disagree widen the interval; equal ones do not."""
    fates = [float(i % 2) for i in range(60)]
    single = bootstrap([(f"p{i}", "t", fate) for i, fate in enumerate(fates)])
    equal = bootstrap([(f"p{i}", "t", [fate] * 5) for i, fate in enumerate(fates)])
    assert equal[0] == single[0]
    assert abs((equal[2] - equal[1]) / (single[2] - single[1]) - 1) < 0.15
    # Every image has the same mean, so all of the width is due to the draws.
    apart = bootstrap([(f"p{i}", "t", [0.3, 0.4, 0.5, 0.6, 0.7]) for i in range(60)])
    assert abs(apart[0] - 0.5) < 1e-12
    assert apart[2] - apart[1] > 0.15
    level = bootstrap([(f"p{i}", "t", [0.5] * 5) for i in range(60)])
    assert level[2] - level[1] < 1e-12


def test_bootstrap_covers_the_truth():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        skill = rng.beta(6, 4, size=80)  # images differ
        rows = [
            (f"p{i}", f"t{k}", float(rng.random() < p)) for i, p in enumerate(skill) for k in (0, 1)
        ]
        _, low, high = bootstrap(rows, rounds=300)
        hits += low <= 0.6 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_mcnemar_is_the_sign_test():
    # Two-sided binomial probabilities, by hand.
    assert mcnemar(0, 0) == mcnemar(4, 4) == 1.0
    assert mcnemar(5, 0) == mcnemar(0, 5) == 2 / 32
    close(mcnemar(8, 2), 2 * (1 + 10 + 45) / 1024, terms=10)
    assert mcnemar(3000, 2000) < 1e-40
