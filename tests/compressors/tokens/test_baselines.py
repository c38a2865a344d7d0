"""The controls: random, evenly spaced and averaged tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.closeness import close
from support.engine.kept import with_digests
from support.helpers_layout import REQUEST, image_arguments, make_image, prompt
from support.tiny_models import make_image as tiny_image
from vlmfast import VLM, Answer, Request
from vlmfast.compressors.select import count
from vlmfast.compressors.tokens.downsample import Downsample
from vlmfast.compressors.tokens.random import Random, shuffled
from vlmfast.core.layout import VisualTokens
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.statistics import VisionStats
from vlmfast.core.views import cells

NO_ROWS: dict[int, torch.Tensor] = {}  # controls use no vision statistics


def reduced(stage: EncodeStage, *images: dict) -> tuple[VisualTokens, VisualTokens]:
    tokens, stats = prompt(*images)
    return tokens, stage.reduce(tokens, VisionStats(stats.items, NO_ROWS), REQUEST)


# --- random and grid -----------------------------------------------------------------------------


def test_counts_round_half_to_even() -> None:
    assert [count(0.25, n) for n in (1, 2, 6, 10)] == [1, 1, 2, 2]


def test_random_draws_differ_by_seed_and_item() -> None:
    arguments = {"tiles": (2, 2), "patches": (6, 6)}
    same_image_twice = reduced(Random(0.3), arguments, arguments)[1]
    tokens, one = reduced(Random(0.3), arguments)
    second = same_image_twice.layout.item == 1
    offset = int(same_image_twice.layout.order[second][0] - one.layout.order[0])
    assert not torch.equal(same_image_twice.layout.order[second], one.layout.order + offset)
    other = reduced(Random(0.3, seed=1), arguments)[1]
    assert not torch.equal(other.layout.order, one.layout.order)
    few = set(reduced(Random(0.1), arguments)[1].layout.order.tolist())
    assert few < set(one.layout.order.tolist())
    # Every patch is drawn at some seed: no part of the image is left out.
    drawn = torch.zeros(len(tokens))
    for seed in range(60):
        drawn[reduced(Random(0.3, seed=seed), arguments)[1].layout.order - 3] += 1
    assert (drawn[tokens.layout.patches] > 3).all()


def test_shuffled_is_pinned() -> None:
    """The draw is part of a recipe's meaning: changing it changes published numbers."""
    assert shuffled(8, 0, 0, 8).tolist() == [5, 6, 0, 7, 3, 1, 4, 2]
    assert sorted(shuffled(100, 3, 1, 100).tolist()) == list(range(100))


def test_every_image_has_a_draw_of_its_own(random_vlm: VLM) -> None:
    """The draw depends on the content, and neither on the cache, the batch nor the entry point."""

    def kept(answer: Answer) -> list[int]:
        return (answer.trace.depth > 0).nonzero().flatten().tolist()

    ask = {"recipe": "random:0.3", "max_new_tokens": 1}
    images = [tiny_image(seed=seed) for seed in range(3)]
    drawn = [kept(random_vlm.ask("what ?", image, **ask)) for image in images]
    assert len({len(rows) for rows in drawn}) == 1
    assert len({tuple(rows) for rows in drawn}) == 3
    with random_vlm.prefix_cache.bypassed():
        assert [kept(random_vlm.ask("is it ?", image, **ask)) for image in images] == drawn
    generation = {"max_new_tokens": 1}
    requests = [Request("what ?", [i], recipe="random:0.3", generation=generation) for i in images]
    assert [kept(answer) for answer in random_vlm.ask_many(requests, batch_size=3)] == drawn
    other = kept(random_vlm.ask("what ?", images[0], recipe="random:0.3,seed=1", max_new_tokens=1))
    assert other != drawn[0]


