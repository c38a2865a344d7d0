"""Times of videos reach the prompt by every way in, as Hugging Face's processors write them."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from support import media_fixtures as fx
from support import tiny_families
from support.eval_data import VIDEOS, write_video_mme
from vlmfast import VLM, MediaError, Request, VLMFastError
from vlmfast.eval.tasks import find_task
from vlmfast.media import FrameTimes, VideoFrames, VideoInfo, load_video, open_video, probe_video

TIMED = ("smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")  # prompts or positions tell times
QUESTION = "hi there"
ASK: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
BUILT: dict[str, VLM] = {}
PERIOD = 5  # seconds between the frames of `slow`


def family(name: str) -> VLM:
    if name == "smolvlm":
        pytest.importorskip("num2words")  # needed by its processor
    if name not in BUILT:
        BUILT[name] = VLM(*tiny_families.builders()[name]())
    return BUILT[name]


@pytest.fixture(scope="module")
def slow() -> bytes:
    """A minute in twelve frames."""
    return fx.still(60 // PERIOD, Fraction(1, PERIOD))


def images(count: int, size: int = 64) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(count)]


def processed(vlm: VLM, frames: list[Any], **about: Any) -> dict[str, torch.Tensor]:
    """What Hugging Face's processor makes of frames that are described by a `VideoMetadata`."""
    processor = vlm.processor
    content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    shown = [np.asarray(frame) for frame in frames]
    smol = vlm.adapter.config.model_type == "smolvlm"
    return processor(
        text=[text],
        videos=[[np.stack(shown)]] if smol else [shown],
        video_metadata=[VideoMetadata(**about)],
        do_sample_frames=False,
        return_tensors="pt",
    )


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two prompts have the same ids and, where times enter positions, the same steps."""
    steps = [of.get("second_per_grid_ts") for of in (ours, theirs)]
    lists = [None if of is None else torch.as_tensor(of).tolist() for of in steps]
    return torch.equal(ours["input_ids"], theirs["input_ids"]) and lists[0] == lists[1]


def smol_times(ids: torch.Tensor) -> list[int]:
    """The length and the times, in seconds, that SmolVLM reads."""
    text = family("smolvlm").processor.tokenizer.decode(ids[0])
    hours, minutes, seconds = map(int, re.search(r"from a (\d+):(\d+):(\d+)", text).groups())
    marks = [int(a) * 60 + int(b) for a, b in re.findall(r"Frame from (\d+):(\d+)", text)]
    return [(hours * 60 + minutes) * 60 + seconds, *marks]


# --- files ---------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[bytes, Fraction, int, int]:
    """A file of constant rate, often with an offset; its rate, its frames, and how many to read."""
    draw = random.Random(seed)
    rate = draw.choice(
        [
            Fraction(draw.randint(200, 60_000), 1000),
            Fraction(draw.choice([24_000, 30_000, 60_000]), 1001),
            Fraction(draw.randint(1, 60)),
            Fraction(1, draw.randint(1, 5)),
        ]
    )
    count, container = draw.randint(2, 150), draw.choice(["mp4", "mov", "matroska", "avi"])
    first = 0 if container == "avi" else draw.choice([0, 1, 7])  # AVI has no times
    data = fx.still(count, rate, container, periods=range(first, first + count))
    return data, rate, count, min(count, draw.randint(2, 32))


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(200))
def test_prompts_of_constant_rate_equal_those_of_hugging_face(seed: int) -> None:
    data, rate, count, shown = drawn(seed)
    with av.open(io.BytesIO(data)) as container:
        stated = float(container.streams.video[0].average_rate)
    assert stated == pytest.approx(float(rate), rel=1e-6)
    chosen = np.linspace(0, count - 1, shown, dtype=int).tolist()
    frames = load_video(data, num_frames=shown).frames
    about = {"total_num_frames": count, "fps": stated, "duration": count / stated}
    for name in TIMED:
        vlm = family(name)
        ours = vlm.inputs(QUESTION, video=data, num_frames=shown)
        assert same(ours, processed(vlm, frames, **about, frames_indices=list(chosen))), name
        other = {**about, "fps": 3 * stated, "duration": count / stated / 3}
        control = processed(vlm, frames, **other, frames_indices=list(chosen))
        # Times may round to the same text; these families are told lengths and rates.
        told = name == "qwen2_5_vl" or (name == "smolvlm" and count > 2 * stated)
        assert not (told and same(ours, control)), name


def test_chosen_frames_keep_their_place_in_the_video(slow: bytes) -> None:
    video = load_video(slow, select=lambda info: [5, 7, 8, 11])
    about = {"total_num_frames": 12, "fps": 1 / PERIOD, "duration": 60.0}
    for name in TIMED:
        wanted = processed(family(name), video.frames, **about, frames_indices=[5, 7, 8, 11])
        assert same(family(name).inputs(QUESTION, video=video), wanted), name
    assert smol_times(family("smolvlm").inputs(QUESTION, video=video)["input_ids"]) == [
        60, 25, 35, 40, 55,
    ]  # fmt: skip


def drawn_ticks(seed: int, container: str) -> tuple[bytes, list[int]]:
    """A file whose frames are irregular numbers of milliseconds apart, and their times."""
    draw = random.Random(seed)
    ticks = [0]
    for _ in range(draw.randint(3, 40)):
        ticks.append(ticks[-1] + draw.choice([1, 17, 40, 250, 1000, draw.randint(1, 9000)]))
    offset = draw.choice([0, 40, 1234])
    periods = [offset + tick for tick in ticks]
    return fx.still(len(ticks), Fraction(1000), container, periods=periods), ticks


@pytest.mark.cases(3)
@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("seed", range(20))
def test_times_of_variable_rate_are_those_of_the_container(container: str, seed: int) -> None:
    data, ticks = drawn_ticks(seed, container)
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        tick, times = float(stream.time_base), [frame.time for frame in file.decode(stream)]
    times = [at - times[0] for at in times]
    assert times == pytest.approx([at / 1000 for at in ticks], abs=1e-3)
    count = len(ticks)
    video = load_video(data, num_frames=count)
    assert video.indices == list(range(count))
    assert video.timestamps_s == pytest.approx(times, abs=tick)
    # Frames at whole seconds are not told a second less.
    ours = smol_times(family("smolvlm").inputs(QUESTION, video=data, num_frames=count)["input_ids"])
    assert ours == [int(video.info.duration_s), *(at // 1000 for at in ticks)]
    vlm = family("qwen3_5")
    text = vlm.processor.tokenizer.decode(
        vlm.inputs(QUESTION, video=data, num_frames=count)["input_ids"][0]
    )
    odd = [*times, times[-1]][: count + count % 2]
    steps = [(a + b) / 2 for a, b in zip(odd[::2], odd[1::2], strict=True)]
    told = [float(of) for of in re.findall(r"<([\d.]+) seconds>", text)]
    assert told == pytest.approx(steps, abs=0.05 + tick)


def test_a_frame_that_is_missing_is_not_rounded_away() -> None:
    """In a container with ticks as long as a period, too."""
    periods = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    data = fx.still(10, Fraction(25), "mp4", periods=periods)
    times = load_video(data, num_frames=10).timestamps_s
    assert times == pytest.approx([at / 25 for at in periods], abs=1e-6)


def test_a_last_frame_that_stays_counts_to_the_length() -> None:
    data = fx.still(4, Fraction(1), "mp4")
    info = probe_video(data)
    assert (info.fps, info.duration_s) == (1.0, 4.0)
    late = probe_video(fx.still(4, Fraction(1), "mp4", periods=[0, 1, 2, 9]))
    assert late.duration_s == 10.0 and late.fps == pytest.approx(0.4)


# --- lists ---------------------------------------------------------------------------------------


def test_lists_with_a_rate_or_times_have_the_prompts_of_their_file(slow: bytes) -> None:
    whole = load_video(slow, num_frames=12)
    for name in TIMED:
        vlm = family(name)
        file = vlm.inputs(QUESTION, video=slow, num_frames=12)
        assert same(vlm.inputs(QUESTION, video=whole.frames, fps=1 / PERIOD), file), name
        assert same(vlm.inputs(QUESTION, video=whole), file), name
        assert not same(vlm.inputs(QUESTION, video=whole.frames), file), name  # 1 s apart
        some = vlm.inputs(QUESTION, video=slow, num_frames=4)
        assert same(vlm.inputs(QUESTION, video=whole.frames, fps=1 / PERIOD, num_frames=4), some), (
            name
        )
        assert same(vlm.inputs(QUESTION, video=whole, num_frames=4), some), name


def test_times_of_a_list_are_told_as_they_are() -> None:
    given = [10.0, 12.5, 13.0, 40.25, 59.0]
    for times in (given, tuple(given), np.array(given), torch.tensor(given)):
        ours = family("smolvlm").inputs(QUESTION, video=images(5), timestamps=times)
        assert smol_times(ours["input_ids"]) == [59, 10, 12, 13, 40, 59]
    about = {"total_num_frames": 5, "fps": 1.0, "frames_indices": given, "duration": 59.0}
    for name in ("smolvlm", "qwen3_vl", "qwen3_5", "glm4v"):
        ours = family(name).inputs(QUESTION, video=images(5), timestamps=given)
        assert same(ours, processed(family(name), images(5), **about)), name
    even = [index / 2 for index in range(6)]
    rate, times = (
        family("qwen2_5_vl").inputs(QUESTION, video=images(6), **of)
        for of in ({"fps": 2}, {"timestamps": even})
    )
    assert same(rate, times) and rate["second_per_grid_ts"].tolist() == [1.0]


def test_media_functions_take_the_same_lists() -> None:
    listed = load_video(images(4), timestamps=[0, 1, 4, 9], num_frames=2)
    assert (listed.indices, listed.timestamps_s) == ([0, 3], [0.0, 9.0])
    assert listed.info == VideoInfo(4, 1 / 3, 9.0, 64, 64)
    assert listed.times == FrameTimes(4, 1 / 3, 9.0, (0, 3), (0.0, 9.0))
    assert load_video(images(4), fps=8).timestamps_s == [0.0, 0.125, 0.25, 0.375]
    again = load_video(listed, select=lambda info: [info.frames - 1])
    assert (again.indices, again.timestamps_s, again.info) == ([3], [9.0], listed.info)
    assert probe_video(listed) == listed.info
    assert [np.asarray(frame).tolist() for frame in listed] == [
        np.asarray(listed[at]).tolist() for at in (0, 1)
    ]
    with open_video(listed, num_frames=1) as opened:
        assert opened.times == replace(listed.times, indices=(0,), timestamps_s=(0.0,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timestamps": [0, 1]}, "timestamps: 2 times for 3 frames"),
        ({"timestamps": []}, "timestamps: 0 times for 3 frames"),
        ({"timestamps": [0, 1, 2], "fps": 1}, "fps and timestamps: only one"),
        ({"timestamps": [0, 2, 1]}, r"timestamps=\[0, 2, 1\]: .* ascending, from 0"),
        ({"timestamps": [0, 1, 1]}, "ascending"),
        ({"timestamps": [-1, 0, 1]}, "from 0 on"),
        ({"timestamps": [0, 1, float("nan")]}, "finite"),
        ({"timestamps": [0, 1, float("inf")]}, "finite"),
        ({"timestamps": ["0", "1", "2"]}, "list of finite numbers"),
        ({"timestamps": "012"}, "list of finite numbers"),
        ({"timestamps": {0: 0, 1: 1, 2: 2}}, "list of finite numbers"),
        ({"timestamps": 3}, "timestamps=3: must be a list"),
        ({"timestamps": [0, 1, 1e300]}, "at most 1e.09 s"),
        ({"fps": 0}, "fps=0: must be a finite number above 0"),
        ({"fps": "2"}, "fps='2': must be a finite number"),
        ({"fps": 1e-300}, "at most 1e.09 s"),
    ],
)
def test_times_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MediaError, match=message):
        family("qwen2_5_vl").ask(QUESTION, video=images(3), **given, **ASK)


def test_files_have_their_own_times(slow: bytes) -> None:
    vlm, video = family("qwen2_5_vl"), load_video(slow, num_frames=3)
    with pytest.raises(MediaError, match="timestamps: a file has its own"):
        vlm.ask(QUESTION, video=slow, timestamps=[0, 1], **ASK)
    for given in ({"fps": 1}, {"timestamps": [0, 1, 2]}):
        with pytest.raises(MediaError, match="have times already"):
            vlm.ask(QUESTION, video=video, **given, **ASK)
    with pytest.raises(VLMFastError, match=r"timestamps.*for video=, and no video was given"):
        vlm.ask(QUESTION, images=images(1), timestamps=[0], **ASK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": [0, 1]}, "2 indices and 3 timestamps_s"),
        ({"frames": []}, "3 indices for 0 frames"),
        ({"indices": [0, 2, 1]}, "indices: must ascend"),
        ({"indices": [0, 1, 12]}, "at most 11"),
        ({"timestamps_s": [0.0, 9.0, 5.0]}, "timestamps_s: must ascend"),
        ({"timestamps_s": [0.0, 5.0, 61.0]}, "at most duration_s=60"),
        ({"info": VideoInfo(12, 0.0, 60.0, 32, 32)}, "fps must be a finite number above 0"),
    ],
)
def test_inconsistent_frames_are_refused(slow: bytes, change: dict, message: str) -> None:
    video = load_video(slow, num_frames=3)
    with pytest.raises(MediaError, match=message):
        replace(video, **change)


# --- one frame -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(of, marks=[] if of in TIMED else pytest.mark.slow)
        for of in tiny_families.builders()
    ],
)
def test_one_frame_answers(name: str) -> None:
    vlm = family(name)
    (frame,) = images(1)
    one = vlm.ask(QUESTION, video=[frame], timestamps=[7.0], **ASK)
    assert len(one.token_ids) > 0 and one.stats.visual_tokens_in > 0
    inputs = vlm.inputs(QUESTION, video=[frame], timestamps=[7.0])
    wanted = vlm.model.generate(**inputs, **ASK)[0, inputs["input_ids"].shape[1] :]
    assert one.token_ids == wanted.tolist()
    other = vlm.ask(QUESTION, video=[255 - frame], timestamps=[7.0], **ASK)
    assert other.stats.visual_tokens_in == one.stats.visual_tokens_in


def test_one_frame_is_a_step_of_its_own() -> None:
    """Processors that join frames repeat the last one of an odd number: so does one frame."""
    (frame,) = images(1)
    about = {"total_num_frames": 9, "fps": 2.0, "duration": 4.5}
    video = VideoFrames([frame], [7], [3.5], VideoInfo(9, 2.0, 4.5, 64, 64))
    for name in ("qwen3_vl", "qwen3_5", "glm4v"):
        vlm = family(name)
        wanted = processed(vlm, [frame, frame], **about, frames_indices=[7, 7])
        ours = vlm.inputs(QUESTION, video=video)
        assert same(ours, wanted), name
        pixels = wanted["pixel_values_videos"].to(ours["pixel_values_videos"].dtype)
        assert torch.equal(ours["pixel_values_videos"], pixels), name


# --- ways in -------------------------------------------------------------------------------------


def ways(data: bytes, path: Path) -> dict[str, Callable[[VLM], list[int]]]:
    """Ways to ask about four frames of a video, which return the ids of the answer."""
    video, whole = load_video(data, num_frames=4), load_video(data, num_frames=12)
    times = {"video": whole.frames, "timestamps": [*whole.timestamps_s], "num_frames": 4}
    rate = {"video": whole.frames, "fps": 1 / PERIOD, "num_frames": 4}
    text = {"type": "text", "text": QUESTION}

    def chat(**entry: Any) -> list[dict]:
        return [{"role": "user", "content": [{"type": "video", **entry}, text]}]

    def session(vlm: VLM, **media: Any) -> list[int]:
        with vlm.session(**media) as opened:
            return opened.ask(QUESTION, **ASK).token_ids

    return {
        "path": lambda v: v.ask(QUESTION, video=path, num_frames=4, **ASK).token_ids,
        "frames": lambda v: v.ask(QUESTION, video=video, **ASK).token_ids,
        "rate": lambda v: v.ask(QUESTION, **rate, **ASK).token_ids,
        "stream": lambda v: [*v.stream(QUESTION, **rate, **ASK)][-1].token_ids,
        "chat": lambda v: v.chat(chat(path=str(path), num_frames=4), **ASK).token_ids,
        "chat about a list": lambda v: v.chat(chat(**rate), **ASK).token_ids,
        "batch": lambda v: v.ask_many([Request(QUESTION, **rate)], **ASK)[0].token_ids,
        "submit": lambda v: v.submit(Request(messages=chat(**rate)), **ASK).result().token_ids,
        "session": lambda v: session(v, video=path, num_frames=4),
        "session about a list": lambda v: session(v, **rate),
        "compare": lambda v: (
            v.compare(QUESTION, **rate, recipes=["none"], **ASK)[1].answer.token_ids
        ),
        "times": lambda v: v.ask(QUESTION, **times, **ASK).token_ids,
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(of, marks=[] if of in TIMED[:2] else pytest.mark.slow) for of in TIMED],
)
def test_every_way_in_tells_the_same_times(slow: bytes, tmp_path: Path, name: str) -> None:
    vlm, path = family(name), tmp_path / "slow.mp4"
    path.write_bytes(slow)
    about = {"total_num_frames": 12, "fps": 1 / PERIOD, "frames_indices": [0, 3, 7, 11]}
    inputs = processed(vlm, load_video(slow, num_frames=4).frames, **about, duration=60.0)
    wanted = vlm.model.generate(**inputs, **ASK)[0, inputs["input_ids"].shape[1] :].tolist()
    asked = ways(slow, path)
    if name == "smolvlm":
        del asked["times"]  # the length of a list with times is that of its last
    for way, ask in asked.items():
        assert ask(vlm) == wanted, way
    frames = load_video(slow, num_frames=4).frames
    untold = vlm.ask(QUESTION, video=frames, **ASK)  # a second apart
    assert untold.token_ids != wanted or name not in ("smolvlm", "qwen3_vl")


def test_the_same_frames_at_other_times_share_no_cache() -> None:
    vlm, frames = family("qwen2_5_vl"), images(8)
    rates = (1, 0.1, 8, 1)
    with vlm.prefix_cache.bypassed():
        alone = [vlm.ask(QUESTION, video=frames, fps=rate, **ASK).token_ids for rate in rates]
    assert alone[0] == alone[3] and len({*map(tuple, alone)}) > 1  # the control
    assert [vlm.ask(QUESTION, video=frames, fps=rate, **ASK).token_ids for rate in rates] == alone


@pytest.mark.parametrize(
    "recipe",
    [
        "none",
        "divprune:0.5,positions=compact",
        pytest.param("divprune:0.5,positions=keep", marks=pytest.mark.slow),
        pytest.param("fastv:k=2,keep=0.5", marks=pytest.mark.slow),
    ],
)
def test_sessions_continue_after_times_that_lead_the_text(recipe: str) -> None:
    """A rotary id for each half of a second, and a few for each frame: text follows the latter."""
    vlm, media = family("qwen2_5_vl"), {"video": images(8), "fps": 0.2}
    questions = (QUESTION, "what is it ?")
    inputs = vlm.inputs(QUESTION, **media)
    position = vlm.adapter.positions(inputs)
    assert position.max() > position[:, -1].max() + 20
    with vlm.prefix_cache.bypassed():
        wanted = [vlm.ask(of, **media, recipe=recipe, **ASK).token_ids for of in questions]
    if recipe == "none":
        whole = vlm.model.generate(**inputs, **ASK)[0, inputs["input_ids"].shape[1] :]
        assert wanted[0] == whole.tolist()
    with vlm.session(**media, recipe=recipe, history=False) as session:
        assert [session.ask(of, **ASK).token_ids for of in questions] == wanted
    drafter = "draft-ngram" if recipe == "none" else f"{recipe}+draft-ngram"
    drafted = vlm.ask(QUESTION, **media, recipe=drafter, **ASK)
    assert drafted.token_ids == wanted[0] and wanted[0] != wanted[1]


def test_sessions_keep_times_when_they_are_saved(slow: bytes, tmp_path: Path) -> None:
    vlm = family("smolvlm")
    with vlm.session(video=slow, num_frames=4) as session:
        session.save(tmp_path / "session")
        wanted = session.ask(QUESTION, **ASK).token_ids
    with vlm.load_session(tmp_path / "session") as loaded:
        assert loaded.ask(QUESTION, **ASK).token_ids == wanted
    frames = load_video(slow, num_frames=4).frames
    with vlm.session(video=frames) as other:  # the control
        assert other.ask(QUESTION, **ASK).token_ids != wanted


def test_long_videos_tell_times_where_the_family_does(slow: bytes) -> None:
    """Frames that are read as images have the family's marks beside them."""
    marks: dict[str, Callable[[float], list[str]]] = {
        "qwen3_vl": lambda at: [f"<{at:.1f} seconds>", ""],
        "glm4v": lambda at: ["", f"{int(at)}"],
    }
    video = load_video(slow, num_frames=4)
    for name, mark in marks.items():
        vlm = family(name)
        content: list[dict] = []
        for frame, at in zip(video.frames, video.timestamps_s, strict=True):
            before, after = mark(at)
            content += [{"type": "text", "text": before}] if before else []
            content.append({"type": "image", "image": frame})
            content += [{"type": "text", "text": after}] if after else []
        content.append({"type": "text", "text": QUESTION})
        wanted = vlm.chat([{"role": "user", "content": content}], **ASK)
        for media in ({"video": slow, "num_frames": 4}, {"video": video}):
            long = vlm.ask(QUESTION, **media, max_kv_tokens=10**6, progress=False, **ASK)
            assert long.token_ids == wanted.token_ids, name
            assert long.stats.prompt_tokens == wanted.stats.prompt_tokens, name
        listed = {"video": video.frames, "timestamps": video.timestamps_s}
        long = vlm.ask(QUESTION, **listed, max_kv_tokens=10**6, progress=False, **ASK)
        assert long.stats.prompt_tokens == wanted.stats.prompt_tokens, name


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Video-MME with a video of twenty minutes, a frame each minute."""
    folder = write_video_mme(tmp_path_factory.mktemp("video-mme"))
    data = fx.still(20, Fraction(1, 60))
    (folder / "data" / f"{next(iter(VIDEOS))}.mp4").write_bytes(data)
    return folder


@pytest.mark.parametrize("control", [None, "question-only"])
@pytest.mark.parametrize(
    ("mode", "minutes"),
    [
        ("lmms-eval", [0, 6, 12, 19]),
        ("official", [0, 6, 12, 19]),
        ("vlmevalkit", [4, 8, 12, 16]),
    ],
)
def test_video_mme_tells_the_times_of_the_file(
    films: Path, mode: str, minutes: list[int], control: str | None
) -> None:
    task = find_task("video-mme", data=films, num_frames=4, mode=mode)
    doc = next(doc for doc in task.docs(None, 0) if doc.media_id == next(iter(VIDEOS)))
    media = task.media(doc, control)
    ids = family("smolvlm").inputs(**media)["input_ids"]
    assert smol_times(ids) == [1200, *(60 * of for of in minutes)]
