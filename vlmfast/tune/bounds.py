"""Confidence bounds on the difference of two accuracies that are measured on the same questions.

The loss of a recipe is the full model's accuracy minus its own. On n questions it is
``(worse - better) / n``, where ``worse`` counts the questions that only the full model answers
correctly, and ``better`` those that only the recipe does. Bounds are Tango's score bounds for
paired proportions (Statistics in Medicine 17, 1998, 891-908), with a correction for continuity:
unlike the usual ``loss + z s``, they have a width where no answer differs, and unlike the score
bounds alone they cover the loss with at least the stated confidence on few questions too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_STEPS = 60  # of a bisection: an error below 1e-17
_CONTINUITY = 0.5  # answers


@dataclass(frozen=True)
class Loss:
    """Paired outcomes of a recipe and the full model.

    Parameters
    ----------
    worse, better : int
        Questions that only the full model, or only the recipe, answers correctly.
    n : int
        All questions.
    effect : float
        Variance of the mean over images divided by that over independent questions, at least 1:
        questions about one image are correlated.
    """

    worse: int
    better: int
    n: int
    effect: float = 1.0

    @property
    def mean(self) -> float:
        return (self.worse - self.better) / self.n

    @property
    def error(self) -> float:
        """Standard error of `mean`; 0 if no outcome differs."""
        differ = self.worse + self.better
        return math.sqrt(max(0.0, differ / self.n - self.mean**2) * self.effect / self.n)

    def upper(self, confidence: float) -> float:
        """One-sided upper confidence bound on the loss."""
        z = NormalDist().inv_cdf(confidence) * math.sqrt(self.effect)
        low, high = self.mean, 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if _score(self.worse, self.better, self.n, middle) > -z:
                low = middle
            else:
                high = middle
        return high

    def lower(self, confidence: float) -> float:
        """One-sided lower confidence bound on the loss."""
        return -Loss(self.better, self.worse, self.n, self.effect).upper(confidence)


def paired(full: Sequence[int], recipe: Sequence[int], groups: Sequence[Hashable]) -> Loss:
    """The loss of a recipe from its scores and those of the full model, 0 or 1, in equal order.

    ``groups`` names the image or video of each question.
    """
    differences = [a - b for a, b in zip(full, recipe, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    sums: dict[Hashable, float] = {}
    for difference, group in zip(differences, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + difference - mean
    alone = sum((difference - mean) ** 2 for difference in differences)
    effect = max(1.0, sum(s * s for s in sums.values()) / alone) if alone else 1.0
    return Loss(differences.count(1), differences.count(-1), n, effect)


def least_bound(n: int, confidence: float) -> float:
    """The bound that n questions certify if no answer differs: none can certify less."""
    return Loss(0, 0, n).upper(confidence)


def needed(bound: float, confidence: float) -> int:
    """Questions that certify a bound if no answer differs."""
    n = 1
    while least_bound(n, confidence) > bound:
        n *= 2
    return bisect_left(range(n), -bound, key=lambda k: -least_bound(k, confidence) if k else -1.0)


def _score(worse: int, better: int, n: int, loss: float) -> float:
    """Tango's statistic of the hypothesis that the loss is ``loss``, corrected for continuity."""
    b = (2 * n - worse + better) * loss - worse - better
    root = math.sqrt(max(0.0, b * b + 8 * n * better * loss * (1 - loss)))
    variance = n * (2 * (root - b) / (4 * n) + loss * (1 - loss))
    difference = worse - better - n * loss + _CONTINUITY
    if variance <= 0:
        return 0.0 if difference == 0 else math.copysign(math.inf, difference)
    return difference / math.sqrt(variance)
