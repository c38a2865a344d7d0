"""The tool that changes the code in small ways and sees whether a test fails."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

if not (ROOT / "tools" / "mutants.py").is_file():
    pytest.skip("the tool is not part of this distribution", allow_module_level=True)

SOURCE = '''"""A module: 1 + 1."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from x import y

LIMIT = 3


def rule(a: "list[1 + 1]", b: int = 2) -> int:
    """Text 1 < 2."""
    assert a != b
    if a < LIMIT and not b:
        raise ValueError(f"{a + 1}")
    a.clear()
    b -= 1
    return max(a[1:b], call(a, b, k=True)) if a is None else a[0] / b
'''


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("mutants")
    finally:
        sys.path.remove(str(ROOT / "tools"))
        for name in ("mutants", "mutations", "recorder", "trials"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def mutations(tool: Any) -> Any:
    return sys.modules["mutations"]


# --- the changes ---------------------------------------------------------------------------------


def test_every_kind_of_change_occurs_once(mutations: Any) -> None:
    found = mutations.mutants_of(SOURCE, "rule.py", "engine")
    assert [mutant.change for mutant in found] == [
        "3 -> 2",
        "3 -> 4",
        "2 -> 1",
        "2 -> 3",
        "a < LIMIT -> (a <= LIMIT)",
        "a < LIMIT and not b -> (a < LIMIT or not b)",
        "not b -> (b)",
        "a.clear() -> pass",
        "b -= 1 -> b += 1",
        "b -= 1 -> pass",
        "1 -> 0",
        "1 -> 2",
        "max(a[1:b], call(a, b, k=True)) -> (max(call(a, b, k=True), a[1:b]))",
        "max(a[1:b], call(a, b, k=True)) -> (min(a[1:b], call(a, b, k=True)))",
        "max(a[1:b], call(a, b, k=True)) if a is None else a[0] / b"
        " -> (a[0] / b if a is None else max(a[1:b], call(a, b, k=True)))",
        "1 -> 0",
        "1 -> 2",
        "1:b -> 1 + 1:b",
        "1:b -> 1:b + 1",
        "call(a, b, k=True) -> (call(b, a, k=True))",
        "True -> False",
        "a is None -> (a is not None)",
        "a[0] / b -> (a[0] * b)",
        "0 -> -1",
        "0 -> 1",
    ]


def test_a_change_is_valid_and_leaves_the_rest(mutations: Any) -> None:
    raw = SOURCE.encode()
    for mutant in mutations.mutants_of(SOURCE, "rule.py", "engine"):
        changed = mutant.apply(raw)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(raw)), mutant.change
        assert changed[: mutant.start] == raw[: mutant.start]
        assert changed.endswith(raw[mutant.end :])
        assert SOURCE.splitlines()[mutant.line - 1].strip() == mutant.text


def test_identity_survives_edits_elsewhere(mutations: Any) -> None:
    before = mutations.mutants_of(SOURCE, "rule.py", "engine")
    after = mutations.mutants_of("import os\n" + SOURCE, "rule.py", "engine")
    assert [mutant.key for mutant in before] == [mutant.key for mutant in after]
    assert len({mutant.key for mutant in before}) == len(before)
    assert replace(before[0], file="other.py").key != before[0].key


@pytest.mark.slow
def test_sample_is_seeded_and_stratified(mutations: Any) -> None:
    strata = tuple(mutations.STRATA)
    drawn = mutations.sample(ROOT, strata, 2 * len(strata), seed=0)
    assert [m.stratum for m in drawn] == list(strata) * 2
    assert drawn[:7] == mutations.sample(ROOT, strata, 7, seed=0)
    assert drawn != mutations.sample(ROOT, strata, 2 * len(strata), seed=1)


def test_an_edit_replaces_the_mutants_of_its_lines_alone(mutations: Any, tmp_path: Path) -> None:
    folder = tmp_path / mutations.STRATA["eval"]
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(SOURCE)
    count = len(list(mutations.mutants_of(SOURCE, "a.py", "eval")))
    before = mutations.sample(tmp_path, ["eval"], count, seed=0)
    (folder / "a.py").write_text(SOURCE.replace("b -= 1", "b = -b\n    b += 2"))
    after = [m.key for m in mutations.sample(tmp_path, ["eval"], count + 9, seed=0)]
    kept = [m.key for m in before if m.text != "b -= 1"]
    assert len(kept) < len(before)
    assert [key for key in after if key in set(kept)] == kept


def test_known_mutants_are_in_the_code(mutations: Any) -> None:
    known = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
    for mutant in mutations.named(ROOT, known["named"]):
        source = (ROOT / mutant.file).read_bytes()
        assert mutations.is_valid(mutant.apply(source))
    for entry in known.get("equivalent", ()):
        found = mutations.mutants_of(
            (ROOT / entry["file"]).read_text(encoding="utf-8"), entry["file"], "engine"
        )
        assert any((m.text, m.change) == (entry["line"], entry["change"]) for m in found), entry
        assert entry["reason"]


def test_a_named_mutant_that_is_gone_is_an_error(mutations: Any) -> None:
    entry = {"file": "vlmfast/engine/rounds.py", "line": "no such line", "change": "such -> any"}
    entry["tests"] = []
    with pytest.raises(SystemExit, match="no single line"):
        mutations.named(ROOT, [entry])


# --- tests and results ---------------------------------------------------------------------------


def ran(file: str, line: int, seconds: float = 0.0) -> dict[str, Any]:
    """The recording of a test that runs one line."""
    return {"seconds": seconds, "lines": {file: [line]}}


def test_fast_tests_come_first_and_few_of_one_function(tool: Any, mutations: Any) -> None:
    found = mutations.mutants_of(SOURCE, "rule.py", "engine")
    constant, mutant = found[0], next(m for m in found if m.change == "b -= 1 -> pass")
    cases = [f"t.py::test_a[{i}]" for i in range(5)]
    tests = {name: ran("rule.py", mutant.line, 0.1 * i) for i, name in enumerate(cases)}
    tests["t.py::test_c"] = ran("rule.py", 99)
    recording = tool.Recording(tests | {"t.py::test_b": ran("rule.py", mutant.line, 9.0)}, {})
    assert recording.of(mutant, mutant.line) == [*cases[:3], "t.py::test_b", *cases[3:]]
    assert recording.of(replace(mutant, first=60), 60) == []
    assert recording.of(replace(mutant, file="other.py"), 1) == []
    # A line that runs on import, in whichever test came first: every test of the file.
    every = {*cases, "t.py::test_b", "t.py::test_c"}
    assert set(recording.of(constant, constant.line)) == every


def test_lines_that_run_on_import(mutations: Any) -> None:
    found = mutations.mutants_of(SOURCE, "rule.py", "engine")
    assert [m.change for m in found if m.on_import] == ["3 -> 2", "3 -> 4", "2 -> 1", "2 -> 3"]


def test_recordings_add_up(tool: Any) -> None:
    old = {
        "tests": {"x": ran("a.py", 1), "y": {"lines": {"a.py": [1], "b.py": [1], "c.py": [5]}}},
        "digests": {"a.py": "1", "b.py": "1", "c.py": "1"},
    }
    new = {"tests": {"x": ran("a.py", 3)}, "digests": {"a.py": "1", "b.py": "2"}}
    assert sys.modules["recorder"].merged(old, new) == {
        # What was known of the changed file is gone.
        "tests": {"x": ran("a.py", 3), "y": {"lines": {"a.py": [1], "c.py": [5]}}},
        "digests": {"a.py": "1", "b.py": "2", "c.py": "1"},
    }


def rows() -> list[dict[str, Any]]:
    row = {"file": "a.py", "line": 3, "text": "x = 1", "stratum": "engine", "by": ""}
    return [
        row | {"change": "1 -> 2", "result": "killed"},
        row | {"change": "1 -> 0", "result": "survived"},
        row | {"change": "1 -> 3", "result": "survived"},
    ]


def test_equivalent_mutants_do_not_count(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"file": "a.py", "line": "x = 1", "change": "1 -> 0", "reason": "only its sign matters"}
    known = [tool.with_known(row, [entry]) for row in rows()]
    assert [row["result"] for row in known] == ["killed", "equivalent", "survived"]
    found = tool.report(known, ["engine", "eval"])
    total = {
        "killed": 1,
        "survived": 1,
        "equivalent": 1,
        "share": 0.5,
        "interval": [0.0945, 0.9055],
    }
    assert found["engine"] == found["all"] == total
    assert found["eval"]["share"] is None
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "equivalent: a.py:3: 1 -> 0  only its sign matters"
    assert told[-1].startswith("all: 1 killed, 1 survived, 1 equivalent; 50.0%")


class Counting:
    def __init__(self, stop: int) -> None:
        self.judged: list[str] = []
        self.stop = stop

    def judge(self, mutant: Any) -> dict[str, Any]:
        if len(self.judged) == self.stop:
            raise KeyboardInterrupt
        self.judged.append(mutant.key)
        return {
            "key": mutant.key,
            "result": "killed",
            "by": "t",
            "file": mutant.file,
            "line": mutant.line,
            "change": mutant.change,
        }


def test_an_interrupted_run_continues(tool: Any, mutations: Any, tmp_path: Path) -> None:
    mutants, out = mutations.mutants_of(SOURCE, "rule.py", "engine")[:6], tmp_path / "r.jsonl"
    first = Counting(stop=3)
    with pytest.raises(KeyboardInterrupt):
        tool.run(mutants, first, out, lambda line: None)
    with out.open("a") as file:
        file.write('{"key": "half of a li')
    second = Counting(stop=99)
    found = tool.run(mutants, second, out, lambda line: None)
    assert [row["key"] for row in found] == [mutant.key for mutant in mutants]
    assert first.judged + second.judged == [mutant.key for mutant in mutants]
    third = Counting(stop=0)
    assert tool.run(mutants, third, out, lambda line: None) == found
    # Survivors alone are judged again.
    with out.open("a") as file:
        file.write(json.dumps(found[2] | {"result": "survived"}) + "\n")
    fourth = Counting(stop=99)
    tool.run(mutants, fourth, out, lambda line: None, again=True)
    assert fourth.judged == [mutants[2].key]


# --- a whole run ---------------------------------------------------------------------------------

RULE = '''"""A rule."""

