"""The prefix cache: its store, and image features shared by requests."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from PIL import Image
from transformers import LogitsProcessor, LogitsProcessorList

import vlmfast
from support import tiny_families
from support.engine.kept import (
    CacheStats,
    Entry,
    Key,
    KindStats,
    PrefixCache,
    before_ids_are_compared,
    before_images_are_joined,
    features_alone,
    held_bytes,
    images_read,
    locked,
    overlook,
    prefix_cache_of,
    recent,
    tensors_of,
)
from support.engine.prompts import Inputs, Stats, Trace, prepare, switched
from support.engine.storage import total_bytes
from support.interrupts import Line, traced
from vlmfast import VLM, RecipeError, Request, VLMFastError
from vlmfast.core.protocols import InEncoderStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names
from vlmfast.eval.bench import bench
from vlmfast.eval.runner import evaluate

FAMILIES = sorted(tiny_families.FIRST)


@pytest.fixture(autouse=True)
def _only_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values would save the tower, too; see test_prefixes.py."""
    features_alone(monkeypatch)


QUESTION = "what is here ?"
SIZES = ((60, 44), (30, 70), (90, 33))
# Of every kind: none, by saliency, by features alone, in the tower, in the language model, both.
RECIPES = (
    "none",
    "hired:0.3",
    "visionzip:0.3",
    "divprune:0.3",
    "prumerge",
    "scope:0.3",
    "tome:budget=0.5",
    "mustdrop",
    "pyramiddrop:0.5",
    "hired:0.5+pyramiddrop:0.5+kivi:4,residual=16,group=16",
)


def image_of(seed: int, size: tuple[int, int] = SIZES[0]) -> Image.Image:
    shape = (size[1], size[0], 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


IMAGES = [image_of(i, size) for i, size in enumerate(SIZES)]


# In the fast run every family and every recipe is there, not every pair.
PAIRS = [
    pytest.param(family, recipe, marks=[pytest.mark.slow] if (i + j) % 4 else [])
    for i, family in enumerate(FAMILIES)
    for j, recipe in enumerate(RECIPES)
]


def built(family: str) -> VLM:
    """In float64, so that rounding changes no token."""
    model, processor = tiny_families.builders()[family]()
    return VLM(model.double(), processor)


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request: pytest.FixtureRequest) -> VLM:
    if request.param == "smolvlm":
        pytest.importorskip("num2words")
    return built(request.param)


@pytest.fixture
def llava() -> VLM:
    return built("llava")


