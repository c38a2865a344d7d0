"""``make results``: its list of commands is complete, and an interrupted run continues."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from support.documented import CHECKS
from support.paths import ROOT
from vlmfast.cli.commands import build_parser
from vlmfast.core.exit_codes import ExitCode
from vlmfast.eval.commands import planned

TOOL = ROOT / "tools" / "results.py"
if not TOOL.is_file():
    pytest.skip("the tool is not part of this distribution", allow_module_level=True)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_tool", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the list ------------------------------------------------------------------------------------


def test_every_result_file_has_a_command(tool: ModuleType) -> None:
    names = [name for entry in tool.read() for name in entry.writes]
    assert len(names) == len(set(names))
    assert len({entry.name for entry in tool.read()}) == len(tool.read())
    listed = subprocess.run(
        ["git", "ls-files", "docs/results", "benchmarks/results"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git repository")
    written = "docs/results/families.md"  # by test_support.py and test_families.py
    assert set(listed.stdout.split()) - {written} <= set(names)
    for folder in {name.rpartition("/")[0] for name in names}:
        assert (ROOT / folder).is_dir()


def test_commands_exist(tool: ModuleType) -> None:
    for entry in tool.read():
        for command in entry.commands:
            assert "--accept-" not in command  # terms are accepted by hand
            words = shlex.split(command)
            if words[0] == "vlmfast":
                CHECKS["vlmfast"](words[1:], False)
            elif words[0] == "python":
                script = Path(words[1]).relative_to("benchmarks").as_posix()
                CHECKS["python benchmarks/"]([script, *words[2:]], False)
            elif words[0] == "make":
                assert f"\n{words[1]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")
            else:
                assert words[0] == "cp" and len(words) == 3


def test_evaluations_contain_the_recipes_of_the_reports(tool: ModuleType) -> None:
    for entry in tool.read():
        report = next((ROOT / n for n in entry.writes if n.endswith("/report.json")), None)
        if report is None:
            continue
        made = {"none"}
        for command in entry.commands:
            words = shlex.split(command)[1:]
            if words[0] == "benchmarks/pocket/evidence.py":  # has the options of `eval`, and these
                kept = re.sub(r" --(parts|kind|drawings) \S+", "", shlex.join(words[1:]))
                words = ["eval", *shlex.split(kept)]
            args = build_parser().parse_args(words)
            if args.command == "report":
                assert args.out == Path(report).parent.relative_to(ROOT)
                continue
            axes = args.budget, args.positions, args.share
            recipes = {"none", *map(str, planned(args.recipe, *axes))}
            made |= recipes
            made |= {f"{r}@session" for r in recipes} if args.session else set()
            controls = ("question-only", "background-only")
            made |= {f"none@{c}" for c in controls} if args.controls else set()
        (found,) = json.loads(report.read_text())["tasks"].values()
        assert {*found["recipes"]} <= made


def test_benchmarks_run_as_recorded(tool: ModuleType) -> None:
    """The command in a result file, with the device."""
    for entry in tool.read():
        for name in entry.writes:
            if not name.startswith("benchmarks/") or not name.endswith(".json"):
                continue
            if not (ROOT / name).exists():
                continue
            recorded = shlex.split(json.loads((ROOT / name).read_text()).get("command", ""))
            kept = [shlex.split(command) for command in entry.commands]
            if entry.name == "mutants":  # `make` runs it
                assert recorded[:2] == ["python", "tools/mutants.py"]
                continue
            for option in ("--out", "--minutes"):
                if option in recorded:
                    at = recorded.index(option)
                    del recorded[at : at + 2]
            assert any(command[: len(recorded)] == recorded for command in kept), name


# --- the runner ----------------------------------------------------------------------------------

STEP = """
import sys, time
from pathlib import Path
number, wait = sys.argv[1], Path("wait")
with open("calls.txt", "a") as calls:
    calls.write(number)
if wait.exists() and wait.read_text() == number:
    Path("waiting").touch()
    time.sleep(60)
if number == "9":
    sys.exit(5)
Path(f"{number}.json").write_text("{}")
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "step.py").write_text(STEP)
    for name in ("tables", "cards"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / f"{name}.py").write_text(f"open('{name}', 'w').close()")
    return tmp_path


