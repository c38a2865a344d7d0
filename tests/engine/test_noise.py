"""Sampling noise: a function of seed, position and token, with the Gumbel distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import close
from support.engine.draws import gumbel

N = 200_000
WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mixed(x: int) -> int:
    """SplitMix64's finalizer, in arbitrary-precision integers."""
    for by, factor in MIX:
        x = (x ^ x >> by) * factor % WORD
    return x ^ x >> 31


def unmixed(x: int) -> int:
    """The inverse of `mixed`."""

    def unshifted(x: int, by: int) -> int:
        y = x
        for _ in range(64 // by):
            y = x ^ y >> by
        return y

    x = unshifted(x, 31)
    for by, factor in reversed(MIX):
        x = unshifted(x * pow(factor, -1, WORD) % WORD, by)
    return x


def uniform(seed: int, position: int, token: int) -> float:
    """The uniform number from which one token's noise is computed."""
    key = mixed(mixed(seed % WORD) + position * GOLDEN & WORD - 1)
    return ((mixed((key + (token + 1) * GOLDEN) % WORD) >> 12) + 0.5) / 2**52


def ks(sample: Tensor) -> float:
    """Kolmogorov-Smirnov statistic against the Gumbel distribution, times sqrt(n)."""
    cdf = torch.exp(-torch.exp(-sample.double().sort().values))
    n = len(sample)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    gap = torch.maximum((steps[1:] - cdf).max(), (cdf - steps[:-1]).max())
    return float(gap) * math.sqrt(n)


# --- one number per seed, position and token -----------------------------------------------------

seeds = st.integers(-(2**70), 2**70)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 2**20), st.integers(1, 40))
def test_noise_equals_integer_reference(seed: int, position: int, size: int) -> None:
    """The bits do not depend on the device: they result from integer products and shifts alone."""
    mine = gumbel(seed, position, size)
    assert mine.dtype == torch.float64
    wanted = [-math.log(-math.log(uniform(seed, position, token))) for token in range(size)]
    wanted = torch.tensor(wanted, dtype=torch.float64)
    # Two logarithms: the relative error of the inner result is the absolute error of the outer one.
    close(mine, wanted, terms=2, scale=1 + wanted.abs())


def test_noise_depends_only_on_seed_position_and_token() -> None:
    positions = list(range(40))
    one = {position: gumbel(5, position, 100) for position in positions}
    torch.manual_seed(1)  # the global state has no effect
    for position in reversed(positions):
        assert torch.equal(gumbel(5, position, 100), one[position])
        assert torch.equal(gumbel(5, position, 7), one[position][:7])  # a smaller vocabulary
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(gumbel(6, 0, 100), one[0])


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**30, -(10**30)])
def test_any_integer_is_a_valid_seed(seed: int) -> None:
    noise = gumbel(seed, 3, 50)
    assert noise.isfinite().all()
    assert torch.equal(noise, gumbel(seed % WORD, 3, 50))
    assert not torch.equal(noise, gumbel(seed + 1, 3, 50))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_cpu_and_cuda_noise_agree() -> None:
    for seed in (0, -1, 2**63):
        here, there = gumbel(seed, 9, N), gumbel(seed, 9, N, "cuda").cpu()
        close(there, here, terms=2, scale=1 + here.abs())


# --- finite values -------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [0, 11])
@pytest.mark.parametrize("bits", [0, 2**52 - 1])
def test_extreme_noise_is_finite(bits: int, token: int) -> None:
    """Seeds that produce the smallest and the largest uniform number."""
    key = (unmixed(bits << 12) - (token + 1) * GOLDEN) % WORD
    seed = unmixed(unmixed(key))  # at position 0
    assert uniform(seed, 0, token) == (2.0**-53 if bits == 0 else 1 - 2.0**-53)
    noise = gumbel(seed, 0, 12)
    assert noise.isfinite().all()
    extreme = -math.log(53 * math.log(2)) if bits == 0 else 53 * math.log(2)
    close(noise[token], extreme, terms=2)
    # A token of probability 0 keeps it for any noise.
    logits = torch.zeros(12, dtype=torch.float64).index_fill(0, torch.tensor(token), -math.inf)
    assert int((logits + noise).argmax()) != token


# --- distribution --------------------------------------------------------------------------------

# 2.23: 1 in 10,000 samples exceeds it.


@pytest.mark.parametrize("seed", [0, 1, -7, 2**40])
def test_tokens_are_gumbel_distributed(seed: int) -> None:
    noise = gumbel(seed, 12, N)
    assert ks(noise) < 2.23
    assert ks(noise * 1.02) > 2.23  # the control
    assert float(noise.mean()) == pytest.approx(0.5772, abs=4 * 1.2825 / math.sqrt(N))
