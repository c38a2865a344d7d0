"""`vlmfast tune`: its data, its files, interruptions, and `recipe="auto"`."""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import shlex
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import vlmfast
from support import media_fixtures
from support.engine.commands import loads
from support.paths import ROOT
from vlmfast.api.stored_recipe import home, recipe_path, store_recipe
from vlmfast.api.vlm import VLM, Request
from vlmfast.cli import arguments as cli_arguments
from vlmfast.cli import commands as cli
from vlmfast.core.recipe import Recipe
from vlmfast.errors import RecipeError, VLMFastError
from vlmfast.media import load_image
from vlmfast.tune import commands, data
from vlmfast.tune.outcomes import CannotRun, ModelSource, Store

QUESTIONS = 60
RECIPES = ["hired:0.2", "divprune:0.1", "divprune:0.3", "random:0.1", "snapkv", "tome"]


@dataclass
class FakeVLM:
    """Answers at once; ``random`` is often wrong, and ``tome`` is refused."""

    weight: float = 1.0
    delay: float = 0.0
    after: Callable[[], None] = lambda: None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, self.weight)
        torch.nn.init.zeros_(model.bias)
        self.adapter = SimpleNamespace(
            model=model, processor=None, dtype=torch.float32, sizes=lambda: [2]
        )

    def recipe(self, recipe: Any) -> Recipe:
        return Recipe.of(recipe)

    def ask_many(self, requests: Iterable[Request], *, batch_size: int, errors: str) -> list[Any]:
        assert errors == "keep"
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Any:
        self.after()
        time.sleep(self.delay)
        recipe = str(request.recipe)
        self.asked.append((recipe, str(request.question)))
        if recipe.startswith("tome"):
            return RecipeError("tome: not for this tower")
        number = str(request.question).split()[-1]
        wrong = recipe.startswith("random") and zlib.crc32(number.encode()) % 4
        cost = {"hired": 80.0, "divprune:0.1": 40.0, "divprune:0.3": 120.0}.get(recipe, 400.0)
        cost = 20.0 if recipe.startswith("random") else cost
        stats = SimpleNamespace(equivalent_tokens=cost, kv_bytes=int(1000 * cost))
        return SimpleNamespace(text="nothing" if wrong else f" It is {number}.", stats=stats)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 60 questions about 30 images, and a home of its own."""
    monkeypatch.setenv("VLMFAST_HOME", str(tmp_path / "home"))
    write(tmp_path, answers=True)
    return tmp_path


def write(folder: Path, *, answers: bool, count: int = QUESTIONS) -> None:
    lines = []
    for number in range(count):
        name = f"{number // 2}.png"
        Image.new("RGB", (8, 8)).save(folder / name)
        line = {"image": name, "question": f"What is {number}"}
        lines.append(json.dumps(line | ({"answer": f"it is {number}"} if answers else {})))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


def arguments(folder: Path, *more: str, out: str = "out") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli_arguments.tune(parser)
    words = ["--data", str(folder / "data.jsonl"), "--out", str(folder / out), "--max-loss", "20%"]
    for recipe in RECIPES:
        words += ["--recipe", recipe]
    return parser.parse_args([*words, *more])


def tuned(folder: Path, out: str = "out") -> dict[str, Any]:
    return json.loads((folder / out / "tune.json").read_text())


# --- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [True, False])
def test_run_writes_the_choice_and_how_to_repeat_it(
    folder: Path, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    write(folder, answers=answers)
    vlm = FakeVLM()
    assert commands.run(arguments(folder), lambda: vlm) == 0
    found, out = tuned(folder), capsys.readouterr().out
    assert (found["chosen"], found["certified"]) == ("divprune:0.1", True)
    assert yaml.safe_load((folder / "out" / "recipe.yaml").read_text()) == {
        "recipe": "divprune:0.1"
    }
    page = (folder / "out" / "tune.html").read_text(encoding="utf-8")
    assert '"divprune:0.1"' in page and '"tome"' not in page
    status = {row["recipe"]: row["status"] for row in found["candidates"]}
    assert status["random:0.1"] == "loses too much"
    assert status["snapkv"] == "not cheaper"
    assert status["tome"] == "cannot run"
    assert "cannot run: tome: line " in out
    assert "tome: not for this tower" in out
    assert "* divprune:0.1" in out
    assert "divprune:0.1 loses at most " in out
    assert found["command"] in out
    assert len({*vlm.asked}) == len(vlm.asked), "no question is asked twice"


def test_json_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands.run(arguments(folder, "--json"), FakeVLM)
    assert json.loads(capsys.readouterr().out) == tuned(folder)


def test_strict_run_that_certifies_nothing_fails(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(folder, "--strict", "--max-loss", "1%")
    assert commands.run(args, FakeVLM) == 1
    out = capsys.readouterr()
    assert tuned(folder)["chosen"] == "none"
    commands.run(arguments(folder, "--max-loss", "1%"), FakeVLM)
    chosen = tuned(folder)["chosen"]
    assert chosen != "none"
    assert f"* {chosen} " in capsys.readouterr().out.partition("wrote")[0]
    commands.run(args, FakeVLM)
    assert "30 held-out questions can certify a loss of at most 11.1 % at best" in out.out
    assert "30 held-out questions can certify" in out.err, "also before the run"


@pytest.mark.slow
def test_all_methods_are_candidates_by_default(folder: Path) -> None:
    args = arguments(folder)
    args.recipes = None
    commands.run(args, FakeVLM)
    found = [row["recipe"] for row in tuned(folder)["candidates"]]
    assert len(found) > 100
    assert "pyramiddrop:budget=0.33" in found


PAGE = ROOT / "docs" / "evaluation.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not part of this distribution")
def test_commands_of_the_page_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the data of this test, through the command line."""
    (folder / "questions.jsonl").write_text((folder / "data.jsonl").read_text())
    monkeypatch.chdir(folder)
    loads(monkeypatch, lambda args: FakeVLM())
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("vlmfast tune ")]
    shown = [line for line in lines if "--data" in line]
    assert shown
    for line in shown:
        assert cli.main(shlex.split(line)[1:]) == 0
    found = {path.name for path in (folder / "runs" / "tune").iterdir()}
    written = {"recipe.yaml", "tune.json", "tune.html", "answers.jsonl"}
    assert found == written | {"plotly.min.js"}


