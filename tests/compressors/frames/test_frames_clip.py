"""frames-clip: selected frames of lists and files, and the cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.tiny_models import build_llava
from support.tiny_models import make_image as photo
from vlmfast import VLM, RecipeError
from vlmfast.compressors import clip as open_clip_models
from vlmfast.compressors.frames.frames_clip import FramesClip
from vlmfast.kernels.diversity import cosine, dpp
from vlmfast.media import VideoInfo, load_video

QUESTION = "where is the dog ?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[str, str]:
    pytest.importorskip("open_clip", reason="OpenCLIP (open_clip_torch) is not installed")
    from support import tiny_clip

    return tiny_clip.build(tmp_path_factory.mktemp("clip"))


def video(n: int) -> list:
    return [photo(40, 40, seed=i) for i in range(n)]


def by_hand(weights, frames: list, places: list[int], n: int, question: str) -> list[int]:
    judge = open_clip_models.load("test", *weights)
    seen = judge.images([frames[i] for i in places])
    r = seen @ judge.text(question)
    r = (r - r.min()) / (r.max() - r.min() + 1e-6)
    s = cosine(seen) + 1e-4 * torch.eye(len(seen))
    return sorted(places[i] for i in dpp(r[:, None] * s * r, n).tolist())


def stage(weights, **values) -> FramesClip:
    return FramesClip(model=weights[0], pretrained=weights[1], **values)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_chosen_frames_equal_a_choice_by_hand(weights, n) -> None:
    frames = video(12)
    seen = load_video(frames, select=lambda info: stage(weights, n=n).frames(info, QUESTION))
    assert seen.indices == by_hand(weights, frames, list(range(12)), n, QUESTION)
    assert seen.info.read is None
    # Fewer candidates: the middles of equal parts.
    few = stage(weights, n=n, candidates=6)
    seen = load_video(frames, select=lambda info: few.frames(info, QUESTION))
    assert seen.indices == by_hand(weights, frames, [1, 3, 5, 7, 9, 11], n, QUESTION)


def test_another_question_chooses_other_frames(weights) -> None:
    info = VideoInfo(20, 1.0, 20.0, 40, 40)
    frames = video(20)
    info = replace(info, read=lambda part: [frames[i] for i in part])
    chosen = {
        tuple(stage(weights, n=4).frames(info, question))
        for question in (QUESTION, "why ?", "a red ball", "nothing at all")
    }
    assert len(chosen) > 1


def test_short_videos_keep_all_frames() -> None:
    """And no CLIP model is loaded."""
    assert FramesClip(n=8).frames(VideoInfo(8, 1.0, 8.0, 4, 4), QUESTION) == list(range(8))


def test_run_with_chosen_frames(weights) -> None:
    vlm, frames = VLM(*build_llava()), video(9)
    chosen = vlm.ask(QUESTION, video=frames, recipe=stage(weights, n=3), max_new_tokens=6)
    places = by_hand(weights, frames, list(range(9)), 3, QUESTION)
    expected = vlm.ask(QUESTION, video=[frames[i] for i in places], max_new_tokens=6)
    assert chosen.token_ids == expected.token_ids
    other = [i for i in range(9) if i not in places][:3]
    assert vlm.ask(QUESTION, video=[frames[i] for i in other], max_new_tokens=6).token_ids != (
        expected.token_ids
    )
    with pytest.raises(RecipeError, match=r"frames-clip chooses frames by the question"):
        vlm.session(video=frames, recipe=stage(weights, n=3))


def test_invalid_values_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"candidates=4 must be at least n=8"):
        FramesClip(candidates=4)
    with pytest.raises(RecipeError, match=r"frames-clip needs the frames"):
        FramesClip(n=2).frames(VideoInfo(8, 1.0, 8.0, 4, 4), QUESTION)
