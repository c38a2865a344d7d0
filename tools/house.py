"""Draw how the package depends on itself: folders and modules are rooms, imports are arrows.

``python tools/house.py`` prints the rooms of ``vlmfast/`` floor by floor, ``--svg PATH`` writes the
drawing as an SVG, ``--check`` lists every violation of `ORDER` and of the limits, and ``--suggest``
prints an `ORDER` that fits. Imports inside functions and under ``TYPE_CHECKING`` count as well.
Imports by a string, such as those of ``importlib``, do not.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "vlmfast"
MAX_FLOORS, MAX_ROOMS = 12, 23

# The children of a package bottom up: a child imports only children that stand before it. In other
# packages no children may import each other in a circle, so that a new file needs no entry here.
ORDER = {
    "vlmfast": """errors version weights scenes kernels media core models compressors drafters
        engine api testing train eval tune check serve integrations demos cli __init__ __main__""",
    "vlmfast.compressors": """budget cells clip groups part select evictor reducer guard
        layered frames encoder tokens views prefill cache __init__""",
}
ORDER = {package: tuple(names.split()) for package, names in ORDER.items()}

Graph = dict[str, set[str]]


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted name to file of every module. The name of a package leads to its ``__init__.py``."""
    paths = [path.relative_to(package.parent) for path in sorted(package.rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: package.parent / path for name, path in zip(names, paths, strict=True)}


def find_imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules among ``known`` that a file imports anywhere, also in functions and for types."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            inside = [f"{module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else module for name in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known.keys()) - {name}


def module_graph(package: Path) -> Graph:
    """Every module with the modules that it imports."""
    known = find_modules(package)
    return {name: find_imports(name, path, known) for name, path in known.items()}


def child_of(parent: str, module: str) -> str:
    """The child of a package that contains a module, or an empty string."""
    inside = module.startswith(f"{parent}.")
    return module[len(parent) + 1 :].split(".")[0] if inside else "__init__" * (module == parent)


def room_graph(modules: Graph, parent: str) -> Graph:
    """Every child of a package with the children that it imports."""
    rooms: Graph = {}
    for module in sorted(modules):
        if room := child_of(parent, module):
            imported = {child_of(parent, other) for other in modules[module]}
            rooms.setdefault(room, set()).update(imported - {room, ""})
    return rooms


def data_folders(folder: Path) -> list[str]:
    """Folders that contain files but no code."""
    files = [path.relative_to(folder) for path in folder.glob("*/**/*") if path.is_file()]
    code = {path.parts[0] for path in files if path.suffix == ".py"}
    return sorted({path.parts[0] for path in files if "__pycache__" not in path.parts} - code)


def house(package: Path) -> Graph:
    """The rooms of the top level with their imports. Folders without code are rooms too."""
    rooms = room_graph(module_graph(package), package.name)
    return rooms | {name: set() for name in data_folders(package)}


def find_circle(graph: Graph) -> str:
    """Names that lead to each other in a circle, as ``a -> b -> a``, or an empty string."""
    try:
        TopologicalSorter({node: sorted(graph[node]) for node in sorted(graph)}).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1][::-1])
    return ""


def find_floors(rooms: Graph) -> dict[str, int]:
    """Floor of every room: one above the highest floor among its imports, from 1 up."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = 1 + max((floors[other] for other in rooms[room]), default=0)
    return floors


def nested(modules: Graph) -> list[str]:
    """Packages that have folders of modules."""
    return sorted({name.rsplit(".", 2)[0] for name in modules if name.count(".") > 1})


def suggest(rooms: Graph) -> list[str]:
    """Rooms bottom up, by floor and name, and last an ``__init__`` that no other room imports."""
    floors, imported = find_floors(rooms), set().union(*rooms.values())
    return sorted(rooms, key=lambda r: (r[:2] == "__" and r not in imported, floors[r], r))


def check(package: Path, order: dict[str, tuple[str, ...]]) -> list[str]:
    """One line for each circle, room that is missing or unknown, and import against ``order``."""
    modules = module_graph(package)
    found = [f"circle: {circle}"] if (circle := find_circle(modules)) else []
    for parent in sorted({*nested(modules), *order}):
        rooms = room_graph(modules, parent)
        if parent not in order:
            circle = find_circle(rooms)
            found += [f"{parent}: circle: {circle}"] if circle else []
            continue
        names = order[parent]
        known = {*rooms, *data_folders(package.parent.joinpath(*parent.split(".")))}
        found += [f"{parent}: {room} is not in ORDER" for room in rooms if room not in names]
        found += [f"{parent}: {name} does not exist" for name in names if name not in known]
        for module, other in ((a, b) for a in modules for b in sorted(modules[a])):
            low, high = child_of(parent, module), child_of(parent, other)
            if {low, high} <= {*names} and names.index(low) < names.index(high):
                found.append(f"{module} imports {other}: ORDER puts {high} above {low}")
    return found


def check_limits(rooms: Graph) -> list[str]:
    """One line for each limit that the top level exceeds."""
    floors = 0 if find_circle(rooms) else max(find_floors(rooms).values())
    counts = (("floors", floors, MAX_FLOORS), ("rooms", len(rooms), MAX_ROOMS))
    return [f"{n} {what}, at most {most} allowed" for what, n, most in counts if n > most]


def describe(package: Path) -> dict[str, str]:
    """First sentence of the docstring of every room."""
    found = dict.fromkeys(data_folders(package), "Files without code.")
    for name, path in find_modules(package).items():
        if name.count(".") < 2:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            text = re.sub(r":\w+:(?=`)|[`~]", "", " ".join(text.split()))
            found[child_of(package.name, name)] = re.split(r"(?<=[.?!]) ", text)[0]
    return found


def draw_text(rooms: Graph) -> str:
    """One line for each floor from the top down, then the counts."""
    lines: dict[int, list[str]] = {}
    for room, floor in sorted(find_floors(rooms).items()):
        imported = ", ".join(sorted(rooms[room]))
        lines.setdefault(floor, []).append(f"{room} -> {imported}" if imported else room)
    text = "".join(f"{floor:3}  {'; '.join(lines[floor])}\n" for floor in sorted(lines)[::-1])
    arrows = sum(map(len, rooms.values()))
    return f"{text}{len(lines)} floors, {len(rooms)} rooms, {arrows} arrows\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw how the package depends on itself.")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="write the drawing to a file")
    parser.add_argument("--check", action="store_true", help="list violations and exit with 1")
    parser.add_argument("--suggest", action="store_true", help="print an ORDER that fits")
    args, rooms, modules = parser.parse_args(), house(PACKAGE), module_graph(PACKAGE)
    if args.check:
        sys.exit("\n".join(check(PACKAGE, ORDER) + check_limits(rooms)) or 0)
    for parent in nested(modules) if args.suggest else ():
        children = room_graph(modules, parent)
        if circle := find_circle(children):
            sys.exit(f"{parent}: circle: {circle}")
        text = f'    "{parent}": """{" ".join(suggest(children))}""",'
        print(textwrap.fill(text, 100, subsequent_indent=" " * 8))
    if circle := find_circle(rooms):
        sys.exit(f"circle: {circle}")
    if args.svg:
        from house_svg import draw_svg

        args.svg.write_text(draw_svg(rooms, describe(PACKAGE)), encoding="utf-8")
    elif not args.suggest:
        print(draw_text(rooms), end="")


if __name__ == "__main__":
    main()
