"""Equal cost: from a share of the visual tokens, averaged over layers, to a method's parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def equivalent(n: int, layers: Sequence[int], counts: Sequence[int], depth: int) -> float:
    """Visual tokens averaged over ``depth`` layers.

    ``n`` enter the first layer; from layer ``layers[i]`` on there are ``counts[i]``.
    """
    edges = [0, *layers, depth]
    held = [n, *counts]
    return sum(k * (b - a) for k, a, b in zip(held, edges[:-1], edges[1:], strict=True)) / depth


def solve(cost: Callable[[float], float], target: float) -> float:
    """The parameter in (0, 1] whose cost is nearest to ``target``; ``cost`` must not fall.

    A target below everything attainable gives a parameter at the floor, one above gives 1.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if cost(middle) < target:
            low = middle
        else:
            high = middle
    # `high` is the smallest parameter that reaches the target; just below it is the next step down.
    if low > 0 and abs(cost(low) - target) < abs(cost(high) - target):
        return low
    return high
