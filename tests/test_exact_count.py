"""`exact_count` equals what the stages keep, for any size and budget, or is refused."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig

from tiny_models import IMAGE_SIZE, PATCH, PINPOINTS, build_llava, build_llava_next
from vlmfast import VLM, Recipe, RecipeError, exact_count
from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import ImageLayout
from vlmfast.core.layout import Kind, VisualTokens
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.saliency import Saliency
from vlmfast.core.statistics import VisionStats
from vlmfast.models import adapter_class

WIDTH, HEADS = 8, 2
REDUCERS = (
    "divprune",
    "downsample",
    "flashvid",
    "grid",
    "hired",
    "prumerge",
    "prumerge-plus",
    "random",
    "scope",
    "visionzip",
)


def adapter_of(family: str, side: int = 4) -> Any:
    """An adapter of a family whose views have ``side x side`` patches."""
    vision = CLIPVisionConfig(image_size=side * PATCH, patch_size=PATCH, num_hidden_layers=1)
    scale = side * PATCH / IMAGE_SIZE
    pinpoints = [[int(h * scale), int(w * scale)] for h, w in PINPOINTS]
    config = SimpleNamespace(
        model_type=family,
        vision_config=vision,
        image_grid_pinpoints=pinpoints,
        vision_feature_select_strategy="full" if family == "llava_onevision" else "default",
        vision_aspect_ratio="anyres_max_2",
    )
    processor = SimpleNamespace(image_processor=SimpleNamespace(), video_processor=None)
    return adapter_class(family).without_weights(config, processor)


def kept(recipe: Recipe, image: ImageLayout, seed: int) -> int:
    """What the stages of a recipe leave of an image with random content."""
    generator = torch.Generator().manual_seed(seed)
    n, geometry = len(image), image.geometry
    features = torch.randn(n, WIDTH, generator=generator)
    if seed % 5 == 0:  # near-duplicates and ties
        features = features.round().clamp(-1, 1)
    newline = image.layout.kind == Kind.NEWLINE
    features[newline] = torch.randn(WIDTH, generator=generator)
    views, patches = geometry.views[1] - geometry.views[0], math.prod(geometry.patches)
    tokens = VisualTokens(features, image.layout)
    request = EncodeRequest("", features[:0], 4)
    for stage in recipe.acting("encode"):
        rows = torch.rand(views, HEADS, patches, generator=generator)
        rows = (rows * 4).softmax(-1) * 0.9
        saliency = {}
        for asked in stage.saliencies():
            keys = torch.randn(views, patches, 6, generator=generator)
            saliency[asked.key] = (Saliency("cls", rows, keys if asked.keys else None),)
        cls = torch.randn(views, WIDTH, generator=generator) if seed % 2 else None
        stats = VisionStats((geometry,), {}, cls=cls, saliency=saliency)
        tokens = stage.reduce(tokens, stats, request)
    return len(tokens)


def drawn(rng: random.Random, adapters: list[Any]) -> tuple[Recipe, ImageLayout]:
    """A recipe of one or two reducers, and the layout of an image of any size."""
    adapter = rng.choice(adapters)
    ratio = rng.choice((1, 1, 1, 4, 40))
    size = rng.randint(8, 2000), max(8, rng.randint(8, 2000) // ratio)
    image = adapter.image_layout(size, alone=rng.random() < 0.8)
    stages = [reducer(rng, name) for name in rng.sample(REDUCERS, rng.choice((1, 1, 2)))]
    return Recipe(tuple(stages)), image


def reducer(rng: random.Random, name: str) -> Any:
    share = rng.choice((round(rng.uniform(0.005, 1), 3), 0.5, 1.0))
    values: dict[str, Any] = {rng.choice(("budget", "keep")): share}
    if name == "hired":
        values |= {
            "rule": rng.choice(("paper", "code")),
            "newline": rng.choice(("drop", "drop", "keep", "rows")),
            "grid_compat": rng.random() < 0.2,
            "alpha": rng.choice((0.1, 0.5)),
        }
    if name in ("hired", "visionzip") and values.get("newline") != "rows":
        values["reserve"] = rng.choice((0.0, 0.0, 0.3))
    if name == "visionzip" and rng.random() < 0.3:
        own = {"dominant": rng.randint(0, 9), "contextual": rng.randint(0, 3)}
        values = own | {"reserve": values["reserve"]}
    return stage_class(name)(**values)


def check(cases: int, adapters: list[Any], seed: int) -> tuple[int, int]:
    """The number of exact counts and of refusals among random cases."""
    rng, exact, refused = random.Random(seed), 0, 0
    for number in range(cases):
        recipe, image = drawn(rng, adapters)
        try:
            count = exact_count(recipe, image)
        except RecipeError:
            refused += 1
            continue
        exact += 1
        assert count == kept(recipe, image, number), (str(recipe), image.geometry)
    return exact, refused


FAMILIES = ("llava", "llava_next", "llava_onevision")


def test_counts_equal_what_the_stages_keep() -> None:
    exact, refused = check(150, [adapter_of(family) for family in FAMILIES], seed=0)
    assert exact > refused > 0


@pytest.mark.slow
def test_ten_thousand_counts_equal_what_the_stages_keep() -> None:
    adapters = [adapter_of(family, side) for family in FAMILIES for side in (2, 4, 7)]
    exact, refused = check(15_000, adapters, seed=1)
    assert exact >= 10_000 and refused > 0


@pytest.mark.parametrize("name", REDUCERS)
def test_every_reducer_has_exact_counts(name: str) -> None:
    """And one that is not always that of the budget times all tokens would be wrong."""
    image = adapter_of("llava_next").image_layout((64, 64))
    stage = stage_class(name)(budget=0.3)
    count = exact_count(stage, image)
    assert count == kept(Recipe((stage,)), image, 1) < len(image)
    assert count != exact_count(stage_class(name)(budget=0.6), image)


def test_every_encode_stage_is_counted_or_refused() -> None:
    image = adapter_of("llava_next").image_layout((64, 64))
    outcome = {}
    for name in stage_names():
        stage = stage_class(name)()
        if not any(part.protocol in ("encode", "in-encoder") for part in stage.expand()):
            continue
        try:
            outcome[name] = exact_count(stage, image)
        except RecipeError as error:
            outcome[name] = str(error)
            assert name in outcome[name] and "exact count" in outcome[name]
    assert {name for name, found in outcome.items() if isinstance(found, int)} >= {
        "divprune",
        "grid",
        "random",
        "scope",
        "visionzip",
    }
    assert "question" in outcome["mmtok"] and "question" in outcome["catp"]
    assert "trained" in outcome["elastic"] and "vision tower" in outcome["tome"]


def test_stages_after_the_prompt_do_not_change_the_count() -> None:
    image = adapter_of("llava").image_layout((64, 64))
    assert exact_count("divprune:0.5+snapkv:0.2", image) == exact_count("divprune:0.5", image)
    assert exact_count(None, image) == len(image) == 16


def test_crops_that_are_not_encoded_have_no_exact_count() -> None:
    image = adapter_of("llava_next").image_layout((64, 64))
    with pytest.raises(RecipeError, match="depends on the crops that it chooses"):
        exact_count("crops:0.5+divprune:0.5", image)
    assert exact_count("crops:1", image) == len(image)


def test_a_view_of_a_drafter_drops_nothing() -> None:
    image = adapter_of("llava").image_layout((64, 64))
    assert exact_count("draft-self:view=divprune", image) == len(image)


def test_the_smallest_budget_leaves_a_token() -> None:
    image = adapter_of("llava").image_layout((64, 64))
    assert exact_count("divprune:budget=0.01", image) == 1
    assert exact_count("divprune:budget=0.5", image) == len(image) / 2


@pytest.mark.parametrize("build", [build_llava, build_llava_next])
@pytest.mark.parametrize("size", [(64, 64), (200, 31)])
def test_layout_and_count_are_those_of_an_answer(build: Any, size: tuple[int, int]) -> None:
    from PIL import Image

    vlm = VLM(*build())
    image = Image.new("RGB", (size[1], size[0]), (200, 30, 90))
    layout = vlm.image_layout(size)
    bare = adapter_class(vlm.model.config.model_type).without_weights(
        vlm.model.config, vlm.processor
    )
    full = vlm.ask("What is this?", images=image, max_new_tokens=1)
    assert full.stats.visual_tokens_in == len(layout)
    for other in (layout, bare.image_layout(size)):
        for name in ("kind", "tile", "grid", "view", "order"):
            wanted = getattr(full.trace.layout, name)
            wanted = wanted - wanted[0] if name == "order" else wanted
            assert torch.equal(getattr(other.layout, name), wanted), name
    recipe = "divprune:budget=0.3"
    answer = vlm.ask("What is this?", images=image, recipe=recipe, max_new_tokens=1)
    assert answer.stats.visual_tokens_kept["divprune"] == exact_count(recipe, layout)


def test_family_without_layouts_is_refused() -> None:
    from vlmfast import ModelError

    adapter = adapter_class("qwen2_5_vl").without_weights(
        SimpleNamespace(model_type="qwen2_5_vl"), None
    )
    with pytest.raises(ModelError, match="supported are llava, llava_next and llava_onevision"):
        adapter.image_layout((64, 64))
