"""The command line: output, errors and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from support import fresh, tiny_models
from support.engine.turns import renewed
from support.media_fixtures import write_video
from support.paths import ROOT
from vlmfast import VLM
from vlmfast.cli import main
from vlmfast.cli.commands import COMMANDS, build_parser
from vlmfast.cli.parser import every_parser, shown_default
from vlmfast.core.recipe import Recipe

QUESTION = "How many?"


@pytest.fixture(scope="module", autouse=True)
def _loaded_once() -> Iterator[None]:
    """Commands load a checkpoint when it is named for the first time."""
    load = functools.cache(VLM.from_pretrained)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLM, "from_pretrained", lambda *given, **more: renewed(load(*given, **more)))
        yield


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "picture.png"
    tiny_models.make_image(80, 60).save(path)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("media") / "clip.mp4"
    return write_video(path, 6, height=64, width=64, rate=4)


@pytest.fixture
def ask(random_llava_next: Path, image: Path):
    """Arguments of `vlmfast ask` on a random model, with further ones."""

    def arguments(*more: str, command: str = "ask", file: Path = image) -> list[str]:
        return [
            command, str(file), QUESTION, "--model", str(random_llava_next), "--device", "cpu",
            "--max-new-tokens", "4", *more,
        ]  # fmt: skip

    return arguments


def run_json(capsys: pytest.CaptureFixture[str], argv: list[str]):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def run_error(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The single line on stderr of a command that must fail."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vlmfast: error: ")
    assert err.count("\n") == 1
    return err


# --- ask and compare -----------------------------------------------------------------------------


def test_ask_prints_answer_and_costs(ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ask("--recipe", "hired:0.3")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *_, head, row = out.splitlines()
    assert head.split("  ")[0] == "recipe"
    for column in ("visual tokens", "TTFT", "tokens/s", "KV cache"):
        assert column in head
    assert row.startswith("hired:0.3")
    assert " → " in row


def test_ask_json(ask, capsys: pytest.CaptureFixture[str]) -> None:
    full = run_json(capsys, ask("--json"))
    assert full["recipe"] == "none"
    assert full["question"] == QUESTION
    as_given = run_json(capsys, ask("--json", "--recipe", "hired:0.2"))
    assert as_given["recipe"] == "hired:0.2"
    assert len(full["token_ids"]) == 4
    fewer = run_json(capsys, ask("--json", "--recipe", "hired:0.3"))
    stats = fewer["stats"]
    assert stats["visual_tokens_in"] == full["stats"]["visual_tokens_in"]
    assert stats["equivalent_tokens"] < stats["visual_tokens_in"]
    assert stats["kv_bytes"] < stats["kv_bytes_full"]


def test_ask_about_a_video(ask, video: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, four, rate = (
        run_json(capsys, ask("--json", *option, file=video))["stats"]["visual_tokens_in"]
        for option in (["--num-frames", "2"], ["--num-frames", "4"], ["--fps", "4"])
    )
    assert four == 2 * two
    assert rate == 3 * two


def test_ask_about_an_animation(ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = (Image.new("RGB", (64, 64), colour) for colour in ("red", "lime", "blue"))
    moving, still = tmp_path / "moving.gif", tmp_path / "still.gif"
    first.save(moving, save_all=True, append_images=others, duration=100)
    first.save(still)
    two, three = (
        run_json(capsys, ask("--json", "--num-frames", count, file=moving))["stats"]
        for count in ("2", "3")
    )
    assert 2 * three["visual_tokens_in"] == 3 * two["visual_tokens_in"]
    assert "still.gif: is an image (GIF), not a video; --num-frames" in run_error(
        capsys, ask("--num-frames", "2", file=still)
    )


def test_compare_prints_a_row_per_recipe(ask, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ask("--recipe", "hired:0.3", "--recipe", "grid:0.5", command="compare")
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(QUESTION)
    starts = [line.split()[0] for line in lines[2:]]
    assert starts == ["recipe", "none", "hired:0.3", "grid:0.5"]
    assert "100%" in lines[3]
    edge = lines[2].index("agreement") + len("agreement")
    assert all(line[edge - 1] == "%" for line in lines[3:])


def test_compare_json_and_overlay(ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = tmp_path / "sheet.png"
    argv = ask("--recipe", "hired:0.3", "--json", "--overlay", str(sheet), command="compare")
    document = run_json(capsys, [*argv, "--no-warmup"])
    full, fewer = document["answers"]
    assert (full["recipe"], full["agreement"]) == ("none", 1.0)
    assert fewer["recipe"] == "hired:0.3"
    with Image.open(sheet) as image:
        assert image.width > 800
        assert image.height > 600


# --- methods, env, train, eval, report -----------------------------------------------------------


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    found = {method["name"]: method for method in run_json(capsys, ["methods", "--json"])}
    assert {"hired", "random", "grid", "downsample"} <= set(found)
    parameters = {p["name"]: p for p in found["hired"]["parameters"]}
    assert parameters[found["hired"]["value"]]["default"] == 0.2
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0].partition(":")[0]: line for line in lines if line.startswith("  ")}
    assert set(listed) == set(found)
    for name, method in found.items():
        assert listed[name].endswith(f"  {method['summary']}")
        assert f"  {method['tier']} " in listed[name]
    assert "presets: none, faithful, balanced, fast" in lines
    assert len(lines) < 70


def test_methods_shows_the_details_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "SnapKV", "hired"]) == 0
    out = capsys.readouterr().out
    first, second = out.split("\n\n")
    assert first.startswith("snapkv  (baseline, cache, training-free, query-dependent)")
    assert second.startswith("hired  (core, tokens, training-free, query-independent)")
    assert "2408.10945" in second and "recipe: hired:0.2" in second
    (keep,) = (line for line in second.splitlines() if line.strip().startswith("keep=0.2 "))
    assert "float, > 0 and <= 1; fraction of the patches" in keep
    assert "rule=paper" in second and "one of paper, code" in second
    assert main(["methods", "fast", "hired"]) == 0
    first, again = capsys.readouterr().out.split("\n\n")
    assert first == "fast  (preset)\n  recipe: downsample:budget=0.33+scope:budget=0.33"
    assert again == second
    (row,) = run_json(capsys, ["methods", "none", "--json"])
    assert row == {"name": "none", "recipe": "none"}


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--where", "cache"], lambda m: m["place"] == "cache"),
        (["--where", "frames", "--where", "encoder"], lambda m: m["place"][0] in "fe"),
    ],
)
def test_methods_are_filtered(
    options: list[str], chosen, capsys: pytest.CaptureFixture[str]
) -> None:
    every = run_json(capsys, ["methods", "--json"])
    found = run_json(capsys, ["methods", "--json", *options])
    assert found == [method for method in every if chosen(method)]
    assert 0 < len(found) < len(every)


def test_places_of_methods(capsys: pytest.CaptureFixture[str]) -> None:
    places = {m["name"]: m["place"] for m in run_json(capsys, ["methods", "--json"])}
    wanted = ["frames", "views", "encoder", "tokens", "prefill", "cache", "drafter"]
    some = ("frames-clip", "crops", "tome", "elastic", "sparsevlm", "fastkv", "draft-eagle")
    assert set(places.values()) == set(wanted)
    assert [places[name] for name in some] == wanted
    assert main(["methods", "hired", "--where", "frames"]) == 0
    assert "no method acts there" in capsys.readouterr().out


def test_method_of_another_package_has_a_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmfast.core import registry

    names = {**registry.stage_names(), "h2o": "elsewhere.h2o"}
    monkeypatch.setattr(registry, "stage_names", lambda: names)
    (method,) = run_json(capsys, ["methods", "h2o", "--json"])
    assert method["place"] == "cache"


def test_types_of_parameters_without_postponed_annotations() -> None:
    from support.engine.private import method
    from vlmfast.compressors import Reducer, param

    own = [("cell", int, param(2, "side of a cell")), ("least", float | None, param(None, "floor"))]
    cls = dataclasses.make_dataclass("Cells", own, bases=(Reducer,), frozen=True)
    types = {p["name"]: p["type"] for p in method(cls)["parameters"]}
    assert (types["cell"], types["least"], types["keep"]) == ("int", "float | None", "float")


def test_env_hides_secrets_and_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLMFAST_API_KEY", "password-of-a-server")
    monkeypatch.setenv("VLMFAST_CLOSENESS", str(tmp_path))
    monkeypatch.setenv("VLMFAST_KERNELS", "-swiglu")
    facts = run_json(capsys, ["env", "--json"])
    assert facts["packages"]["torch"] and facts["cores"] >= 1
    shown = {"VLMFAST_API_KEY": "(set)", "VLMFAST_CLOSENESS": "(set)", "VLMFAST_KERNELS": "-swiglu"}
    assert shown.items() <= facts["variables"].items()
    assert main(["env"]) == 0
    out = capsys.readouterr().out + json.dumps(facts)
    assert "password-of-a-server" not in out and str(tmp_path) not in out
    assert "transformers" in out and str(Path.home()) not in out


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch):
    """Lets ``vlmfast check`` find these rows of the kernels."""
    from vlmfast.check import commands
    from vlmfast.check.rows import Row

    def found(*rows: Row, reports: list[object]) -> None:
        model = [Row("memory", True, "1 MB"), Row("capture and reuse", None, note="no GPU")]

        def check(vlm: object, *, quick: bool) -> commands.Report:
            reports.append((vlm, quick))
            return commands.Report("cpu", "on a stand-in", list(rows), model)

        monkeypatch.setattr(commands, "check", check)

    return found


def test_check_prints_tables_and_the_setting(
    checked, random_llava_next: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vlmfast.check.rows import Row

    argv = ["check", "--model", str(random_llava_next), "--device", "cpu", "--quick"]
    reports: list[object] = []
    checked(Row("swiglu", True, "a", error=0.1), reports=reports)
    assert main(argv) == 0
    assert [quick for _, quick in reports] == [True]
    out = capsys.readouterr().out
    assert "passed" in out and "FAILED" not in out and "VLMFAST_KERNELS" not in out
    assert "copy rate" not in out  # nothing was timed
    wrong = Row("pool", False, "b", "differs from its reference")
    timed = Row("swiglu", True, "a", "", 0.1, 2e-5, 10**8, 0.8)
    checked(timed, wrong, reports=reports)
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "b: differs from its reference" in out
    assert "VLMFAST_KERNELS=-pool" in out and "80%" in out and "100 MB" in out
    assert main([*argv, "--json"]) == 1
    text = capsys.readouterr().out
    document = json.loads(text)
    assert document["passed"] is False and document["setting"] == "VLMFAST_KERNELS=-pool"
    assert document["checkpoint"] == random_llava_next.name
    assert [row["name"] for row in document["kernels"]] == ["swiglu", "pool"]
    assert str(random_llava_next.parent) not in text and str(Path.home()) not in text


@pytest.mark.slow
def test_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, ["check", "--quick", "--json", "--device", "cpu"])
    assert document["passed"] and document["setting"] is None
    assert {row["passed"] for row in document["kernels"]} <= {True, None}
    text = json.dumps(document)
    assert str(Path.home()) + os.sep not in text and os.getcwd() not in text


PARSERS = list(every_parser(build_parser()))


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """What the help says of an argument, without its name."""
    formatter = parser.formatter_class(parser.prog, max_help_position=4, width=10_000)
    formatter.add_argument(action)
    return formatter.format_help().partition("\n")[2]


@pytest.mark.parametrize("parser", [p for _, p in PARSERS], ids=[" ".join(p) for p, _ in PARSERS])
def test_help_has_every_default(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or action.nargs == argparse.PARSER:
            continue
        assert action.help, action.option_strings
        default = shown_default(action)
        if default is not None:
            about = help_of(parser, action).replace(",", "")
            assert re.search(rf"default: {re.escape(default)}\b", about) or (
                default in about and "default: " in about
            ), action.option_strings


def examples_of(parser: argparse.ArgumentParser) -> list[str]:
    """The commands of an epilog, without their comments."""
    lines = re.findall(r"^  (vlmfast .*)$", parser.epilog or "", re.M)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


@pytest.mark.parametrize(("path", "parser"), PARSERS, ids=[" ".join(path) for path, _ in PARSERS])
def test_help_has_examples_that_parse(
    path: tuple[str, ...], parser: argparse.ArgumentParser
) -> None:
    examples = examples_of(parser)
    assert examples
    for example in examples:
        assert f"  {example}" in parser.format_help()
        words = shlex.split(example.partition(" > ")[0])[1:]
        if words[0] != "COMMAND":
            assert words[: len(path)] == list(path)
        if "--help" in words:
            continue
        args = build_parser().parse_args(words)
        recipes = [getattr(args, "recipe", None) or [], getattr(args, "recipes", None) or []]
        for recipe in recipes:
            for text in [recipe] if isinstance(recipe, str) else recipe:
                if text not in ("all", "cache"):
                    Recipe.parse(text)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import vlmfast

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"vlmfast {vlmfast.__version__}\n"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "hird:0.2"], ["hird", "did you mean 'hired'"]),
        (["--recipe", "hired:1.5"], ["hired", "1.5", "<= 1"]),
        (["--recipe", "hired:0"], ["hired", "> 0"]),
        (["--num-frames", "4"], ["not a video", "--num-frames and --fps are for videos"]),
        (["--fps", "0"], ["not a video", "--num-frames and --fps are for videos"]),
        (["--device", "toaster"], ["toaster"]),
        (["--device", "cuda:99"], ["cuda:99", "GPU"]),
        (["--model", "no/such/model"], ["no/such/model"]),
    ],
)
def test_errors_are_one_line(
    ask, argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = run_error(capsys, ask(*argv))
    for word in words:
        assert word in error


@pytest.mark.parametrize("name", ["sheet.xyz", "sheet", "missing/sheet.png"])
def test_overlay_that_cannot_be_written(
    ask, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ask("--recipe", "grid", "--overlay", str(tmp_path / name), command="compare")
    assert "--overlay" in run_error(capsys, argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_counts_are_checked(ask, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(ask("--num-frames", count))
    assert leaving.value.code == 2
    assert "whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(ask, place: str) -> None:
    import vlmfast

    argv = ask("--recipe", "hired:2")
    with pytest.raises(vlmfast.RecipeError):
        main(["--debug", *argv] if place == "before" else [*argv, "--debug"])


# --- exit codes ----------------------------------------------------------------------------------


def replace(monkeypatch: pytest.MonkeyPatch, run) -> None:
    about, fill, _ = COMMANDS["env"]
    monkeypatch.setitem(COMMANDS, "env", (about, fill, run))


def test_internal_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: argparse.Namespace) -> None:
        raise KeyError("defect")

    replace(monkeypatch, broken)
    with pytest.raises(KeyError):
        main(["env"])


def test_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    replace(monkeypatch, interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr() == ("", "")


def test_out_of_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def full(args: argparse.Namespace) -> None:
        raise torch.OutOfMemoryError("tried to\nallocate")

    replace(monkeypatch, full)
    assert "tried to allocate" in run_error(capsys, ["env"])
    replace(monkeypatch, lambda args: torch.empty(1 << 50))  # the CPU's allocator
    assert "the memory is too small" in run_error(capsys, ["env"])


class Refused:
    """A model that refuses some recipes of a comparison."""

    def __init__(self, vlm) -> None:
        self.vlm = vlm

    def compare(self, question: str, *, recipes: list[str], **more):
        from types import SimpleNamespace

        rows = self.vlm.compare(question, recipes=recipes[:1], **more)
        refused = [SimpleNamespace(answer=None, error="not on\nthis model") for _ in recipes[1:]]
        return [*rows, *refused]


def test_refused_recipe_of_a_comparison_is_a_row(
    ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = VLM.from_pretrained
    monkeypatch.setattr(VLM, "from_pretrained", lambda *args, **more: Refused(load(*args, **more)))
    argv = ask("--recipe", "hired:0.2", "--recipe", "tome:0.5", command="compare")
    assert main([*argv, "--no-warmup", "--overlay", str(tmp_path / "a.png")]) == 3
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("tome:0.5") and row.endswith("refused: not on this model")
    assert main([*argv, "--no-warmup", "--json"]) == 3
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [answer["recipe"] for answer in answers] == ["none", "hired:0.2", "tome:0.5"]
    assert answers[2] == {"recipe": "tome:0.5", "answer": None, "error": "not on\nthis model"}


@pytest.mark.parametrize(("progress", "code"), [(1.0, 0), (0.4, 3)])
def test_training_tells_that_it_stopped_early(
    progress: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from types import SimpleNamespace

    from vlmfast.train import stages

    trainer = SimpleNamespace(
        out=Path("runs"), name="elastic", step=4, progress=progress, train=lambda: None
    )
    monkeypatch.setattr(stages, "StageTrainer", lambda name, args: trainer)
    assert main(["train", "elastic"]) == code
    assert ("stopped early, at 40%" in capsys.readouterr().out) == bool(code)


def test_exit_codes_of_delegated_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, lambda args: 3)
    assert main(["env"]) == 3


# --- logging -------------------------------------------------------------------------------------


def talking(args: argparse.Namespace) -> None:
    log = logging.getLogger("vlmfast.somewhere")
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)("a line")


@pytest.mark.parametrize(
    ("before", "after", "variable", "levels"),
    [
        ([], [], None, ["WARNING", "ERROR"]),
        ([], ["--log-level", "info"], None, ["INFO", "WARNING", "ERROR"]),
        (["--log-level", "error"], [], "debug", ["ERROR"]),
        ([], [], "info", ["INFO", "WARNING", "ERROR"]),
        (["--debug"], [], None, ["DEBUG", "INFO", "WARNING", "ERROR"]),
    ],
)
def test_log_lines_of_the_library(
    before: list[str],
    after: list[str],
    variable: str | None,
    levels: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace(monkeypatch, talking)
    monkeypatch.delenv("VLMFAST_LOG", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLMFAST_LOG", variable)
    assert main([*before, "env", *after]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"vlmfast: {level}: a line" for level in levels]
    assert out == ""
    talking(argparse.Namespace())  # of a program that does not ask for them
    assert capsys.readouterr().err == ""


def test_unknown_log_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLMFAST_LOG", "loud")
    assert "VLMFAST_LOG='loud' must be one of debug, info" in run_error(capsys, ["env"])


def test_narrow_terminal(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main(ask("--recipe", "grid")) == 0
    narrow.seek(0)
    assert " ? " in narrow.read()


def test_errors_of_arguments_come_before_imports(image: Path) -> None:
    runs = [
        (["missing.png", "q"], "missing.png: no such file", {"torch", "PIL", "av"}),
        ([str(image), "q", "--model", "Qwen2.5-VL-3B"], "as in Qwen/Qwen2.5-VL-3B", {"torch"}),
        ([str(image), "q", "--model", "./absent"], "./absent is no folder", {"torch"}),
        ([str(image), "q", "--recipe", "hird:0.2"], "unknown method 'hird'", set()),
    ]
    for words, error, absent in runs:
        script = "import sys; from vlmfast.cli import main\n"
        script += f"print(main({['ask', *words]}), *sys.modules)"
        command = [sys.executable, "-c", script]
        if "torch" in absent:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
        else:
            done = fresh.run(script)
        (line,) = done.stderr.splitlines()
        assert line.startswith("vlmfast: error: ") and error in line
        code, *names = done.stdout.split()
        assert code == "2" and not {*absent, "transformers"} & set(names)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--num-frmes=3", "--num-frmes (did you mean '--num-frames'?)"),
        ("--recipes", "--recipes (did you mean '--recipe'?)"),
    ],
)
def test_unknown_options_name_the_nearest(
    capsys: pytest.CaptureFixture[str], option: str, hint: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ask", "picture.png", "q", option])
    assert f"unrecognized argument {hint}" in capsys.readouterr().err


def test_closed_pipe_is_quiet() -> None:
    done = fresh.run(
        "import os, runpy, sys\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader), os.dup2(writer, 1)\n"
        "sys.argv = ['vlmfast', 'methods']\n"
        "runpy.run_module('vlmfast', run_name='__main__')"
    )
    assert done.stderr == ""
    assert done.returncode == 141


PRINTING = {
    "--help": None,
    "env --help": None,
    "--version": None,
    "": None,
    "methods": None,
    "completion bash": None,
    "env --json": None,
    "env": lambda args: print("a long answer " * 10_000),  # more than a buffer
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("command", PRINTING)
def test_full_output_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (run := PRINTING[command]) is not None:
        replace(monkeypatch, run)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(command.split()) == 2
        full.flush()  # nothing is left that Python would report when it ends
    message = "vlmfast: error: the output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("command", PRINTING)
def test_closed_output_is_quiet(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (run := PRINTING[command]) is not None:
        replace(monkeypatch, run)
    error = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)  # as in Python, if the descriptor is closed
    monkeypatch.setattr(sys, "stderr", error)
    with contextlib.suppress(SystemExit):  # --help
        assert main(command.split()) == 0
    sys.stdout.close()
    assert error.getvalue() == ""
    # Nor is an error printed elsewhere if the place for errors is closed too.
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    with contextlib.suppress(SystemExit):
        main(["methods", "nothing"])
    sys.stderr.close()
    assert out.getvalue() == ""


@pytest.mark.slow
def test_process_prints_a_single_json_document(ask) -> None:
    command = [sys.executable, "-m", "vlmfast", *ask("--json", "--recipe", "HiRED:0.3")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stderr == ""
    assert done.returncode == 0
    assert json.loads(done.stdout)["recipe"] == "hired:0.3"


def test_examples_writes_files_that_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "examples"
    assert main(["examples", str(folder)]) == 0
    image, video = folder / "picture.png", folder / "clip.mp4"
    printed = capsys.readouterr().out
    assert f"{image}: " in printed and "What is in the bottom left?" in printed
    assert f"{video}: " in printed and "Which way does the cyan star move?" in printed
    image.write_bytes(b"mine")
    written = video.read_bytes()
    assert main(["examples", str(folder)]) == 0
    assert image.read_bytes() == b"mine" and video.read_bytes() == written
    assert main(["examples", str(image)]) == 2
    assert str(image) in capsys.readouterr().err
