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

import vlmfast

ROOT = Path(vlmfast.__file__).parent.parent
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
        del sys.modules["mutants"], sys.modules["mutations"]


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


def test_sample_is_seeded_and_stratified(mutations: Any) -> None:
    strata = tuple(mutations.STRATA)
    drawn = mutations.sample(ROOT, strata, 30, seed=0)
    assert [m.stratum for m in drawn] == list(strata) * 10
    assert drawn[:7] == mutations.sample(ROOT, strata, 7, seed=0)
    assert drawn != mutations.sample(ROOT, strata, 30, seed=1)


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
    with pytest.raises(SystemExit, match="no single line"):
        mutations.named(ROOT, [entry])


# --- tests and results ---------------------------------------------------------------------------


def test_fast_tests_come_first_and_few_of_one_function(tool: Any, mutations: Any) -> None:
    (mutant, *_) = mutations.mutants_of(SOURCE, "rule.py", "engine")
    cases = [f"t.py::test_a[{i}]" for i in range(5)]
    lines = {"rule.py": {mutant.line: [*cases, "t.py::test_b"], 99: ["t.py::test_c"], 50: []}}
    seconds = {name: 0.1 * i for i, name in enumerate(cases)} | {"t.py::test_b": 9.0}
    coverage = tool.Coverage(lines, seconds)
    assert coverage.of(mutant, mutant.line) == [*cases[:3], "t.py::test_b", *cases[3:]]
    # A line that runs on import: every test of the file. One that never runs: none.
    every = {*cases, "t.py::test_b", "t.py::test_c"}
    assert set(coverage.of(replace(mutant, first=50), 50)) == every
    assert coverage.of(replace(mutant, first=60), 60) == []
    assert coverage.of(replace(mutant, file="other.py"), 1) == []


@pytest.mark.parametrize(
    ("killed", "total", "interval"),
    [(9, 10, (0.5958, 0.9821)), (0, 5, (0.0, 0.4345)), (5, 5, (0.5655, 1.0)), (0, 0, (0.0, 1.0))],
)
def test_wilson_interval(tool: Any, killed: int, total: int, interval: tuple) -> None:
    assert tool.wilson(killed, total) == pytest.approx(interval, abs=1e-4)


def rows() -> list[dict[str, Any]]:
    row = {"file": "a.py", "line": 3, "text": "x = 1", "stratum": "engine", "by": ""}
    return [
        row | {"change": "1 -> 2", "result": "killed"},
        row | {"change": "1 -> 0", "result": "survived"},
        row | {"change": "1 -> 3", "result": "survived"},
    ]


def test_equivalent_mutants_do_not_count(tool: Any) -> None:
    entry = {"file": "a.py", "line": "x = 1", "change": "1 -> 0", "reason": "only its sign matters"}
    known = [tool.with_known(row, [entry]) for row in rows()]
    assert [row["result"] for row in known] == ["killed", "equivalent", "survived"]
    total = tool.summary(known)
    assert (total["killed"], total["survived"], total["equivalent"]) == (1, 1, 1)
    assert total["share"] == 0.5
    told: list[str] = []
    tool.report(known, told.append)
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
        for name in ("mutants", "mutations")
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
    again = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert "min left" not in again.stdout  # nothing was judged again
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_a_mutant_that_hangs_is_killed(tool: Any, mutations: Any, project: Path) -> None:
    (mutant, *_) = mutations.mutants_of(RULE, "vlmfast/engine/rule.py", "engine")
    coverage = tool.Coverage({mutant.file: {mutant.line: ["tests/test_rule.py"]}}, {})
    runner = tool.Runner(project, coverage, limit=1.0, starts=0.0)
    row = runner.judge(mutant)
    assert (row["result"], row["by"]) == ("killed", "time")
    assert (project / mutant.file).read_text(encoding="utf-8") == RULE
