"""Equal cost: solve a method's parameter for a budget averaged over the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmfast.errors import RecipeError


def equivalent(n: int, layers: Sequence[int], counts: Sequence[float], depth: int) -> float:
    """Visual tokens averaged over ``depth`` layers.

    ``n`` enter the first layer; from layer ``layers[i]`` on, ``counts[i]`` are left.
    """
    edges = [0, *layers, depth]
    lengths = [n, *counts]
    return sum(k * (b - a) for k, a, b in zip(lengths, edges[:-1], edges[1:], strict=True)) / depth


def solve(cost: Callable[[float], float], target: float) -> float:
    """The parameter in (0, 1] whose cost is nearest to ``target``; ``cost`` must not decrease.

    A target below the attainable range gives the lowest parameter, one above it gives 1.
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


def solve_counts(
    n: int,
    target: float,
    layers: Sequence[int],
    depth: int,
    *,
    least: int = 1,
    whole: Callable[[float], int] = round,
) -> tuple[int, ...]:
    """Tokens after each drop that bring the average over ``depth`` layers nearest to ``target``.

    ``n`` enter the language model. After drop ``s``, ``n lambda^s`` are left, rounded by ``whole``
    and never fewer than ``least``.
    """

    def counts(ratio: float) -> tuple[int, ...]:
        powers = (ratio**s for s in range(1, len(layers) + 1))
        return tuple(max(whole(n * power), least) for power in powers)

    return counts(solve(lambda ratio: equivalent(n, layers, counts(ratio), depth), target))


def check_layers(name: str, layers: Sequence[float]) -> None:
    """Raise `RecipeError` unless ``layers`` are ascending fractions and ascending whole numbers."""
    shares, numbers = [n for n in layers if n < 1], [n for n in layers if n >= 1]
    ascending = all(part == sorted(set(part)) for part in (shares, numbers))
    if not layers or not ascending or any(n % 1 != 0 for n in numbers):
        raise RecipeError(
            f"{name}: layers={_slashed(layers)} must be one or more whole numbers, or "
            "fractions of the depth below 1, that ascend"
        )


def drop_layers(
    name: str, layers: Sequence[float], depth: int, *, merge: bool = False
) -> tuple[int, ...]:
    """Number of layers before each drop, for a model of ``depth`` layers.

    Parameters
    ----------
    layers : sequence of float
        Whole numbers, or below 1 fractions of the depth.
    merge : bool
        Whether drops that fall on the same layer of a shallow model become one.

    Raises
    ------
    RecipeError
        When they do not ascend or exceed the depth of the model.
    """
    check_layers(name, layers)
    counts = [max(round(n * depth), 1) if n < 1 else int(n) for n in layers]
    if merge:
        counts = list(dict.fromkeys(counts))
    if counts != sorted(set(counts)) or counts[-1] >= depth:
        raise RecipeError(
            f"{name}: layers={_slashed(layers)} means drops after {', '.join(map(str, counts))} "
            f"layers; they must ascend and stay below {depth}"
        )
    return tuple(counts)


def moved_layers(layers: Sequence[float], depth: int, first: int) -> dict[int, int]:
    """Map the number of layers before each drop to the index of the last drop there.

    Fractions that mean fewer layers than ``first`` move to ``first``.
    """
    counts = [max(round(n * depth), first) if n < 1 else int(n) for n in layers]
    return {count: index for index, count in enumerate(counts)}


def _slashed(layers: Sequence[float]) -> str:
    return "/".join(f"{n:g}" for n in layers)
