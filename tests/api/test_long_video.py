"""Videos that are prefilled block by block into a cache of bounded size."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import vlmfast.api.long_video as module
from support import interrupts
from support.closeness import apart, close, network, tower
from support.engine.media import decoded_groups
from support.engine.passes import before_prefills, lengths_of_layers, written
from support.engine.videos import (
    blocks_read,
    planned,
    progress_at_once,
    renumberings,
)
from support.media_fixtures import frame_number, write_video
from support.paths import TESTS
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, MediaError, ModelError, RecipeError, Request, VLMFastError
from vlmfast.api.long_video import LongVideo
from vlmfast.core.protocols import CacheStage
from vlmfast.media import OpenVideo, load_video, open_video

QUESTION = "what happens here ?"
HUGE = 1 << 20
NEW = 6
QUIET = {"max_new_tokens": NEW, "progress": False}


FRAMES = [make_image(40, 40, seed) for seed in range(40)]


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava(layers=3, kv_heads=2))


@pytest.fixture(scope="module")
def video_file(tmp_path_factory) -> Path:
    """Thirty frames, ten per second."""
    return write_video(tmp_path_factory.mktemp("clip") / "clip.mp4", 30)


@pytest.fixture
def lengths(monkeypatch) -> list[int]:
    """Physical length of every layer at each write to it."""
    return lengths_of_layers(monkeypatch)


@pytest.fixture
def logits(monkeypatch) -> list[torch.Tensor]:
    """The final logits of each long video's prefill."""
    seen, prefill = [], LongVideo.prefill

    def keep(self, *args):
        seen.append((yield from prefill(self, *args)))
        return seen[-1]

    monkeypatch.setattr(LongVideo, "prefill", keep)
    return seen


# --- one block, many blocks ----------------------------------------------------------------------


def test_drafter_with_the_default_method(vlm):
    """The default cache method goes before drafters."""
    given = {"video": FRAMES[:12], "max_kv_tokens": 200, **QUIET}
    expected = vlm.ask(QUESTION, **given)
    got = vlm.ask(QUESTION, recipe="divprune:1+draft-ngram", **given)
    assert got.token_ids == expected.token_ids
    assert got.recipe == "divprune:1+quickprefill:1+draft-ngram"
    assert got.stats.rounds > 0


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "recipe",
    [
        None,
        "hired:0.5",
        "visionzip:dominant=4,contextual=3",
        "visionzip:dominant=4,contextual=3,proportional_attention=true",
    ],
)
def test_blocks_equal_one_prefill(vlm, logits, recipe, monkeypatch):
    """If all fits, the block size has no effect, also on weights of merged tokens."""
    for block in (12, 5, 1):
        monkeypatch.setattr(module, "FRAMES", block)
        got = vlm.ask(QUESTION, video=FRAMES[:12], recipe=recipe, max_kv_tokens=HUGE, **QUIET)
    terms = tower(vlm.model) + network(vlm.model, got.stats.prompt_tokens)
    for other in logits[1:]:
        close(other, logits[0], terms=terms)
    vlm.ask(QUESTION, video=FRAMES[:11], recipe=recipe, max_kv_tokens=HUGE, **QUIET)
    apart(logits[-1], logits[0], terms=terms)  # control


@pytest.mark.parametrize("build", [build_llava, build_llava_next], ids=["llava", "llava_next"])
def test_prompt_equals_the_processors(build, monkeypatch):
    vlm, ids = VLM(*build(layers=2)), []
    own = LongVideo.ids

    def keep(self):
        ids.append(own(self))
        return ids[-1]

    monkeypatch.setattr(LongVideo, "ids", keep)
    vlm.ask(QUESTION, video=FRAMES[:9], max_kv_tokens=HUGE, **QUIET)
    vlm.adapter.config.vlmfast_frame_label = "frame {i} "
    vlm.ask(QUESTION, video=FRAMES[:9], max_kv_tokens=HUGE, **QUIET)
    assert torch.equal(ids[1], vlm.inputs(QUESTION, video=FRAMES[:9])["input_ids"])
    vlm.adapter.config.vlmfast_frame_label = ""
    assert torch.equal(ids[0], vlm.inputs(QUESTION, video=FRAMES[:9])["input_ids"])
    assert ids[1].shape > ids[0].shape


