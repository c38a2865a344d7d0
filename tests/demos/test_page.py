"""What the page shows and refuses: headline, kept tokens, opening, recipes of users, files."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vlmfast
from support.engine.prompts import Stats
from vlmfast import RecipeError
from vlmfast.demos import panels, views
from vlmfast.demos.files import Files, temporary
from vlmfast.demos.talk import FULL, RECIPE, Conversation, Desk, Media, Opening, Turn

QUESTION = "What is in the bottom left?"


def turn_of(tiny, media: Media, recipe: str, tokens: int = 2) -> Turn:
    talk = Conversation(tiny, media, tiny.recipe(recipe), False)
    list(talk.ask(QUESTION, max_new_tokens=tokens))
    return talk.turns[-1]


# --- headline ------------------------------------------------------------------------------------


def turn_with(full: dict, shown: dict, texts: tuple[str, str] = ("yes", "yes")) -> Turn:
    """A turn with given statistics."""
    base = {"visual_tokens_in": 300, "kv_bytes_full": 1000, "kv_bytes": 1000}
    turn = Turn(QUESTION)
    for side, numbers, text in zip((FULL, RECIPE), (full, shown), texts, strict=True):
        answer = vlmfast.Answer(text, list(text.encode()), Stats(**base | numbers), None, side)
        turn.texts[side], turn.answers[side] = text, answer
    return turn


def test_headline_reports_savings() -> None:
    turn = turn_with(
        {"equivalent_tokens": 300.0, "ttft_s": 0.0801},
        {"equivalent_tokens": 60.0, "ttft_s": 0.05, "kv_bytes": 220},
    )
    assert panels.headline(turn) == (
        "5.0× fewer visual tokens · 1.6× faster first token · 22 % of the KV cache · same answer"
    )


def test_headline_reports_what_is_not_better() -> None:
    turn = turn_with(
        {"equivalent_tokens": 300.0, "ttft_s": 0.05},
        {"equivalent_tokens": 300.0, "ttft_s": 0.07},
        ("yes", "yen"),
    )
    assert panels.headline(turn) == (
        "as many visual tokens · 1.4× slower first token · 100 % of the KV cache · "
        "67 % of the answer agrees"
    )
    equal = replace(turn.answers[RECIPE], stats=replace(turn.answers[FULL].stats))
    turn.answers[RECIPE] = equal
    assert "first token as fast" in panels.headline(turn)


def test_headline_reports_drafts() -> None:
    numbers = {"equivalent_tokens": 300.0, "ttft_s": 0.05}
    drafts = {"drafted": 40, "accepted": 30, "rounds": 10, "mean_accepted": 3.0}
    turn = turn_with(numbers, numbers | drafts)
    assert "tokens per forward pass" in panels.headline(turn)
    rows = {what: cells for what, *cells in panels.counters(turn)}
    assert rows["Accepted drafts"][1] in panels.headline(turn)


def test_headline_agrees_with_the_table(tiny, image: Media) -> None:
    turn = turn_of(tiny, image, "balanced", 8)
    rows = {what: cells for what, *cells in panels.counters(turn)}
    full, shown = map(float, rows["Visual tokens, mean over layers"])
    said = panels.headline(turn).split(" · ")
    assert said[0] == f"{full / shown:.1f}× fewer visual tokens"
    assert said[2] == re.search(r"\((.+)\)", rows["KV cache"][1])[1] + " of the KV cache"


def test_rows_that_do_not_apply_are_absent(tiny, image: Media) -> None:
    names = [what for what, *_ in panels.counters(turn_of(tiny, image, "balanced"))]
    assert "Visual tokens" in names
    assert "Accepted drafts" not in names
    assert "Prompt tokens reused from the cache" not in names
    drafts = [w for w, *_ in panels.counters(turn_of(tiny, image, "draft-ngram", 24))]
    assert "Accepted drafts" in drafts


def test_answers_are_escaped() -> None:
    turn = turn_with({"ttft_s": 1.0}, {"ttft_s": 1.0}, ("<b>x", "<b>x"))
    turn.question = "<i>?"
    talk = Conversation.__new__(Conversation)
    talk.turns, talk.current = [turn, turn], None
    for text in (panels.answer_html(talk, RECIPE, "Recipe"), panels.result(turn)):
        assert "<b>x" not in text
        assert "<i>" not in text
    assert "Earlier (1)" in panels.answer_html(talk, RECIPE, "Recipe")


# --- kept tokens ---------------------------------------------------------------------------------

RECIPES = (
    "none",
    "balanced",
    "hired:0.2",
    "tome",
    "visionzip:0.2",
    "flashvid:0.2",
    "prumerge-plus:0.2",
    "hired:0.5+pyramiddrop",
    "kivi",
)


@pytest.mark.cases(6)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_captions_add_up_to_the_table(tiny, examples, kind: str, recipe: str) -> None:
    media = Media(kind, examples[kind][0][0], 2)
    answer = turn_of(tiny, media, recipe, 1).shown
    drawn = views.views(answer)
    steps = [answer.stats.visual_tokens_in, *answer.stats.visual_tokens_kept.values()]
    text = views.summary(answer)
    kept, total = map(int, re.match(r"(\d+) of (\d+) visual tokens kept", text).groups())
    assert (kept, total) == (steps[-1], steps[0])
    ends = re.search(r"row ends: (\d+) of (\d+)", text)
    rest = map(int, ends.groups()) if ends else (0, 0)
    counted = [sum(view.kept for view in drawn), sum(view.total for view in drawn)]
    assert [a + b for a, b in zip(counted, rest, strict=True)] == [kept, total]


def test_kept_patches_are_not_covered(tiny, image: Media) -> None:
    full, shown = (turn_of(tiny, image, recipe).shown for recipe in ("none", "hired:0.22"))
    assert not any(view.dropped.any() for view in views.views(full))
    crops, base = views.views(shown)
    assert (crops.name, base.name) == ("Crops", "Base view")
    for view in (crops, base):
        assert set(np.unique(view.dropped)) == {0, 1}
        share = 1 - view.dropped.mean()
        assert share == pytest.approx(view.kept / view.total, abs=0.02)


def test_later_drops_are_less_dark(tiny, image: Media) -> None:
    (view, *_) = views.views(turn_of(tiny, image, "pyramiddrop").shown)
    values = np.unique(view.dropped)
    assert values.min() == 0
    assert len(values) > 2
    assert values.max() < 1  # nothing was dropped before the language model


def test_merged_groups_are_outlined(tiny, image: Media) -> None:
    answer = turn_of(tiny, image, "downsample:0.25").shown
    merged = sum(len(view.merged) for view in views.views(answer))
    assert views.kept_html(answer).count("<rect") == merged > 10
    assert "merged from" in views.summary(answer)
    assert "<rect" not in views.kept_html(turn_of(tiny, image, "hired:0.22").shown)


# --- the opening ---------------------------------------------------------------------------------


def test_opening_is_answered_once(tiny, image: Media) -> None:
    desk = Desk(tiny, "tiny", recipe="balanced")
    opening = Opening(image, QUESTION)
    assert desk.opened(opening) is None
    seen = list(desk.open(opening))
    assert len({id(talk) for talk in seen}) == 2  # the first one only loads what is used
    talk = desk.opened(opening)
    assert talk is seen[-1]
    assert talk.turns[-1].texts == {FULL: "yellow triangle", RECIPE: "yellow triangle"}
    assert [again is talk for again in desk.open(opening)] == [True]


def test_full_detail_after_the_opening(tiny, image: Media) -> None:
    desk = Desk(tiny, "tiny", recipe="balanced")
    opening = Opening(image, QUESTION)
    list(desk.open(opening))
    *_, talk = desk.look_again("u", 8, opening)
    assert talk is desk.talk("u")
    assert talk.turns[-1].shown.stats.equivalent_tokens == 336
    assert len(desk.opened(opening).turns[-1].answers) == 2  # other users see it as it was


# --- recipes of users ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pvc:weights=/etc/passwd", "--recipe"),
        ("hired:0.2+draft-eagle:weights=some/repository", "--recipe"),
        ("clip-relevance:model=/srv/model", "--recipe"),
        ("clip-relevance", "--recipe"),
        ("@/etc/passwd", "unknown method"),
        ("recipe.yaml", "cannot name a recipe file|unknown method"),
        ("{}/recipe.yaml", "cannot name a recipe file"),
    ],
)
def test_recipe_cannot_name_files_or_models(
    tiny, image: Media, tmp_path: Path, text: str, words: str
) -> None:
    vlmfast.Recipe.parse("grid:0.5").save(tmp_path / "recipe.yaml")
    desk, text = Desk(tiny, "tiny", recipe="balanced"), text.format(tmp_path)
    for attempt in (
        lambda: desk.recipe(text),
        lambda: next(desk.ask("u", image, QUESTION, text, 4, False)),
    ):
        with pytest.raises(RecipeError, match=words) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_shipped_weights_and_those_of_the_operator_are_allowed(tiny, tmp_path: Path) -> None:
    desk = Desk(tiny, "tiny", recipe=f"elastic:0.5,weights={tmp_path}")
    assert desk.recipe(str(desk.first)) == desk.first
    assert desk.recipe("elastic") == tiny.recipe("elastic")
    with pytest.raises(RecipeError, match="weights cannot be set"):
        desk.recipe(f"elastic:0.5,weights={tmp_path}/other")


# --- temporary files -----------------------------------------------------------------------------


def test_files_of_a_closed_page_are_removed(tmp_path: Path) -> None:
    files = Files(tmp_path)
    shared, own, again = (files.uploads / name / "image.png" for name in "123")
    outside = tmp_path / "other.png"
    for path in (shared, own, again, outside):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    claims = [("a", shared), ("b", shared), ("a", own), ("a", again), ("a", outside), ("a", None)]
    for user, path in claims:
        files.claim(user, path and str(path))
    os.utime(again, ns=(1, 1))  # by a user whose page has not reported it yet
    files.release("a")
    assert [path.exists() for path in (shared, own, again, outside)] == [True, False, True, True]
    files.release("b")
    assert not shared.exists()


def test_latest_upload(tmp_path: Path) -> None:
    files = Files(tmp_path)
    paths = [str(files.uploads / name / "image.png") for name in "12"]
    assert files.latest("a") is None
    for user, path in (("a", paths[0]), ("a", paths[1]), ("b", paths[1]), ("a", paths[0])):
        files.claim(user, path)
    assert [files.latest(user) for user in "abc"] == [paths[0], paths[1], None]


def test_uploads_are_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", "/elsewhere")
    with temporary() as files:
        assert os.environ["GRADIO_TEMP_DIR"] == str(files.uploads)
        assert files.uploads.is_dir()
    assert not files.uploads.exists()
    assert os.environ["GRADIO_TEMP_DIR"] == "/elsewhere"


WAITS = """
from vlmfast.core.signals import exit_on_sigterm
from vlmfast.demos.files import temporary
with exit_on_sigterm(), temporary() as files:
    print(files.uploads, flush=True)
    import threading
    threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_remove_the_temporary_folder(number: signal.Signals) -> None:
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Shells without job control start background jobs, such as this test, without SIGINT.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        folder = Path(process.stdout.readline().decode().strip())
        assert folder.is_dir()
        process.send_signal(number)
        try:
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert not folder.parent.exists()
