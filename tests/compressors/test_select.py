"""Shared arithmetic of methods: selection, counts, patch indices, layers and budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from support.closeness import close
from support.helpers_layout import image_arguments, make_image
from vlmfast.compressors.budget import check_layers, drop_layers, equivalent, solve_counts
from vlmfast.compressors.select import best, most_alike, plus_mean, top
from vlmfast.core.views import by_view, covering, marked, per_token, slots
from vlmfast.errors import RecipeError

# --- selection -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1), st.integers(0, 12))
def test_top_selects_best_allowed(entries: list[tuple[int, bool]], k: int) -> None:
    scores = torch.tensor([float(score) for score, _ in entries])
    among = torch.tensor([allowed for _, allowed in entries])
    chosen = top(scores, among, k)
    assert int(chosen.sum()) == min(k, int(among.sum()))
    assert not (chosen & ~among).any()
    left = among & ~chosen
    if chosen.any() and left.any():
        assert scores[chosen].min() >= scores[left].max()
    if among.all():
        assert torch.equal(chosen, best(scores[None], [k])[0])


class Sorts(TorchFunctionMode):
    """Records whether sorts are stable. On a CPU all are, so that results cannot show it."""

    def __init__(self) -> None:
        super().__init__()
        self.stable: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("sort", "argsort"):
            self.stable.append((kwargs or {}).get("stable", False))
        return func(*args, **(kwargs or {}))


def test_best_takes_the_first_of_equals_on_every_device() -> None:
    scores = torch.tensor([[1.0, 2, 2, 2, 0]])
    with Sorts() as sorts:
        chosen = best(scores, [2])
        scores.sort()
    assert chosen.tolist() == [[False, True, True, False, False]]
    assert sorts.stable == [True, False]


def test_most_alike_uses_cosine_similarity() -> None:
    targets = torch.tensor([[1.0, 0], [0, 5], [0, 1]])
    rows = torch.tensor([[9.0, 1], [0.1, 0.2], [0, 0]])
    assert most_alike(rows, targets).tolist() == [0, 1, 0]  # the first of equals


@settings(deadline=None)
@given(st.lists(st.integers(-1, 9), min_size=10, max_size=10), st.integers(0, 99))
def test_plus_mean_equals_loop(wanted: list[int], seed: int) -> None:
    # Targets belong to their own group.
    home = [i if i in wanted else w for i, w in enumerate(wanted)]
    features = torch.randn(10, 3, generator=torch.Generator().manual_seed(seed))
    got = plus_mean(features, torch.tensor(home))
    for i in (i for i in range(10) if home[i] == i):
        others = [j for j in range(10) if home[j] == i and j != i]
        expected = features[i] + features[others].mean(0) if others else features[i]
        close(got[i], expected, terms=len(home), scale=features.abs().max())


# --- patch indices -------------------------------------------------------------------------------


@given(image_arguments())
def test_token_and_patch_indices_are_inverse(arguments: dict) -> None:
    tokens, geometry = make_image(**arguments, view=3)
    layout, (h, w) = tokens.layout, geometry.patches
    first, last = geometry.views
    ids = torch.arange((last - first) * h * w).view(last - first, h * w)
    slot = slots(layout, geometry)
    here = layout.patches
    assert torch.equal(per_token(ids, slot, -1) >= 0, here)
    assert torch.equal(slot[~here], torch.full_like(slot[~here], ids.numel()))
    assert torch.equal(ids[marked(slot, ids)], slot[here].sort().values)
    for view, (index, values) in enumerate(by_view(layout, geometry, ids)):
        assert (layout.view[index] == first + view).all()
        assert torch.equal(values, slot[index])


def test_covering_boxes() -> None:
    boxes = torch.tensor([[0.0, 0, 1, 1], [2, 0, 3, 1], [1, 4, 2, 5]])
    covered = covering(boxes, torch.tensor([1, 1, 0]), 2)
    assert covered.tolist() == [[1, 4, 2, 5], [0, 0, 3, 1]]


# --- layers and budgets --------------------------------------------------------------------------


def test_drop_layers() -> None:
    assert drop_layers("x", (0.25, 0.5, 0.75), 32) == (8, 16, 24)
    assert drop_layers("x", (0.25, 20), 32) == (8, 20)
    assert drop_layers("x", (0.1, 0.2, 0.5), 4, merge=True) == (1, 2)
    with pytest.raises(RecipeError, match="means drops after 1, 1, 2 layers; they must ascend"):
        drop_layers("x", (0.1, 0.2, 0.5), 4)
    with pytest.raises(RecipeError, match=r"x: layers=3/32 .* stay below 32"):
        drop_layers("x", (3, 32), 32)


@pytest.mark.parametrize(
    "layers", [(), (2.5,), (float("inf"),), (3, 3), (7, 3), (0.5, 0.25), (0.5, 0.5)], ids=str
)
def test_invalid_layers_raise(layers: tuple[float, ...]) -> None:
    for ask in (lambda: check_layers("x", layers), lambda: drop_layers("x", layers, 99)):
        with pytest.raises(RecipeError, match=r"x: layers=.* whole numbers, or fractions"):
            ask()


@given(
    st.integers(1, 3000),
    st.floats(0.01, 1.1),
    st.integers(1, 5),
    st.integers(0, 40),
    st.sampled_from([int, round]),
)
def test_solved_counts_meet_the_target(n: int, share: float, drops: int, least: int, whole) -> None:
    layers, least = tuple(range(2, 2 + drops)), min(least, n)
    counts = solve_counts(n, share * n, layers, 8, least=least, whole=whole)
    assert list(counts) == sorted(counts, reverse=True)
    assert least <= counts[-1] <= counts[0] <= n
    floor = equivalent(n, layers, [least] * drops, 8)
    got = equivalent(n, layers, counts, 8)
    # Counts are integers: one more in every stage is the distance of two attainable costs.
    assert abs(got - min(max(share * n, floor), n)) <= 0.5 * (8 - 2) / 8 * drops