class Tower:
    """Counts the images that the vision tower encodes."""

    def __init__(self, vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: list[int] = []
        encode = vlm.adapter.encode

        def counted(tensors: Any, context: Any) -> Any:
            self.images.append(len(context.items))
            return encode(tensors, context)

        monkeypatch.setattr(vlm.adapter, "encode", counted)

    def since(self) -> list[int]:
        """Images of each run since the last call."""
        found, self.images[:] = list(self.images), []
        return found


@pytest.fixture
def tower(llava: VLM, monkeypatch: pytest.MonkeyPatch) -> Tower:
    return Tower(llava, monkeypatch)


def asked(vlm: VLM, images: Any, recipe: str = "none", **more: Any) -> vlmfast.Answer:
    return vlm.ask(QUESTION, images, recipe=recipe, max_new_tokens=6, **more)


def cold(vlm: VLM, images: Any, recipe: str = "none", **more: Any) -> vlmfast.Answer:
    with vlm.prefix_cache.bypassed():
        return asked(vlm, images, recipe, **more)


def shown(answer: vlmfast.Answer) -> dict[str, Any]:
    """All of an answer except times and what the cache had."""
    stats = answer.stats.to_dict()
    others = ("cached_tokens", "peak_memory_bytes", "tokens_per_s", "vision_passes")
    others += ("views", "views_encoded")
    same = {k: v for k, v in stats.items() if not k.endswith("_s") and k not in others}
    return {"tokens": answer.token_ids, "trace": answer.trace.to_dict(), **same}


# --- features: equal answers ---------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(("vlm", "recipe"), PAIRS, indirect=["vlm"])
def test_warm_answer_equals_cold_one(vlm: VLM, recipe: str) -> None:
    """Several images, one of them twice, in another order: tokens, trace and statistics."""
    for chosen in ([0, 1, 0], [1], [2, 0, 1], [1, 1]):
        images = [IMAGES[i] for i in chosen]
        try:
            wanted = shown(cold(vlm, images, recipe))
        except RecipeError:
            pytest.skip("the recipe does not run on this family")
        assert shown(asked(vlm, images, recipe)) == wanted  # some are known
        again = asked(vlm, images, recipe)
        assert shown(again) == wanted
        assert again.stats.cached_tokens == again.stats.visual_tokens_in > 0


@pytest.mark.cases(2)
def test_other_images_have_other_answers(vlm: VLM) -> None:
    """Control of the test above: the features of another image change the answer."""
    first, *others = (image_of(seed) for seed in range(6))
    answer = asked(vlm, first).token_ids
    assert any(asked(vlm, other).token_ids != answer for other in others)


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", ["none", "flashvid:0.4", "visionzip:0.3", "tome:budget=0.5"])
@pytest.mark.parametrize(
    "vlm",
    ["llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm"],
    indirect=True,
)
def test_video(vlm: VLM, recipe: str) -> None:
    frames = [image_of(20 + i, (40, 40)) for i in range(4)]
    more = {"video": frames, "num_frames": 4}
    wanted = shown(cold(vlm, None, recipe, **more))
    for _ in range(2):
        found = asked(vlm, None, recipe, **more)
        assert shown(found) == wanted
    assert found.stats.cached_tokens == found.stats.visual_tokens_in > 0
    more = {"video": frames[::-1], "num_frames": 4}
    assert shown(asked(vlm, None, recipe, **more)) == shown(cold(vlm, None, recipe, **more))


@pytest.mark.cases(1)
@pytest.mark.parametrize("vlm", ["llava_next_video", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_images_and_video_in_one_prompt(vlm: VLM) -> None:
    frames = [image_of(20 + i, (40, 40)) for i in range(4)]

    def ask(images: list[Any], first: bool) -> vlmfast.Answer:
        video = {"type": "video", "video": frames, "num_frames": 4}
        parts = [{"type": "image", "image": image} for image in images]
        content = [video, *parts] if first else [*parts[:1], video, *parts[1:]]
        content.append({"type": "text", "text": QUESTION})
        return vlm.chat([{"role": "user", "content": content}], max_new_tokens=6)

    asked(vlm, IMAGES[1])
    for first in (True, False):
        with vlm.prefix_cache.bypassed():
            wanted = shown(ask(IMAGES, first))
        assert shown(ask(IMAGES, first)) == wanted
        again = ask(IMAGES, first)
        assert shown(again) == wanted
        assert again.stats.cached_tokens == again.stats.visual_tokens_in


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["llava", "llava_next_video", "qwen3_vl", "internvl", "tiny"])
def test_statistics_of_images_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stages read of images from the cache is what they read of the tower."""
    if name == "tiny":
        vlm = VLM.from_pretrained("tiny", device="cpu")
    else:
        model, processor = tiny_families.builders()[name]()
        vlm = VLM(model, processor)
    read = images_read(monkeypatch)
    for recipe in ("visionzip:0.3", "prumerge", "flashvid:0.4", "scope:0.3"):
        read.clear()
        for _ in range(2):
            asked(vlm, IMAGES[:2], recipe)
        first, second = read
        assert len(first) == len(second) > 20
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
            assert one.dtype == other.dtype


def test_entries_are_never_written() -> None:
    """Every method and drafter, on the shipped model, cold and warm."""
    vlm = VLM.from_pretrained("tiny", device="cpu")
    before: dict[Key, list[torch.Tensor]] = {}
    tried = 0
    for name in sorted(stage_names()):
        for _ in range(2):
            try:
                vlm.ask("What is in the bottom left?", IMAGES[2], recipe=name, max_new_tokens=2)
            except (VLMFastError, ImportError):
                continue  # needs another model, a video, or a longer prompt
            tried += 1
        now = {entry.key: tensors_of(entry) for entry in recent(vlm.prefix_cache)}
        for key, tensors in before.items():
            for one, other in zip(tensors, now[key], strict=True):
                assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)), name
        before = now
    assert tried > 60
    assert len(before) > 3


# --- features: what is encoded -------------------------------------------------------------------


def test_tower_runs_only_on_missing_images(llava: VLM, tower: Tower) -> None:
    a, b, c = (image_of(seed) for seed in range(3))
    assert (asked(llava, a).stats.cached_tokens, tower.since()) == (0, [1])
    partial = asked(llava, [b, a, c])
    assert tower.since() == [2]
    assert partial.stats.cached_tokens == partial.stats.visual_tokens_in // 3
    asked(llava, [c, b, a])
    asked(llava, [c, c])
    assert tower.since() == []
    new = image_of(7)
    asked(llava, [new, new])
    assert tower.since() == [1]
    stats = llava.prefix_cache.stats()
    assert stats.entries == 4
    assert stats.kinds == {"images": KindStats(5, 4, 4, stats.bytes, 0)}
    assert stats.hit_rate == 5 / 9


def test_another_image_of_the_same_size_is_encoded(
    llava: VLM, tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = image_of(0), image_of(1)
    asked(llava, one)
    wanted = cold(llava, other).token_ids
    tower.since()
    assert asked(llava, other).token_ids == wanted
    assert tower.since() == [1]
    # One pixel is enough, and without the digest the features of the first image are found.
    pixels = np.array(other)
    pixels[5, 5] ^= 255
    asked(llava, Image.fromarray(pixels))
    assert tower.since() == [1]
    overlook(monkeypatch, "pixels")
    llava.prefix_cache.clear()
    first = asked(llava, one).token_ids
    assert asked(llava, other).token_ids == first != wanted


def test_other_statistics_are_another_entry(llava: VLM, tower: Tower) -> None:
    image = image_of(0)
    for recipe in ("none", "visionzip:0.3", "tome:budget=0.5", "tome:budget=0.6"):
        asked(llava, image, recipe)
        assert tower.since() == [1], recipe
    for recipe in ("divprune:0.3", "pyramiddrop:0.5", "visionzip:0.5", "tome:budget=0.5"):
        asked(llava, image, recipe)
        assert tower.since() == [], recipe


def test_images_stay_together_where_a_stage_sees_all(llava: VLM, tower: Tower) -> None:
    a, b = image_of(0), image_of(1)
    recipe = "tome:budget=0.5"
    asked(llava, [a, b], recipe)
    assert tower.since() == [2]
    asked(llava, a, recipe)
    asked(llava, [b, a], recipe)
    assert tower.since() == [1, 2]
    asked(llava, [a, b], recipe)
    assert tower.since() == []


def test_sessions_and_long_videos_share_features(llava: VLM, tower: Tower) -> None:
    with llava.session(IMAGES[0]) as session:
        assert session.stats.cached_tokens == 0
    with llava.session(IMAGES[0]) as session:
        assert session.stats.cached_tokens == session.stats.visual_tokens_in
        found = session.ask(QUESTION, max_new_tokens=6).token_ids
    assert tower.since() == [1]
    assert found == cold(llava, IMAGES[0]).token_ids
    tower.since()
    frames = [image_of(30 + i, (40, 40)) for i in range(6)]
    long = {"video": frames, "num_frames": 6, "max_kv_tokens": 300, "progress": False}
    first = asked(llava, None, "quickprefill:0.5", **long)
    assert tower.since()
    again = asked(llava, None, "quickprefill:0.5", **long)
    assert tower.since() == []
    assert again.token_ids == first.token_ids
    assert again.stats.cached_tokens == again.stats.visual_tokens_in


def test_attached_model_shares_features(llava: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with vlmfast.attach(llava.model, llava.processor) as attached:
        inputs = attached.vlm.inputs(QUESTION, IMAGES[0])
        tower = Tower(attached.vlm, monkeypatch)
        first = llava.model.generate(**inputs, max_new_tokens=6)
        again = llava.model.generate(**inputs, max_new_tokens=6)
    assert tower.since() == [1]
    assert torch.equal(first, again)


# --- features: what makes them out of date -------------------------------------------------------


def flip(vlm: VLM) -> None:
    vlm.adapter.projector().linear_2.weight.data.mul_(-1)


# All other changes of a tower are in test_prefixes.py.
CHANGES: dict[str, Callable[[VLM], None]] = {
    "weight": flip,
    "feature layer": lambda vlm: setattr(vlm.model.config, "vision_feature_layer", -4),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_is_not_answered_from_old_features(
    change: str, llava: VLM, tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_of(0)
    before = asked(llava, image).token_ids
    CHANGES[change](llava)
    after = asked(llava, image)
    assert after.stats.cached_tokens == 0
    assert after.token_ids == cold(llava, image).token_ids
    assert after.token_ids != before, "the change does not matter"
    # Control: without fingerprint and settings the old features answer.
    llava.prefix_cache.clear()
    overlook(monkeypatch, "tower")
    asked(llava, image)
    flip(llava)
    stale = asked(llava, image)
    assert stale.stats.cached_tokens > 0
    assert stale.token_ids != cold(llava, image).token_ids


def test_weights_of_the_language_model_do_not_matter(llava: VLM, tower: Tower) -> None:
    image = image_of(0)
    before = asked(llava, image).token_ids
    for layer in llava.adapter.decoder.layers:
        layer.mlp.down_proj.weight.data.mul_(-1)
    after = asked(llava, image)
    assert after.stats.cached_tokens > 0
    assert after.token_ids == cold(llava, image).token_ids != before


def test_old_weights_find_their_features_again(llava: VLM, tower: Tower) -> None:
    answers = []
    for _ in range(4):
        answers.append(asked(llava, image_of(0)).token_ids)
        flip(llava)
    assert answers[:2] == answers[2:]
    assert tower.since() == [1, 1]


def test_dtype(llava: VLM, tower: Tower) -> None:
    image = image_of(0)
    asked(llava, image)
    llava.model.float()
    found = asked(llava, image)
    assert found.stats.cached_tokens == 0
    assert tower.since() == [1, 1]
    assert found.token_ids == cold(llava, image).token_ids


def test_autocast(llava: VLM, tower: Tower) -> None:
    llava.model.float()
    image = image_of(0)
    asked(llava, image)
    with torch.autocast("cpu", torch.bfloat16):
        asked(llava, image)
        asked(llava, image)
    assert tower.since() == [1, 1]


def test_crop_of_the_processor_moves_boxes(llava: VLM) -> None:
    """A uniform image has the same pixels with and without the crop, and other boxes."""
    image, images = Image.new("RGB", (90, 40), "red"), llava.processor.image_processor
    found = []
    for crop in (True, False):
        images.do_center_crop = crop
        images.do_resize = True
        images.size = {"shortest_edge": 32} if crop else {"height": 32, "width": 32}
        found.append(shown(asked(llava, image))["trace"])
        assert found[-1] == shown(cold(llava, image))["trace"]
    assert found[0] != found[1]


def test_training_mode_and_hooks_bypass_it(llava: VLM, tower: Tower) -> None:
    image, cache = image_of(0), llava.prefix_cache
    asked(llava, image)
    before, tower.images[:] = cache.stats(), []
    llava.model.train()
    asked(llava, image)
    llava.model.eval()
    part = llava.model.model.multi_modal_projector
    part.train()
    asked(llava, image)
    part.eval()
    seen = []
    handle = part.register_forward_hook(lambda *_: seen.append(1))
    asked(llava, image)
    handle.remove()
    assert tower.since() == [1, 1, 1]
    assert seen == [1]
    assert cache.stats() == before
    assert asked(llava, image).stats.cached_tokens > 0


def test_gradients_bypass_it(llava: VLM, tower: Tower) -> None:
    inputs = Inputs(llava.inputs(QUESTION, image_of(0)), [(44, 60)])
    for grad in (True, True, False, False):
        with switched(llava.model), torch.set_grad_enabled(grad):
            prompt = prepare(llava.adapter, inputs, Recipe(), Stats(), Trace())
        assert prompt.embeds.requires_grad == grad
    assert tower.since() == [1, 1, 1]


def test_stage_whose_parameters_can_change_is_not_shared(llava: VLM, tower: Tower) -> None:
    """A stage of the user's own that cannot be hashed."""

    @dataclass(frozen=True, eq=True)
    class Noted(InEncoderStage):
        name: ClassVar[str] = "noted"
        seen: Any = None
        cells: ClassVar[bool] = True
        __hash__ = None

        def blocks(self, depth: int) -> tuple[int, ...]:
            return (1,)

        def on_block(self, context: Any, index: int, hidden: torch.Tensor) -> Any:
            self.seen.append(index)
            return hidden, None

    stage = Noted([])
    for _ in range(2):
        llava.ask(QUESTION, image_of(0), recipe=stage, max_new_tokens=2)
    assert stage.seen == [1, 1]
    assert tower.since() == [1, 1]


# --- features: tenants, threads, bounds ----------------------------------------------------------


def test_tenants_share_nothing(llava: VLM, tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(tenant: str) -> int:
        request = Request(QUESTION, image_of(0), tenant=tenant, generation={"max_new_tokens": 3})
        return llava.submit(request).result().stats.cached_tokens

    assert [ask(tenant) for tenant in ("a", "b", "")] == [0, 0, 0]
    assert tower.since() == [1, 1, 1]
    assert all(ask(tenant) > 0 for tenant in ("a", "b", ""))
    assert asked(llava, image_of(0)).stats.cached_tokens > 0  # as the tenant ""
    # Control: without the tenant in the key, all of them find the entry of the first.
    llava.prefix_cache.clear()
    overlook(monkeypatch, "tenant")
    assert [ask(tenant) > 0 for tenant in ("c", "d")] == [False, True]


def test_questions_of_a_session_belong_to_its_tenant(llava: VLM, tower: Tower) -> None:
    with llava.session(image_of(0), recipe="tome:budget=0.5", tenant="a") as session:
        session.ask(QUESTION, restore=True, max_new_tokens=2)
    assert tower.since() == [1, 1]
    for tenant, encoded in (("a", []), ("", [1])):
        request = Request(QUESTION, image_of(0), tenant=tenant, generation={"max_new_tokens": 2})
        llava.submit(request).result()
        assert tower.since() == encoded


@pytest.mark.parametrize("tenant", [None, 3, b"a"])
def test_bad_tenant_is_refused(llava: VLM, tenant: Any) -> None:
    with pytest.raises(VLMFastError, match=r"tenant=.* must be a text"):
        llava.submit(Request(QUESTION, tenant=tenant))


def test_two_threads_ask_for_the_same_image(llava: VLM, tower: Tower) -> None:
    wanted = cold(llava, image_of(3)).token_ids
    tower.since()
    barrier = threading.Barrier(4)

    def work(_: int) -> list[int]:
        barrier.wait()
        return asked(llava, image_of(3)).token_ids

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert found == [wanted] * 4
    assert tower.since() == [1]
    assert llava.prefix_cache.stats().entries == 1


def test_entry_evicted_while_it_is_read(llava: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of a prompt are in use until they are joined."""
    images = [image_of(seed) for seed in range(3)]
    asked(llava, images[:2])
    llava.prefix_cache.limit = llava.prefix_cache.stats().bytes  # two images
    wanted = cold(llava, images).token_ids
    cache, held = llava.prefix_cache, list[list[bool]]()

    def pressed() -> None:
        cache.free()
        held.append([entry.in_use for entry in recent(cache)])

    before_images_are_joined(monkeypatch, pressed)
    assert asked(llava, images).token_ids == wanted  # the third one finds no room
    assert held == [[True, True]] * 2  # the third one, then all
    assert not any(entry.in_use for entry in recent(cache))
    # Control: entries that are not in use are gone.
    overlook(monkeypatch, "uses")
    asked(llava, images)
    assert held[-1] == []


def test_failed_tower_leaves_nothing_in_use(llava: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(llava, image_of(0))

    def failing(*args: Any) -> Any:
        raise vlmfast.ModelError("the tower fails")

    monkeypatch.setattr(llava.adapter, "encode", failing)
    with pytest.raises(vlmfast.ModelError, match="the tower fails"):
        asked(llava, [image_of(0), image_of(1)])
    assert not any(entry.in_use for entry in recent(llava.prefix_cache))
    assert llava.prefix_cache.stats().entries == 1


def test_exhausted_memory_frees_entries(llava: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that does not fit is tried again after the entries have been dropped."""
    asked(llava, image_of(0))
    assert llava.prefix_cache.stats().entries == 1
    zeros, tries = torch.zeros, []

    def exhausted(*args: Any, **more: Any) -> torch.Tensor:
        tries.append(llava.prefix_cache.stats().entries)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return zeros(*args, **more)

    monkeypatch.setattr(torch, "zeros", exhausted)
    llava.adapter.pool.take((3, 1 << 12), torch.float32, torch.device("cpu"))
    assert tries == [1, 0]


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("bytes", [-1, 1.5, "1 GB", True, float("nan")])
def test_bad_limit_is_refused(llava: VLM, bytes: Any) -> None:
    for build in (
        lambda: VLM(llava.model, llava.processor, prefix_cache_bytes=bytes),
        lambda: VLM.from_pretrained("tiny", device="cpu", prefix_cache_bytes=bytes),
    ):
        with pytest.raises(VLMFastError, match=r"^prefix_cache_bytes=.*whole number of at least 0"):
            build()


def test_limit(llava: VLM) -> None:
    total = total_bytes(torch.device("cpu"))
    assert llava.prefix_cache.limit == int(total) // 10  # unless the memory is unknown
    off = VLM(llava.model, llava.processor, prefix_cache_bytes=0)
    for _ in range(2):
        assert asked(off, image_of(0)).stats.cached_tokens == 0
    assert off.prefix_cache.stats() == CacheStats()
    small = VLM.from_pretrained("tiny", device="cpu", prefix_cache_bytes=1 << 20)
    assert small.prefix_cache.limit == 1 << 20
    assert small.prefix_cache is prefix_cache_of(small.adapter)
    assert small.prefix_cache is not llava.prefix_cache


# --- timed cold ----------------------------------------------------------------------------------


def test_compare_is_cold_and_decodes_once(
    llava: VLM, tower: Tower, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    path = tmp_path / "image.png"
    image_of(0).save(path)
    for _ in range(2):
        assert asked(llava, path).token_ids
    decoded, load = [], vlmfast.media.load_image
    monkeypatch.setattr(vlmfast.media, "load_image", lambda of: decoded.append(of) or load(of))
    tower.since()
    found = llava.compare(QUESTION, path, recipes=["none", "divprune:0.3"], max_new_tokens=4)
    assert tower.since() == [1, 1, 1]
    assert [one.answer.stats.cached_tokens for one in found] == [0, 0, 0]
    assert decoded == [path]
    assert asked(llava, path).stats.cached_tokens > 0  # afterwards it is on again


def test_compare_decodes_a_video_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = built("llava_next_video")
    decoded, load = [], vlmfast.media.load_video
    monkeypatch.setattr(
        vlmfast.media, "load_video", lambda of, **more: decoded.append(1) or load(of, **more)
    )
    frames = [image_of(i, (40, 40)) for i in range(4)]
    more = {"video": frames, "num_frames": 4, "max_new_tokens": 3}
    found = vlm.compare(QUESTION, recipes=["none", "random:0.5"], **more)
    assert decoded == [1]
    assert found[0].answer.token_ids == vlm.ask(QUESTION, **more).token_ids


def test_bench_is_cold(llava: VLM, tower: Tower) -> None:
    bench(llava, ["none", "divprune:0.3"], new_tokens=2, repeats=2)
    assert tower.since() == [1] * 9


@pytest.mark.slow
def test_evaluation_is_cold(llava: VLM, tower: Tower, tmp_path: Any) -> None:
    for more in ({}, {"session": True}, {"batch_size": 2}):
        evaluate(llava, "shapes", "none", tmp_path / str(len(more)), 1, **more)
        assert llava.prefix_cache.stats().entries == 0
        assert tower.since()


class Once(LogitsProcessor):
    """Calls a function at the first token."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.calls = [call]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        while self.calls:
            self.calls.pop()()
        return scores


@pytest.mark.parametrize("timed", ["compare", "warmup"])
def test_other_threads_keep_the_cache(
    llava: VLM, monkeypatch: pytest.MonkeyPatch, timed: str
) -> None:
    """Also where the thread that is timed runs the engine for them."""
    monkeypatch.undo()
    image, found = image_of(0), []
    with llava.session(image) as session:
        session.ask(QUESTION, max_new_tokens=2)

        def others() -> None:
            found.append(session.ask(QUESTION, max_new_tokens=2))
            found.append(asked(llava, image))

        thread = threading.Thread(target=others)

        def start() -> None:
            thread.start()
            while not llava.engine.load().waiting:
                time.sleep(0.001)

        now = LogitsProcessorList([Once(start)])
        if timed == "compare":
            more = {"max_new_tokens": 4, "logits_processor": now}
            own = llava.compare(QUESTION, image_of(1), recipes=["none"], **more)
            assert [one.answer.stats.cached_tokens for one in own] == [0, 0]
        else:
            ask = llava.ask
            given = {"logits_processor": now}
            monkeypatch.setattr(llava, "ask", lambda *of, **more: ask(*of, **more, **given))
            before = llava.prefix_cache.stats().entries
            llava.warmup()
            monkeypatch.undo()
            assert llava.prefix_cache.stats().entries - before <= 1  # of the session
        thread.join()
        assert session.reuses == "kv"
        assert all(answer.stats.prompt_reused > 0 for answer in found)
    assert llava.prefix_cache.enabled


def test_bypass_nests_and_counts(llava: VLM, tower: Tower) -> None:
    cache = llava.prefix_cache
    asked(llava, image_of(0))
    with cache.bypassed():
        with cache.bypassed():
            assert not cache.enabled
        assert not cache.enabled
        asked(llava, image_of(0))
    assert cache.enabled
    with cache.bypassed(), cache.bypassed(False):
        assert cache.enabled
    with pytest.raises(KeyError), cache.bypassed():
        raise KeyError
    assert cache.enabled
    assert tower.since() == [1, 1]
    assert (cache.stats().hits, cache.stats().misses) == (0, 1)


# --- the store -----------------------------------------------------------------------------------


def key(content: Any, tenant: str = "", kind: str = "x") -> Key:
    return Key(kind, tenant, content)


def prefix(*ids: int) -> Key:
    return Key("x", "", "", ids)


def stored(cache: PrefixCache, name: Any, size: int = 1, **more: Any) -> bool:
    """Put an entry that is not in use."""
    return cache.put(key(name), f"value of {name}", size, **more) is not None


def in_use() -> Lock:
    """A use that lasts until its lock is released."""
    lock = Lock()
    lock.acquire()
    return lock


def test_find_and_put() -> None:
    cache = PrefixCache(10)
    assert cache.find(key("a")) is None
    assert stored(cache, "a", 4)
    entry = cache.find(key("a"))
    assert (entry.value, entry.bytes, entry.in_use) == ("value of a", 4, False)
    assert cache.find(key("a", tenant="other")) is None
    assert cache.find(key("a", kind="other")) is None
    assert stored(cache, "b")
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes) == (1, 3, 2, 5)
    assert stats.kinds["other"].misses == 1
    assert stats.hit_rate == 0.25
    cache.clear()
    assert cache.stats() == CacheStats(limit=10)
    assert CacheStats().hit_rate == 0


def test_release_may_use_the_cache() -> None:
    """Its entry is not found any more."""
    cache = PrefixCache(1)
    seen: list[int] = []
    assert stored(cache, "a", release=lambda: seen.append(cache.stats().entries))
    assert stored(cache, "b")
    assert seen == [0]


def test_equal_hashes_of_other_ids_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are compared while other threads can use the cache."""
    cache = PrefixCache(10)

    def compared() -> None:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(cache.stats).result(timeout=60).entries == 2

    before_ids_are_compared(monkeypatch, compared)
    assert cache.put(Key("x", "a", "", (1, 2)), 1, 1) is not None
    overlook(monkeypatch, "ids")
    assert cache.put(Key("x", "b", "", (3, 4)), 2, 1) is not None
    for tenant, ids, count in (("a", (3, 4), 0), ("b", (3, 5), 0), ("b", (3, 4), 2)):
        entry, found = cache.search(Key("x", tenant, "", ids))
        assert (found, entry is not None) == (count, count > 0)
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (1, 2)


class Store(RuleBasedStateMachine):
    """Random uses of a store, checked against a list of what was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(10)
        self.released: dict[int, int] = {}
        self.used: list[tuple[Entry, Lock]] = []
        self.sizes: dict[int, int] = {}
        self.lowered = False

    @rule(name=st.integers(0, 5), tenant=st.sampled_from("ab"), size=st.integers(0, 12))
    def put(self, name: int, tenant: str, size: int) -> None:
        number = len(self.released)

        def release() -> None:
            self.released[number] += 1

        self.released[number], self.sizes[number] = 0, size
        before, use = {*recent(self.cache)}, in_use()
        entry = self.cache.put(key(name, tenant), (tenant, number), size, release, use)
        if entry is None:
            assert size + self.held() > self.cache.limit
            assert {*recent(self.cache)} == before
            del self.released[number]
            self.released[number] = -1  # the caller's
        else:
            self.used.append((entry, use))

    def held(self) -> int:
        """Bytes that are in use."""
        return sum(entry.bytes for entry in {id(e): e for e, _ in self.used}.values())

    @rule(name=st.integers(0, 5), tenant=st.sampled_from("ab"))
    def find(self, name: int, tenant: str) -> None:
        use = in_use()
        entry = self.cache.find(key(name, tenant), use)
        if entry is not None:
            assert entry.value[0] == tenant
            self.used.append((entry, use))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def end_use(self, data: st.DataObject) -> None:
        _, use = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        use.release()

    @rule(limit=st.integers(1, 12))
    def limit(self, limit: int) -> None:
        self.cache.limit = limit

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule()
    def free(self) -> None:
        self.cache.free()

    @invariant()
    def bytes_are_bounded(self) -> None:
        stats, kept = self.cache.stats(), recent(self.cache)
        assert stats.bytes == sum(entry.bytes for entry in kept)
        ended = {n for n, times in self.released.items() if times}
        taken = sum(size for n, size in self.sizes.items() if n not in ended)
        assert taken == held_bytes(self.cache)
        assert taken <= max(self.cache.limit, self.held())

    @invariant()
    def released_once_and_never_in_use(self) -> None:
        assert all(times in (-1, 0, 1) for times in self.released.values())
        assert all(self.released[entry.value[1]] == 0 for entry, _ in self.used)

    def teardown(self) -> None:
        for _, use in self.used:
            use.release()
        self.cache.clear()
        assert all(times in (-1, 1) for times in self.released.values())
        assert held_bytes(self.cache) == 0


STORE = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStore = Store.TestCase
TestStore.settings = STORE


def used_in_every_way(cache: PrefixCache, release: Callable[[str], None]) -> None:
    """Put, find, replace, evict, remove and clear entries, of both kinds, also in use."""

    def put(name: str, size: int, of: Key, use: Lock | None = None) -> None:
        cache.put(of, name, size, partial(release, name), use)

    use = Lock()
    with use:
        put("a", 2, key("a"), use)
        put("b", 2, prefix(1, 2, 3), use)
        cache.find(key("a"), use)
        cache.search(prefix(1, 2, 4), 1, use)
        put("c", 3, key("a"))
        put("d", 1, prefix(1, 2, 5, 6))
        cache.remove(cache.find(prefix(1, 2, 3)))
        put("e", 2, key("e"))
    put("f", 7, key("f"))
    put("g", 2, prefix(7, 8))
    put("i", 2, prefix(7, 8, 9))
    cache.limit = 9
    cache.free()
    put("h", 4, key("h"))
    cache.clear()


def reached(call: Callable[[], Any]) -> int:
    """How many lines of the engine a call runs, each as often as it is run."""
    found: list[Line] = []
    with traced(found.append):
        call()
    return len(found)


@pytest.mark.cases(1)
@pytest.mark.parametrize("part", range(8))
def test_an_interrupt_of_the_store_leaves_nothing(part: int) -> None:
    """Nothing is in use or counted that is not stored; nothing is released twice."""
    whole = PrefixCache(10)
    count = reached(lambda: used_in_every_way(whole, lambda name: None))
    for last in range(part, count, 8):
        cache, released, left = PrefixCache(10), [], [last]

        def at(line: Line, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), traced(at):
            used_in_every_way(cache, released.append)
        assert sorted(set(released)) == sorted(released)
        found = {name: cache.find(key(name)) for name in "aefh"}
        assert not any(entry.in_use for entry in found.values() if entry is not None)
        assert not {e.value for e in found.values() if e is not None} & {*released}
        for new in (key("new"), prefix(1, 2, 3)):
            cache.limit = 10
            assert cache.put(new, "new", 10) is not None  # evicts all others
            assert cache.stats().bytes == 10
        entry, count = cache.search(prefix(1, 2, 3, 4))
        assert entry is not None and (entry.key, count) == (new, 3)
        cache.clear()
        assert cache.stats() == CacheStats(limit=10)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=30))
def test_order_of_evictions(names: list[int]) -> None:
    """Three entries fit: the last three that were used stay."""
    cache, last, put = PrefixCache(3), [], 0
    for name in names:
        if cache.find(key(name)) is None:
            assert stored(cache, name)
            put += 1
        last = [name, *(other for other in last if other != name)][:3]
        assert [entry.key.content for entry in recent(cache)] == last
    assert cache.stats().evictions == put - len(last)


def test_threads() -> None:
    cache, released = PrefixCache(40), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(400):
            name, use = int(rng.integers(12)), Lock()
            with use:
                entry = cache.find(key(name), use)
                if entry is None:
                    size, value = int(rng.integers(1, 9)), [name]
                    cache.put(key(name), value, size, partial(released.append, value), use)
                else:
                    assert entry.value == [name]
                    assert not any(value is entry.value for value in released)
            if rng.random() < 0.02:
                cache.free()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert cache.stats().bytes == held_bytes(cache) <= 40
    assert released


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_starts_empty() -> None:
    """Also while another thread holds the lock or uses an entry."""
    cache, released, use = PrefixCache(10), [], in_use()
    cache.put(key("a"), 1, 10, lambda: released.append(1), use)
    with locked(cache):
        child = os.fork()
        if not child:
            fine = stored(cache, "b", 10) and cache.stats().entries == 1 and not released
            os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.stats().entries == 1
    assert copy.copy(released) == []
