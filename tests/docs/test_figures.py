"""Every recipe that a page prints beside a figure is the one of the run that gave the figure."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.paths import ROOT
from vlmfast import Recipe, RecipeError
from vlmfast.core.recipe import PRESETS
from vlmfast.core.registry import stage_names
from vlmfast.eval.axes import method_of, with_field

RESULTS = sorted([*ROOT.glob("docs/results/**/*.json"), *ROOT.glob("benchmarks/results/*.json")])
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
REPORTS = sorted(ROOT.glob("docs/results/**/report.md"))
if not all(page.is_file() for page in PAGES) or not RESULTS:
    pytest.skip("the pages are not part of this distribution", allow_module_level=True)

NAMES = {*stage_names(), *PRESETS}
# Tables whose figures are no stored numbers of the recipe in their row, by page and first head.
DERIVED = {
    ("README.md", "llava-next-7b, NVIDIA H200"): "ratios to another row",
    ("docs/gpu.md", "llava-next-7b, NVIDIA H200"): "ratios to another row",
    ("docs/models.md", "method"): "commands",
    ("docs/pocket.md", "preset"): "columns of other recipes",
    ("docs/serving.md", "answers per second over `transformers serve`"): "ratios to another row",
}
UNSTORED = ("tokens per second", "McNemar's p")  # columns of reports that their JSON leaves out
_RECIPE = re.compile(r"`([^`]+)`(?: \(\w+\))?(?:,? \(?mean of \d+ draws\)?)?")
_FIGURE = re.compile(r"(?<![+\-–\d.,=:\w])\d[\d,]*\.\d+(?![\d.]*[`\w])")
_UNITS = (1, 1e2, 1e3, 1e-3, 1e-6, 1e-9)


class Cell(NamedTuple):
    """A figure of a table."""

    page: str
    head: str
    recipe: str
    column: str
    figure: str


@functools.cache
def canonical(text: str) -> str | None:
    if not {re.split("[:@]", part)[0].strip() for part in text.split("+")} <= NAMES:
        return None  # without a search for what was meant
    try:
        return str(Recipe.parse(text.partition("@")[0]))
    except RecipeError:
        return None


@functools.cache
def filled() -> Callable[[str], str]:
    """What puts the tables into a page."""
    names = ("sources", "accuracy", "timings", "tables")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "tools")
        modules = {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)
    return modules["tables"].filled


def shown(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return filled()(text) if "<!-- table: " in text else text


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Head and rows of each table."""
    head: list[str] = []
    rows: list[list[str]] = []
    for line in [*shown(page).splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not head:
                head = cells
            elif not re.fullmatch(r"\|[\s:|-]+\|", line):
                rows.append(cells)
        elif head:
            yield head, rows
            head, rows = [], []


def figures(page: Path) -> Iterator[Cell]:
    """The figures in rows that begin with a recipe, without those of `DERIVED`."""
    name = page.relative_to(ROOT).as_posix()
    for head, rows in tables(page):
        if (name, head[0]) in DERIVED:
            continue
        for first, *cells in rows:
            found = _RECIPE.fullmatch(first)
            recipe = found and canonical(found[1])
            for column, cell in zip(head[1:], cells, strict=False) if recipe else ():
                text = re.sub(r"\[[^\]]*\]\([^)]*\)", "", cell)  # links
                if column in UNSTORED:
                    continue
                for figure in _FIGURE.findall(text):
                    yield Cell(name, head[0], recipe, column, figure.replace(",", ""))


@functools.cache
def measured() -> dict[str, set[float]]:
    """The numbers of the runs of each recipe; of a method without a budget, those of all its runs.

    In a column about ``positions=compact``, the recipe of the row means the one that does so.
    """
    numbers: dict[str, set[float]] = defaultdict(set)
    for file in RESULTS:
        _collect(json.loads(file.read_text(encoding="utf-8")), frozenset(), numbers)
    found = defaultdict(set, {recipe: set(own) for recipe, own in numbers.items()})
    for recipe, own in numbers.items():
        parsed = Recipe.parse(recipe)
        names = {method_of(parsed)[0]} - {recipe}
        kept, compact = (with_field(parsed, "positions", policy) for policy in ("keep", "compact"))
        if parsed != kept or kept == compact:
            names |= {f"compact {kept}", f"compact {method_of(kept)[0]}"}
        for name in names:
            found[name] |= own
    return found


def _collect(value: Any, under: frozenset[str], numbers: dict[str, set[float]]) -> None:
    if isinstance(value, dict):
        texts = [text for key in ("recipe", "method") if isinstance(text := value.get(key), str)]
        if isinstance(what := value.get("what"), str):
            texts += re.findall(r"`([^`]+)`", what)
        under |= {found for text in texts if (found := canonical(text))}
        for key, inner in value.items():
            keys = [canonical(part) for part in re.split(r" \| ", key)]
            _collect(inner, under | set(filter(None, keys)), numbers)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, under, numbers)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        for recipe in under:
            numbers[recipe].add(float(value))


@functools.cache
def printed(name: str, digits: int) -> frozenset[str]:
    """The numbers of `measured` as fractions, as percentages and in other units."""
    found = measured().get(name, ())
    return frozenset(f"{number * unit:.{digits}f}" for number in found for unit in _UNITS)


def named(cell: Cell) -> str:
    """The recipe that gave a figure: that of its row, but for some columns."""
    if cell.column.startswith("full model"):
        return "none"
    return f"compact {cell.recipe}" if "compact" in cell.column else cell.recipe


def unexplained(cells: Iterable[Cell]) -> list[Cell]:
    """Figures that no run of their recipe has."""
    return [
        c
        for c in cells
        if c.figure
        not in printed(
            named(c),
            len(c.figure.partition(".")[2]),
        )
    ]


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_figures_are_those_of_their_recipe(page: Path) -> None:
    assert unexplained(figures(page)) == []
