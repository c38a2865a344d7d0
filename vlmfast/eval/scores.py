"""Scores of answers, and intervals around their means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_Z = 1.959963984540054  # 97.5 % point of the normal distribution

# A mean with the ends of its 95 % interval.
Interval = tuple[float, float, float]


def normalise(text: str) -> str:
    """Strip, lower case, no full stop at the end."""
    return text.strip().lower().removesuffix(".").rstrip()


def wilson(right: float, n: int) -> Interval:
    """Fraction ``right / n`` with Wilson's 95 % score interval.

    Unlike the usual ``p +- z s`` it stays inside [0, 1] and has a width at 0 and at 1.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"wilson: {right} right answers of {n}")
    share, z2 = right / n, _Z * _Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # Clamped, because rounding at 0 and 1 could exclude the fraction from its interval.
    return share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


# An image, the type of a question, and the score of its answer, or those of each draw of a control.
Scored = tuple[str, str, float | Sequence[float]]


def bootstrap(rows: Iterable[Scored], *, seed: int = 0, rounds: int = 2000) -> Interval | None:
    """Mean over types of the mean score of each type, with a 95 % bootstrap interval.

    Whole images are resampled, because the errors of several questions about one image are
    correlated; resampling questions would make the interval too narrow. Draws are resampled too,
    where there are several.

    Parameters
    ----------
    rows : iterable of (image, type, score)
        A score, or one for each draw, the same number in all rows. Scores may be differences
        between two recipes on the same sample (a paired interval).
    seed : int
        The interval depends on the seed, not on the order of the rows.
    rounds : int

    Returns
    -------
    (mean, low, high), or None without rows.
    """
    import numpy as np

    rows = sorted(rows)
    if not rows:
        return None
    images = {name: i for i, name in enumerate(dict.fromkeys(row[0] for row in rows))}
    types = {t: i for i, t in enumerate(dict.fromkeys(sorted(row[1] for row in rows)))}
    draws = np.size(rows[0][2])
    sums = np.zeros((draws, len(images), len(types)))
    counts = np.zeros(sums.shape[1:])
    for image, type_, score in rows:
        sums[:, images[image], types[type_]] += score
        counts[images[image], types[type_]] += 1
    mean = float((sums.mean(0).sum(0) / counts.sum(0)).mean())

    rng, n, means = np.random.default_rng(seed), len(images), []
    chunk = max(1, min(rounds, 4_000_000 // n))  # at most 32 MB per chunk
    for start in range(0, rounds, chunk):
        size = min(chunk, rounds - start)
        times = rng.multinomial(n, np.full(n, 1 / n), size=size)
        share = np.ones((size, 1))
        if draws > 1:
            share = rng.multinomial(draws, np.full(draws, 1 / draws), size=size) / draws
        total = sum(share[:, draw, None] * (times @ sums[draw]) for draw in range(draws))
        with np.errstate(invalid="ignore"):
            by_type = total / (times @ counts)
        # A rare type can be missing from a resample; the mean is then over the others.
        means.append(np.nanmean(by_type, axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return mean, float(low), float(high)


def mcnemar(only_a: int, only_b: int) -> float:
    """P value of McNemar's exact test, two-sided.

    Parameters
    ----------
    only_a, only_b : int
        Number of questions that only ``a``, or only ``b``, answers correctly.
    """
    n, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**n)) if n else 1.0
