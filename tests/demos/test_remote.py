"""The demo with the model of a server: the same answers, counters and drawings as with its own."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")
pytest.importorskip("openai", reason="pip install 'vlmfast[demo]'")

import httpx2
import openai
import uvicorn
from PIL import Image

import vlmfast
from vlmfast import DeadlineExceeded, RecipeError, VLMFastError
from vlmfast.cli.commands import build_parser, demo_model
from vlmfast.demos import panels, remote, views
from vlmfast.demos.remote import RemoteVLM
from vlmfast.demos.talk import FULL, RECIPE, Conversation, Desk, Limits, Media, Stopped
from vlmfast.serve.app import Server, create_app
from vlmfast.serve.config import ServerConfig

QUESTION, DESCRIBE = "What is in the bottom left?", "Describe the image."
KEY = "a-key-of-the-demo"
GUARD = 60.0  # seconds; only a test that fails waits as long


@contextlib.contextmanager
def served(vlm: vlmfast.VLM) -> Iterator[tuple[str, Server]]:
    config = ServerConfig(recipe="fast", aliases={"full": "none"}, api_keys=(KEY,))
    server = Server(config, lambda: vlm)
    options = {"port": 0, "log_config": None, "access_log": False, "ws": "none"}
    running = uvicorn.Server(uvicorn.Config(create_app(server), **options))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait(lambda: running.started and server.ready)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        running.should_exit = True
        thread.join(GUARD)


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end, "the condition was not met"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server(tiny) -> Iterator[tuple[str, Server]]:
    with served(tiny) as found:
        yield found


@pytest.fixture(scope="module")
def far(server: tuple[str, Server]) -> Iterator[RemoteVLM]:
    vlm = RemoteVLM(f"{server[0]}/v1/", KEY)
    yield vlm
    vlm.close()


def ask(vlm, media: Media, question: str = QUESTION, **changed) -> Conversation:
    """The conversation after one question, at a desk of its own."""
    return ask_at(Desk(vlm, "tiny"), media, question, **changed)


def ask_at(desk: Desk, media: Media, question: str = QUESTION, **changed) -> Conversation:
    given = {"user": "u", "recipe": "balanced", "tokens": 64, "history": False, **changed}
    *_, talk = desk.ask(media=media, question=question, **given)
    return talk


# --- answers -------------------------------------------------------------------------------------


def test_model_of_a_server(far: RemoteVLM, server: tuple[str, Server], tiny) -> None:
    assert (far.name, far.url) == ("tiny", server[0])
    for text in ("balanced", "none", "hired:0.2+pyramiddrop"):
        assert far.recipe(text) == tiny.recipe(text)


RECIPES = (
    "balanced",
    "grid:0.05",
    "downsample",
    "visionzip:0.2",
    "hired:0.5+pyramiddrop+draft-ngram",
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_answers_counters_and_drawings_equal_those_of_a_model_in_the_process(
    far: RemoteVLM, tiny, image: Media, recipe: str
) -> None:
    here, there = (ask(vlm, image, DESCRIBE, recipe=recipe).turns[-1] for vlm in (tiny, far))
    assert there.texts == here.texts
    assert there.agreement == pytest.approx(_agreement_without_end(tiny, here))
    for side in (FULL, RECIPE):
        own, other = here.answers[side], there.answers[side]
        assert other.canonical_recipe == own.canonical_recipe
        assert other.finish_reason == own.finish_reason
        for name in ("visual_tokens_kept", "equivalent_tokens", "kv_bytes", "drafted", "accepted"):
            assert getattr(other.stats, name) == getattr(own.stats, name), name
        assert other.stats.ttft_s > 0 < other.stats.tokens_per_s
        assert other.trace.to_dict() == own.trace.to_dict()
    rows = [{what: cells for what, *cells in panels.counters(turn)} for turn in (here, there)]
    for what in ("Visual tokens", "Visual tokens, mean over layers", "KV cache"):
        assert rows[0][what] == rows[1][what]
    mine, theirs = (views.views(turn.shown) for turn in (here, there))
    for own, other in zip(mine, theirs, strict=True):
        assert np.array_equal(np.asarray(own.image), np.asarray(other.image))
        assert np.array_equal(own.dropped, other.dropped)
        # A recipe that neither drops nor merges anything would look like the input.
        assert other.dropped.any() or (there.shown.trace.entered.weight > 1).any()
        assert own.caption == other.caption


def _agreement_without_end(tiny, turn) -> float:
    """The API does not return end tokens."""
    ends = tiny.processor.tokenizer.all_special_ids
    full, shown = (
        [i for i in turn.answers[side].token_ids if i not in ends] for side in (FULL, RECIPE)
    )
    return vlmfast.api.vlm.agreement(shown, full)


def test_drafts_are_counted(far: RemoteVLM, image: Media) -> None:
    turn = ask(far, image, DESCRIBE, recipe=RECIPES[-1], tokens=24).turns[-1]
    stats = turn.shown.stats
    (row,) = (cells for what, *cells in panels.counters(turn) if what == "Accepted drafts")
    assert row == ["–", f"{stats.accepted} of {stats.drafted}"]
    assert 0 < stats.accepted < stats.drafted


def test_first_questions_find_no_cache_and_later_ones_do(far: RemoteVLM, image: Media) -> None:
    for _ in range(2):  # of two users
        desk = Desk(far, "tiny")
        talk = ask_at(desk, image)
        assert talk.turns[-1].answers[FULL].stats.prompt_reused == 0
        ask_at(desk, image, "What color is the circle?")  # a session reads the image once
        talk = ask_at(desk, image, "What color is the circle?")
        assert talk.turns[-1].answers[FULL].stats.prompt_reused > 300
        assert not talk.turns[0].answers


def test_video_is_read_by_the_server(far: RemoteVLM, tiny, examples) -> None:
    path, question = examples["video"][0]
    here, there = (ask(vlm, Media("video", path, 4), question).turns[-1] for vlm in (tiny, far))
    assert there.texts == here.texts == {FULL: "up", RECIPE: "up"}
    strips = [views.views(turn.shown) for turn in (here, there)]
    for mine, theirs in zip(*strips, strict=True):
        assert mine.caption == theirs.caption
        assert np.array_equal(mine.dropped, theirs.dropped)
        assert np.array_equal(np.asarray(mine.image), np.asarray(theirs.image))
    fewer = ask(far, Media("video", path, 2), question).turns[-1]
    assert len(fewer.shown.trace.images) == 2


def test_frames_that_the_recipe_chooses_are_blank(examples) -> None:
    path = examples["video"][0][0]
    images = remote.RemoteMedia(None, path, None).images(3)
    assert len(images) == 3
    assert images[0].getcolors() == [(images[0].width * images[0].height, remote.BLANK)]
    assert len(remote.RemoteMedia(None, path, 3).images(3)[0].getcolors(10_000)) > 1


# --- what ends early -----------------------------------------------------------------------------


def test_stop_cancels_the_request_at_the_server(
    far: RemoteVLM, server: tuple[str, Server], image: Media
) -> None:
    desk = Desk(far, "tiny")
    engine = server[1].running.vlm.engine

    def stopped() -> None:
        for talk in desk.ask("u", image, DESCRIBE, "balanced", 512, False):
            if talk.current and talk.current.texts.get(FULL):
                talk.stop()

    with pytest.raises(Stopped):
        stopped()
    wait(lambda: engine.load().decoding == engine.load().prefilling == 0)
    assert desk.talk("u").turns == []
    assert ask_at(desk, image).turns[-1].texts[FULL]


def test_time_limit(far: RemoteVLM, image: Media) -> None:
    desk = Desk(far, "tiny", Limits(seconds=1e-6))
    with pytest.raises(DeadlineExceeded, match="1e-06 s"):
        ask_at(desk, image)


def test_stream_without_its_end_is_an_error(
    far: RemoteVLM, image: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late() -> Iterator[object]:
        error = {"message": "too late", "param": None, "code": "timeout"}
        request = httpx2.Request("POST", "http://127.0.0.1")
        raise openai.APIError("of a stream", request, body=error)
        yield

    picture = Image.open(image.path)
    session = far.session(picture, recipe=vlmfast.Recipe(), history=False, tenant="one")
    for chunks, words in (((), "closed the connection"), (late(), "too late")):
        response = contextlib.nullcontext(chunks)
        completions = far.client.chat.completions
        monkeypatch.setattr(completions, "create", lambda given=response, **_: given)
        with pytest.raises(VLMFastError, match=words):
            list(session.stream(QUESTION, max_new_tokens=1))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "words"), [("hird:0.2", "hired"), ("hired:speed=2", "speed")])
def test_recipe_is_checked_by_the_server(
    far: RemoteVLM, image: Media, recipe: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        ask(far, image, recipe=recipe)
    assert str(caught.value).startswith("recipe: ")  # as the server says it


def test_wrong_servers(server: tuple[str, Server], tmp_path: Path) -> None:
    url = server[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for where, key, words in (
        (url, None, "Authorization"),
        (url, "another", "Authorization"),
        (closed, KEY, f"cannot reach the server {closed}"),
        ("127.0.0.1:8000", KEY, "must be a URL"),
        (f"{url}/other", KEY, "not served"),
    ):
        with pytest.raises(VLMFastError, match=re.escape(words)) as caught:
            RemoteVLM(where, key)
        assert KEY not in str(caught.value) and "\n" not in str(caught.value)


def test_command_line(server: tuple[str, Server], monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    def model(*words: str):
        return demo_model(build_parser().parse_args(["demo", *words]))

    vlm, name = model("--server", server[0], "--api-key", KEY)
    assert isinstance(vlm, RemoteVLM) and name == "tiny"
    vlm.close()
    monkeypatch.setenv("VLMFAST_API_KEY", KEY)
    vlm, name = model("--server", server[0])
    assert name == "tiny"
    vlm.close()
    with pytest.raises(VLMFastError, match="Authorization"):
        model("--server", server[0], "--api-key", "another")
    monkeypatch.setattr(vlmfast.VLM, "from_pretrained", lambda *args, **more: tiny)
    assert model() == (tiny, "tiny")
    other = ("--server", server[0], "--model", "other")
    for words in (("--api-key", KEY), ("--server", server[0], "--device", "cpu"), other):
        with pytest.raises(VLMFastError, match="--server"):
            model(*words)