SIZE = 4


def larger(a, b):
    return a > b


def small(a):
    return a < SIZE


def unseen(a):
    return a + 1
'''
TESTS = """from vlmfast.engine.rule import larger, small


def test_larger():
    assert larger(2, 1)
    assert not larger(1, 2)


def test_size():
    assert small(1)
"""
TOML = """[[named]]
file = "vlmfast/engine/rule.py"
line = "SIZE = 4"
change = "4 -> 1"
tests = ["tests/test_rule.py"]

[[equivalent]]
file = "vlmfast/engine/rule.py"
line = "SIZE = 4"
change = "4 -> 5"
reason = "any size above one"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one module, its tests and the tool."""
    files = {
        "vlmfast/__init__.py": "",
        "vlmfast/engine/__init__.py": "",
        "vlmfast/engine/rule.py": RULE,
        "tests/test_rule.py": TESTS,
        "tools/mutants.toml": TOML,
        ".gitignore": "/runs/\n__pycache__/\n",
    }
    files |= {
        f"tools/{name}.py": (ROOT / "tools" / f"{name}.py").read_text(encoding="utf-8")
        for name in ("mutants", "mutations", "recorder", "trials")
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.slow
def test_a_whole_run(project: Path) -> None:
    pytest.importorskip("coverage", reason="records the tests of each line; part of the dev extra")
    command = [sys.executable, "tools/mutants.py", "--only", "engine", "--tests", "tests"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        row["change"]: row
        for row in map(
            json.loads, (project / "runs/mutants/results.jsonl").read_text().splitlines()
        )
    }
    assert found["4 -> 1"]["result"] == "killed"
    assert found["4 -> 1"]["by"] == "FAILED tests/test_rule.py::test_size"
    assert found["a > b -> (a >= b)"]["result"] == "survived"
    assert found["a + 1 -> (a - 1)"]["by"] == "no test runs this line"
    assert "named: killed vlmfast/engine/rule.py:3: 4 -> 1" in done.stdout
    assert "equivalent: vlmfast/engine/rule.py:3: 4 -> 5  any size above one" in done.stdout
    assert (project / "vlmfast/engine/rule.py").read_text() == RULE  # the copy was changed
    command += ["--report", "report.json"]
    again = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert json.loads((project / "report.json").read_text())["all"]["equivalent"] == 1
    assert "min left" not in again.stdout  # nothing was judged again
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


@pytest.fixture
def trials(tool: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process that runs tests of the project, without the large libraries."""
    return tool.Trials(project, libraries=("schemathesis.pytest.plugin", "langsmith.pytest_plugin"))


def first_mutant(mutations: Any) -> Any:
    return mutations.mutants_of(RULE, "vlmfast/engine/rule.py", "engine")[0]


@pytest.mark.slow
def test_a_mutant_that_hangs_is_killed(
    tool: Any, mutations: Any, project: Path, trials: Any
) -> None:
    """By the processor time that it uses; a test that only takes long does not end so."""
    mutant, rule = first_mutant(mutations), project / "vlmfast/engine/rule.py"
    rule.write_text(RULE.replace("SIZE = 4", "SIZE = 4\nwhile SIZE < 4:\n    pass"))
    recording = tool.Recording({"tests/test_rule.py::test_size": ran(mutant.file, 3)}, {})
    runner = tool.Runner(project, recording, 1.0, trials, starts=3.0)
    row = runner.judge(mutant)
    assert mutant.change == "4 -> 3"
    assert (row["result"], row["by"]) == ("killed", "time")
    assert "SIZE = 4" in rule.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_test_that_fails_anyway_kills_nothing(
    tool: Any, mutations: Any, project: Path, trials: Any
) -> None:
    (project / "tests/test_other.py").write_text("def test_broken():\n    assert False\n")
    mutant = first_mutant(mutations)
    names = ["other.py::test_broken", "rule.py::test_larger", "gone.py::test_gone"]
    recording = tool.Recording({f"tests/test_{name}": ran(mutant.file, 3) for name in names}, {})
    row = tool.Runner(project, recording, 1.0, trials).judge(mutant)
    assert (row["result"], row["tests"]) == ("survived", 3)
    named = replace(mutant, tests=("tests/test_other.py::test_broken", "tests/test_rule.py"))
    named = replace(named, after="0")
    row = tool.Runner(project, recording, 1.0, trials).judge(named)
    assert (row["result"], row["by"]) == ("killed", "FAILED tests/test_rule.py::test_size")


@pytest.mark.slow
def test_declarations_have_tests_that_no_recording_finds(
    tool: Any, mutations: Any, project: Path, trials: Any
) -> None:
    recording, tests = tool.Recording({}, {}), ("tests/test_rule.py::test_size",)
    runner = tool.Runner(project, recording, 1.0, trials, declarations=tests)
    found = mutations.mutants_of(RULE, "vlmfast/engine/rule.py", "engine")
    inside = next(mutant for mutant in found if mutant.change == "a < SIZE -> (a <= SIZE)")
    constant = replace(found[0], after="0")
    assert runner.judge(constant)["by"] == "FAILED tests/test_rule.py::test_size"
    assert runner.judge(replace(inside, after="(False)"))["by"] == "no test runs this line"


@pytest.mark.slow
def test_a_changed_file_is_recorded_again(
    tool: Any, mutations: Any, project: Path, trials: Any
) -> None:
    mutant = first_mutant(mutations)
    recording = tool.Recording({}, {mutant.file: "of another text"})
    with pytest.raises(SystemExit, match=r"rule\.py has changed since it was recorded: --record"):
        tool.Runner(project, recording, 1.0, trials).judge(mutant)
