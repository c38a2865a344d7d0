"""Structure: scripts do not import each other, and one folder owns a request's state.

Another one is the only door of the tests to the engine and to private names. `[tool.importlinter]`
and ruff say the rest.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import support.engine
import vlmfast
from support.engine.turns import Sequence

PACKAGE = Path(vlmfast.__file__).parent
ROOT = PACKAGE.parent
DOOR = Path(support.engine.__file__).parent
SCRIPTS = [ROOT / name for name in ("tools", "benchmarks", "benchmarks/pocket", "benchmarks/tiny")]


@pytest.mark.parametrize("folder", SCRIPTS, ids=lambda folder: folder.name)
def test_no_scripts_import_each_other(folder: Path) -> None:
    if not folder.is_dir():
        pytest.skip("the scripts are not part of this distribution")
    files = {path.stem: path for path in folder.glob("*.py")}
    imports = {name: imported(path) & files.keys() for name, path in files.items()}
    TopologicalSorter(imports).prepare()


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found - {path.stem}


OWNED = {field.name for field in fields(Sequence)}
NAMED = re.compile(rf"setattr|\.({'|'.join(OWNED)})\b")  # a file without need not be parsed


def written(tree: ast.AST) -> set[str]:
    """Fields of a sequence, its statistics or trace that a file assigns or deletes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("setattr"), [_, ast.Constant(name), *_]) if name in OWNED:
                found.add(ast.unparse(node))
            case ast.Attribute(owner, name, ast.Store() | ast.Del()):
                own = isinstance(owner, ast.Name) and owner.id == "self"
                inner = isinstance(owner, ast.Attribute) and owner.attr in ("stats", "trace")
                if inner or (name in OWNED and not own):
                    found.add(ast.unparse(node))
    return found


def test_only_the_engine_writes_sequences() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        if not name.startswith("engine/") and NAMED.search(text):
            found = written(ast.parse(text))
            wrong += [f"{name}: {what}" for what in sorted(found)]
    assert not wrong


def test_the_engine_uses_no_private_names_of_models() -> None:
    for name in ("api/session.py", "api/request.py", "api/long_video.py", "engine/engine.py"):
        assert "vlm._" not in (PACKAGE / name).read_text(encoding="utf-8")


OURS = ("vlmfast", "support", "benchmarks", "tools")
PRIVATE = re.compile(r"(^|[. ])_(?!_)|^vlmfast\.engine\b")
OTHERS = {"_disable_adapters"}  # PEFT's
PATCHES = ("setattr", "delattr", "getattr", "setitem", "delitem", "object", "patch")
# A file without any of these need not be parsed.
SUSPECT = re.compile(
    r"[\"'](_(?!_)|vlmfast\.([\w.]*\._|engine))|^\s*(from|import) .*\b_(?!_)|^ +_\w+( as \w+)?,$",
    re.M,
)


def behind_the_door(tree: ast.Module) -> Iterator[str]:
    """Imports and patches of private names or of the engine, which ruff does not see."""
    foreign = {"self", "sys"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names) | ast.ImportFrom(names=names):
                for one in names:
                    whole = f"{getattr(node, 'module', '')}.{one.name}".strip(".")
                    if not whole.startswith(OURS):
                        foreign.add((one.asname or one.name).split(".")[0])
                    elif PRIVATE.search(f"{whole} {one.asname or ''}"):
                        yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Call(ast.Attribute(attr=by) | ast.Name(by), [of, *more]) if by in PATCHES:
                match of, *more[:1]:
                    case [ast.Constant(str(name)), *_]:  # "package.module.name"
                        ours = name.startswith(OURS)
                    case [_, ast.Constant(str(name))]:
                        ours = ast.unparse(of).split(".")[0] not in foreign
                    case _:
                        continue
                if ours and PRIVATE.search(name) and name not in OTHERS:
                    yield f"{node.lineno}: {ast.unparse(node)}"


def test_one_folder_of_the_tests_names_the_engine() -> None:
    """And private names."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.parent != DOOR and SUSPECT.search(text):
            name = path.relative_to(ROOT).as_posix()
            wrong += [f"{name}:{what}" for what in behind_the_door(ast.parse(text))]
    assert not wrong, "\n".join(wrong)


BEHIND = """
from vlmfast.eval import _x
import vlmfast.models._own
from support.engine.private import parser as _parser
monkeypatch.setattr("vlmfast.engine.engine.time", 1)
mock.patch("vlmfast.eval.shapes._STRIDE", 3)
mock.patch.object(vlm.adapter, "_copies", 1)
"""
FINE = """
import torch._dynamo as dynamo
monkeypatch.setattr("vlmfast.serve.app.read_as", 1)
monkeypatch.setattr(dynamo, "_x", 1)
monkeypatch.setattr("torch._dynamo._x", 1)
"""


def test_what_is_behind_the_door() -> None:
    assert len(list(behind_the_door(ast.parse(BEHIND)))) == len(BEHIND.split("\n")) - 2
    assert not list(behind_the_door(ast.parse(FINE)))
