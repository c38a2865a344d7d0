"""Tables of README and the documentation, from the committed results.

A public function of `accuracy` or `timings` is a table. ``<!-- table: gpu-kernels nvidia-h200 -->``
on a page of the documentation stands for what ``gpu_kernels("nvidia-h200")`` returns, and is
replaced when the documentation is built. ``python tools/tables.py`` writes the tables of README
between their markers; a test checks that they match.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import accuracy
import timings
from sources import ROOT

README = ("gpu", "presets", "speed")
TABLES: dict[str, Callable[..., str]] = {
    name.replace("_", "-"): function
    for module in (accuracy, timings)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
}
MARK = re.compile(r"<!-- table: ([^>]+) -->")


def filled(page: str) -> str:
    """A page of the documentation with its tables, each in the place of its mark.

    Raises
    ------
    ValueError
        For a table that does not exist.
    """

    def made(mark: re.Match[str]) -> str:
        name, *arguments = mark[1].split()
        if name not in TABLES:
            raise ValueError(f"there is no table {name}; tables are {', '.join(TABLES)}")
        return TABLES[name](*arguments)

    return MARK.sub(made, page)


def written(text: str, mark: str, table: str) -> str:
    """Return ``text`` with ``table`` between ``<!-- mark -->`` and ``<!-- end -->``."""
    before, found, rest = text.partition(f"<!-- {mark} -->\n")
    if not found:
        raise ValueError(f"the page has no mark <!-- {mark} -->")
    return f"{before}{found}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    for name in README:
        text = written(text, name, TABLES[name]())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