# --- interruptions -------------------------------------------------------------------------------


def interrupted(folder: Path) -> None:
    """The process that the next test kills."""
    commands.run(arguments(folder), lambda: FakeVLM(delay=0.01))


def test_killed_run_continues_and_ends_like_another(folder: Path) -> None:
    file = folder / "out" / "answers.jsonl"
    process = multiprocessing.get_context("fork").Process(target=interrupted, args=(folder,))
    process.start()
    while not file.exists() or file.read_bytes().count(b"\n") < 40:
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with open(file, "a") as torn:
        torn.write('{"recipe": "hired", "quest')
    known = file.read_bytes().count(b"\n") - 1
    assert not (folder / "out" / "tune.json").exists()

    rest, whole = FakeVLM(), FakeVLM()
    commands.run(arguments(folder), lambda: rest)
    commands.run(arguments(folder, out="other"), lambda: whole)
    assert len(rest.asked) == len(whole.asked) - known
    first, second = tuned(folder), tuned(folder, "other")
    del first["command"], second["command"]
    assert first == second


def test_finished_run_asks_nothing_again(folder: Path) -> None:
    commands.run(arguments(folder), FakeVLM)
    again = FakeVLM()
    commands.run(arguments(folder), lambda: again)
    assert again.asked == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", ["model", "data", "max_new_tokens"])
def test_answers_of_another_run_are_refused(folder: Path, what: str) -> None:
    commands.run(arguments(folder), FakeVLM)
    if what == "data":
        write(folder, answers=True, count=QUESTIONS - 2)
    more = ("--max-new-tokens", "7") if what == "max_new_tokens" else ()
    weight = 2.0 if what == "model" else 1.0
    with pytest.raises(VLMFastError, match=f"another run: {what} is"):
        commands.run(arguments(folder, *more), lambda: FakeVLM(weight))


