"""Few cases that cover all pairs of values."""

from __future__ import annotations

import itertools
import random


def covering(axes: tuple[list, ...], seed: int = 0) -> list[tuple]:
    """Few cases in which every two values of different axes meet; greedy, in random order."""
    draw = random.Random(seed)
    pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a in axes[i]
        for b in axes[j]
    }
    cases = []
    while pairs:
        (i, a), (j, b) = min(pairs, key=str)
        best, most = None, -1
        for _ in range(40):
            case = [draw.choice(axis) for axis in axes]
            case[i], case[j] = a, b
            met = len(pairs & met_by(case))
            if met > most:
                best, most = tuple(case), met
        cases.append(best)
        pairs -= met_by(best)
    return cases


def met_by(case) -> set:
    return set(itertools.combinations(enumerate(case), 2))