def test_rounding_does_not_change_a_digest(random_vlm: VLM) -> None:
    """Other arithmetic and bfloat16 leave it; another image changes it."""

    def digest(pixels: torch.Tensor) -> int:
        return with_digests(adapter, {**tensors, "pixel_values": pixels}, items)[0].digest

    adapter, image = random_vlm.adapter, tiny_image(seed=1)
    prompt = random_vlm.processor(images=[image], text="<image>", return_tensors="pt")
    tensors = {key: value for key, value in prompt.items() if key != "input_ids"}
    items = adapter.items(dict(prompt), [(image.height, image.width)], None)
    pixels = tensors["pixel_values"]
    noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0))
    assert digest(pixels) == digest(pixels + 1e-6 * noise) != 0
    assert digest(pixels.double()) == digest(pixels)
    assert digest(pixels + 0.1) != digest(pixels)


@given(st.integers(1, 200), st.data())
def test_evenly_spaced_indices(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    chosen = cells(k, n).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == k
    assert 0 <= chosen[0] <= chosen[-1] < n
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert abs(chosen[0] - (n - 1 - chosen[-1])) <= 1
    assert cells(3, 10).tolist() == [1, 5, 8]


# --- downsample ----------------------------------------------------------------------------------


def test_representative_is_nearest_the_centre() -> None:
    tokens, geometry = make_image((0, 0), (6, 6))
    kept = Downsample(4 / 36).reduce(tokens, VisionStats((geometry,), NO_ROWS), REQUEST)
    assert kept.layout.grid[:, 1:].tolist() == [[1, 1], [1, 4], [4, 1], [4, 4]]


@given(image_arguments(), st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_weighted_sum_is_conserved(arguments: dict, rate: float) -> None:
    tokens, kept = reduced(Downsample(rate), arguments)
    patches = tokens.layout.patches
    assert float(kept.layout.weight.sum()) == int(patches.sum())
    ours = (kept.features * kept.layout.weight[:, None]).sum(0)
    rows = tokens.features[patches]
    # Means of cells, then their sum; the terms of the sum may cancel.
    close(ours, rows.sum(0), terms=2 * len(rows), scale=rows.abs().sum(0))
    for view in set(tokens.layout.view[patches].tolist()):
        whole = tokens.layout.view == view
        assert float(kept.layout.weight[kept.layout.view == view].sum()) == int(whole.sum())


@given(image_arguments(), st.floats(0.01, 0.99))
@settings(max_examples=25, deadline=None)
def test_resolution_is_nearest_to_target(arguments: dict, rate: float) -> None:
    """Brute-force search over every allowed shape of cells."""
    tokens, kept = reduced(Downsample(rate), arguments)
    target, (h, w) = count(rate, len(tokens)), arguments["patches"]
    patches = tokens.layout.select(tokens.layout.patches)
    places = list(zip(patches.tile.tolist(), *patches.grid[:, 1:].T.tolist(), strict=True))
    attainable = {
        len({(t, (2 * y + 1) * a // (2 * h), (2 * x + 1) * b // (2 * w)) for t, y, x in places})
        for a in range(1, h + 1)
        for b in range(1, w + 1)
        if 0.5 <= (h * b) / (w * a) <= 2 or a == b == 1
    }
    assert len(kept) in attainable
    assert abs(len(kept) - target) == min(abs(number - target) for number in attainable)


def test_weights_and_levels_are_pooled() -> None:
    tokens, geometry = make_image((0, 0), (4, 4))
    weight = 1 + torch.arange(16.0) % 3
    protected = torch.arange(16) == 5
    level = torch.randn(16, 8, dtype=torch.float64)
    tokens = VisualTokens(
        tokens.features.half(),
        tokens.layout.replace(weight=weight, protected=protected),
        (level,),
    )
    kept = Downsample(1 / 16).reduce(tokens, VisionStats((geometry,), NO_ROWS), REQUEST)
    assert kept.layout.weight.tolist() == [float(weight.sum())]
    assert kept.layout.protected.tolist() == [True]
    assert kept.features.dtype == torch.float16
    expected = (level * weight[:, None]).sum(0) / weight.sum()
    # In float32 for any input type.
    scale = level.abs().max()
    close(kept.extra[0][0], expected, torch.float32, len(weight), scale=scale)