def test_labels_precede_their_frames(vlm, monkeypatch):
    """With text between the frames, blocks have no effect either."""
    monkeypatch.setattr(vlm.adapter.config, "vlmfast_frame_label", "frame {i} ", raising=False)
    expected = vlm.ask(QUESTION, video=FRAMES[:10], max_new_tokens=NEW)
    monkeypatch.setattr(module, "FRAMES", 3)
    got = vlm.ask(QUESTION, video=FRAMES[:10], max_kv_tokens=HUGE, **QUIET)
    assert got.token_ids == expected.token_ids
    assert got.stats.prompt_tokens == expected.stats.prompt_tokens


# --- the cap -------------------------------------------------------------------------------------


@pytest.mark.cases(6)
@pytest.mark.parametrize("cap", [150, 200, 320, 500, 800])
@pytest.mark.parametrize(
    "recipe", [None, "quickprefill:0.3", "hired:0.5", "hired:0.3+quickprefill"]
)
def test_no_layer_ever_exceeds_the_cap(vlm, lengths, cap, recipe):
    """Neither during the prefill of a block nor while the answer grows."""
    answer = vlm.ask(QUESTION, video=FRAMES, recipe=recipe, max_kv_tokens=cap, **QUIET)
    assert max(lengths) <= cap
    assert len(lengths) > 3 * (len(FRAMES) // 16)
    assert len(answer.token_ids) == NEW
    assert max(answer.stats.kv_tokens_per_layer) <= cap - NEW
    if recipe is None and cap < 800:
        assert max(lengths) > 0.6 * cap  # the cap is used
    assert answer.stats.visual_tokens_in == 16 * len(FRAMES)
    assert (
        answer.stats.kv_bytes_full
        == vlm.adapter.bytes_per_token() * vlm.inputs(QUESTION, video=FRAMES)["input_ids"].shape[1]
    )
    assert answer.stats.kv_bytes == 2 * 2 * 16 * 4 * sum(answer.stats.kv_tokens_per_layer)


def test_text_is_kept_and_frames_share_the_rest(vlm, monkeypatch):
    layers = written(monkeypatch)
    monkeypatch.setattr(vlm.adapter.config, "vlmfast_frame_label", "frame {i} ", raising=False)
    answer = vlm.ask(QUESTION, video=FRAMES, max_kv_tokens=1100, **QUIET)
    ids = vlm.inputs(QUESTION, video=FRAMES)["input_ids"][0]
    visual = ids == vlm.adapter.image_token_id
    question = len(ids) - int(visual.nonzero()[-1]) - 1
    assert len(layers) == 3
    for at, parts in enumerate(layers):
        # A layer's KV is passed twice in its first block: when it ran and at the end.
        orders = torch.cat([kv.order[0] for kv in parts]).unique()
        kept_visual = torch.cat([kv.order[0][kv.visual[0]] for kv in parts]).unique()
        assert orders.max() < len(ids) - question
        there = torch.zeros(len(ids), dtype=torch.bool)
        there[orders] = True
        there[-question:] = True  # kept as it is
        assert there[~visual].all()
        assert visual[kept_visual].all() and len(kept_visual) < int(visual.sum())
        assert answer.stats.kv_tokens_per_layer[at] == len(orders) + question
        # No part of the video is forgotten: each quarter has about as much left.
        quarters = torch.histc(kept_visual.float(), 4, 0, len(ids))
        assert quarters.min() > 0.6 * quarters.max()


@pytest.mark.cases(7)
@pytest.mark.parametrize("frames", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize("cap", [1, 70, 100, 128])
def test_smallest_cap_is_named(vlm, frames, cap, lengths):
    """It works, one less does not, and all above it do."""

    def ask(cap: int) -> None:
        vlm.ask(
            QUESTION, video=FRAMES[:frames], max_kv_tokens=cap, max_new_tokens=20, progress=False
        )
        assert max(lengths) <= cap

    try:
        ask(cap)
        return
    except VLMFastError as error:
        message = str(error)
    assert f"max_kv_tokens={cap} is too small for {frames} frames of 16 tokens" in message
    assert "20 of answer" in message
    least = int(re.search(r"it must be at least (\d+)$", message)[1])
    lengths.clear()
    ask(least)
    assert max(lengths) > 0.6 * least
    with pytest.raises(VLMFastError, match=f"at least {least}$"):
        ask(least - 1)


def test_every_cap_above_the_smallest_works():
    """Although larger blocks need more free slots in addition to the kept ones."""

    def plan(frames: int, per_frame: int, label: int, room: int, cap: int) -> bool | int:
        try:
            blocks, space, block = planned(frames, per_frame, label, room, cap, most=HUGE)
        except VLMFastError as error:
            return int(re.search(r"at least (\d+)$", str(error))[1])
        assert space >= blocks == -(-frames // block)
        assert block == 1 or 4 * block * per_frame <= cap
        return True

    for args in ((40, 16, 1, 6), (33, 88, 8, 60), (192, 88, 8, 1), (130, 9, 0, 16), (1, 576, 3, 9)):
        least = plan(*args, 1)
        assert plan(*args, least - 1) == least
        assert all(plan(*args, cap) is True for cap in range(least, least + 1500))


@pytest.mark.parametrize("cap", [0, -5, 1.5, "100", True, False, [9]])
def test_invalid_caps_are_refused(vlm, cap):
    with pytest.raises(VLMFastError, match=r"max_kv_tokens=.* must be a whole number of at least"):
        vlm.ask(QUESTION, video=FRAMES[:4], max_kv_tokens=cap)


# --- recipes and prompts that cannot be read block by block --------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "pyramiddrop",
        "fastv",
        "mustdrop",
        "snapkv:0.5",
        "h2o:0.5",
        "kivi",
        "zipcache",
        "streamingllm",
        "hired:0.5+snapkv:0.5",
    ],
)
def test_stages_that_need_the_whole_prompt_are_refused(vlm, recipe):
    with pytest.raises(RecipeError, match="needs the whole prompt at once") as error:
        vlm.ask(QUESTION, video=FRAMES[:4], recipe=recipe, max_kv_tokens=HUGE)
    assert recipe.split("+")[-1].split(":")[0] in str(error.value)


def test_cap_without_a_single_video_is_refused(vlm):
    for media in ({"images": make_image()}, {}, {"images": make_image(), "video": FRAMES[:3]}):
        with pytest.raises(VLMFastError, match="max_kv_tokens is for video= alone"):
            vlm.ask(QUESTION, **media, max_kv_tokens=500)
    with pytest.raises(VLMFastError, match="question is empty"):
        vlm.ask(" ", video=FRAMES[:3], max_kv_tokens=500)


def test_sliding_window_limits_the_prompt_not_the_cap():
    """The positions of video and answer count."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, MistralConfig

    model, processor = build_llava()
    text = model.config.text_config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    mistral = MistralConfig(
        **{key: text[key] for key in keys},
        num_hidden_layers=2,
        num_key_value_heads=2,
        sliding_window=200,
    )
    config = LlavaConfig(
        vision_config=model.config.vision_config,
        text_config=mistral,
        image_token_id=model.config.image_token_id,
    )
    windowed = VLM(LlavaForConditionalGeneration(config).eval(), processor)

    def ask(frames: int, new: int, **cap) -> list[int]:
        return windowed.ask(
            QUESTION, video=FRAMES[:frames], max_new_tokens=new, progress=False, **cap
        ).token_ids

    inputs = windowed.inputs(QUESTION, video=FRAMES[:4])
    length = inputs["input_ids"].shape[1]
    max_new_tokens = 200 - length
    wanted = windowed.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    assert ask(4, max_new_tokens) == wanted[0, length:].tolist()
    assert ask(4, max_new_tokens, max_kv_tokens=1000) == ask(4, max_new_tokens)
    for frames, new in ((4, max_new_tokens + 1), (40, 1)):
        for cap in ({}, {"max_kv_tokens": 1000}, {"max_kv_tokens": 250}):
            with pytest.raises(ModelError, match="sliding window of 200"):
                ask(frames, new, **cap)


# --- frames --------------------------------------------------------------------------------------


def test_frames_are_chosen_as_without_a_cap(vlm, video_file, monkeypatch):
    """All choices of `ask`; the tower gets the same frames in the same order."""
    read, seen = OpenVideo.read, []

    def keep(self, start, stop):
        frames = read(self, start, stop)
        if (start, stop) != (0, 1) or self.indices == [0]:
            seen.extend(frame_number(frame) for frame in frames)
        return frames

    monkeypatch.setattr(OpenVideo, "read", keep)
    monkeypatch.setattr(module, "FRAMES", 4)
    for how in ({"num_frames": 10}, {"fps": 5}, {}, {"num_frames": 30}, {"fps": 0.4}):
        seen.clear()
        got = vlm.ask(QUESTION, video=str(video_file), max_kv_tokens=HUGE, **how, **QUIET)
        chosen = list(seen)
        expected = vlm.ask(QUESTION, video=str(video_file), max_new_tokens=NEW, **how)
        assert chosen == load_video(video_file, **how).indices
        assert got.token_ids == expected.token_ids
        assert got.stats.visual_tokens_in == 16 * len(chosen)
    with pytest.raises(VLMFastError):
        vlm.ask(QUESTION, video=str(video_file), num_frames=3, fps=1, max_kv_tokens=HUGE)


@pytest.mark.cases(2)
@pytest.mark.parametrize("decoder", ["av", "decord"])
@pytest.mark.parametrize("container", ["mp4", "mkv", "avi", "mpg"])
def test_parts_of_a_video_equal_those_of_the_whole(tmp_path, decoder, container):
    """For any ranges: consecutive ones, with gaps, and backwards."""
    if decoder == "decord":
        pytest.importorskip("decord")
        if container in ("avi", "mpg"):
            return  # a codec that is not passed to decord
    codec = {"avi": "mpeg4", "mpg": "mpeg1video"}.get(container, "libx264")
    rate = 25 if container == "mpg" else 10
    path = write_video(tmp_path / f"clip.{container}", 40, codec=codec, rate=rate)
    whole = [np.asarray(frame) for frame in load_video(path, num_frames=40, decoder=decoder).frames]
    assert len({of.tobytes() for of in whole}) >= len(whole) - 2 >= 36
    n = len(whole)
    every = lambda info: list(range(info.frames))  # noqa: E731
    cuts = [
        [(0, 1), (0, 7), (7, 8), (8, 21), (21, n)],
        [(at, at + 3) for at in range(0, n - 3, 5)],
        [(20, 30), (5, 9), (9, 12), (11, 14), (30, n), (0, 1)],
    ]
    for parts in cuts:
        with open_video(path, select=every, decoder=decoder) as opened:
            for start, stop in parts:
                got = opened.read(start, stop)
                assert len(got) == stop - start
                for frame, expected in zip(got, whole[start:stop], strict=True):
                    assert np.array_equal(np.asarray(frame), expected)


def test_consecutive_parts_are_decoded_once(tmp_path, monkeypatch):
    """A video that is read in parts is not decoded from its beginning each time."""
    path = write_video(tmp_path / "clip.avi", 40, codec="mpeg4")
    with open_video(path, num_frames=40) as opened:
        starts = decoded_groups(monkeypatch)
        for at in range(0, 40, 4):
            opened.read(at, at + 4)
    assert len(starts) == 1


class Made(list):
    """A video whose frames are drawn on access."""

    def __init__(self, count: int, bad: dict | None = None) -> None:
        super().__init__([None] * count)
        self.bad = bad or {}

    def __getitem__(self, at):
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self.bad.get(at, None) or make_image(40, 40, at)


def threads() -> set:
    """Running threads, except the one that watches all progress bars of the process."""
    return {t for t in threading.enumerate() if type(t).__name__ != "TMonitor"}


def test_frames_are_never_all_in_memory(vlm, monkeypatch):
    frames, blocks, alive = [], [], []
    read = OpenVideo.read

    def living(of: list) -> int:
        return sum(ref() is not None for ref in of)

    def reading(self, start, stop):
        got = read(self, start, stop)
        frames.extend(weakref.ref(frame) for frame in got)
        return got

    def made(block):
        blocks.append(weakref.ref(block.tensors["pixel_values"]))
        alive.append((living(frames), living(blocks)))

    monkeypatch.setattr(OpenVideo, "read", reading)
    blocks_read(monkeypatch, after=made)
    vlm.ask(QUESTION, video=Made(160), max_kv_tokens=600, **QUIET)
    block = 600 // 4 // 16
    assert len(alive) == -(-160 // block) + 1
    assert max(count for count, _ in alive) <= 2 * block
    # One being made, two waiting, one in the model; and the one before it.
    assert max(count for _, count in alive) <= 5
    assert living(frames) == 0 == living(blocks)


def test_decoding_overlaps_with_the_model(vlm, monkeypatch):
    """The model starts a block only when the next one is being made."""
    made, taken, news = [], [], threading.Condition()
    starts = [0, *range(0, 40, 4)]  # the first frame alone, to measure a frame's tokens

    def making(start: int) -> None:
        with news:
            made.append(start)
            news.notify_all()

    def overlapping() -> None:
        taken.append(1)
        with news:
            # Sequentially, no block would be made now, and this would time out.
            wanted = min(len(taken) + 2, len(starts))
            assert news.wait_for(lambda: len(made) >= wanted, timeout=60)

    blocks_read(monkeypatch, before=making)
    before_prefills(monkeypatch, overlapping)
    vlm.ask(QUESTION, video=FRAMES, max_kv_tokens=4 * 4 * 16, max_new_tokens=1, progress=False)
    assert made == starts
    assert len(taken) == 10 + 1  # ten blocks, and the text after the video


BAD = {
    "missing": ({25: "nowhere.png"}, "frame 26 of 40: nowhere.png"),
    "of another size": ({25: make_image(48, 40)}, "frame 26 of 40: is 48x40, the first is 40x40"),
    # Frames of a block are alike, and unlike those before them.
    "all of another size": (
        {at: make_image(48, 40, at) for at in range(24, 40)},
        "frame 25 of 40: is 48x40, the first is 40x40",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_unreadable_frame_in_the_middle(vlm, case):
    before = threads()
    bad, message = BAD[case]
    with pytest.raises(MediaError, match=message):
        vlm.ask(QUESTION, video=Made(40, bad), max_kv_tokens=300, **QUIET)
    assert threads() == before
    assert vlm.model.config.text_config._attn_implementation == "sdpa"
    assert vlm.ask(QUESTION, video=FRAMES[:4], max_kv_tokens=300, **QUIET).token_ids


@dataclass(frozen=True)
class Breaks(CacheStage):
    """Fails in the third block."""

    name: ClassVar[str] = "test-breaks"
    blockwise: ClassVar[bool] = True

    def compress(self, step, layer, kv, stats):
        if int(kv.order[0, 0]) > 100:
            raise KeyError("in the middle")
        return kv.select(torch.arange(min(len(kv), step.limit)))


def test_decoding_thread_ends_when_the_model_fails(vlm):
    """If the model fails, the thread that makes blocks must not wait forever."""
    before = threads()
    with pytest.raises(KeyError, match="in the middle"):
        vlm.ask(QUESTION, video=Made(400), recipe=Breaks(), max_kv_tokens=700, **QUIET)
    assert threads() == before


def test_an_interrupt_ends_the_thread_that_reads(vlm, monkeypatch):
    """Wherever it comes while that thread reads."""
    monkeypatch.setattr(interrupts, "ENGINE", module.__file__)
    own = {number for *_, number in LongVideo.prefill.__code__.co_lines()}
    lines = [line for line in interrupts.lines_of(lambda: read_slowly(vlm)) if line[1] in own]
    before = threads()
    assert 20 < len(lines) <= len(own)
    passed = []
    for line in lines[::5]:
        with interrupts.no_hang(), contextlib.suppress(KeyboardInterrupt):
            interrupts.interrupted(lambda: read_slowly(vlm), line)
            passed.append(line)
        assert threads() == before, line
    assert len(passed) <= 1, passed  # whether frames are waited for depends on the machine


@dataclass
class Slow:
    """A video whose frames are read only after an event, from the second block on."""

    video: VLM
    go: threading.Event

    def __enter__(self) -> Slow:
        self.answer: list[list[int]] = []
        read, self._patch = OpenVideo.read, pytest.MonkeyPatch()

        def slow(video: OpenVideo, start: int, stop: int) -> list:
            assert not start or self.go.wait(60), "the event has not happened"
            return read(video, start, stop)

        self._patch.setattr(OpenVideo, "read", slow)
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        while not self.video.engine.load().prefilling:
            time.sleep(0.001)
        return self

    def _ask(self) -> None:
        self.answer.append(read_slowly(self.video))

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._thread.join()
        self._patch.undo()


def read_slowly(vlm: VLM) -> list[int]:
    return vlm.ask(QUESTION, video=FRAMES, max_kv_tokens=300, **QUIET).token_ids


def test_a_video_that_waits_for_frames_is_passed_over(vlm):
    """Prompts that come later are answered before its next frames are there."""
    short = Request(QUESTION, FRAMES[0], generation={"max_new_tokens": NEW, "eos_token_id": None})
    wanted, slow = vlm.submit(short).result().token_ids, read_slowly(vlm)
    go = threading.Event()
    with Slow(vlm, go) as video:
        handles = [vlm.submit(short) for _ in range(3)]
        streamed = list(vlm.stream(short.question, short.images, **short.generation))
        assert [handle.result(timeout=60).token_ids for handle in handles] == [wanted] * 3
        assert streamed[-1].token_ids == wanted
        load = vlm.engine.load()
        assert not go.is_set() and (load.prefilling, load.decoding, load.waiting) == (1, 0, 0)
    assert video.answer == [slow]


def test_a_video_that_waits_for_frames_counts_as_a_row(vlm, monkeypatch):
    monkeypatch.setattr(vlm.engine, "max_rows", 1)
    go = threading.Event()
    with Slow(vlm, go) as video:
        handle = vlm.submit(Request(QUESTION, generation={"max_new_tokens": 2}))
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.05)
        go.set()
        assert handle.result(timeout=60).token_ids
    assert len(video.answer) == 1


def test_progress_bar_counts_the_frames(vlm, capsys, monkeypatch):
    progress_at_once(monkeypatch)
    vlm.ask(QUESTION, video=FRAMES, max_kv_tokens=300, max_new_tokens=1)
    out, err = capsys.readouterr()
    assert "reading" in err and "40/40" in err and out == ""
    vlm.ask(QUESTION, video=FRAMES, max_kv_tokens=300, max_new_tokens=1, progress=False)
    assert capsys.readouterr() == ("", "")


# --- memory --------------------------------------------------------------------------------------

ASK = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
from support.engine.passes import lengths_of_layers
from support.tiny_models import build_llava
from vlmfast import VLM, media

lengths = lengths_of_layers(types.SimpleNamespace(setattr=setattr))
vlm = VLM(*build_llava(layers=2, kv_heads=2))
vlm.model.config.get_text_config().max_position_embeddings = 8000  # more than a cache holds
cap, *paths = sys.argv[2:]
for path in paths:
    if int(cap):
        tokens = vlm.ask(
            "what happens ?",
            video=path,
            fps=1,
            max_kv_tokens=int(cap),
            max_new_tokens=8,
            progress=False,
        ).stats.visual_tokens_in
    else:
        tokens = 16 * len(media.load_video(path, fps=1, max_pixels=None).frames)
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(json.dumps({"tokens": tokens, "cached": max(lengths, default=0), "kilobytes": peak}))
"""


def drawn(path: Path, seconds: int) -> Path:
    """A video of one frame per second, in which a bar moves."""
    import av

    height, width = 240, 320
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=1)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = {"preset": "ultrafast"}
        for second in range(seconds):
            pixels = np.full((height, width, 3), second % 200, np.uint8)
            pixels[:, second % width] = 255
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return path