def test_damaged_answers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"data": 1}\n{"recipe"\n{}\n')
    with pytest.raises(VLMFastError, match="line 2 is damaged"):
        Store(path, {"data": 1})
    path.write_text('{"data": 1}\n{"recipe": "none"}\n')
    with pytest.raises(VLMFastError, match="is damaged: its lines need recipe, question"):
        Store(path, {"data": 1})


def test_recipe_that_cannot_run_costs_one_question(folder: Path) -> None:
    questions, _ = data.read(folder / "data.jsonl")
    vlm = FakeVLM()
    source = ModelSource(vlm, questions, Store(folder / "a.jsonl", {}))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(CannotRun, match="line 6: tome: not for this tower"):
            source.outcomes("tome", range(5, 60))
    assert len(vlm.asked) == 1


def test_question_that_the_full_model_cannot_answer_is_an_error(folder: Path) -> None:
    class Broken(FakeVLM):
        def _answer(self, request: Request) -> Any:
            return vlmfast.MediaError("7.png is damaged")

    with pytest.raises(VLMFastError, match=r"data.jsonl, line \d+: 7.png is damaged"):
        commands.run(arguments(folder), Broken)


def test_failed_download_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about media that cannot be read now have no recorded outcome."""

    class Loading(FakeVLM):
        def _answer(self, request: Request) -> Any:
            try:
                for image in request.images:
                    load_image(image)
            except vlmfast.MediaError as error:
                return error
            return super()._answer(request)

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    content, file = (folder / "0.png").read_bytes(), folder / "out" / "answers.jsonl"
    with media_fixtures.web_server(content) as address:
        lines = (folder / "data.jsonl").read_text().splitlines()
        lines[30] = json.dumps(json.loads(lines[30]) | {"image": f"{address}/image"})
        (folder / "data.jsonl").write_text("\n".join(lines))
        with monkeypatch.context() as patch:
            patch.setattr(socket, "create_connection", refuse)
            with pytest.raises(VLMFastError, match=r"line 31: .*refused; repeat the command"):
                commands.run(arguments(folder), Loading)
        rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        assert rows and not any("error" in row for row in rows)  # the others of the same batch
        assert commands.run(arguments(folder), Loading) == 0
        assert commands.run(arguments(folder, out="other"), Loading) == 0
    first, second = tuned(folder), tuned(folder, "other")
    del first["command"], second["command"]
    assert first == second


def refuse(*args: Any, **given: Any) -> socket.socket:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")


# --- the data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 3 is not JSON"),
        ("[]", "line 3 must be an object"),
        ('{"question": "Q"}', "either 'image' or 'video'"),
        ('{"image": "0.png", "video": "0.mp4", "question": "Q"}', "either 'image' or 'video'"),
        ('{"image": "0.png", "question": "Q", "answers": "a"}', "(did you mean 'answer'?)"),
        ('{"image": "0.png"}', "'question' must be a text"),
        ('{"image": "0.png", "question": " "}', "'question' must be a text"),
        ('{"image": "x.png", "question": "Q"}', "image 'x.png' does not exist"),
        ('{"image": [], "question": "Q"}', "'image' must be a text or a list"),
        ('{"video": ["0.png", "1.png"], "question": "Q"}', "'video' must be one path"),
        ('{"image": "0.png", "question": "Q", "answer": 3}', "'answer' must be a text"),
        ('{"image": "0.png", "question": "Q", "num_frames": 3}', "'num_frames' is for videos"),
        ('{"video": "0.png", "question": "Q", "num_frames": "3"}', "must be a whole number"),
    ],
)
def test_unusable_line_is_named(folder: Path, line: str, reason: str) -> None:
    lines = (folder / "data.jsonl").read_text().splitlines()
    (folder / "data.jsonl").write_text("\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(VLMFastError, match="line 3") as error:
        data.read(folder / "data.jsonl")
    assert reason in str(error.value)


def test_lines_are_read(folder: Path) -> None:
    with open(folder / "data.jsonl", "a") as file:
        file.write('\n{"video": "0.png", "question": "Q", "num_frames": 4, "answer": ["a", "b"]}\n')
        file.write('{"image": ["0.png", "https://e.org/1.png"], "question": "Q", "id": 5}\n')
    questions, _ = data.read(folder / "data.jsonl")
    video, images = questions[-2:]
    assert video.line == QUESTIONS + 2
    assert video.arguments() == {"video": str(folder / "0.png"), "num_frames": 4}
    assert video.answers == ("a", "b")
    assert images.arguments() == {"images": [str(folder / "0.png"), "https://e.org/1.png"]}


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VLMFastError, match="cannot be read"):
        data.read(tmp_path / "data.jsonl")
    write(tmp_path, answers=True, count=19)
    with pytest.raises(VLMFastError, match="has 19 questions; at least 20"):
        data.read(tmp_path / "data.jsonl")
    lines = [json.dumps({"image": "0.png", "question": f"Q {n}"}) for n in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    with pytest.raises(VLMFastError, match="too few images"):
        commands.run(arguments(tmp_path), FakeVLM)


@pytest.mark.parametrize("text", ["0", "100%", "-1%", "x", "nan"])
def test_loss_must_be_a_fraction(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        arguments(folder, f"--max-loss={text}")
    assert "must be above 0 % and below 100 %" in capsys.readouterr().err


# --- recipe="auto" -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu")


def test_auto_is_the_choice_for_this_model(
    tiny: VLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMFAST_HOME", str(tmp_path))
    with pytest.raises(RecipeError, match="run `vlmfast tune --model"):
        tiny.recipe("auto")
    path = store_recipe(tiny.adapter, Recipe.parse("hired:0.1"))
    assert path == recipe_path(tiny.adapter)
    assert tiny.recipe("auto") == Recipe.parse("hired:0.1")
    image = Image.new("RGB", (64, 64), "red")
    (answer,) = tiny.ask_many([Request("What is this?", image, recipe="auto")], max_new_tokens=1)
    assert answer.recipe == "hired:0.1"
    # A model with other weights has no choice.
    weight = next(iter(tiny.model.parameters())).data
    weight.view(-1)[0] += 1
    with pytest.raises(RecipeError, match="none is stored"):
        tiny.recipe("auto")
    weight.view(-1)[0] -= 1


def test_home_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_HOME", str(tmp_path / "a"))
    assert home() == tmp_path / "a"
    monkeypatch.delenv("VLMFAST_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert home() == tmp_path / "b" / "vlmfast"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "vlmfast"
