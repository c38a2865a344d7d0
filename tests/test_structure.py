"""Structure: scripts do not import each other, and one folder owns a request's state.

`[tool.importlinter]` says the rest.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vlmfast
from vlmfast.engine.sequence import Sequence

PACKAGE = Path(vlmfast.__file__).parent


ROOT = PACKAGE.parent
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


def test_the_engine_uses_no_private_names_of_models() -> None:
    for name in ("api/session.py", "api/request.py", "api/long_video.py", "engine/engine.py"):
        assert "vlm._" not in (PACKAGE / name).read_text(encoding="utf-8")
