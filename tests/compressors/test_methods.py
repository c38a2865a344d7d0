"""Properties of every method, trained or not, on the shipped model."""

from __future__ import annotations

import functools
import re
from dataclasses import fields, replace

import pytest
import torch
from PIL import Image

import vlmfast
from support import tiny_families
from support.paths import ROOT
from support.tiny_models import make_image
from vlmfast.compressors import clip as open_clip_models
from vlmfast.core.recipe import PRESETS, Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.errors import RecipeError

_ELSEWHERE = ("media", "views", "drafter")  # have tests of their own
METHODS = sorted(n for n in stage_names() if stage_class(n).protocol not in _ELSEWHERE)
REDUCERS = [n for n in METHODS if hasattr(stage_class(n)(), "budget")]
CACHES = [n for n in METHODS if n not in REDUCERS]
SHARED = [n for n in CACHES if hasattr(stage_class(n)(), "keep")]
MEDIA = {
    "one pixel": {"images": Image.new("RGB", (1, 1), "red")},
    "two images": {"images": [make_image(seed=1), make_image(128, 128, seed=2)]},
    "a video": {"video": [make_image(seed=i) for i in range(3)], "num_frames": 3},
}
# Replaces defaults that are meant for prompts of thousands of tokens.
SHORT = {"window": 0.1, "residual": 32, "tsp": 0.6}


def with_parameters(stage, **values):
    """The stage with those of the values that are parameters of it."""
    names = {f.name for f in fields(stage)}
    return replace(stage, **{name: value for name, value in values.items() if name in names})


def with_budget(name: str, share: float):
    """A method that keeps about ``share`` of the visual tokens or of the cache."""
    if name in REDUCERS:
        return with_parameters(stage_class(name)(), budget=share)
    return with_parameters(stage_class(name)(), keep=share, **SHORT)


@pytest.fixture(autouse=True, scope="module")
def small_openclip(tmp_path_factory):
    """Methods that use an OpenCLIP model use a tiny one, so that tests need no network."""
    from support import tiny_clip

    folder, load, names = tmp_path_factory.mktemp("clip"), open_clip_models.load, []

    def tiny(stage, model, pretrained):
        names[:] = names or tiny_clip.build(folder)
        return load(stage, *names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_clip_models, "load", tiny)
        yield


@functools.cache
def plain(tiny: vlmfast.VLM, case: str, count: int) -> vlmfast.Answer:
    """The answer of the full model."""
    return tiny.ask("what ?", **MEDIA[case], max_new_tokens=count)


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", REDUCERS)
def test_budget_1_is_identity(tiny, name) -> None:
    full = plain(tiny, "two images", 6)
    media = MEDIA["two images"]
    same = tiny.ask("what ?", **media, recipe=with_budget(name, 1.0), max_new_tokens=6)
    assert same.token_ids == full.token_ids
    assert same.stats.equivalent_tokens == full.stats.equivalent_tokens


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", [n for n in REDUCERS if stage_class(n)().floor(6) == 0])
def test_budget_is_met_without_a_floor(tiny, name) -> None:
    """As closely as equal cells and integer counts allow."""
    for budget in (0.5, 0.22, 0.11):
        stats = tiny.ask(
            "what ?", make_image(128, 128), recipe=with_budget(name, budget), max_new_tokens=1
        ).stats
        assert stats.equivalent_tokens / stats.visual_tokens_in == pytest.approx(budget, rel=0.12)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", SHARED)
def test_cache_share_is_met(tiny, name) -> None:
    """In bytes: text that is always kept and the state of decode stages are added."""
    for share in (0.5, 0.2, 0.1):
        stats = tiny.ask(
            "what ?", make_image(128, 128), recipe=with_budget(name, share), max_new_tokens=1
        ).stats
        kept = stats.kv_bytes / stats.kv_bytes_full
        text = 1 - stats.visual_tokens_in / stats.prompt_tokens
        assert share * 0.95 < kept < share * 1.06 + text


