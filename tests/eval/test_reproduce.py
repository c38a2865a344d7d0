"""``vlmfast reproduce``: the published values, and runs with a stand-in for lmms-eval."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.fake_lmms_eval import Fake
from support.paths import ROOT
from vlmfast.cli import main
from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.recipe import Recipe
from vlmfast.eval.reproduce.papers import Method, catalogue

ZIP = ("zipvl:tau=0.96", "zipvl:tau=0.975")
TASKS = {"gqa": ("exact_match", 12578), "mme": ("mme_perception_score", 2374)}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """lmms-eval with the published values of zipvl on GQA and MME."""
    found = Fake(tmp_path / "site")
    monkeypatch.syspath_prepend(str(found.folder))
    here = ROOT
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(found.folder), str(here)]))
    monkeypatch.chdir(tmp_path)
    paper = catalogue().papers["zipvl"]
    methods = (Method("none", paper.full), *paper.methods)
    for task, (metric, n) in TASKS.items():
        scale = catalogue().tasks[task].scale
        for method in methods:
            found.score(method.recipe, task, n, **{metric: method.values[task] / scale})
    return found


def reproduce(*words: object) -> int:
    return main(["reproduce", "zipvl", "--tasks", "gqa,mme", "--out", "out", *map(str, words)])


def rows() -> dict[tuple[str, str], dict]:
    report = json.loads(Path("out/zipvl/report.json").read_text())
    return {(row["recipe"], row["task"]): row for row in report["rows"]}


# --- the data ------------------------------------------------------------------------------------


def test_data_is_usable() -> None:
    known = catalogue()
    assert {"hired", "pyramiddrop", "mustdrop", "visionzip", "lookm", "zipvl"} <= {*known.papers}
    used = {task for paper in known.papers.values() for task in paper.full}
    assert used == {*known.tasks}
    for paper in known.papers.values():
        assert paper.origin in ("authors", "quoted") and paper.reason and paper.table
        assert {task for method in paper.methods for task in method.values} == {*paper.full}
        # Every recipe is that of the paper, or its control.
        assert all(Recipe.parse(method.recipe) for method in paper.methods)
        assert paper.methods[0].recipe.startswith(paper.name.partition("-")[0])
        for method in paper.methods:
            for task, value in method.values.items():
                assert 0.2 < value / paper.full[task] < 1.2, (paper.name, method.recipe, task)
        assert all(0 < value <= known.tasks[task].maximum for task, value in paper.full.items())


def test_tolerance_grows_with_fewer_questions() -> None:
    paper, gqa = catalogue().papers["zipvl"], catalogue().tasks["gqa"]
    # 1.5 %, and two standard errors of a difference with a tenth of the answers changed.
    expected = 1.5 + 2 * 100 * math.sqrt(0.1 / 12578) / 0.619
    assert paper.of_method(gqa, 12578) == pytest.approx(expected)
    assert paper.of_method(gqa, 500) > paper.of_method(gqa, 12578)
    # The full model has answered the paper's questions, or a sample of them.
    assert paper.of_full(gqa, 12578) == 1.5
    assert paper.of_full(gqa, 500) == pytest.approx(
        1.5 + 200 * math.sqrt(0.619 * 0.381 / 500) / 0.619
    )
    assert paper.of_method(gqa, None) is None


# --- before a run --------------------------------------------------------------------------------


def test_list_and_dry_run_need_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in catalogue().papers)
    for name, paper in catalogue().papers.items():
        assert main(["reproduce", name, "--dry"]) == 0
        commands = re.findall("^python -m lmms_eval .*", capsys.readouterr().out, re.MULTILINE)
        measured = [len(method.values) for method in paper.methods]
        assert len(commands) == len(paper.full) + sum(measured)
        assert all("," not in words.split("recipe=")[1].split()[0] for words in commands)
    assert main(["reproduce", "pyramiddrop", "--dry"]) == 0
    out = capsys.readouterr().out
    assert "recipe=pyramiddrop:layers=8/16/24;keep=0.5;positions=compact" in out
    assert "# none on gqa: published 62" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zipvl", "--tasks", "docvqa"), "zipvl has no task 'docvqa'; tasks: vqav2_val, chartqa"),
        (("zipvl", "--model", "a,b"), "has a comma"),
        (("lookm",), "lmms-eval has no task milebench_t1, .*add --include-path DIR"),
        (("lookm", "--include-path", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys, fake) -> None:
    assert main(["reproduce", *words]) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not fake.calls


def test_missing_lmms_eval_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["reproduce", "zipvl"]) == ExitCode.USER_ERROR
    assert "run pip install 'lmms-eval==" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- a run ---------------------------------------------------------------------------------------


def test_published_values_are_within(fake: Fake, capsys) -> None:
    assert reproduce("--device", "cpu") == ExitCode.FINISHED
    found = rows()
    assert [*found] == [(recipe, task) for recipe in ZIP for task in TASKS]
    for row in found.values():
        assert row["verdict"] == "within" and row["reason"] == ""
        for pair in (row["full"], row["method"], row["kept"]):
            assert pair["measured"] == pytest.approx(pair["published"])
    gqa = found[ZIP[0], "gqa"]
    assert gqa["kept"]["published"] == pytest.approx(100 * 61.3 / 61.9)
    assert gqa["questions"] == 12578
    assert "61.9 / 61.9" in capsys.readouterr().out
    report = Path("out/zipvl/report.md").read_text()
    assert "| `zipvl:tau=0.96` | GQA | 61.9 / 61.9 | 61.3 / 61.3 | 99.0 / 99.0 |" in report
    assert "Not measured" not in report  # zipvl leaves nothing out
    assert len(fake.calls) == 6
    assert (
        "--model_args pretrained=llava-hf/llava-1.5-7b-hf,recipe=none,device=cpu" in fake.calls[0]
    )
    # Again: everything is read from the folder.
    assert reproduce("--device", "cpu") == ExitCode.FINISHED
    assert len(fake.calls) == 6


def test_differences_are_named(fake: Fake) -> None:
    fake.score(ZIP[0], "gqa", 12578, exact_match=0.55)
    fake.score(ZIP[1], "gqa", 12578, exact_match=0.68)
    fake.score("none", "mme", 2374, mme_perception_score=1400.0)
    assert reproduce() == ExitCode.CHECK_FAILED
    verdicts = {key: row["verdict"] for key, row in rows().items()}
    assert verdicts[ZIP[0], "gqa"] == "below"
    assert verdicts[ZIP[1], "gqa"] == "above"
    assert verdicts[ZIP[0], "mme"] == "full model differs"


def test_metrics_are_added_and_scaled(fake: Fake) -> None:
    scores = {"mme_perception_score": 1500.0, "mme_cognition_score": 362.0}
    fake.score("none", "mme", 2374, **scores)
    for recipe, value in (("192", 1787.0), ("128", 1745.0), ("64", 1612.0)):
        lost = {**scores, "mme_perception_score": value - 362}
        fake.score(f"mustdrop:published={recipe};positions=compact", "mme", 2374, **lost)
    assert main(["reproduce", "mustdrop", "--tasks", "mme_sum", "--out", "out"]) == 0
    report = json.loads(Path("out/mustdrop/report.json").read_text())
    assert [row["method"]["measured"] for row in report["rows"]] == [1787, 1745, 1612]
    assert report["rows"][0]["full"] == {"published": 1862.0, "measured": 1862.0}


def test_limit_widens_the_tolerance_and_has_its_own_folder(fake: Fake, capsys) -> None:
    assert reproduce("--limit", 100) == ExitCode.FINISHED
    row = rows()[ZIP[0], "gqa"]
    assert row["questions"] == 100 and row["tolerance"] > 10
    assert "--limit 100" in fake.calls[0]
    assert reproduce() == ExitCode.USER_ERROR
    assert (
        "rows.jsonl is of another run: limit is 100 there and null here; use another folder"
        in capsys.readouterr().err
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"log": ["Traceback", "ValueError: bad data"]}, "ValueError: bad data"),
        ({"code": 3}, "it printed nothing"),
        (
            {"n": 9, "metrics": {"exact": 0.5}},
            "no number exact_match of gqa; it has exact,none",
        ),
        ({"n": 9, "metrics": {"exact_match": float("nan")}}, "no number exact_match of gqa"),
    ],
)
def test_row_without_result_does_not_stop_the_others(fake: Fake, capsys, what, reason) -> None:
    fake.set(ZIP[0], "gqa", **what)
    assert reproduce() == ExitCode.CUT_SHORT
    out, err = capsys.readouterr()
    found = rows()
    row = found.pop((ZIP[0], "gqa"))
    assert row["verdict"] == "no result" and reason in row["reason"]
    assert reason in out and reason in err and reason in Path("out/zipvl/report.md").read_text()
    assert {other["verdict"] for other in found.values()} == {"within"}
    calls = len(fake.calls)
    assert reproduce() == ExitCode.CUT_SHORT
    assert len(fake.calls) - calls <= 1  # only that row, at most


def test_without_the_full_model_recipes_are_not_run(fake: Fake) -> None:
    fake.set("none", "gqa", log=["KeyError: 'image'"])
    assert reproduce() == ExitCode.CUT_SHORT
    assert sum("--tasks gqa" in call for call in fake.calls) == 1
    assert rows()[ZIP[1], "gqa"]["reason"].startswith("KeyError: 'image'")


def test_incomplete_result_is_measured_again(fake: Fake) -> None:
    fake.set(ZIP[1], "mme", n=2374, metrics={"mme_perception_score": 1524.0}, cut=40)
    assert reproduce() == ExitCode.CUT_SHORT
    fake.score(ZIP[1], "mme", 2374, mme_perception_score=1524.0)
    assert reproduce() == ExitCode.FINISHED
    assert len(fake.calls) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_killed_run_is_resumed(fake: Fake, capsys, number: signal.Signals) -> None:
    """At the fifth of six rows: four are kept, and no other process stays."""
    fake.set(ZIP[0], "mme", wait=True)
    words = ["reproduce", "zipvl", "--tasks", "gqa,mme", "--out", "out"]
    process = subprocess.Popen([sys.executable, "-m", "vlmfast", *words])
    pid = fake.folder / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    capsys.readouterr()
    assert reproduce() == ExitCode.USER_ERROR
    assert "another run is writing" in capsys.readouterr().err
    process.send_signal(number)
    process.wait(30)
    child = int(pid.read_text())
    if number == signal.SIGKILL:  # which leaves no time to end it
        os.kill(child, signal.SIGKILL)
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert not Path("out/zipvl/report.json").exists()
    fake.score(ZIP[0], "mme", 2374, mme_perception_score=1515.0)
    assert reproduce() == ExitCode.FINISHED
    assert len(fake.calls) == 5 + 2
    assert len(rows()) == 4


def test_folder_that_cannot_be_written_is_one_line(fake: Fake, capsys) -> None:
    Path("out").write_text("a file")
    assert reproduce() == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be written" in error
