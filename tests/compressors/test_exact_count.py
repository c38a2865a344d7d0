"""`exact_count` equals what the stages keep, for any size and budget, or is refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig

from support import tiny_families
from support.tiny_models import IMAGE_SIZE, PATCH, PINPOINTS, build_llava
from vlmfast import VLM, MediaError, Recipe, RecipeError, exact_count, exact_counts
from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import ImageLayout, VideoLayout
from vlmfast.core.layout import Kind, TokenLayout, VisualTokens
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.saliency import Saliency
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.models import adapter_class

WIDTH, HEADS = 8, 2
REDUCERS = (
    "divprune",
    "downsample",
    "flashvid",
    "grid",
    "hired",
    "mmtok",
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


def kept(recipe: Recipe, media: ImageLayout | VideoLayout, seed: int) -> list[int]:
    """What the stages of a recipe leave of an image, or of each frame, with random content."""
    generator = torch.Generator().manual_seed(seed)
    frames = media.frames if isinstance(media, VideoLayout) else (media,)
    layout = TokenLayout.cat([frame.layout for frame in frames])
    layout = layout.replace(order=torch.arange(len(layout)))
    items = tuple(frame.geometry for frame in frames)
    features = torch.randn(len(layout), WIDTH, generator=generator)
    if seed % 5 == 0:  # near-duplicates and ties
        features = features.round().clamp(-1, 1)
    newline = layout.kind == Kind.NEWLINE
    features[newline] = torch.randn(WIDTH, generator=generator)
    text = torch.randn(3, WIDTH, generator=generator)
    tokens = VisualTokens(features, layout)
    request = EncodeRequest("", text, 4, order=torch.arange(3) + len(layout))
    views = items[-1].views[1]
    for stage in recipe.acting("encode"):
        saliency = {}
        for asked in stage.saliencies():
            saliency[asked.key] = tuple(_saliency(item, asked.keys, generator) for item in items)
        cls = torch.randn(views, WIDTH, generator=generator) if seed % 2 else None
        stats = VisionStats(items, {}, cls=cls, saliency=saliency)
        tokens = stage.reduce(tokens, stats, request)
    return tokens.layout.item.bincount(minlength=len(frames)).tolist()


def _saliency(item: ItemGeometry, keys: bool, generator: torch.Generator) -> Saliency:
    views, patches = item.views[1] - item.views[0], math.prod(item.patches)
    rows = torch.rand(views, HEADS, patches, generator=generator)
    made = torch.randn(views, patches, 6, generator=generator) if keys else None
    return Saliency("cls", (rows * 4).softmax(-1) * 0.9, made)


def video_of(image: ImageLayout, frames: int) -> VideoLayout:
    """A video whose frames have one view each."""
    item = replace(image.geometry, video=0)
    return VideoLayout(
        tuple(
            ImageLayout(
                replace(item, views=(i, i + 1), frame=(i, frames)),
                image.layout.replace(
                    item=torch.full_like(image.layout.item, i),
                    view=torch.where(image.layout.view < 0, -1, i),
                ),
            )
            for i in range(frames)
        )
    )


def drawn(
    rng: random.Random, adapters: list[Any], videos: bool
) -> tuple[Recipe, ImageLayout | VideoLayout]:
    """A recipe of one or two reducers, and the layout of an image or video of any size."""
    if videos:
        side = rng.randint(1, 5)
        frame = adapter_of("llava", side).image_layout((side * PATCH,) * 2)
        names = [*rng.sample(REDUCERS, rng.choice((1, 1, 2))), *rng.sample(("divprune",), 1)]
        stages = [reducer(rng, name) for name in dict.fromkeys(names[: rng.choice((1, 2, 3))])]
        return Recipe(tuple(stages)), video_of(frame, rng.randint(1, 9))
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


def check(cases: int, adapters: list[Any], seed: int, videos: bool = False) -> tuple[int, int, int]:
    """The number of exact counts, of these frame by frame, and of refusals among random cases."""
    rng, exact, apart, refused = random.Random(seed), 0, 0, 0
    for number in range(cases):
        recipe, media = drawn(rng, adapters, videos)
        try:
            count = exact_count(recipe, media)
        except RecipeError:
            refused += 1
            continue
        exact += 1
        found = kept(recipe, media, number)
        assert count == sum(found), str(recipe)
        if videos:
            try:
                each = exact_counts(recipe, media)
            except RecipeError:
                continue
            apart += 1
            assert list(each) == found, str(recipe)
    return exact, apart, refused


FAMILIES = ("llava", "llava_next", "llava_onevision")


@pytest.mark.parametrize(
    ("seed", "cases", "sides"),
    [(0, 120, (4,)), pytest.param(1, 15_000, (2, 4, 7), marks=pytest.mark.slow)],
)
def test_counts_equal_what_the_stages_keep(seed: int, cases: int, sides: tuple[int, ...]) -> None:
    adapters = [adapter_of(family, side) for family in FAMILIES for side in sides]
    exact, _, refused = check(cases, adapters, seed)
    assert exact > refused > 0


@pytest.mark.parametrize(
    ("cases", "most"),
    [
        *((25, most) for most in (8192, 30)),
        *(pytest.param(2_000, most, marks=pytest.mark.slow) for most in (8192, 30, 7)),
    ],
)
def test_counts_of_videos_equal_what_the_stages_keep(
    cases: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of videos that are longer than what is compared together."""
    monkeypatch.setattr("vlmfast.core.counting.MOST", most)
    exact, apart, refused = check(cases, [], seed=most, videos=True)
    assert exact > refused > 0 and exact > apart > 0


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
        "catp",
        "clip-relevance",
        "divprune",
        "grid",
        "mmtok",
        "random",
        "scope",
        "visionzip",
    }
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