@pytest.fixture
def run(tool: ModuleType, repository: Path) -> Callable[..., int]:
    def run(*words: str, writes: tuple[str, ...] = ("3.json",), last: str = "3") -> int:
        steps = tuple(f"python step.py {n}" for n in ("1", "2", last))
        entries = [
            tool.Entry("figures", writes, steps),
            tool.Entry("others", ("5.json",), ("python step.py 4", "cp 4.json 5.json")),
        ]
        return tool.main(list(words), entries, repository)

    return run


def calls(repository: Path) -> str:
    path = repository / "calls.txt"
    return path.read_text() if path.exists() else ""


def test_commands_run_once(run, repository: Path, capsys) -> None:
    assert run("--list") == 0
    assert capsys.readouterr().out == (
        "figures: 3 of 3 commands left\nothers: 2 of 2 commands left\n"
    )
    assert run() == ExitCode.FINISHED
    assert calls(repository) == "1234" and (repository / "5.json").exists()
    assert (repository / "tables").exists() and (repository / "cards").exists()
    assert run() == ExitCode.FINISHED
    assert calls(repository) == "1234"
    # A command that has changed runs, and those before it do not.
    assert run(last="6", writes=("6.json",)) == ExitCode.FINISHED
    assert calls(repository) == "12346"


def test_only_some(run, repository: Path, capsys) -> None:
    assert run("--only", "others") == ExitCode.FINISHED
    assert calls(repository) == "4"
    assert run("--only", "figure") == ExitCode.USER_ERROR
    assert "unknown result 'figure'; results: figures, others" in capsys.readouterr().err


def test_entries_are_left_out_without_what_they_need(
    tool: ModuleType, repository: Path, capsys, monkeypatch
) -> None:
    entries = [
        tool.Entry("gpu", ("1.json",), ("python step.py 1",), gpu=True),
        tool.Entry("weights", ("2.json",), ("python step.py 2",), after="make pocket"),
    ]
    monkeypatch.setattr(tool, "has_gpu", lambda: False)
    assert tool.main([], entries, repository) == ExitCode.FINISHED
    assert calls(repository) == ""
    said = capsys.readouterr().err
    assert "gpu: left out, it needs a GPU" in said
    assert "weights: left out, first make pocket; then --only weights" in said
    monkeypatch.setattr(tool, "has_gpu", lambda: True)
    assert tool.main([], entries, repository) == ExitCode.FINISHED
    assert tool.main(["--only", "weights"], entries, repository) == ExitCode.FINISHED
    assert calls(repository) == "12"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"last": "9"}, "exit code 5: python step.py 9"),
        ({"writes": ("3.json", "7.json")}, "figures: its commands did not write 7.json"),
    ],
)
def test_failing_entry_does_not_stop_the_others(run, repository, capsys, what, message) -> None:
    assert run(**what) == ExitCode.CHECK_FAILED
    assert message in capsys.readouterr().err
    assert (repository / "5.json").exists()
    assert not (repository / "tables").exists()  # not from old and new results
    before = len(calls(repository))
    assert run(**what) == ExitCode.CHECK_FAILED
    assert len(calls(repository)) == before + 1  # what failed is tried again


def test_file_of_an_earlier_measurement_does_not_count(run, repository: Path, capsys) -> None:
    old = repository / "7.json"
    old.touch()
    os.utime(old, (1e9, 1e9))
    assert run(writes=("7.json",)) == ExitCode.CHECK_FAILED
    assert "did not write 7.json" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_killed_run_continues(run, repository: Path) -> None:
    (repository / "wait").write_text("2")
    program = (
        "import importlib.util, sys, pathlib\n"
        f"spec = importlib.util.spec_from_file_location('results_tool', {str(TOOL)!r})\n"
        "tool = sys.modules['results_tool'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(tool)\n"
        "steps = tuple(f'python step.py {n}' for n in '123')\n"
        "tool.main([], [tool.Entry('figures', ('3.json',), steps)], pathlib.Path('.').resolve())"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=repository, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    while not (repository / "waiting").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    (repository / "wait").unlink()
    assert run() == ExitCode.FINISHED
    assert calls(repository) == "12" + "234"
