"""The committed results, and parts of the tables that show them."""

from __future__ import annotations

import importlib
import json
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from vlmfast.core.display import markdown_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"

Row, Column = TypeVar("Row"), TypeVar("Column")

# --- files ---------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def measured(name: str) -> dict[str, Any]:
    """A result file of ``benchmarks``."""
    return read(ROOT / "benchmarks" / "results" / f"{name}.json")


def numbers(folder: str, task: str = "shapes") -> dict[str, dict[str, Any]]:
    """The numbers of one report by recipe.

    ``image`` and ``video`` are the accuracies with their intervals, ``pair`` both without.
    """
    recipes = read(RESULTS / folder / "report.json")["tasks"][task]["recipes"]
    return {run["recipe"]: _shown(run) for run in recipes.values() if run["control"] is None}


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    kinds = [of for of in ("image", "video") if run.get(f"accuracy_{of}") is not None]
    pair = " / ".join(f"{100 * run[f'accuracy_{kind}']:.1f}" for kind in kinds)
    return {**run, **{kind: within(run, f"accuracy_{kind}") for kind in kinds}, "pair": pair}


def rows_of(page: Path) -> Iterator[dict[str, str]]:
    """The lines of the Markdown tables of a page: cells by the names of their columns."""
    head: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif not cells[0].startswith("---"):
            yield dict(zip(head, cells, strict=True))


def script(name: str) -> ModuleType:
    """A script of ``benchmarks``; they import each other."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


# --- tables --------------------------------------------------------------------------------------


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    return markdown_table(rows[0], rows[1:])


def grid(
    corner: str,
    rows: Mapping[str, Row],
    columns: Mapping[str, Column],
    cell: Callable[[Row, Column], str],
) -> str:
    """A table in which a cell follows from its row and its column."""
    lines = [
        [name, *(cell(row, column) for column in columns.values())] for name, row in rows.items()
    ]
    return markdown_table([corner, *columns], lines)


def listed(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table with a line for each row, whose values fill the texts of the columns.

    ``{time:.1f ms}`` shows seconds in milliseconds, ``{kept:.0f %}`` a fraction in percent, and
    both show None as an empty text.
    """
    fill = _Cells().vformat
    lines = [[fill(text, (), row) for text in columns.values()] for row in rows]
    return markdown_table([*columns], lines)


_UNITS = {"": 1, "%": 1e2, "ms": 1e3, "us": 1e6, "MB": 1e-6, "GB": 1e-9}


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        number, space, unit = format_spec.partition(" ")
        if value is None:
            return ""
        return format(value * _UNITS[unit] if unit else value, number) + space + unit


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def within(run: Mapping[str, Any], key: str) -> str:
    """A fraction in percent with its interval."""
    low, high = run[f"{key}_ci"]
    return f"{100 * run[key]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