@pytest.mark.parametrize("name", [n for n in METHODS if stage_class(n).trained])
def test_missing_weights_raise(name) -> None:
    from support.tiny_models import build_llava

    other = vlmfast.VLM(*build_llava())
    with pytest.raises(RecipeError, match=f"{name}: there are no weights for this llava model"):
        other.ask("what ?", make_image(), recipe=name)
    with pytest.raises(RecipeError, match=rf"vlmfast train {name}"):
        other.ask("what ?", make_image(), recipe=f"{name}:weights=nowhere")
    # Text-only prompts need none.
    assert other.ask("what ?", recipe=name, max_new_tokens=1).token_ids


@pytest.mark.parametrize("name", [n for n in METHODS if stage_class(n).trained])
def test_shipped_weights_are_small(name) -> None:
    from vlmfast.core.weights import SHIPPED

    (folder,) = SHIPPED.glob(f"*-{name}")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000


STACKS = (
    "hired:budget=0.5+pyramiddrop:budget=0.6",
    "elastic:budget=0.3+atp:budget=0.5",
    "pvc:budget=0.22+hired:budget=0.5",
    "mustdrop:budget=0.5+visionzip:budget=0.5",
    "hired:budget=0.5+elastic:budget=0.5+fastv:budget=0.6",
    "downsample:0.4,proportional_attention=true+fastv",
    "mustdrop:0.4,proportional_attention=true+hired:0.5+pyramiddrop",
)


def in_turn(recipes: tuple[str, ...]) -> list:
    """Recipe, medium, positions: every two of them meet; the other half is slow."""
    return [
        pytest.param(recipe, case, positions, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
        for i, recipe in enumerate(recipes)
        for j, case in enumerate(["two images", "a video"])
        for k, positions in enumerate(["keep", "compact"])
    ]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("recipe", "case", "positions"), in_turn(STACKS))
def test_stacked_methods_cost_less_than_each_alone(tiny, recipe, case, positions) -> None:
    """Several stages in one recipe, on an image and a video, with both position policies."""
    stages = tuple(with_parameters(s, positions=positions) for s in Recipe.parse(recipe))
    first = tiny.ask("what ?", **MEDIA[case], recipe=stages[:1], max_new_tokens=2).stats
    whole = tiny.ask("what ?", **MEDIA[case], recipe=stages, max_new_tokens=2)
    assert whole.stats.equivalent_tokens < first.equivalent_tokens
    assert whole.token_ids


CACHE_STACKS = (
    "hired:0.5+lookm:0.4",
    "pyramiddrop+kivi:residual=32",
    "elastic:budget=0.3+snapkv:0.5,window=0.1",
    "pvc:budget=0.22+h2o:0.5",
    "fastv+streamingllm:0.4",
    "downsample:0.4,proportional_attention=true+cake:0.5,window=0.1",
    "visionzip:0.5+fastkv:0.4,window=0.1,tsp=0.6",
    "hired:0.5+zipvl",
    "mustdrop:budget=0.5+lookm:0.5",
    "atp+pyramidkv:0.5,window=0.1",
    "lookm:0.4+kivi:residual=32",
    "vlcache:0.4+zipcache",
)


@pytest.mark.cases(3)
@pytest.mark.parametrize(("recipe", "case", "positions"), in_turn(CACHE_STACKS))
def test_stacked_cache_methods_use_less_memory_than_each_alone(
    tiny, recipe, case, positions
) -> None:
    """Also if an earlier stage renumbered the rows, or dropped different rows per layer."""
    stages = tuple(with_parameters(s, positions=positions) for s in Recipe.parse(recipe))
    whole = tiny.ask("what ?", **MEDIA[case], recipe=stages, max_new_tokens=4)
    assert whole.token_ids
    for part in stages:
        alone = tiny.ask("what ?", **MEDIA[case], recipe=part, max_new_tokens=1)
        assert whole.stats.kv_bytes < alone.stats.kv_bytes, (case, str(part))