def measured(cap: int, *videos: Path) -> list[dict]:
    """Asks about all videos, one after the other, in a separate process."""
    result = subprocess.run(
        [sys.executable, "-c", ASK, str(TESTS), str(cap), *map(str, videos)],
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")


@linux
@pytest.mark.slow
def test_an_hour_takes_no_more_memory_than_ten_minutes(tmp_path):
    ten = drawn(tmp_path / "ten.mp4", 600)
    hour = drawn(tmp_path / "hour.mp4", 3600)
    (few,), (many,) = measured(6000, ten), measured(6000, hour)
    assert (few["tokens"], many["tokens"]) == (600 * 16, 3600 * 16)
    for run in (few, many):
        assert 4000 < run["cached"] <= 6000
    assert many["kilobytes"] < 1.1 * few["kilobytes"]
    # Control: keeping all frames is detected.
    (whole,) = measured(0, hour)
    assert whole["kilobytes"] > 1.5 * few["kilobytes"]


# --- positions -----------------------------------------------------------------------------------


@pytest.fixture
def positions() -> Iterator[tuple[VLM, list[int]]]:
    """A model of 200 positions, and the largest rotary id of each forward pass."""
    vlm, seen = VLM(*build_llava(layers=3, kv_heads=2)), []
    vlm.model.config.get_text_config().max_position_embeddings = 200

    def note(module, args, kwargs) -> None:
        seen.append(int(kwargs["position_ids"].max()))

    hook = vlm.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    yield vlm, seen
    hook.remove()


def test_video_with_more_tokens_than_positions_is_renumbered(positions, vlm):
    bound, seen = positions
    got = bound.ask(QUESTION, video=FRAMES, max_kv_tokens=HUGE, **QUIET)
    assert max(seen) < 200 and max(got.stats.kv_tokens_per_layer) <= 200
    assert got.recipe == "quickprefill:1" and got.stats.visual_tokens_in == 40 * 16
    # The answer depends on the video, and one that fits is read as before.
    other = bound.ask(QUESTION, video=FRAMES[::-1], max_kv_tokens=HUGE, **QUIET)
    assert other.token_ids != got.token_ids
    short = {"video": FRAMES[:8], "max_kv_tokens": 120, **QUIET}
    assert bound.ask(QUESTION, **short).token_ids == vlm.ask(QUESTION, **short).token_ids
    seen.clear()
    bound.model.config.get_text_config().max_position_embeddings = 4096
    bound.ask(QUESTION, video=FRAMES, max_kv_tokens=150, **QUIET)
    assert max(seen) >= 200  # control: if not needed, ids are those of the prompt


def test_renumbered_keys_equal_those_of_the_same_tokens(positions, monkeypatch):
    """Rotated back by their ids, keys are equal to those before."""
    bound, _ = positions
    found = renumberings(monkeypatch)
    bound.ask(QUESTION, video=FRAMES, max_kv_tokens=HUGE, **QUIET)
    assert len(found) > 1
    for each in found:
        assert each.now == each.longest < each.was
        for one, other, control in zip(each.before, each.after, each.off, strict=True):
            # A rotation sums two products; its angle is rounded as the id is large.
            scale = float(one.abs().max()) * each.was
            close(one, other, terms=2, scale=scale)
            apart(one, control, terms=2, scale=scale)


def test_block_larger_than_the_positions_is_refused(positions):
    bound, seen = positions
    bound.model.config.get_text_config().max_position_embeddings = 60
    with pytest.raises(ModelError, match=r"takes \d+ positions and its answer up to 6, .* has 60"):
        bound.ask(QUESTION, video=FRAMES, max_kv_tokens=HUGE, **QUIET)
    assert not seen
