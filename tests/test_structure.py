"""Structure of the package: no import cycles, and one owner of a request's state."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import vlmfast
from vlmfast.engine.sequence import Sequence

PACKAGE = Path(vlmfast.__file__).parent


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules that a file imports, also in functions and for annotations."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                inside = ".".join([*module, alias.name])
                found.add(inside if inside in known else ".".join(module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known.keys()) - {name}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules of one import cycle, or an empty list."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := walk(name, []))), [])


def test_no_import_cycles() -> None:
    known = modules()
    assert not circle({name: imports(name, path, known) for name, path in known.items()})


def test_import_cycle_is_detected() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    assert circle(edges) == ["b", "c"]
    assert not circle({**edges, "c": set()})


OWNED = {field.name for field in fields(Sequence)}
# Modules whose own objects have fields of the same name.
OTHERS = {("models/tiny/tokenizer.py", "tok.decoder")}


def written(tree: ast.AST) -> set[str]:
    """Fields of a sequence, its statistics or trace that a file assigns or deletes."""
    found = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
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
            wrong += [f"{name}: {what}" for what in sorted(found) if (name, what) not in OTHERS]
    assert not wrong


def test_write_is_detected() -> None:
    text = "sequence.done = True\nof.stats.rounds += 1\ndel a.decoder\nself.done = 1\nb.other = 2"
    assert written(ast.parse(text)) == {"sequence.done", "of.stats.rounds", "a.decoder"}


def test_sessions_use_no_private_names() -> None:
    """Nor do other modules below `VLM`."""
    known = modules()
    for name in ("session", "request", "long_video", "engine.engine"):
        text = known[f"vlmfast.{name}"].read_text(encoding="utf-8")
        assert "vlm._" not in text
        assert "vlmfast.api.vlm" not in imports(f"vlmfast.{name}", known[f"vlmfast.{name}"], known)