SHORT_MEDIA = {
    "text alone": {},
    "one pixel": MEDIA["one pixel"],
    "8 x 8": {"images": make_image(8, 8)},
    "one frame": {"video": [make_image(64, 64)]},
}


def test_short_prompts_keep_more_than_the_budget(tiny) -> None:
    """The window, the text, a visual token; a control is a prompt that has room for the budget."""
    for recipe, least in {
        "snapkv": 32,
        "cake": 32,
        "snapkv:0.01,window=20": 20,
        "streamingllm:0.01": 4,
        "hired:0.2+lookm": 8,
        "fastkv:0.01,tsp=0.01": 8,
        "divprune:budget=0.22+snapkv:0.5": 32,
        "divprune:budget=0.001": 1,
        "fast": 1,
    }.items():
        for case in ("one pixel", "8 x 8", "one frame"):
            stats = tiny.ask("what ?", **SHORT_MEDIA[case], recipe=recipe, max_new_tokens=2).stats
            assert all(n >= least for n in stats.kv_tokens_per_layer), (recipe, case)
            assert stats.visual_tokens_per_layer[0] > 0, (recipe, case)
    stats = [
        tiny.ask("what ?", image, recipe="snapkv:0.15", max_new_tokens=1).stats
        for image in (make_image(8, 8), make_image(128, 128))
    ]
    kept = [s.kv_tokens_per_layer[0] / s.prompt_tokens for s in stats]
    assert kept[1] == pytest.approx(0.15, abs=0.01) and kept[0] > 0.2


def test_rope_aware_merging_in_bfloat16(tiny) -> None:
    assert tiny.model.dtype == torch.bfloat16
    recipe = "lookm:keep=0.5,rope_aware=true"
    assert tiny.ask("what ?", make_image(), recipe=recipe, max_new_tokens=2).token_ids


def recipes_of_the_guides() -> list[str]:
    """Recipes that the documentation shows, in code and in text."""
    root = ROOT
    pages = [root / "README.md", *(p for p in root.glob("docs/*.md") if p.name != "api.md")]
    found: dict[str, None] = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for word in re.findall(r"`([^`\n]+)`|recipe=\"([^\"]+)\"|--recipe ([^\s`]+)", text):
            found[next(filter(None, word))] = None
    return [text for text in found if _is_recipe(text)]


def _is_recipe(text: str) -> bool:
    try:
        return bool(Recipe.parse(text))
    except RecipeError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny", "qwen2_5_vl", "idefics3", "gemma3", "fast_vlm"])
def test_no_recipe_refuses_a_short_input(family: str, request) -> None:
    """Of those that the family and its weights allow, which a larger image tells."""
    if family == "tiny":
        vlm = request.getfixturevalue("tiny")
    else:
        vlm = vlmfast.VLM(*getattr(tiny_families, f"build_{family}")())
    names = [
        *sorted(stage_names()),
        *PRESETS,
        *(recipes_of_the_guides() if family == "tiny" else ()),
    ]
    refused, answered = [], 0
    for recipe in map(Recipe.parse, dict.fromkeys(names)):
        larger = {"video": [make_image(96, 96, seed=i) for i in range(3)]}
        try:
            vlm.ask("what ?", **larger, recipe=recipe, max_new_tokens=1)
            vlm.ask("what ?", make_image(128, 128), recipe=recipe, max_new_tokens=1)
        except RecipeError as error:
            refused.append((str(recipe), str(error)))
            continue
        for case, media in SHORT_MEDIA.items():
            answer = vlm.ask("what ?", **media, recipe=recipe, max_new_tokens=2)
            assert answer.token_ids, (case, str(recipe))
        answered += 1
    assert answered > 2 * len(refused), refused
    if family == "tiny":
        other = {recipe for recipe, error in refused if "weights" not in error}
        assert other == {"fastv:k=6", "fastv:k=9"}, refused  # the guides show their errors
