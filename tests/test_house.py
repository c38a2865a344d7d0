"""The drawing of the package's imports: the rooms keep their order, and the drawing is current."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest

import vlmfast

PACKAGE = Path(vlmfast.__file__).parent
ROOT = PACKAGE.parent
DRAWING = ROOT / "docs" / "images" / "structure.svg"
if not (ROOT / "tools" / "house.py").is_file():
    pytest.skip("the tool is not part of this distribution", allow_module_level=True)

PLANTED = {
    "__init__.py": '"""A planted package."""\nfrom .top import answer\n',
    "__main__.py": "from .top import answer\n",
    "base.py": '"""Errors & more. A second sentence."""\n',
    "deep/__init__.py": '"""A folder of modules."""\n',
    "deep/low.py": "from .. import base\n",
    "deep/high.py": "from planted.deep import low\nimport json\n",
    "deep/inner/__init__.py": "",
    "deep/inner/leaf.py": "from ..low import base\n",
    "top.py": "import planted.deep.high\nfrom .base import *\n",
    "weights/data.json": "{}",
    "stale/__pycache__/old.pyc": "",
}
ORDER = {
    "planted": ("base", "deep", "top", "__init__", "__main__"),
    "planted.deep": ("low", "high", "inner", "__init__"),
}
ROOMS = {
    "__init__": {"top"},
    "__main__": {"top"},
    "base": set(),
    "deep": {"base"},
    "top": {"base", "deep"},
    "weights": set(),
}


@pytest.fixture(scope="module")
def tools():
    """The modules of ``tools``."""
    sys.path.insert(0, str(ROOT / "tools"))
    names = ("house", "house_svg")
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(ROOT / "tools"))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def house(tools) -> ModuleType:
    return tools.house


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for name, text in PLANTED.items():
        path = tmp_path / "planted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "planted"


# --- the package ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def violations(tools) -> list[str]:
    return tools.house.check(PACKAGE, tools.house.ORDER)


@pytest.fixture(scope="module")
def rooms(tools) -> dict[str, set[str]]:
    return tools.house.house(PACKAGE)


def test_imports_keep_the_order(house: ModuleType, violations: list[str]) -> None:
    assert not violations
    assert house.ORDER["vlmfast"][-2:] == ("__init__", "__main__")


def test_floors_and_rooms_are_few(house: ModuleType, rooms) -> None:
    assert not house.check_limits(rooms)


def test_drawing_is_current(tools, rooms) -> None:
    """Write it with ``python tools/house.py --svg docs/images/structure.svg``."""
    drawn = tools.house_svg.draw_svg(rooms, tools.house.describe(PACKAGE))
    assert DRAWING.read_text(encoding="utf-8") == drawn


# --- checks --------------------------------------------------------------------------------------


def test_planted_package_keeps_its_order(house: ModuleType, planted: Path) -> None:
    assert house.check(planted, ORDER) == []
    # Folders without code may stand in the order.
    assert house.check(planted, {**ORDER, "planted": ("weights", *ORDER["planted"])}) == []


@pytest.mark.parametrize(
    "line",
    [
        "from . import top",
        "from .top import answer",
        "import planted.top",
        "def late():\n    from planted.top import answer",
        "if TYPE_CHECKING:\n    from .top import Answer",
    ],
)
def test_upward_arrow_is_found(house: ModuleType, planted: Path, line: str) -> None:
    (planted / "top.py").write_text("", encoding="utf-8")
    (planted / "base.py").write_text(line, encoding="utf-8")
    wrong = "planted.base imports planted.top: ORDER puts top above base"
    assert house.check(planted, ORDER) == [wrong]


def test_upward_arrow_in_a_folder_is_found(house: ModuleType, planted: Path) -> None:
    (planted / "deep" / "low.py").write_text("from .inner import leaf", encoding="utf-8")
    (planted / "deep" / "inner" / "leaf.py").write_text("", encoding="utf-8")
    wrong = "planted.deep.low imports planted.deep.inner.leaf: ORDER puts inner above low"
    assert house.check(planted, ORDER) == [wrong]


def test_import_of_the_package_itself_is_found(house: ModuleType, planted: Path) -> None:
    (planted / "__init__.py").write_text("", encoding="utf-8")
    (planted / "base.py").write_text("from . import __version__", encoding="utf-8")
    wrong = "planted.base imports planted: ORDER puts __init__ above base"
    assert house.check(planted, ORDER) == [wrong]


@pytest.mark.parametrize(
    "line",
    [
        "from .other import b",
        "def late():\n    from .other import b",
        "if TYPE_CHECKING:\n    from planted.deep.inner import other",
    ],
)
def test_circle_is_found_in_a_flat_folder(house: ModuleType, planted: Path, line: str) -> None:
    (planted / "deep" / "inner" / "leaf.py").write_text(line, encoding="utf-8")
    (planted / "deep" / "inner" / "other.py").write_text("from . import leaf", encoding="utf-8")
    (found,) = house.check(planted, ORDER)
    leaf, other = "planted.deep.inner.leaf", "planted.deep.inner.other"
    assert found in (
        f"circle: {leaf} -> {other} -> {leaf}",
        f"circle: {other} -> {leaf} -> {other}",
    )


def test_missing_and_unknown_rooms_are_found(house: ModuleType, planted: Path) -> None:
    order = {**ORDER, "planted": ("base", "gone", "deep", "__init__", "__main__")}
    assert house.check(planted, order) == [
        "planted: top is not in ORDER",
        "planted: gone does not exist",
    ]


def test_circle_of_folders_without_an_entry_is_found(house: ModuleType, planted: Path) -> None:
    order = {"planted": ORDER["planted"]}
    assert house.check(planted, order) == []
    (planted / "deep" / "inner" / "leaf.py").write_text("from ..low import x", encoding="utf-8")
    (planted / "deep" / "inner" / "other.py").write_text("", encoding="utf-8")
    (planted / "deep" / "low.py").write_text("from .inner.other import y", encoding="utf-8")
    (found,) = house.check(planted, order)
    assert found in (
        "planted.deep: circle: inner -> low -> inner",
        "planted.deep: circle: low -> inner -> low",
    )


@pytest.mark.parametrize(
    ("rooms", "said"),
    [
        ({"a0": set()} | {f"a{i}": {f"a{i - 1}"} for i in range(1, 12)}, []),
        (
            {"a0": set()} | {f"a{i}": {f"a{i - 1}"} for i in range(1, 13)},
            ["13 floors, at most 12 allowed"],
        ),
        ({f"a{i}": set() for i in range(23)}, []),
        ({f"a{i}": set() for i in range(24)}, ["24 rooms, at most 23 allowed"]),
        # `check` reports the circle; it has no floors to count.
        ({"a": {"b"}, "b": {"a"}}, []),
    ],
)
def test_limits(house: ModuleType, rooms: dict[str, set[str]], said: list[str]) -> None:
    assert house.check_limits(rooms) == said


def test_suggested_order_passes(house: ModuleType, planted: Path) -> None:
    modules = house.module_graph(planted)
    assert house.nested(modules) == ["planted", "planted.deep"]
    order = {name: house.suggest(house.room_graph(modules, name)) for name in house.nested(modules)}
    assert order["planted"] == ["base", "deep", "top", "__init__", "__main__"]
    assert house.check(planted, order) == []


def test_suggested_order_puts_an_imported_init_first(house: ModuleType) -> None:
    assert house.suggest({"__init__": set(), "a": {"__init__"}}) == ["__init__", "a"]


# --- drawings ------------------------------------------------------------------------------------


def test_rooms_and_floors(house: ModuleType, planted: Path) -> None:
    assert house.house(planted) == ROOMS
    floors = {"base": 1, "weights": 1, "deep": 2, "top": 3, "__init__": 4, "__main__": 4}
    assert house.find_floors(ROOMS) == floors


def test_text(house: ModuleType) -> None:
    assert house.draw_text(ROOMS) == (
        "  4  __init__ -> top; __main__ -> top\n"
        "  3  top -> base, deep\n"
        "  2  deep -> base\n"
        "  1  base; weights\n"
        "4 floors, 6 rooms, 5 arrows\n"
    )


def test_svg_has_every_room_once(tools, planted: Path) -> None:
    text = tools.house_svg.draw_svg(ROOMS, tools.house.describe(planted))
    root = ElementTree.fromstring(text)
    svg = "{http://www.w3.org/2000/svg}"
    boxes = [group for group in root.iter(f"{svg}g") if group.find(f"{svg}title") is not None]
    assert sorted(box.find(f"{svg}text").text for box in boxes) == sorted(ROOMS)
    titles = {box.find(f"{svg}title").text for box in boxes}
    assert "base: Errors & more. Imports: nothing." in titles
    assert "top:  Imports: base, deep." in titles
    assert "weights: Files without code. Imports: nothing." in titles
    # Floor 1 is the lowest.
    heights = {box.find(f"{svg}text").text: float(box.find(f"{svg}rect").get("y")) for box in boxes}
    assert heights["base"] == heights["weights"] > heights["deep"] > heights["top"]


def test_implied_arrows_are_left_out(tools) -> None:
    links = tools.house_svg.find_links({"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"c"}})
    assert links == [(("b", 2), ("a", 1)), (("c", 3), ("b", 2)), (("d", 4), ("c", 3))]


def test_long_arrows_to_a_room_join(tools) -> None:
    rooms = {"a": set(), "b": set(), "c": {"b"}, "d": {"a", "c"}, "e": {"a", "c"}}
    links = tools.house_svg.find_links(rooms)
    assert [link for link in links if link[1][0] == "a"] == [
        (("a", 2), ("a", 1)),
        (("d", 3), ("a", 2)),
        (("e", 3), ("a", 2)),
    ]


def test_boxes_and_lines_keep_their_distance(tools, rooms, monkeypatch) -> None:
    svg = tools.house_svg
    monkeypatch.setattr(svg, "STARTS", 1)
    floors, links = tools.house.find_floors(rooms), svg.find_links(rooms)
    points = sorted({*floors.items(), *(point for link in links for point in link)})
    size = {p: 80 if floors[p[0]] == p[1] else 0 for p in points}
    x = svg.lay_out(size, links)
    for floor in floors.values():
        row = sorted((p for p in points if p[1] == floor), key=x.get)
        for a, b in pairwise(row):
            assert x[b] - x[a] >= (size[a] + size[b]) / 2 + svg.SPACE - 1e-6
        assert x[row[0]] - size[row[0]] / 2 >= svg.MARGIN - 1e-6
        assert x[row[-1]] + size[row[-1]] / 2 <= svg.WIDTH


# --- the command ---------------------------------------------------------------------------------


def run(planted: Path, *arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    """The tool on a planted package, with its own ``PACKAGE`` and `ORDER`."""
    code = (
        "import sys, house, pathlib; house.PACKAGE = pathlib.Path(sys.argv.pop(1)); "
        f"house.ORDER = {ORDER!r}; house.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code, str(planted), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def test_command_checks(planted: Path) -> None:
    assert run(planted, "--check").returncode == 0
    (planted / "base.py").write_text("from .deep import low", encoding="utf-8")
    done = run(planted, "--check")
    assert done.returncode == 1
    assert "planted.base imports planted.deep.low: ORDER puts deep above base" in done.stderr
    # Without an order of floors there is no drawing.
    done = run(planted)
    assert done.returncode == 1 and done.stderr.startswith("circle: ")


def test_command_draws_the_same_in_every_process(planted: Path, tmp_path: Path) -> None:
    drawn = []
    for seed in ("1", "2"):
        done = run(planted, "--svg", str(tmp_path / seed), seed=seed)
        assert done.returncode == 0 and done.stdout == ""
        drawn.append((tmp_path / seed).read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1]


def test_command_suggests(planted: Path) -> None:
    done = run(planted, "--suggest")
    assert done.stdout.splitlines() == [
        '    "planted": """base deep top __init__ __main__""",',
        '    "planted.deep": """low high inner __init__""",',
    ]
