"""Frames of a video that are not encoded again while nothing changes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from support import tiny_families
from support.closeness import apart, close
from support.look import Look
from support.tiny_models import build_llava, build_llava_next
from support.views import looked, rows_in
from vlmfast import VLM, RecipeError, Request
from vlmfast.compressors.views.static_frames import StaticFrames, change
from vlmfast.core.protocols import ViewStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest

BUILD = {"llava": build_llava, "llava_next": build_llava_next} | {
    name: getattr(tiny_families, f"build_{name}")
    for name in (
        "llava_next_video", "llava_onevision", "internvl", "idefics3", "smolvlm", "gemma3",
        "paligemma", "aya_vision", "fast_vlm",
    )
}  # fmt: skip
SIDE = 40


@functools.cache
def built(name: str) -> VLM:
    if name == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    return VLM(*BUILD[name](), prefix_cache_bytes=0)


@pytest.fixture(scope="module", params=BUILD)
def vlm(request) -> VLM:
    return built(request.param)


@pytest.fixture(scope="module")
def model() -> VLM:
    return built("llava_next")


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def video(*seeds: int) -> dict:
    return {"video": [noise(seed) for seed in seeds], "num_frames": len(seeds)}


STILL = video(0, 0, 0, 1, 1, 0)
SOURCE = [0, 0, 0, 3, 3, 5]
SALIENCIES = (SaliencyRequest(), SaliencyRequest(source="norm"))


# --- the rule -------------------------------------------------------------------------------------


def test_change_is_that_of_the_square_that_changes_most() -> None:
    frame = torch.zeros(2, 3, 10, 10)
    other = frame.clone()
    other[1, :, 8:, 8:] = 0.6  # the lower right square of 4 x 4 has 2 x 2 pixels
    assert float(change(other, frame, 4)) == pytest.approx(0.6)
    assert float(change(other, frame, 5)) == pytest.approx(0.6 * 4 / 25)
    assert float(change(other, frame, 100)) == pytest.approx(0.6 * 4 / 100)
    assert float(change(frame, frame, 4)) == 0
    assert change(frame.half(), frame.half(), 4).dtype == torch.float32


def frames(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None, None, None, None].expand(-1, 1, 3, 8, 8)


@pytest.mark.parametrize(
    ("values", "threshold", "refresh", "expected"),
    [
        ((0.0,), 0.5, 8, [0]),
        ((0.0, 0.0, 0.1, 0.0), 0.0, 8, [0, 0, 2, 3]),
        ((0.0, 0.25, 0.5, 0.75, 1.0), 0.5, 8, [0, 0, 0, 3, 3]),  # slow changes add up
        ((0.0, 0.25, 0.5, 0.75, 1.0), 9.0, 8, [0, 0, 0, 0, 0]),
        ((0.0, 0.0, 0.0, 0.0, 0.0), 9.0, 2, [0, 0, 2, 2, 4]),
        ((0.0, 0.0, 0.0), 9.0, 1, [0, 1, 2]),
        ((0.0, 1.0, 0.0), 0.5, 8, [0, 1, 2]),
    ],
)
def test_reused_frames(values, threshold, refresh, expected) -> None:
    assert StaticFrames(threshold, refresh).reused(frames(*values)) == expected


@functools.lru_cache(maxsize=1)
def unchanged(vlm: VLM) -> tuple:
    """`STILL` with all its frames encoded."""
    return looked(vlm, asked=SALIENCIES, **STILL)


# --- every family that encodes frames one by one --------------------------------------------------


@pytest.mark.cases(4)
def test_features_are_those_of_the_encoded_frames(vlm) -> None:
    full, before, plain = unchanged(vlm)
    tokens, stats, answer = looked(vlm, StaticFrames(0.0), asked=SALIENCIES, **STILL)
    assert torch.equal(tokens.layout.order, full.layout.order)
    assert torch.equal(tokens.layout.view, full.layout.view)
    close(tokens.features, full.features, terms=4000)
    assert answer.token_ids == plain.token_ids
    for one in SALIENCIES:
        for item in stats.items:
            close(stats.salient(one, item).rows, before.salient(one, item).rows, terms=4000)
    assert plain.stats.views_encoded == plain.stats.views == answer.stats.views
    each = plain.stats.views // 6
    assert answer.stats.views_encoded == 3 * each
    # Control: a threshold above every change leaves the first frame alone.
    one, _, other = looked(vlm, StaticFrames(100.0), asked=SALIENCIES, **STILL)
    assert other.stats.views_encoded == each
    apart(one.features, full.features, terms=4000)


def test_reused_frames_enter_neither_tower_nor_projector(vlm) -> None:
    full = rows_in(vlm, lambda: vlm.ask("what ?", **STILL, max_new_tokens=1))
    given = {"recipe": StaticFrames(0.0), "max_new_tokens": 1}
    assert rows_in(vlm, lambda: vlm.ask("what ?", **STILL, **given)) == tuple(n // 2 for n in full)


def test_refresh_1_is_identity(vlm) -> None:
    full, _, plain = unchanged(vlm)
    tokens, _, answer = looked(vlm, StaticFrames(100.0, refresh=1), **STILL)
    assert torch.equal(tokens.features, full.features)
    assert answer.token_ids == plain.token_ids


@pytest.mark.cases(5)
def test_video_of_one_frame_and_images_are_left_alone(vlm) -> None:
    for media in (video(0), {"images": noise(3)}):
        full, _, plain = looked(vlm, **media)
        tokens, _, answer = looked(vlm, StaticFrames(100.0), **media)
        assert torch.equal(tokens.features, full.features)
        assert answer.token_ids == plain.token_ids


def test_images_beside_a_video(vlm) -> None:
    if vlm.adapter.config.model_type == "smolvlm":
        pytest.skip("smolvlm reads images or one video")
    media = {"images": noise(0), **STILL}  # the image equals the first frame
    full, _, plain = looked(vlm, **media)
    tokens, _, answer = looked(vlm, StaticFrames(0.0), **media)
    close(tokens.features, full.features, terms=4000)
    assert answer.token_ids == plain.token_ids
    assert answer.stats.views_encoded < answer.stats.views


# --- other stages, sessions, batches --------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava_next", "internvl", "llava_onevision"])
def test_tome_groups_of_reused_frames(name) -> None:
    vlm, tome = built(name), Recipe.parse("tome:0.5")[0]
    full, _, _ = looked(vlm, tome, **STILL)
    tokens, _, answer = looked(vlm, StaticFrames(0.0), tome, **STILL)
    assert torch.equal(tokens.layout.order, full.layout.order)
    assert torch.equal(tokens.layout.weight, full.layout.weight)
    close(tokens.features, full.features, terms=4000)
    assert answer.stats.views_encoded < answer.stats.views


def test_crops_of_reused_frames(model) -> None:
    """A reused frame has the crops of the frame that it is a copy of."""
    big = [np.random.default_rng(s).integers(0, 256, (100, 100, 3), dtype=np.uint8) for s in (0, 1)]
    media = {"video": [big[0], big[0], big[1]], "num_frames": 3}
    full, _, plain = looked(model, Recipe.parse("crops:0.5")[0], **media)
    recipe = Recipe.parse("crops:0.5+static-frames:0")
    tokens, stats, answer = looked(model, *recipe, **media)
    assert torch.equal(tokens.layout.order, full.layout.order)
    close(tokens.features, full.features, terms=4000)
    assert answer.token_ids == plain.token_ids
    assert answer.stats.views_encoded == 2 * 3
    assert stats.skipped.tolist() == Look.seen["stats"].skipped.tolist()
    assert int(stats.skipped.sum()) == 3 * 2


@pytest.mark.parametrize("recipe", ["static-frames:0.2+flashvid:0.5", "static-frames+hired:0.5"])
def test_reducers_follow(model, recipe) -> None:
    answer = model.ask("what ?", **STILL, recipe=recipe, max_new_tokens=3)
    assert answer.stats.views_encoded == answer.stats.views // 2
    assert answer.stats.equivalent_tokens < 0.6 * answer.stats.visual_tokens_in


def test_sessions_batches_and_the_prefix_cache() -> None:
    model = VLM(*build_llava_next())
    recipe, given = StaticFrames(100.0), {"max_new_tokens": 5}
    alone = model.ask("what ?", **STILL, recipe=recipe, **given).token_ids
    full = model.ask("what ?", **STILL, **given).token_ids
    assert alone != full
    with model.session(**STILL, recipe=recipe, history=False) as session:
        assert session.ask("what ?", **given).token_ids == alone
        assert session.ask("what ?", restore=True, **given).token_ids == full
    requests = [
        Request("what ?", **STILL, recipe=recipe),
        Request("what ?", **STILL),
        Request("what ?", **video(4, 0, 0), recipe=recipe),
    ]
    answers = model.ask_many(requests, batch_size=3, **given)
    assert [answer.token_ids for answer in answers[:2]] == [alone, full]
    # The same frames elsewhere in a video may have other features.
    fresh = VLM(*build_llava_next(), prefix_cache_bytes=0)
    expected = fresh.ask("what ?", **video(4, 0, 0), recipe=recipe, **given)
    assert answers[2].token_ids == expected.token_ids


# --- bad input ------------------------------------------------------------------------------------


def test_towers_that_encode_frames_together_are_refused() -> None:
    vlm = VLM(*tiny_families.build_qwen2_5_vl())
    message = "leaves out frames of a video, and qwen2_5_vl cannot encode some of them without"
    for media in (STILL, {"images": noise(0)}):
        with pytest.raises(RecipeError, match=message):
            vlm.ask("what ?", **media, recipe="static-frames", max_new_tokens=1)
        whole = vlm.ask("what ?", **media, recipe="static-frames:refresh=1", max_new_tokens=1)
        assert whole.token_ids


@pytest.mark.parametrize("choice", [[0, 0], [0, 1, 1], [1, 1, 2], [0, 0, 1], [0, 1, 3]])
def test_invalid_choice_of_a_stage_raises(model, choice) -> None:
    @dataclass(frozen=True)
    class Chooses(ViewStage):
        name: ClassVar[str] = "test-chooses"
        reuses_frames: ClassVar[bool] = True

        def reused(self, pixels):
            return choice

    if choice == [0, 1, 1]:  # the control
        assert model.ask("what ?", **video(0, 1, 2), recipe=Chooses(), max_new_tokens=1).token_ids
        return
    with pytest.raises(RecipeError, match=r"test-chooses chose the frames .* a video of 3"):
        model.ask("what ?", **video(0, 1, 2), recipe=Chooses(), max_new_tokens=1)
