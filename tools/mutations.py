"""Small changes of Python code, one at a time: what `tools/mutants.py` judges."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "vlmfast"
STRATA = {p.name: f"vlmfast/{p.name}" for p in sorted(PACKAGE.iterdir()) if any(p.glob("*.py"))}


@dataclass(frozen=True)
class Mutant:
    """One change of a file.

    Parameters
    ----------
    file : str
        Relative to the root.
    line : int
        Where the change begins.
    text : str
        That line, stripped.
    change : str
        ``before -> after``.
    start, end : int
        Span of the file's bytes that is replaced.
    after : str
    stratum : str
    nth : int
        Of the same changes on lines of the same text in the file.
    first : int
        Line of the statement.
    tests : tuple of str
        That judge it, where they are given.
    on_import : bool
        It runs when the module is imported, not in a function.
    """

    file: str
    line: int
    text: str
    change: str
    start: int
    end: int
    after: str
    stratum: str
    nth: int = 0
    first: int = 0
    tests: tuple[str, ...] = ()
    on_import: bool = False

    @property
    def key(self) -> str:
        """Identity that survives edits elsewhere in the file."""
        whole = "\0".join((self.file, self.text, self.change, str(self.nth)))
        return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def _both(*pairs: tuple[Any, Any]) -> dict[Any, Any]:
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


COMPARISONS = _both(
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
)
ARITHMETIC = _both(
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift)
)
ARITHMETIC |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NAMES = _both(
    ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("any", "all"), ("ceil", "floor")
)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Changed copies of a node; each is one mutant."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        swapped = COMPARISONS[type(node.ops[0])]()
        yield ast.Compare(node.left, [swapped, *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
        yield ast.Pass()
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Slice):
        one = ast.Constant(1)
        if node.upper is not None:
            yield ast.Slice(node.lower, ast.BinOp(node.upper, ast.Add(), one), node.step)
        if node.lower is not None:
            yield ast.Slice(ast.BinOp(node.lower, ast.Add(), one), node.upper, node.step)
    elif isinstance(node, ast.Call):
        if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            swapped = [node.args[1], node.args[0], *node.args[2:]]
            yield ast.Call(node.func, swapped, node.keywords)
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield ast.Call(ast.Name(NAMES[node.func.id]), node.args, node.keywords)
        if isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
            func = ast.Attribute(node.func.value, NAMES[node.func.attr])
            yield ast.Call(func, node.args, node.keywords)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def code(
    tree: ast.AST, first: int = 0, inside: bool = False
) -> Iterator[tuple[ast.AST, int, bool]]:
    """Nodes that run and that a caller can see, the first line of their statement, and whether
    they are inside a function.

    Annotations, messages, assertions and decorators are left out.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "format_spec"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Assert):
                continue
            if isinstance(node, ast.JoinedStr) or _types_only(node):
                continue
            line = node.lineno if isinstance(node, ast.stmt) else first
            within = inside or (isinstance(tree, FUNCTIONS) and field == "body")
            yield node, line, within
            yield from code(node, line, within)


def _types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def mutants_of(source: str, file: str, stratum: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its text; a few are not valid (`is_valid`)."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw, found, seen = source.encode(), [], Counter[tuple[str, str]]()
    for node, first, inside in code(ast.parse(source)):
        if not hasattr(node, "lineno"):
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = raw[start:end].decode()
        for variant in variants(node):
            after = ast.unparse(ast.fix_missing_locations(variant))
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant | ast.Slice):
                after = f"({after})"
            short = [" ".join(of.split()) for of in (before, after)]
            change, text = " -> ".join(short), lines[node.lineno - 1].strip()
            nth = seen[text, change]
            place = (file, node.lineno, text, change, start, end, after, stratum, nth, first)
            found.append(Mutant(*place, on_import=not inside))
            seen[text, change] += 1
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.change))


def is_valid(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def sample(root: Path, strata: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, as many of each stratum, in an order that a smaller count begins.

    The order is that of a hash of the seed and each key, so that an edit replaces the mutants of
    the lines that it changes and no others.
    """

    def rank(mutant: Mutant) -> bytes:
        return hashlib.blake2b(f"{seed} {mutant.key}".encode()).digest()

    pools = []
    for name in strata:
        sources = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted((root / STRATA[name]).rglob("*.py"))
        }
        every = [m for file, source in sources.items() for m in mutants_of(source, file, name)]
        pools.append(_valid(sorted(every, key=rank), sources))
    turns = (mutant for turn in zip_longest(*pools) for mutant in turn if mutant is not None)
    return list(islice(turns, count))


def _valid(mutants: Iterable[Mutant], sources: Mapping[str, str]) -> Iterator[Mutant]:
    """Parsed one by one, since only a few are drawn."""
    for mutant in mutants:
        if is_valid(mutant.apply(sources[mutant.file].encode())):
            yield mutant


def named(root: Path, entries: Sequence[dict[str, Any]]) -> list[Mutant]:
    """Mutants that ``tools/mutants.toml`` describes by the text of a line and a change in it."""
    found = []
    for entry in entries:
        raw = (root / entry["file"]).read_bytes()
        before, _, after = entry["change"].partition(" -> ")
        line = entry["line"].encode()
        if raw.count(line) != 1 or before not in entry["line"]:
            raise SystemExit(f"mutants: {entry['file']} has no single line {entry['line']!r}")
        start = raw.index(line) + line.index(before.encode())
        number = raw[:start].count(b"\n") + 1
        end = start + len(before.encode())
        stratum = next((n for n, f in STRATA.items() if entry["file"].startswith(f)), "named")
        tests = tuple(entry["tests"])
        place = (entry["file"], number, entry["line"], entry["change"], start, end, after, stratum)
        found.append(Mutant(*place, first=number, tests=tests))
    return found
