"""The command line: output, errors and exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import tiny_models
from vlmfast.cli import commands as cli
from vlmfast.cli import main

QUESTION = "How many?"
ROOT = Path(cli.__file__).parents[2]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "picture.png"
    tiny_models.make_image(80, 60).save(path)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    av = pytest.importorskip("av")
    path = tmp_path_factory.mktemp("media") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for i in range(6):
            frame = av.VideoFrame.from_image(tiny_models.make_image(64, 64, seed=i))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


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


def test_compare_needs_a_recipe(ask, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(ask(command="compare"))
    assert leaving.value.code == 2
    assert "--recipe" in capsys.readouterr().err


# --- methods, env, train, eval, report -----------------------------------------------------------


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    found = {method["name"]: method for method in run_json(capsys, ["methods", "--json"])}
    assert {"hired", "random", "grid", "downsample"} <= set(found)
    parameters = {p["name"]: p for p in found["hired"]["parameters"]}
    assert parameters[found["hired"]["value"]]["default"] == 0.2
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    for name in found:
        assert f"\n{name}  (" in f"\n{out}"
    assert "2408.10945" in out


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    facts = run_json(capsys, ["env", "--json"])
    assert facts["packages"]["torch"]
    assert facts["cores"] >= 1
    assert facts["variables"]["VLMFAST_KERNELS"] == "torch"
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "transformers" in out
    assert "VLMFAST_KERNELS=torch" in out
    assert str(Path.home()) not in out + json.dumps(facts)


def test_env_hides_secrets_and_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLMFAST_API_KEY", "password-of-a-server")
    monkeypatch.setenv("VLMFAST_CLOSENESS", str(tmp_path))
    monkeypatch.setenv("VLMFAST_KERNELS", "-swiglu")
    facts = run_json(capsys, ["env", "--json"])
    shown = {"VLMFAST_API_KEY": "(set)", "VLMFAST_CLOSENESS": "(set)", "VLMFAST_KERNELS": "-swiglu"}
    assert shown.items() <= facts["variables"].items()
    assert main(["env"]) == 0
    out = capsys.readouterr().out + json.dumps(facts)
    assert "password-of-a-server" not in out and str(tmp_path) not in out


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
    assert main([*argv, "--save"]) == 1
    assert "nothing to save" in capsys.readouterr().out
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["check", "--help"], ["--quick", "--save", "--json", "--model"]),
        (["train", "tiny", "--help"], ["--minutes", "--seed"]),
        (["eval", "--help"], ["--recipe", "--budget", "--limit", "--out", "--json"]),
        (["report", "--help"], ["DIR"]),
        (["ask", "--help"], ["--recipe", "--model", "--num-frames", "--dtype"]),
    ],
)
def test_help(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    for word in words:
        assert word in out


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
        (["--num-frames", "4"], ["is an image"]),
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


def test_unreadable_media(ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    empty = tmp_path / "empty.mp4"
    empty.touch()
    for file in (text, empty, tmp_path / "missing.png", tmp_path):
        assert file.name in run_error(capsys, ask(file=file))


def test_text_only_model(ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.build_text_only(tmp_path)
    error = run_error(capsys, ask("--model", str(tmp_path)))
    assert "llama" in error
    assert "supported" in error


def test_empty_question(ask, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ask()
    argv[2] = "  "
    assert "question" in run_error(capsys, argv)


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
    about, fill, _ = cli._COMMANDS["env"]
    monkeypatch.setitem(cli._COMMANDS, "env", (about, fill, run))


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


def test_gpu_out_of_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def full(args: argparse.Namespace) -> None:
        raise torch.OutOfMemoryError("tried to\nallocate")

    replace(monkeypatch, full)
    assert "tried to allocate" in run_error(capsys, ["env"])


def test_exit_codes_of_delegated_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, lambda args: 3)
    assert main(["env"]) == 3


def test_narrow_terminal(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main(ask("--recipe", "grid")) == 0
    narrow.seek(0)
    assert " ? " in narrow.read()


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "vlmfast", "methods"]
    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        cwd=Path(cli.__file__).parents[2],
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141


def test_process_prints_a_single_json_document(ask) -> None:
    command = [sys.executable, "-m", "vlmfast", *ask("--json", "--recipe", "hired:0.3")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stderr == ""
    assert done.returncode == 0
    assert json.loads(done.stdout)["recipe"] == "hired:0.3"
