"""Write tables of the documentation from ``docs/results/**/report.json``.

``python tools/tables.py`` writes each table between its markers. A test checks that they match
the reports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
BUDGETS = (0.33, 0.22, 0.11, 0.05)
_SOURCES = {
    "attention of CLS": "hired:positions=keep,budget={}",
    "attention received": "hired:positions=keep,budget={},saliency=received",
    "feature norm": "hired:positions=keep,budget={},saliency=norm",
}
_COMPARED = {
    "`divprune`": "divprune:positions=keep,budget={}",
    "`random`": "random:positions=keep,budget={}",
}
_POLICIES = ("hired", "visionzip", "flashvid", "scope", "divprune", "random")


def numbers(folder: str) -> dict[str, dict[str, Any]]:
    """The numbers of one report by recipe."""
    text = (RESULTS / folder / "report.json").read_text(encoding="utf-8")
    recipes = json.loads(text)["tasks"]["shapes"]["recipes"]
    return {run["recipe"]: run for run in recipes.values()}


def saliency() -> str:
    """``hired`` by saliency source, compared with ``divprune`` and ``random``."""
    found = numbers("saliency")
    rows = [["images % / videos %", *(f"{100 * budget:.0f} %" for budget in BUDGETS)]]
    for name, recipe in {**_SOURCES, **_COMPARED}.items():
        label = f"`hired` by {name}" if name in _SOURCES else name
        rows.append([label, *(_pair(found[recipe.format(budget)]) for budget in BUDGETS)])
    return _table(rows)


def positions() -> str:
    """Both position policies of the main methods, side by side."""
    kept, compact = numbers(""), numbers("positions")
    budgets = (0.22, 0.11)
    head = ["images % / videos %"]
    head += [f"{100 * b:.0f} %, {policy}" for b in budgets for policy in ("keep", "compact")]
    rows = [head]
    for method in _POLICIES:
        cells = []
        for budget in budgets:
            cells.append(_pair(_of(kept, method, "keep", budget)))
            cells.append(_pair(_of(compact, method, "compact", budget)))
        rows.append([f"`{method}`", *cells])
    return _table(rows)


def _of(found: dict[str, Any], method: str, policy: str, budget: float) -> dict[str, Any]:
    """The run of a method; its recipe omits parameters at their default."""
    names = (f"{method}:budget={budget}", f"{method}:positions={policy},budget={budget}")
    return next(found[name] for name in reversed(names) if name in found)


def _pair(run: dict[str, Any]) -> str:
    return f"{100 * run['accuracy_image']:.1f} / {100 * run['accuracy_video']:.1f}"


def _table(rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


# (page, mark) -> function that returns the table.
TABLES = {
    ("docs/saliency.md", "measured"): saliency,
    ("README.md", "positions"): positions,
}


def written(text: str, mark: str, table: str) -> str:
    """Return ``text`` with ``table`` between ``<!-- mark -->`` and ``<!-- end -->``."""
    before, found, rest = text.partition(f"<!-- {mark} -->\n")
    if not found:
        raise ValueError(f"the page has no mark <!-- {mark} -->")
    return f"{before}{found}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main() -> None:
    for (page, mark), make in TABLES.items():
        path = ROOT / page
        text = written(path.read_text(encoding="utf-8"), mark, make())
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
