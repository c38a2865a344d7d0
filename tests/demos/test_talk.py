"""Conversations of the demo: what is asked, counted and drawn, and what bad input says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from PIL import Image

import vlmfast
from support.engine.clients import messages_of
from support.media_fixtures import frame_number, still, write_video
from vlmfast import MediaError, RecipeError, VLMFastError
from vlmfast.core.protocols import MediaStage
from vlmfast.demos import panels, views
from vlmfast.demos.talk import FULL, RECIPE, RESTORED, Conversation, Desk, Limits, Media, Stopped

QUESTION = "What is in the bottom left?"
BALANCED = str(vlmfast.Recipe.parse("balanced"))


@pytest.fixture
def desk(tiny) -> Desk:
    return Desk(tiny, "tiny")


def ask(desk: Desk, media: Media, question: str = QUESTION, **changed) -> Conversation:
    given = {"user": "u", "recipe": "balanced", "tokens": 24, "history": False, **changed}
    *_, talk = desk.ask(media=media, question=question, **given)
    return talk


# --- answers -------------------------------------------------------------------------------------


def test_first_question_reports_the_statistics_of_ask(desk: Desk, image: Media, tiny) -> None:
    turn = ask(desk, image).turns[-1]
    for side, recipe in ((FULL, "none"), (RECIPE, "balanced")):
        alone = tiny.ask(QUESTION, images=image.path, recipe=recipe, max_new_tokens=24)
        answer = turn.answers[side]
        assert answer.token_ids == alone.token_ids
        assert answer.stats.visual_tokens_kept == alone.stats.visual_tokens_kept
        assert answer.stats.kv_bytes == alone.stats.kv_bytes
    kept = [turn.answers[side].stats.equivalent_tokens for side in (FULL, RECIPE)]
    assert kept[1] < 0.25 * kept[0]


def test_text_is_streamed(desk: Desk, image: Media) -> None:
    seen = []
    given = ("u", image, "Describe the image.", "balanced", 24, False)
    for talk in desk.ask(*given):
        if talk.current:
            seen.append(dict(talk.current.texts))
    texts = [of[FULL] for of in seen if RECIPE not in of]
    assert len(set(texts)) > 5
    assert all(later.startswith(text) for text, later in pairwise(map(str.strip, texts)))
    assert talk.current is None
    assert len(talk.turns) == 1


def test_later_question_reuses_the_image(desk: Desk, image: Media) -> None:
    first = ask(desk, image)
    assert first.turns[0].answers[FULL].stats.prompt_reused == 0
    talk = ask(desk, image, "What color is the circle?")
    assert talk is first
    stats = talk.turns[1].answers[RECIPE].stats
    assert stats.prompt_reused > 300
    assert stats.prompt_fed < 30
    assert not talk.turns[0].answers
    assert talk.turns[1].texts[FULL] == "purple"


def test_both_answers_see_the_history(desk: Desk, image: Media, tiny) -> None:
    ask(desk, image, history=True)
    talk = ask(desk, image, "Is there a blue circle?", history=True)
    said = [{"role": "user", "content": [{"type": "image", "image": image.path},
                                         {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": talk.turns[0].texts[FULL]},
            {"role": "user", "content": "Is there a blue circle?"}]  # fmt: skip
    with tiny.prefix_cache.bypassed():
        answer = tiny.chat(said, max_new_tokens=24)
    assert talk.turns[1].answers[FULL].token_ids == answer.token_ids
    assert (
        talk.turns[1].answers[FULL].stats.prompt_reused
        + talk.turns[1].answers[FULL].stats.prompt_fed
        == answer.stats.prompt_tokens
    )
    assert messages_of(talk, RECIPE)[1]["content"] == talk.turns[0].texts[RECIPE]


@pytest.mark.cases(1)
@pytest.mark.parametrize("history", [False, True])
def test_full_detail_uses_all_tokens(desk: Desk, image: Media, history: bool) -> None:
    ask(desk, image, history=history, recipe="grid:0.05")
    talk = ask(desk, image, "What color is the circle?", history=history, recipe="grid:0.05")
    kept = talk.turns[-1].shown.stats.equivalent_tokens
    for _ in range(2):
        for again in desk.look_again("u", 24):
            assert again is talk
        turn = talk.turns[-1]
        assert turn.shown is turn.answers[RESTORED]
        assert turn.shown.stats.equivalent_tokens == 336 > 10 * kept
        assert turn.agreement == 1
        assert len(messages_of(talk, RECIPE)) == (4 if history else 0)
    assert ask(desk, image, history=history, recipe="grid:0.05").turns[-1].texts[RECIPE]


def test_new_recipe_starts_a_new_conversation(desk: Desk, image: Media) -> None:
    first = ask(desk, image)
    second = ask(desk, image, recipe="fast")
    assert second is not first
    assert first.closed
    assert len(second.turns) == 1
    assert ask(desk, image, recipe=str(vlmfast.Recipe.parse("fast"))) is second


def test_video_is_sampled_and_shown_by_frame(desk: Desk, examples) -> None:
    path, question = examples["video"][0]
    turn = ask(desk, Media("video", path, 4), question).turns[-1]
    assert turn.texts == {FULL: "up", RECIPE: "up"}
    strip = views.views(turn.shown)
    assert [view.name for view in strip] == [f"Frame {i}" for i in range(1, 5)]
    assert sum(view.kept for view in strip) == turn.shown.stats.visual_tokens_kept["scope"]


@dataclass(frozen=True)
class Ends(MediaStage):
    """Reads the first and the last frame."""

    name: ClassVar[str] = "test-ends"
    query_dependent: ClassVar[bool] = False

    def frames(self, video, question):
        return [0, video.frames - 1]


@dataclass(frozen=True)
class AskedEnds(Ends):
    """The same, were it to listen."""

    name: ClassVar[str] = "test-asked-ends"
    query_dependent: ClassVar[bool] = True


@pytest.mark.parametrize("stage", [Ends(), AskedEnds()])
def test_frame_selection_by_the_recipe(tiny, tmp_path: Path, stage: MediaStage) -> None:
    path = write_video(tmp_path / "clip.mp4", 40)
    talk = Conversation(tiny, Media("video", str(path), 3), vlmfast.Recipe((stage,)), False)
    list(talk.ask("Which object moves?", max_new_tokens=2))
    turn = talk.turns[-1]
    images = {side: answer.trace.images for side, answer in turn.answers.items()}
    assert [len(images[side]) for side in (FULL, RECIPE)] == [3, 2]
    assert frame_number(images[RECIPE][1]) == 39  # of the whole video, not of the three frames
    assert [len(views.views(turn.answers[side])) for side in (FULL, RECIPE)] == [3, 2]
    list(talk.ask("Which object moves?", max_new_tokens=2))
    again = talk.turns[-1].shown
    assert len(again.trace.images) == 2
    assert (again.stats.prompt_reused > 0) is not stage.query_dependent


# --- what is shown -------------------------------------------------------------------------------


def test_counters_equal_the_answers_statistics(desk: Desk, image: Media) -> None:
    recipe = f"{BALANCED}+pyramiddrop+draft-ngram"
    talk = ask(desk, image, "Describe the image.", recipe=recipe, tokens=24)
    turn = talk.turns[-1]
    rows = {what: (full, shown) for what, full, shown in panels.counters(turn)}
    kept = turn.shown.stats.visual_tokens_kept
    steps = " → ".join(["336", *(f"{count} ({name})" for name, count in kept.items())])
    assert rows["Visual tokens"] == ("336", steps)
    assert rows["Accepted drafts"][0] == "–"
    assert (
        rows["Accepted drafts"][1]
        == f"{turn.shown.stats.mean_accepted:.2f} tokens per forward pass"
    )
    full, shown = (turn.answers[side].token_ids for side in (FULL, RECIPE))
    assert (
        rows["Agreement with the full model"][1]
        == f"{vlmfast.api.vlm.agreement(shown, full):.0%}"[:-1] + " %"
    )
    page = panels.table(panels.counters(turn))
    assert all(shown in page for _, shown in rows.values())
    assert panels.counters(None) == []


def test_messages_are_escaped() -> None:
    assert "<b>" not in panels.message("<b>", error=True)
    assert 'role="alert"' in panels.message("x", error=True)
    assert "<b>" not in panels.table([("<b>", "<b>", "<b>")])


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "format", "words"), [("image", "TXT", "neither|not"), ("video", "PNG", "tab Image")]
)
def test_unreadable_files_are_reported_and_the_next_question_works(
    desk: Desk, image: Media, tmp_path: Path, kind: str, format: str, words: str
) -> None:
    path = tmp_path / "upload.bin"
    path.write_bytes(b"hello, I am a text" * 20)
    if format == "PNG":
        Image.new("RGB", (64, 64)).save(path, format)
    with pytest.raises(MediaError, match=words) as caught:
        ask(desk, Media(kind, str(path)))
    assert str(tmp_path) not in str(caught.value)
    assert "upload.bin" in str(caught.value)
    assert re.search("choose another file|tab Image", str(caught.value))
    assert ask(desk, image).turns[-1].texts[FULL] == "yellow triangle"


def test_question_without_file(desk: Desk) -> None:
    with pytest.raises(MediaError, match="upload one"):
        ask(desk, Media("image", None))


def test_animation_gives_its_first_image(desk: Desk, tmp_path: Path, examples) -> None:
    frames = [Image.open(path).convert("RGB") for path, _ in examples["image"][:2]]
    path = tmp_path / "animated.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    assert ask(desk, Media("image", str(path))).turns[-1].texts[FULL] == "yellow triangle"
    with pytest.raises(MediaError, match="tab Image"):
        ask(desk, Media("video", str(path)))


def test_long_video_costs_only_sampled_frames(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "hour.mp4"
    path.write_bytes(still(3600, 1))
    talk = ask(desk, Media("video", str(path), 4), "Which object moves?")
    assert len(talk.turns[-1].answers[FULL].trace.images) == 4


@pytest.mark.parametrize("question", ["", "  \n"])
def test_empty_question_is_reported(desk: Desk, image: Media, question: str) -> None:
    with pytest.raises(VLMFastError, match="question is empty"):
        ask(desk, image, question)


def test_invalid_recipe_keeps_the_conversation(desk: Desk, image: Media) -> None:
    talk = ask(desk, image)
    with pytest.raises(RecipeError, match="hired"):
        ask(desk, image, recipe="hirred:0.2")
    assert ask(desk, image) is talk
    assert len(talk.turns) == 2


def test_full_detail_without_question(desk: Desk) -> None:
    with pytest.raises(VLMFastError, match="ask a question first"):
        list(desk.look_again("u", 8))


def test_leaving_during_an_answer_releases_the_model(desk: Desk, image: Media) -> None:
    ask(desk, image)
    pieces = desk.ask("u", image, "Describe the image.", "balanced", 512, False)
    talk = next(pieces)
    next(pieces)
    assert talk.current
    pieces.close()
    assert talk.current is None
    assert len(talk.turns) == 1
    assert ask(desk, image) is talk
    assert talk.turns[-1].texts[RECIPE] == "yellow triangle"


def test_closed_conversation_stops_its_answer(desk: Desk, image: Media) -> None:
    pieces = desk.ask("u", image, "Describe the image.", "balanced", 512, False)
    next(pieces)
    desk.forget("u")
    with pytest.raises(VLMFastError, match="closed"):
        list(pieces)
    assert ask(desk, image).turns[-1].texts[FULL] == "yellow triangle"


def test_stop_keeps_earlier_answers(desk: Desk, image: Media) -> None:
    ask(desk, image)
    pieces = desk.ask("u", image, "Describe the image.", "balanced", 512, False)
    talk = next(pieces)
    talk.stop()
    with pytest.raises(Stopped):
        list(pieces)
    assert [turn.question for turn in talk.turns] == [QUESTION]
    talk.stop()  # nothing is being said
    assert len(ask(desk, image).turns) == 2
    pieces = len(list(desk.ask("u", image, QUESTION, "balanced", 8, False)))
    for number, talk in enumerate(desk.ask("u", image, QUESTION, "balanced", 8, False), 1):
        if number == pieces:
            talk.stop()  # all is said
    assert len(ask(desk, image).turns) == 5


def test_conversations_are_bounded(tiny, image: Media) -> None:
    desk = Desk(tiny, "tiny", Limits(users=2))
    talks = [ask(desk, image, user=user, tokens=1) for user in "abc"]
    assert [talk.closed for talk in talks] == [True, False, False]
    assert desk.talk("a") is None


def test_answers_are_bounded(tiny, image: Media) -> None:
    desk = Desk(tiny, "tiny", Limits(seconds=0.02, tokens=64))
    with pytest.raises(VLMFastError, match="1 to 64"):
        ask(desk, image, tokens=65)
    answer = ask(desk, image, "Describe the image.", tokens=64).turns[-1].answers[FULL]
    free = Desk(tiny, "tiny", Limits(tokens=64))
    whole = ask(free, image, "Describe the image.", tokens=64).turns[-1].answers[FULL]
    assert len(answer.token_ids) < len(whole.token_ids)


def test_users_are_isolated(desk: Desk, examples) -> None:
    first, second = (Media("image", examples["image"][i][0]) for i in (0, 2))
    a = desk.ask("a", first, QUESTION, "balanced", 24, False)
    b = desk.ask("b", second, QUESTION, "fast", 24, False)
    for _ in range(4):
        next(a), next(b)
    *_, one = a
    *_, other = b
    assert one.turns[-1].texts[FULL] == "yellow triangle"
    assert other.turns[-1].texts[FULL] == "blue circle"