# --- every family ---------------------------------------------------------------------------------

BUILD = tiny_families.builders()
RECIPES = ("grid:budget=0.4", "divprune:budget=0.3", "mmtok:budget=0.3", "hired:budget=0.4")


def frame(seed: int, width: int, height: int) -> Any:
    from support.tiny_models import make_image

    return make_image(width, height, seed=seed)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", sorted(BUILD))
def test_layouts_from_sizes_are_those_of_answers(name: str) -> None:
    """Of an image, of two, and of a video, whose counts are those of the answers."""
    vlm = VLM(*BUILD[name]())
    images = [frame(0, 60, 44), frame(1, 30, 75)]
    video = [frame(i, 50, 40) for i in range(5)]
    given: list[tuple[dict[str, Any], list[ImageLayout | VideoLayout]]] = [
        ({"images": images[:1]}, [vlm.image_layout((44, 60))]),
        ({"images": images}, [vlm.image_layout(i.size[::-1], alone=False) for i in images]),
        ({"video": video}, [vlm.video_layout((40, 50), 5)]),
    ]
    for media, layouts in given:
        full = vlm.ask("What is this?", **media, max_new_tokens=1)
        assert full.stats.visual_tokens_in == sum(map(len, layouts))
        frames = [f for m in layouts for f in (m.frames if isinstance(m, VideoLayout) else [m])]
        shown = full.trace.layout.select(full.trace.layout.visual)
        for field in ("kind", "tile", "grid"):
            found = torch.cat([getattr(frame.layout, field) for frame in frames])
            assert torch.equal(found, getattr(shown, field)), field
        for recipe in RECIPES:
            count = sum(exact_count(recipe, layout) for layout in layouts)
            answer = vlm.ask("What is this?", **media, recipe=recipe, max_new_tokens=1)
            (kept,) = answer.stats.visual_tokens_kept.values()
            assert kept == count < full.stats.visual_tokens_in, recipe


def test_counts_in_each_frame() -> None:
    vlm = VLM(*BUILD["qwen2_5_vl"]())
    layout = vlm.video_layout((64, 80), 5)  # in three steps
    assert len(layout.frames) == 3 and len({len(frame) for frame in layout.frames}) == 1
    each = exact_counts("grid:budget=0.4", layout)
    assert len(set(each)) == 1 and sum(each) == exact_count("grid:budget=0.4", layout)
    assert exact_counts("divprune:budget=0.4,across=frame", layout) == each
    assert exact_count("divprune:budget=0.4", layout) == round(0.4 * len(layout))
    with pytest.raises(RecipeError, match=r"divprune: .* in each frame"):
        exact_counts("divprune:budget=0.4", layout)
    with pytest.raises(RecipeError, match=r"grid: .* of each frame"):
        exact_count("divprune:budget=0.4+grid:budget=0.5", layout)


@pytest.mark.parametrize("size", [(0, 64), (64, 2.5), (64,), (10**6, 10**6), (1, 999)])
def test_sizes_that_no_image_has_are_refused(size: Any) -> None:
    vlm = VLM(*build_llava())
    with pytest.raises(MediaError, match="size="):
        vlm.image_layout(size)
    with pytest.raises(MediaError, match="frames=0 must be a whole number"):
        vlm.video_layout((64, 64), 0)
