"""Structure of the package: no import cycles, and one owner of a request's state."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import vlmfast
from vlmfast.engine.sequence import Sequence

PACKAGE = Path(vlmfast.__file__).parent


TOOL = PACKAGE.parent / "tools" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    """The tool that draws the imports of the package."""
    if not TOOL.is_file():
        pytest.skip("the tool is not part of this distribution")
    spec = importlib.util.spec_from_file_location("house", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph(house: ModuleType) -> dict[str, set[str]]:
    return house.module_graph(PACKAGE)


def test_no_modules_import_each_other(house: ModuleType, graph: dict[str, set[str]]) -> None:
    assert not house.find_circle(graph)


def test_a_circle_is_found(house: ModuleType) -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    assert house.find_circle(edges) == "b -> c -> b"
    assert not house.find_circle({**edges, "c": set()})


OWNED = {field.name for field in fields(Sequence)}


def written(tree: ast.AST) -> set[str]:
    """Fields of a sequence, its statistics or trace that a file assigns or deletes."""
    found = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in OWNED:
                found.add(ast.unparse(node))
        for target in targets:
            for part in ast.walk(target):
                if not isinstance(part, ast.Attribute) or not isinstance(
                    part.ctx, ast.Store | ast.Del
                ):
                    continue
                owner = part.value
                own = isinstance(owner, ast.Name) and owner.id == "self"
                inner = isinstance(owner, ast.Attribute) and owner.attr in ("stats", "trace")
                if inner or (part.attr in OWNED and not own):
                    found.add(ast.unparse(part))
    return found


def test_only_the_engine_writes_sequences() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("engine/"):
            found = written(ast.parse(path.read_text(encoding="utf-8")))
            wrong += [f"{name}: {what}" for what in sorted(found)]
    assert not wrong


def test_write_is_detected() -> None:
    text = "sequence.done = True\nof.stats.rounds += 1\ndel a.group\nself.done = 1\nb.other = 2"
    assert written(ast.parse(text)) == {"sequence.done", "of.stats.rounds", "a.group"}


def test_sessions_use_no_private_names(house: ModuleType, graph: dict[str, set[str]]) -> None:
    """Nor do other modules below `VLM`."""
    known = house.find_modules(PACKAGE)
    for name in ("api.session", "api.request", "api.long_video", "engine.engine"):
        text = known[f"vlmfast.{name}"].read_text(encoding="utf-8")
        assert "vlm._" not in text
        assert "vlmfast.api.vlm" not in graph[f"vlmfast.{name}"]
